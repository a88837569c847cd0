"""Every real Megatron checkpoint at hand reads equal to the live run that wrote it, value for value."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from samerun.core.box import check_tilings
from samerun.core.mesh import Layout
from samerun.core.state import Role
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support.corpus import CORPUS, corpus, needs_corpus
from support.megatron import GOLDEN, differences, golden, golden_at, read_tensors

# megatron.core 0.16.1 itself writes these values where they do not belong: see docs/formats/megatron.md.
SHIFTED = "fr_shifted_pp2dp3"
RIGHT = [name for name in golden() if name != SHIFTED]


def folders(name: str) -> list[str]:
    return sorted(path.name for path in (CORPUS / name).iterdir()) if CORPUS and (CORPUS / name).is_dir() else []


def assert_exact(checkpoint: Checkpoint) -> None:
    tensors = checkpoint.state.tensors.values()
    assert all(cover.exact for cover in check_tilings([(entry.shape, entry.tiling) for entry in tensors]))


def said(case: str) -> set[str]:
    """Returns what is found in a whole checkpoint of a kind, and nothing else."""
    kind = case.split("_")[0].rstrip("0123456789")
    codes = {"SR-MEG-VOCAB"} | (set() if kind == "lg" else {"SR-FILE-GENERATION-OPEN"})
    return codes | {"fsms": {"SR-MEG-OLDENCODING"}, "fr": set[str]()}.get(kind, {"SR-MEG-BOUND"})


@needs_corpus
@pytest.mark.parametrize("case", folders("megatron"))
def test_checkpoints_equal_their_truth(case: str) -> None:
    folder = corpus("megatron") / case
    facts = json.loads((folder / "TRUTH.json").read_text())
    checkpoint = open_checkpoint(folder)
    truth = read_tensors(folder / "TRUTH.safetensors")
    # Gradients of these runs were random in padding rows too, so that padding was trained and is kept.
    assert differences(checkpoint, truth, facts["padded_vocab"], legacy=case.startswith("lg")) == []
    assert_exact(checkpoint)
    state, layout = checkpoint.state, facts["layout"]
    assert state.format == ("megatron-legacy" if case.startswith("lg") else "megatron")
    assert (state.progress.update, state.progress.samples) == (facts["iteration"], facts["consumed_train_samples"])
    assert state.topology.world_size == layout["world"]
    assert state.topology.layout == Layout(tp=layout["tp"], pp=layout["pp"], dp_shard=layout["dp"], ep=layout["ep"])
    assert list(state.rng) == [f"rank{rank}" for rank in range(layout["world"])]
    assert state.scheduler == facts["sched"]
    saved = [group for groups in facts["opt_groups"] for group in groups]
    assert [dict(group.hyperparameters) for group in state.groups] == saved
    trained = {entry.key.fqn for entry in state.tensors.values() if entry.key.role is Role.OPTIM}
    assert sorted(fqn for group in state.groups for fqn in group.params) == sorted(trained)
    steps = {float(checkpoint.read(f"optim.step:{fqn}")) for fqn in trained}
    assert steps == {3.0}


@pytest.mark.parametrize("case", RIGHT)
def test_golden_checkpoints_equal_their_truth(case: str, tmp_path: Path) -> None:
    folder = golden_at(case, tmp_path)
    facts = json.loads((folder / "truth.json").read_text())
    checkpoint = open_checkpoint(folder)
    run, state = facts["case"], checkpoint.state
    assert differences(checkpoint, dict(np.load(folder / "truth.npz")), run["vocab"], legacy=run["legacy"]) == []
    assert_exact(checkpoint)
    report = inspect_checkpoint(checkpoint, deep=True)
    assert report.complete
    assert report.resumable.verdict == "yes"
    assert {problem.code for problem in report.problems} == said(case)
    assert report.intact is (True if run["legacy"] else None)
    ranks = run["world"]
    assert state.topology.world_size == len(state.rng) == ranks
    assert state.topology.layout == Layout(
        tp=run["tp"], pp=run["pp"], dp_shard=ranks // run["tp"] // run["pp"], ep=run["ep"]
    )
    assert (state.progress.update, state.progress.samples) == (3, 36)
    assert state.scheduler == {"max_lr": 0.01, "num_steps": 36, "lr_decay_style": "constant", "lr_decay_steps": 1200}
    trained = {entry.key.fqn for entry in state.tensors.values() if entry.key.role is Role.OPTIM}
    assert sorted(fqn for group in state.groups for fqn in group.params) == sorted(trained)
    assert {float(checkpoint.read(f"optim.step:{fqn}")) for fqn in trained} == {3.0}
    for held in facts.get("groups", ()):
        assert any(held.items() <= dict(group.hyperparameters).items() for group in state.groups), held


@pytest.mark.parametrize("case", RIGHT)
def test_one_flipped_bit_or_one_lost_file_shows(case: str, tmp_path: Path) -> None:
    folder = golden_at(case, tmp_path)
    folder = folder if folder.is_relative_to(tmp_path) else shutil.copytree(folder, tmp_path / case)
    facts, truth = json.loads((folder / "truth.json").read_text()), dict(np.load(folder / "truth.npz"))
    checkpoint = open_checkpoint(folder)
    key = next(key for key in checkpoint.state.tensors if key.startswith("optim.exp_avg:decoder.layers"))
    extent = checkpoint.locate(key, len(checkpoint.state.tensors[key].tiling) - 1)
    flipped = bytearray(extent.file.read_bytes())
    flipped[extent.offset_bytes] ^= 1
    extent.file.write_bytes(flipped)
    checkpoint = open_checkpoint(folder)
    [wrong] = differences(checkpoint, truth, facts["case"]["vocab"], legacy=facts["case"]["legacy"])
    assert wrong.startswith(f"{key} differs in 1 of")
    report = inspect_checkpoint(checkpoint, deep=True)
    assert report.intact is False
    assert [p.where["file"] for p in report.problems if p.code in ("SR-FILE-CRC", "SR-PKL-CRC")] == [str(extent.file)]
    extent.file.unlink()
    report = inspect_checkpoint(open_checkpoint(folder))
    assert not report.complete
    assert "SR-FILE-MISSING" in {problem.code for problem in report.problems}


def test_what_the_framework_wrote_in_the_wrong_place_is_found_and_not_repaired(tmp_path: Path) -> None:
    folder = golden_at(SHIFTED, tmp_path)
    checkpoint = open_checkpoint(folder)
    facts = json.loads((folder / "truth.json").read_text())
    wrong = differences(checkpoint, dict(np.load(folder / "truth.npz")), facts["case"]["vocab"])
    masters = {text.split()[0] for text in wrong if text.startswith("master:")}
    assert "master:embedding.word_embeddings.weight" in masters
    assert not [text for text in wrong if text.startswith("param:")]
    report = inspect_checkpoint(checkpoint, deep=True)
    [found] = [problem for problem in report.problems if problem.code == "SR-MEG-MASTER"]
    assert "master:" + found.where["tensor"].partition(":")[2] in masters
    assert report.resumable.verdict == "no"


@needs_corpus
@pytest.mark.parametrize(
    ("case", "code", "complete"),
    [
        ("bitflip_distcp", "SR-FILE-CRC", True),
        ("legacy_missing_rank", "SR-FILE-MISSING", False),
        ("metadata_json_zarr", "SR-MEG-BACKEND", True),
        ("missing_shard_file", "SR-FILE-MISSING", False),
        ("truncated_common_pt", "SR-MEG-COMMON", False),
    ],
)
def test_damaged_checkpoints_are_named(case: str, code: str, complete: bool) -> None:
    report = inspect_checkpoint(open_checkpoint(corpus("megatron-damaged") / case), deep=True)
    assert code in {problem.code for problem in report.problems}
    assert report.complete is complete
    assert report.intact is not True
    assert report.resumable.verdict == "no"


def test_values_do_not_depend_on_the_piece_that_is_asked_for() -> None:
    checkpoint = open_checkpoint(GOLDEN / "dpr_buckets_dp2")
    key = next(key for key in checkpoint.state.tensors if key.endswith("linear_fc1.weight"))
    whole = checkpoint.read(key)
    box = tuple(max(1, size - 1) for size in whole.shape)
    assert np.array_equal(checkpoint.read(key, tuple(0 for _ in box), box), whole[tuple(map(slice, box))])
