"""Findings about DeepSpeed checkpoints, each provoked by one edit of a checkpoint that stock DeepSpeed wrote.

The same golden checkpoint without the edit is silent. What changes a file keeps everything else in it as it came.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from samerun.core.mesh import Layout
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint
from support.dsedit import edit_real
from support.packed import unpack
from support.zero import copy_tree

GOLDEN = Path(__file__).parents[1] / "golden" / "deepspeed"
MIXED = ("even", "steps", "groups")
Edit = Callable[[Path], Any]


def copy(case: str, to: Path) -> Path:
    return copy_tree(GOLDEN / case, to / case)


def deep(root: Path, destination: Layout | None = None) -> InspectReport:
    return inspect_checkpoint(open_checkpoint(root), deep=True, destination=destination)


def codes(report: InspectReport) -> set[str]:
    return {problem.code for problem in report.problems}


def optims(root: Path) -> list[Path]:
    return sorted(root.rglob("*_optim_states.pt"))


def models(root: Path) -> list[Path]:
    return sorted(root.rglob("*model_states.pt"))


def in_optims(change: Callable[[dict[str, Any]], Any], *, last: bool = False) -> Edit:
    """Edits the optimizer's state in every rank's file, or in the last rank's."""

    def edit(root: Path) -> None:
        for path in optims(root)[-1:] if last else optims(root):
            edit_real(path, lambda state: change(state["optimizer_state_dict"]))

    return edit


def in_models(change: Callable[[dict[str, Any]], Any]) -> Edit:
    return lambda root: [edit_real(path, change) for path in models(root)]


def round_masters(state: dict[str, Any]) -> None:
    for part in state["single_partition_of_fp32_groups"]:
        part.data.copy_(part.data.bfloat16().float())


def add_slot(name: str, like: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for held in state["base_optimizer_state"]["state"].values():
            held[name] = like(held["exp_avg"])

    return change


def at(*path: str) -> Callable[[Path], Path]:
    return lambda root: root.joinpath("uc", "zero", *path)


def exclude_frozen(state: dict[str, Any]) -> None:
    """Does what `save_checkpoint(exclude_frozen_parameters=True)` does to a model states file (DeepSpeed 0.19.8)."""
    for name in state["frozen_param_shapes"]:
        del state["module"][name]
    state |= {"frozen_param_shapes": None, "frozen_param_fragments": None}


SLOT = at("up.weight", "exp_avg.pt")
ZERO: list[tuple[str, str, Edit]] = [
    ("SR-ZERO-GROUPS", "z1_bf16opt",
     in_optims(lambda s: s["base_optimizer_state"]["param_groups"][1].update(lr=0.5), last=True)),
    ("SR-ZERO-GROUPS", "z2_align_rr", in_optims(lambda s: s["base_optimizer_state"]["param_groups"].pop())),
    ("SR-ZERO-LAYOUT", "z1_bf16opt",
     in_models(lambda s: s["param_shapes"][0].update({"unused": torch.Size([90, 2])}))),
    ("SR-ZERO-ROUNDED", "z1_bf16opt", in_optims(round_masters)),
    ("SR-ZERO-ROUNDROBIN", "z1_bf16opt",
     in_models(lambda s: s["ds_config"]["zero_optimization"].update(round_robin_gradients=True))),
    ("SR-ZERO-SLOTS", "z1_bf16opt", in_optims(add_slot("max_exp_avg_sq", torch.clone))),
    ("SR-COV-SLOT", "z1_bf16opt", in_optims(add_slot("row_var", lambda like: torch.ones(2, 3)))),
    ("SR-ZERO-UNOWNED", "z2_align_rr", in_models(lambda s: s["module"].update(lost=torch.ones(4)))),
    ("SR-META-SHAPES", "z2_align_rr", in_models(lambda s: s.update(param_shapes=None))),
    ("SR-ZERO-TPUNKNOWN", "tp2dp2", in_models(lambda s: s.pop("universal_checkpoint_info"))),
    ("SR-FILE-GENERATION", "z1_bf16opt",
     lambda root: edit_real(optims(root)[1], lambda s: s["ds_config"].update(train_batch_size=64))),
    ("SR-ZERO-STALE", "z1_bf16opt", lambda root: shutil.copyfile(
        optims(root)[2], optims(root)[2].with_name("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"))),
    ("SR-ZERO-EXCLUDED", "z3_sub_bf16", in_models(exclude_frozen)),
    ("SR-CNT-OPTIMIZER", "z1_bf16opt",
     in_optims(lambda s: [held["step"].fill_(7) for held in s["base_optimizer_state"]["state"].values()])),
]  # fmt: skip
UNIVERSAL: list[tuple[str, Edit]] = [
    ("SR-UNI-DROPPED", lambda root: edit_real(
        at("optimizer_state.pt")(root), lambda s: [group.update(amsgrad=True) for group in s["param_groups"]])),
    ("SR-UNI-LOST", lambda root: [at("up.weight", f"{slot}.pt")(root).unlink() for slot in ("exp_avg", "exp_avg_sq")]),
    ("SR-FILE-MISSING", lambda root: at("up.weight", "fp32.pt")(root).unlink()),
    ("SR-UNI-SHAPE", lambda root: torch.save(torch.ones(7), SLOT(root))),
    ("SR-UNI-STALE", lambda root: shutil.copytree(at("up.weight")(root), at("old.weight")(root))),
    ("SR-UNI-TMP", lambda root: (root / "uc" / "tmp").mkdir()),
    ("SR-UNI-ROUNDED", lambda root: [torch.save(torch.load(path).bfloat16().float(), path)
                                     for path in root.rglob("fp32.pt")]),
    ("SR-UNI-VALUES", lambda root: torch.save(torch.load(SLOT(root)).roll(1), SLOT(root))),
    ("SR-FILE-TRUNCATED", lambda root: SLOT(root).write_bytes(SLOT(root).read_bytes()[:-40])),
]  # fmt: skip


@pytest.mark.parametrize(("code", "case", "edit"), ZERO, ids=[f"{code}-{case}" for code, case, _ in ZERO])
def test_native_checkpoints(code: str, case: str, edit: Edit, tmp_path: Path):
    root = copy(case, tmp_path)
    assert code not in codes(deep(root))
    edit(root)
    assert code in codes(deep(root))


@pytest.mark.parametrize(("code", "edit"), UNIVERSAL, ids=[code for code, _ in UNIVERSAL])
def test_universal_checkpoints(code: str, edit: Edit, tmp_path: Path):
    root = copy("universal_z3_bf16", tmp_path)
    assert code not in codes(deep(root))
    edit(root)
    assert code in codes(deep(root))


def test_groups_of_a_universal_checkpoint_lie_in_its_common_file(tmp_path: Path):
    root = copy("universal_z3_bf16", tmp_path)
    assert not {"SR-FILE-MISSING", "SR-GROUP-NONE"} & codes(deep(root))
    at("optimizer_state.pt")(root).unlink()
    assert {"SR-FILE-MISSING", "SR-GROUP-NONE"} <= codes(deep(root))


def test_what_depends_on_the_layout_that_is_asked_for(tmp_path: Path):
    for case, same, other, code in (
        ("z2_align_rr", Layout(dp_shard=3), Layout(dp_shard=2), "SR-ZERO-RIGID"),
        ("universal_z3_bf16", Layout(dp_shard=7), Layout(tp=2), "SR-UNI-RIGID"),
    ):
        known = [p.code for p in deep(GOLDEN / case, same).problems].count(code)
        assert [p.code for p in deep(GOLDEN / case, other).problems].count(code) == known + 1


def test_converted_saves_that_do_not_belong_together(tmp_path: Path):
    """DeepSpeed's converter made each of these without a word: see `mixed.py`, which put their sources together."""
    found = {name: codes(deep(unpack(GOLDEN / f"universal_z1_{name}.tar.xz", tmp_path))) for name in MIXED}
    assert not found["even"] & {"SR-UNI-STEP", "SR-UNI-GROUPS", "SR-UNI-VALUES", "SR-FILE-GENERATION"}
    assert not found["even"] & {"SR-UNI-GROUPZERO", "SR-UNI-SHAREDSTEP", "SR-UNI-MODELSTATE", "SR-UNI-ROUNDROBIN"}
    assert {"SR-UNI-STEP", "SR-UNI-VALUES", "SR-FILE-GENERATION"} <= found["steps"]
    assert {"SR-UNI-GROUPS", "SR-UNI-VALUES"} <= found["groups"]
    assert "SR-UNI-GROUPS" not in found["steps"]
    assert "SR-UNI-STEP" not in found["groups"]


def test_a_conversion_that_goes_by_wrong_slice_maps(tmp_path: Path):
    """DeepSpeed's own converter, on its own save: round-robin gradients, and nothing else out of order."""
    folder = unpack(GOLDEN / "universal_z2_rr.tar.xz", tmp_path)
    report = deep(folder)
    assert "SR-UNI-ROUNDROBIN" in codes(report)
    assert report.resumable.verdict == "no"
    weights, checkpoint = np.load(folder / "truth.npz"), open_checkpoint(folder)
    names = [key.partition(":")[2] for key in checkpoint.state.tensors if key.startswith("master:")]
    rounded = {name: checkpoint.read(f"master:{name}").astype(ml_dtypes.bfloat16).astype(np.float32) for name in names}
    assert [name for name in names if not np.array_equal(rounded[name], weights[f"module/{name}"])]


def test_the_rank_of_a_file_of_stage_3_stays_open_beyond_two(tmp_path: Path):
    """Of two ranks, padding tells the last one's file; of three it does not tell the others apart."""
    open_ranks = deep(unpack(GOLDEN / "z3_still.tar.xz", tmp_path))
    assert "SR-ZERO-RANKOPEN" in codes(open_ranks)
    assert open_ranks.intact is None
    told = deep(unpack(GOLDEN / "z3_pair.tar.xz", tmp_path))
    assert "SR-ZERO-RANKOPEN" not in codes(told)
    assert told.intact is True


def test_what_stays_open_is_said_where_it_is_open():
    """Stage 3 in ranks of equal size says nothing of which rank a part is of; padding does in these goldens."""
    converted = codes(deep(GOLDEN / "universal_z3_bf16"))
    assert {"SR-UNI-OPEN", "SR-UNI-STAGE", "SR-UNI-GROUPZERO", "SR-UNI-SHAREDSTEP", "SR-UNI-MODELSTATE"} <= converted
    assert "SR-ZERO-GROUPZERO" in codes(deep(GOLDEN / "z3_sub_bf16"))
    assert "SR-ZERO-ROUNDROBIN" in codes(deep(GOLDEN / "z2_align_rr"))
    silent = codes(deep(GOLDEN / "z1_bf16opt"))
    assert not silent & {"SR-UNI-OPEN", "SR-ZERO-GROUPZERO", "SR-ZERO-ROUNDROBIN", "SR-ZERO-RANKOPEN"}


@pytest.mark.parametrize("case", ["z1_bf16opt", "z3_sub_bf16"])
def test_files_on_the_disks_of_other_nodes_are_listed(case: str, tmp_path: Path):
    """What a node holds of a run with `use_node_local_storage`: its own ranks' files, and the model file."""
    root = copy(case, tmp_path)
    in_models(lambda s: s["ds_config"].update(checkpoint={"use_node_local_storage": True}))(root)
    assert "SR-FILE-MISSING" not in codes(deep(root))
    away = tmp_path / "other"
    away.mkdir()
    for path in sorted(root.rglob("*zero_pp_rank_[12]*.pt")):
        path.rename(away / path.name)
    lost = [problem for problem in deep(root).problems if problem.code == "SR-FILE-MISSING"]
    assert {Path(problem.where["file"]).name for problem in lost} == {path.name for path in away.iterdir()}
    assert all("node's own disk" in problem.hint for problem in lost)
    for path in away.iterdir():
        path.rename(root / "global_step3" / path.name)
    assert deep(root).complete
    (optims(root)[-1]).unlink()
    in_models(lambda s: s["ds_config"].pop("checkpoint"))(root)
    assert not any("node's own disk" in problem.hint for problem in deep(root).problems)


def test_masters_are_among_what_a_run_in_16_bits_has():
    assert "masters" in deep(GOLDEN / "z1_bf16opt").resumable.have
    assert "masters" not in deep(GOLDEN.parent / "statedict" / "torch" / "zip.pt").resumable.have


def test_the_tracker_names_a_directory_that_never_finished(tmp_path: Path):
    root = copy("z1_bf16opt", tmp_path)
    shutil.copytree(root / "global_step3", root / "global_step2")
    assert "SR-ZERO-LATEST" not in codes(deep(root))
    optims(root / "global_step3")[-1].unlink()
    found = next(problem for problem in deep(root).problems if problem.code == "SR-ZERO-LATEST")
    assert "global_step2" in found.hint
