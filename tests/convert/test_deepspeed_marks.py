"""What DeepSpeed's own conversion gets wrong without an error: here the right values, or a refusal that names the file.

On checkpoints that stock DeepSpeed wrote; what the running job held is the truth. That engines then hold it too is in
tests/multiprocess/test_deepspeed_jobs.py, and measured in docs/formats/universal.md.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.convert.convert import carry_out
from samerun.convert.prepare import prepare
from samerun.core.mesh import Layout
from samerun.errors import SamerunError
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from support.dsedit import edit_real
from support.zero import codes, copy_tree, flip_byte

GOLDEN = Path(__file__).parents[1] / "golden" / "deepspeed"
STAGES_12, STAGE_3 = (
    "z2_align_rr",
    "z3_sub_bf16",
)  # round-robin with alignment; sub-groups; two groups each, frozen, buffers
Edit = Callable[[Path], Any]


def moved(source: Path, dest: Path, to: str, ranks: int, *allow: str) -> Checkpoint:
    checkpoint = open_checkpoint(source)
    try:
        carry_out(prepare(checkpoint, dest, to=to, layout=Layout(dp_shard=ranks), allow=allow))
    finally:
        checkpoint.close()
    return open_checkpoint(dest)


def key_of(checkpoint: Checkpoint, item: str) -> str:
    role, _, name = item.partition("/")
    if role == "fp32":
        return f"master:{name}" if f"master:{name}" in checkpoint.state.tensors else f"param:{name}"
    return {"module": f"param:{name}", "buffer": f"buffer:{name}"}.get(role, f"optim.{role}:{name}")


def wrong(checkpoint: Checkpoint, truth: Any) -> list[str]:
    """Returns what is not what the running job held."""
    read = {item: checkpoint.read(key_of(checkpoint, item)) for item in truth.files}
    return [item for item, values in read.items() if not np.array_equal(values.astype(truth[item].dtype), truth[item])]


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 5])  # from three: `universal 1 -> 3, 3 -> 1` is an empty AssertionError there
@pytest.mark.parametrize("case", ["z0_bf16", "z1_bf16opt", STAGES_12, STAGE_3])
def test_values_are_those_of_the_running_job(case: str, ranks: int, tmp_path: Path) -> None:
    """Stage 0, padded partitions, round-robin order, sub-groups: masters, moments, buffers, frozen parameters."""
    truth = np.load(GOLDEN / case / "truth.npz")
    found = moved(GOLDEN / case, tmp_path / "zero", "zero", ranks, "SR-CNT-OPTIMIZER")
    assert {item.partition("/")[0] for item in truth.files} >= {"module", "fp32", "exp_avg", "exp_avg_sq", "buffer"}
    assert wrong(found, truth) == []
    source = open_checkpoint(GOLDEN / case)
    assert len({str(group.hyperparameters) for group in source.state.groups}) == 2
    assert found.state.groups == source.state.groups  # every group keeps its own, at stage 3 too
    for key in source.state.tensors:
        if key.startswith("optim.step:"):
            assert found.read(key).item() == source.read(key).item()


@pytest.mark.parametrize("case", ["z1_bf16opt", STAGE_3])
def test_values_of_a_universal_directory_are_too(case: str, tmp_path: Path) -> None:
    found = moved(GOLDEN / case, tmp_path / "universal", "universal", 2)
    assert wrong(found, np.load(GOLDEN / case / "truth.npz")) == []
    assert found.state.groups == open_checkpoint(GOLDEN / case).state.groups


def test_a_wrong_value_would_show(tmp_path: Path) -> None:
    truth = dict(np.load(GOLDEN / STAGE_3 / "truth.npz"))
    name = next(item for item in truth if item.startswith("exp_avg/") and truth[item].ndim == 2)
    truth[name] = truth[name] + np.float32(1e-3)
    np.savez(tmp_path / "truth.npz", **truth)
    found = moved(GOLDEN / STAGE_3, tmp_path / "zero", "zero", 2)
    assert wrong(found, np.load(tmp_path / "truth.npz")) == [name]


# --- refused ----------------------------------------------------------------------------------------------------------


def optims(root: Path) -> list[Path]:
    return sorted(root.rglob("*_optim_states.pt"))


def add_rank(root: Path) -> None:
    """What a save of four ranks left when three saved under the same tag."""
    for path in [optims(root)[2], *root.rglob("zero_pp_rank_2_mp_rank_00_model_states.pt")]:
        shutil.copyfile(path, path.with_name(path.name.replace("_rank_2_", "_rank_3_")))


def swap(first: int, second: int) -> Edit:
    def edit(root: Path) -> None:
        a, b = optims(root)[first], optims(root)[second]
        held = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(held)

    return edit


def step_of(state: dict[str, Any]) -> None:
    inner = state["optimizer_state_dict"]
    base = inner.get("base_optimizer_state") or inner["optimizer_state_dict"]
    for held in base["state"].values():
        held["step"] += 5


def flip(root: Path) -> None:
    """One byte of the longest array in a rank's file."""
    with zipfile.ZipFile(optims(root)[1]) as archive:
        longest = max((item for item in archive.infolist() if "/data/" in item.filename), key=lambda i: i.file_size)
    flip_byte(optims(root)[1], longest.filename.partition("/")[2])


def cut(length: float) -> Edit:
    def edit(root: Path) -> None:
        path = optims(root)[1]
        path.write_bytes(path.read_bytes()[: int(len(path.read_bytes()) * length)])

    return edit


DAMAGES: list[tuple[str, str, Edit]] = [
    ("files of a larger save, same tag", "SR-ZERO-STALE", add_rank),
    ("rank files swapped", "SR-ZERO-SWAPPED", swap(1, 2)),
    ("one rank of another step", "SR-FILE-GENERATION", lambda root: edit_real(optims(root)[1], step_of)),
    ("one flipped bit", "SR-FILE-CRC", flip),
    ("a rank's file missing", "SR-FILE-MISSING", lambda root: optims(root)[1].unlink()),
    ("a truncated file", "SR-FILE-", cut(0.5)),
    ("an empty file", "SR-FILE-", cut(0)),
]


@pytest.mark.parametrize("case", [STAGES_12, STAGE_3])
@pytest.mark.parametrize(("what", "code", "edit"), DAMAGES, ids=[what for what, _, _ in DAMAGES])
@pytest.mark.parametrize("to", ["zero", "universal"])
def test_what_does_not_belong_together_is_refused(
    what: str, code: str, edit: Edit, case: str, to: str, tmp_path: Path
) -> None:
    root = copy_tree(GOLDEN / case, tmp_path / "source")
    edit(root)
    with pytest.raises(SamerunError) as refused:
        moved(root, tmp_path / "dest", to, 2, "SR-UNI-SHUFFLE")
    found = [problem for problem in refused.value.problems if problem.code.startswith(code)]
    assert found, (what, codes(refused.value.problems))
    assert any("rank_" in str(problem.where.get("file")) for problem in found), "the file is named"
    assert not (tmp_path / "dest").exists()


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path) -> None:
    left = tmp_path / "dest" / "tmp" / "old.pt"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"stale")
    with pytest.raises(SamerunError, match="SR-CONVERT-EXISTS"):
        moved(GOLDEN / STAGE_3, tmp_path / "dest", "universal", 2)
    assert [path.name for path in (tmp_path / "dest").rglob("*")] == ["tmp", "old.pt"]


def test_round_robin_blocks_universal_until_the_job_turns_it_off(tmp_path: Path) -> None:
    with pytest.raises(SamerunError, match="SR-UNI-SHUFFLE"):
        moved(GOLDEN / STAGES_12, tmp_path / "dest", "universal", 2)
    found = moved(GOLDEN / STAGES_12, tmp_path / "dest", "universal", 2, "SR-UNI-SHUFFLE")
    assert wrong(found, np.load(GOLDEN / STAGES_12 / "truth.npz")) == []
