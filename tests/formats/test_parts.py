"""A file that is one part of a checkpoint says so when it is opened alone. All were written by the real frameworks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from samerun.errors import UsageError
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
PARTS = {
    "one rank of an FSDP2 job": "statedict/bare/rank_0.pt",
    "one rank's optimizer of ZeRO 2": "deepspeed/z2_align_rr/*/bf16_zero_pp_rank_0_*_optim_states.pt",
    "a stage of a pipeline": "deepspeed/pp2dp2bf16/*/mp_rank_00_model_states.pt",
    "a shard of a model": "statedict/shards/shard-00001-*.safetensors",
    "a rank of Megatron": "megatron/lg_moe_tp2ep2/*/mp_rank_0*/model_optim_rng.pt",
}
WHOLE = {
    "a file of torch.save": "statedict/torch/zip.pt",
    "one of several runs' files": "averages/averaged.pt",
    "a Lightning checkpoint": "statedict/lightning/step3.ckpt",
}


def only(pattern: str) -> Path:
    return next(iter(sorted(GOLDEN.glob(pattern))))


def codes(path: Path) -> tuple[set[str], bool]:
    report = inspect_checkpoint(open_checkpoint(path))
    return {problem.code for problem in report.problems}, report.complete


@pytest.mark.parametrize("pattern", PARTS.values(), ids=PARTS)
def test_a_part_is_called_one_and_is_not_complete(pattern: str):
    found, complete = codes(only(pattern))
    assert "SR-PATH-PART" in found
    assert not complete


@pytest.mark.parametrize("pattern", WHOLE.values(), ids=WHOLE)
def test_a_file_that_is_a_checkpoint_is_none(pattern: str):
    found, complete = codes(only(pattern))
    assert "SR-PATH-PART" not in found
    assert complete


def test_a_data_file_of_dcp_is_no_damaged_archive():
    with pytest.raises(UsageError) as raised:
        open_checkpoint(only("dcp/zstd/**/__0_0.distcp"))
    assert [problem.code for problem in raised.value.problems] == ["SR-PATH-PART"]


def test_files_that_are_numbered_by_updates_are_not_taken_for_ranks(tmp_path: Path):
    for number in (0, 1):
        shutil.copy(only("statedict/torch/zip.pt"), tmp_path / f"{number}.pt")
    found, complete = codes(tmp_path / "0.pt")
    assert "SR-PATH-PART" not in found
    assert complete
