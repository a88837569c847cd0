"""Every finding about universal checkpoints: provoked by one edit, and silent without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samerun.core.mesh import Layout
from samerun.errors import Severity
from samerun.formats.detect import open_checkpoint
from samerun.formats.universal.reader import UniversalCheckpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support.zero import codes, edit_state, flip_byte, slots_of, write_stage2, write_stage3

SHAPES = [{"a.w": (7, 5), "b.w": (5, 9)}, {"a.b": (40,)}]


def made() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [slots_of(rng, group) for group in SHAPES]


def convert2(root: Path, **more: Any) -> Path:
    """What ds_to_universal makes of a directory of stage 2."""
    groups = made()
    native = write_stage2(root / "native", groups, 2, **more)
    target = root / "uc"
    target.mkdir()
    shutil.copy(native / "mp_rank_00_model_states.pt", target)
    write_slots(target, groups, lambda values: {"param": torch.from_numpy(values.copy()), "cat_dim": 0}, steps=True)
    inner = torch.load(native / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)["optimizer_state_dict"]
    kept = {key: value for key, value in inner.items() if key not in ("base_optimizer_state", SINGLE)}
    kept["param_groups"] = inner["base_optimizer_state"]["param_groups"]
    torch.save(kept, target / "zero" / "optimizer_state.pt")
    return target


SINGLE = "single_partition_of_fp32_groups"


def convert3(root: Path, **more: Any) -> Path:
    """What ds_to_universal makes of a directory of stage 3: flat arrays, and rank 0's optimizer file."""
    groups = made()
    native = write_stage3(root / "native", [[group] for group in groups], 2, **more)
    target = root / "uc"
    target.mkdir()
    for path in native.glob("*model_states.pt"):
        shutil.copy(path, target)
    write_slots(target, groups, lambda values: torch.from_numpy(values.reshape(-1).copy()), steps=False)
    optim = next(native.glob("*zero_pp_rank_0_*optim_states.pt"))
    inner = torch.load(optim, weights_only=False)["optimizer_state_dict"]
    inner["param_groups"] = inner["optimizer_state_dict"]["param_groups"]
    torch.save(inner, target / "zero" / "optimizer_state.pt")
    return target


def write_slots(root: Path, groups: list[dict[str, Any]], form: Callable[[np.ndarray], Any], *, steps: bool) -> None:
    for group in groups:
        for slot, full in group.items():
            for name, values in full.items():
                folder = root / "zero" / name
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(form(values), folder / f"{slot}.pt")
                if steps:
                    torch.save(torch.tensor(3.0), folder / "step.pt")


def problems_of(root: Path, *, deep: bool = False) -> list[Any]:
    return list(inspect_checkpoint(open_checkpoint(root), deep=deep).problems)


def only(root: Path, code: str, *, deep: bool = False) -> Any:
    found = [problem for problem in problems_of(root, deep=deep) if problem.code == code]
    assert len(found) == 1, [str(problem) for problem in problems_of(root, deep=deep)]
    return found[0]


@pytest.mark.parametrize("convert", [convert2, convert3])
def test_values_groups_and_steps_are_read(tmp_path: Path, convert: Callable[..., Path]):
    checkpoint = open_checkpoint(convert(tmp_path))
    assert isinstance(checkpoint, UniversalCheckpoint)
    for group in made():
        for slot, full in group.items():
            for name, values in full.items():
                key = f"param:{name}" if slot == "fp32" else f"optim.{slot}:{name}"
                assert np.array_equal(checkpoint.read(key), values), key
                assert checkpoint.read(f"optim.step:{name}") == 3
    assert [group.params for group in checkpoint.state.groups] == [tuple(group) for group in SHAPES]
    assert [group.hyperparameters["lr"] for group in checkpoint.state.groups] == [0.01, 0.005]
    assert "universal checkpoint" in checkpoint.state.written_by["recognised"]


@pytest.mark.parametrize("convert", [convert2, convert3])
def test_a_good_conversion_has_nothing_that_blocks(tmp_path: Path, convert: Callable[..., Path]):
    report = inspect_checkpoint(open_checkpoint(convert(tmp_path)), deep=True)
    own = {problem.code: problem.severity for problem in report.problems if problem.code.startswith("SR-UNI")}
    silent = {"SR-UNI-STAGE", "SR-UNI-OPEN", "SR-UNI-SHAREDSTEP", "SR-UNI-GROUPZERO"}
    assert set(own) <= silent
    assert Severity.ERROR not in own.values()
    assert report.complete
    assert report.intact is None


def test_slots_of_any_optimizer_are_found(tmp_path: Path):
    root = convert2(tmp_path)
    for path in root.glob("zero/*/exp_avg.pt"):
        path.rename(path.with_name("momentum_buffer.pt"))
    state = open_checkpoint(root).state
    assert "optim.momentum_buffer:a.w" in state.tensors
    assert "optim.exp_avg:a.w" not in state.tensors


def test_masters_of_a_16_bit_run_are_kept_beside_the_rounded_weights(tmp_path: Path):
    root = convert3(tmp_path, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(root)
    assert checkpoint.state.tensors["master:a.w"].dtype.name == "float32"
    assert checkpoint.state.tensors["param:a.w"].dtype.name == "bfloat16"


def test_a_tracker_of_its_own_is_followed(tmp_path: Path):
    convert2(tmp_path)
    shutil.rmtree(tmp_path / "native")
    (tmp_path / "latest_universal").write_text("uc")
    (tmp_path / "latest").write_text("native")
    assert open_checkpoint(tmp_path, "universal").state.format == "universal"


def test_values_scrambled_by_round_robin_gradients_are_found_without_reading_all(tmp_path: Path):
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}, "train_batch_size": 4}
    root = convert2(tmp_path, ds_config=config)
    assert "SR-UNI-ROUNDROBIN" not in codes(problems_of(root))
    edit_state(root / "zero" / "b.w" / "fp32.pt", lambda state: state["param"].copy_(state["param"].flip(0)))
    assert only(root, "SR-UNI-ROUNDROBIN").where["tensor"] == "param:b.w"
    assert only(root, "SR-UNI-ROUNDROBIN", deep=True)


def test_values_that_are_not_the_model_files_are_found(tmp_path: Path):
    root = convert2(tmp_path)
    assert "SR-UNI-VALUES" not in codes(problems_of(root, deep=True))
    edit_state(root / "zero" / "a.w" / "fp32.pt", lambda state: state["param"].mul_(2))
    assert only(root, "SR-UNI-VALUES").severity is Severity.ERROR


@pytest.mark.parametrize("slot", ["fp32", "exp_avg", "exp_avg_sq"])
def test_values_that_are_not_rank_zeros_are_found_at_stage_3(tmp_path: Path, slot: str):
    root = convert3(tmp_path)
    edit_state_tensor(root / "zero" / "a.w" / f"{slot}.pt", 0)
    assert only(root, "SR-UNI-VALUES").severity is Severity.ERROR


def test_a_late_difference_is_found_by_reading_all(tmp_path: Path):
    rng = np.random.default_rng(0)
    groups = [slots_of(rng, {"a.w": (40, 40)})]
    native = write_stage3(tmp_path / "native", [groups], 1)
    root = tmp_path / "uc"
    root.mkdir()
    shutil.copy(native / "zero_pp_rank_0_mp_rank_00_model_states.pt", root)
    write_slots(root, groups, lambda values: torch.from_numpy(values.reshape(-1).copy()), steps=False)
    inner = torch.load(native / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    torch.save(inner["optimizer_state_dict"], root / "zero" / "optimizer_state.pt")
    edit_state_tensor(root / "zero" / "a.w" / "exp_avg.pt", 1500)
    assert "SR-UNI-VALUES" not in codes(problems_of(root))
    assert only(root, "SR-UNI-VALUES", deep=True).where["tensor"] == "optim.exp_avg:a.w"


def edit_state_tensor(path: Path, at: int) -> None:
    values = torch.load(path)
    values[at] += 1
    torch.save(values, path)


def test_slots_that_the_converter_does_not_know_are_missed(tmp_path: Path):
    root = convert2(tmp_path)
    assert "SR-UNI-DROPPED" not in codes(problems_of(root))
    common = root / "zero" / "optimizer_state.pt"
    edit_state(common, lambda state: [group.update(amsgrad=True) for group in state["param_groups"]])
    assert only(root, "SR-UNI-DROPPED").where["key"] == "max_exp_avg_sq"
    root = convert3(tmp_path / "three")
    assert "SR-UNI-DROPPED" not in codes(problems_of(root))
    for path in root.glob("zero/*/exp_avg_sq.pt"):
        path.unlink()
    assert only(root, "SR-UNI-DROPPED").where["key"] == "exp_avg_sq"


def test_buffers_of_pipeline_layers_that_were_not_copied_are_missed(tmp_path: Path):
    root = convert2(tmp_path)
    edit_state(root / "mp_rank_00_model_states.pt", lambda state: state.update(module=None))
    assert "SR-FILE-MISSING" not in codes(problems_of(root))
    edit_state(root / "mp_rank_00_model_states.pt", lambda state: state.update(buffer_names=["1.mean"]))
    assert "1 buffers" in only(root, "SR-FILE-MISSING").message


def test_lost_moments_are_named_and_missed(tmp_path: Path):
    root = convert2(tmp_path)
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        (root / "zero" / "a.w" / f"{slot}.pt").unlink()
    assert only(root, "SR-UNI-LOST").where["tensor"] == "a.w"
    assert not inspect_checkpoint(open_checkpoint(root)).complete


@pytest.mark.parametrize("slot", ["fp32", "exp_avg", "exp_avg_sq", "step"])
def test_one_file_of_a_parameter_that_was_removed_is_named_and_missed(tmp_path: Path, slot: str):
    """The model file of stages 1 and 2 holds the parameter too, but the loader wants this file."""
    root = convert2(tmp_path)
    (root / "zero" / "a.w" / f"{slot}.pt").unlink()
    problem = only(root, "SR-FILE-MISSING")
    assert problem.where["file"] == str(root / "zero" / "a.w" / f"{slot}.pt")
    assert "SR-UNI-LOST" not in codes(problems_of(root))
    assert not inspect_checkpoint(open_checkpoint(root)).complete


def test_parameters_of_two_kinds_of_optimizer_lack_nothing(tmp_path: Path):
    """Muon keeps one momentum where Adam, in the same run, keeps two moments."""
    root = convert2(tmp_path)
    (root / "zero" / "a.w" / "exp_avg_sq.pt").unlink()
    (root / "zero" / "a.w" / "exp_avg.pt").rename(root / "zero" / "a.w" / "momentum_buffer.pt")
    assert {"SR-FILE-MISSING", "SR-UNI-LOST", "SR-COV-GAP"}.isdisjoint(codes(problems_of(root)))
    assert inspect_checkpoint(open_checkpoint(root)).complete
    (root / "zero" / "b.w" / "exp_avg.pt").unlink()
    assert only(root, "SR-FILE-MISSING").where["file"].endswith("b.w/exp_avg.pt")


def test_a_parameter_without_folder_is_missed(tmp_path: Path):
    root = convert2(tmp_path)
    shutil.rmtree(root / "zero" / "b.w")
    assert "b.w" in only(root, "SR-FILE-MISSING").message
    assert not inspect_checkpoint(open_checkpoint(root)).complete


def test_a_file_cut_off_is_named_and_missed(tmp_path: Path):
    root = convert2(tmp_path)
    path = root / "zero" / "b.w" / "exp_avg.pt"
    path.write_bytes(path.read_bytes()[:-30])
    assert only(root, "SR-FILE-TRUNCATED").where["file"] == str(path)
    assert "SR-UNI-LOST" not in codes(problems_of(root))
    assert not inspect_checkpoint(open_checkpoint(root)).complete


def test_a_flipped_bit_is_found(tmp_path: Path):
    root = convert2(tmp_path)
    flip_byte(root / "zero" / "b.w" / "exp_avg.pt", "data/0")
    assert "SR-FILE-CRC" not in codes(problems_of(root))
    assert inspect_checkpoint(open_checkpoint(root), deep=True).intact is False


def test_a_working_folder_is_named(tmp_path: Path):
    root = convert2(tmp_path)
    assert "SR-UNI-TMP" not in codes(problems_of(root))
    (root / "tmp").mkdir()
    assert only(root, "SR-UNI-TMP").severity is Severity.WARNING


def test_folders_of_another_model_are_named(tmp_path: Path):
    root = convert2(tmp_path)
    assert "SR-UNI-STALE" not in codes(problems_of(root))
    shutil.copytree(root / "zero" / "a.w", root / "zero" / "old.w")
    assert "old.w" in only(root, "SR-UNI-STALE").message
    assert "param:old.w" not in open_checkpoint(root).state.tensors


def test_a_slot_of_another_size_is_named_and_missed(tmp_path: Path):
    root = convert3(tmp_path)
    torch.save(torch.ones(7), root / "zero" / "a.w" / "exp_avg.pt")
    assert only(root, "SR-UNI-SHAPE").found == [7]
    assert not inspect_checkpoint(open_checkpoint(root)).complete


def test_parameters_at_different_steps_are_named(tmp_path: Path):
    root = convert2(tmp_path)
    assert "SR-UNI-STEP" not in codes(problems_of(root))
    torch.save(torch.tensor(8.0), root / "zero" / "b.w" / "step.pt")
    assert only(root, "SR-UNI-STEP").found == 8


def test_lost_groups_are_named(tmp_path: Path):
    root = convert2(tmp_path)
    assert "SR-UNI-GROUPS" not in codes(problems_of(root))
    edit_state(root / "zero" / "optimizer_state.pt", lambda state: state["param_groups"].pop())
    assert only(root, "SR-UNI-GROUPS").found == "1 groups"
    (root / "zero" / "optimizer_state.pt").unlink()
    assert "hyperparameters" in only(root, "SR-FILE-MISSING").message


def test_what_the_loader_gets_wrong_at_stage_3_is_said(tmp_path: Path):
    found = codes(problems_of(convert3(tmp_path)))
    assert {"SR-UNI-GROUPZERO", "SR-UNI-SHAREDSTEP", "SR-UNI-STAGE"} <= set(found)
    assert not {"SR-UNI-GROUPZERO", "SR-UNI-SHAREDSTEP"} & set(codes(problems_of(convert2(tmp_path / "two"))))


def test_buffers_and_frozen_parameters_that_the_loader_leaves_out_are_named(tmp_path: Path):
    root = convert2(tmp_path)
    assert "SR-UNI-MODELSTATE" not in codes(problems_of(root))
    model = root / "mp_rank_00_model_states.pt"
    edit_state(model, lambda state: state["module"].update(mean=torch.ones(2), frozen=torch.ones(3)))
    edit_state(
        model, lambda state: state.update(buffer_names=["mean"], frozen_param_shapes={"frozen": torch.Size([3])})
    )
    assert "2 buffers and frozen" in only(root, "SR-UNI-MODELSTATE").message
    assert {"buffer:mean", "param:frozen"} <= set(open_checkpoint(root).state.tensors)


def test_masters_rebuilt_from_rounded_weights_are_found(tmp_path: Path):
    root = convert3(tmp_path, dtype=torch.bfloat16)
    assert "SR-UNI-ROUNDED" not in codes(problems_of(root, deep=True))
    for path in root.glob("zero/*/fp32.pt"):
        torch.save(torch.load(path).bfloat16().float(), path)
    assert only(root, "SR-UNI-ROUNDED", deep=True).severity is Severity.WARNING


def test_tensor_parallelism_cannot_change_without_description(tmp_path: Path):
    checkpoint = open_checkpoint(convert2(tmp_path))
    assert isinstance(checkpoint, UniversalCheckpoint)
    assert checkpoint.check_destination(Layout(dp_shard=7)) == []
    assert codes(checkpoint.check_destination(Layout(tp=2))) == ["SR-UNI-RIGID"]


class Strange:
    """An object of the training script's own."""


def test_classes_of_the_script_are_kept_as_records(tmp_path: Path):
    assert "SR-PKL-UNKNOWN" not in codes(problems_of(convert2(tmp_path)))
    assert "Strange" in only(convert2(tmp_path / "b", extra=Strange()), "SR-PKL-UNKNOWN").message


@pytest.mark.parametrize("value", [None, {"param": 3}, {"param": None}, [torch.ones(2)], "text"])
def test_slot_files_with_something_else_inside_are_no_traceback(tmp_path: Path, value: Any):
    root = convert2(tmp_path)
    torch.save(value, root / "zero" / "a.w" / "exp_avg.pt")
    report = inspect_checkpoint(open_checkpoint(root), deep=True)
    assert not report.complete
