"""Every finding about native ZeRO directories: provoked by one edit, and silent without it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from samerun.core.mesh import Layout
from samerun.errors import CorruptCheckpoint, FormatError, Severity
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from samerun.formats.zero.reader import ZeroCheckpoint, open_zero
from samerun.verify.inspection.structure import inspect_checkpoint
from support.zero import codes, edit_state, flip_byte, slots_of, write_stage2, write_stage3

SHAPES = [{"a.w": (7, 3), "b.w": (5, 5)}, {"a.b": (7,), "b.b": (5,)}]
WIDE = {"a.w": (11, 5), "a.b": (7,), "b.w": (5, 13), "b.b": (3,)}


def made(shapes: list[dict[str, tuple[int, ...]]] | None = None, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [slots_of(rng, group) for group in shapes or SHAPES]


def stage2(root: Path, ranks: int = 3, **more: Any) -> Path:
    return write_stage2(root / "global_step3", made(), ranks, **more)


def stage3(root: Path, ranks: int = 3, **more: Any) -> Path:
    return write_stage3(root / "global_step3", [[made([WIDE])[0]]], ranks, **more)


def optim(root: Path, rank: int) -> Path:
    return next(root.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def problems_of(root: Path, *, deep: bool = False) -> list[Any]:
    report = inspect_checkpoint(open_checkpoint(root), deep=deep)
    return list(report.problems)


def only(root: Path, code: str, *, deep: bool = False) -> Any:
    found = [problem for problem in problems_of(root, deep=deep) if problem.code == code]
    assert len(found) == 1, [str(problem) for problem in problems_of(root, deep=deep)]
    return found[0]


def inner(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda state: change(state["optimizer_state_dict"])


@pytest.mark.parametrize("write", [stage2, stage3])
def test_a_whole_directory_has_no_finding_that_blocks(tmp_path: Path, write: Callable[..., Path]):
    report = inspect_checkpoint(open_checkpoint(write(tmp_path)), deep=True)
    own = [p for p in report.problems if p.code.startswith(("SR-ZERO", "SR-FILE", "SR-COV", "SR-META"))]
    assert {problem.severity for problem in own} <= {Severity.NOTE}
    assert report.complete
    assert report.intact is (True if write is stage2 else None)


def test_the_format_is_named_with_its_reason(tmp_path: Path):
    state = open_checkpoint(stage2(tmp_path)).state
    assert state.written_by["format"] == "DeepSpeed ZeRO stage 2"
    expected = "looks like ZeRO stage 2, because zero_pp_rank_0_mp_rank_00_optim_states.pt records it"
    assert state.written_by["recognised"] == expected
    assert state.written_by["deepspeed"] == "0.19.8"


def test_a_missing_rank_is_named_and_its_values_are_missed(tmp_path: Path):
    root = stage2(tmp_path)
    optim(root, 1).unlink()
    assert only(root, "SR-FILE-MISSING").where["rank"] == 1
    report = inspect_checkpoint(open_checkpoint(root))
    assert not report.complete
    assert "SR-COV-GAP" in codes(report.problems)


def test_a_missing_model_file_of_stage_3_is_named(tmp_path: Path):
    root = stage3(tmp_path)
    (root / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    assert "model file" in only(root, "SR-FILE-MISSING").message


@pytest.mark.parametrize("keep", [0, 100, -1000, -1])
def test_a_file_cut_off_or_empty_is_named(tmp_path: Path, keep: int):
    root = stage3(tmp_path)
    path = optim(root, 1)
    path.write_bytes(path.read_bytes()[:keep])
    found = only(root, "SR-FILE-TRUNCATED")
    assert found.where["file"] == str(path)
    assert not inspect_checkpoint(open_checkpoint(root)).complete


def test_a_flipped_bit_is_found_by_the_checksum_only(tmp_path: Path):
    root = stage3(tmp_path)
    flip_byte(optim(root, 1), "data/1")
    assert "SR-FILE-CRC" not in codes(problems_of(root))
    assert only(root, "SR-FILE-CRC", deep=True).where["file"] == str(optim(root, 1))
    assert inspect_checkpoint(open_checkpoint(root), deep=True).intact is False


def test_files_of_a_larger_save_are_stale(tmp_path: Path):
    root = stage3(tmp_path, 2)
    larger = stage3(tmp_path / "other", 4)
    for rank in (2, 3):
        for path in larger.glob(f"*_rank_{rank}_mp_*"):
            path.rename(root / path.name)
    found = only(root, "SR-ZERO-STALE")
    assert found.severity is Severity.ERROR
    assert "4 files" in found.message
    checkpoint = open_checkpoint(root)
    assert checkpoint.state.topology.world_size == 2
    assert np.array_equal(checkpoint.read("param:b.w"), made([WIDE])[0]["fp32"]["b.w"])


def test_optimizer_files_of_another_precision_are_stale(tmp_path: Path):
    root = stage2(tmp_path)
    for rank in range(3):
        (root / f"bf16_{optim(root, rank).name}").write_bytes(optim(root, rank).read_bytes())
    assert "another precision" in only(root, "SR-ZERO-STALE").message


def test_a_rank_of_another_save_shows_by_its_step(tmp_path: Path):
    root = stage2(tmp_path)
    edit_state(optim(root, 1), inner(_count_on))
    found = only(root, "SR-FILE-GENERATION")
    assert (found.where["rank"], found.expected, found.found) == (1, 3, 10)


def _count_on(state: dict[str, Any]) -> None:
    for held in state["base_optimizer_state"]["state"].values():
        held["step"] = torch.tensor(10.0)


def test_a_model_file_of_another_save_shows_by_its_counters(tmp_path: Path):
    root = stage3(tmp_path)
    edit_state(root / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda state: state.update(global_steps=7))
    assert only(root, "SR-FILE-GENERATION").found == "global_steps = 7"


def test_a_rank_with_parts_for_another_number_of_ranks_is_of_another_save(tmp_path: Path):
    root = stage2(tmp_path)
    other = stage2(tmp_path / "other", 4)
    optim(root, 1).write_bytes(optim(other, 1).read_bytes())
    found = codes(problems_of(root))
    assert "SR-FILE-GENERATION" in found
    assert "SR-ZERO-LAYOUT" in found
    assert not inspect_checkpoint(open_checkpoint(root)).complete


def test_a_rank_with_another_batch_configured_is_of_another_save(tmp_path: Path):
    root = stage2(tmp_path)
    edit_state(optim(root, 2), lambda state: state["ds_config"].update(train_batch_size=64))
    assert only(root, "SR-FILE-GENERATION").found == "train_batch_size = 64"


def test_ranks_that_disagree_about_hyperparameters_are_named(tmp_path: Path):
    root = stage2(tmp_path)
    edit_state(optim(root, 2), inner(lambda state: state["base_optimizer_state"]["param_groups"][1].update(lr=0.5)))
    found = only(root, "SR-ZERO-GROUPS")
    assert (found.where["rank"], found.where["key"], found.found) == (2, "lr", 0.5)


def test_lost_groups_are_named(tmp_path: Path):
    root = stage2(tmp_path)
    for rank in range(3):
        edit_state(optim(root, rank), inner(lambda state: state["base_optimizer_state"]["param_groups"].pop()))
    assert only(root, "SR-ZERO-GROUPS").found == "1 groups"


class fragment_address:
    """Stands for DeepSpeed's record of a slice."""

    def __init__(self, start: int, numel: int) -> None:
        self.numel = numel
        self.start = start


fragment_address.__module__ = "deepspeed.utils.tensor_fragment"


def with_maps(root: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 3, reverse: bool = False) -> Path:
    """Adds to every file the slices that its rank holds; `reverse` counts them in another order (round robin)."""
    import sys
    import types

    module = types.ModuleType("deepspeed.utils.tensor_fragment")
    module.fragment_address = fragment_address
    for name in ("deepspeed", "deepspeed.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "deepspeed.utils.tensor_fragment", module)
    for rank in range(ranks):
        edit_state(optim(root, rank), inner(lambda state, rank=rank: _add_maps(state, rank, ranks, reverse)))
    return root


def _add_maps(state: dict[str, Any], rank: int, ranks: int, reverse: bool) -> None:
    maps = []
    for group in SHAPES:
        names = list(group)[::-1] if reverse else list(group)
        part = -(-sum(math.prod(shape) for shape in group.values()) // (2 * ranks)) * 2
        position, held = 0, {}
        for name in names:
            first, stop = max(position, rank * part), min(position + math.prod(group[name]), (rank + 1) * part)
            if first < stop:
                held[name] = fragment_address(first - rank * part, stop - first)
            position += math.prod(group[name])
        maps.append(held)
    state["param_slice_mappings"] = maps


def swap(first: Path, second: Path) -> None:
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


@pytest.mark.parametrize("reverse", [False, True])
def test_swapped_rank_files_show_by_their_slice_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool):
    root = with_maps(stage2(tmp_path), monkeypatch, reverse=reverse)
    if reverse:  # the model's own order, before gradients were dealt out
        names = [name for group in SHAPES for name in list(group)[::-1]]
        model = root / "mp_rank_00_model_states.pt"
        edit_state(model, lambda state: state.update(module={name: state["module"][name] for name in names}))
    assert "SR-ZERO-SWAPPED" not in codes(problems_of(root))
    swap(optim(root, 0), optim(root, 2))
    found = [problem for problem in problems_of(root) if problem.code == "SR-ZERO-SWAPPED"]
    assert [(problem.where["rank"], problem.found) for problem in found] == [
        (0, "the slices of rank 2"),
        (2, "the slices of rank 0"),
    ]


def test_groups_keep_the_order_that_slice_maps_are_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = with_maps(stage2(tmp_path), monkeypatch, reverse=True)
    assert [group.params for group in open_checkpoint(root).state.groups] == [("b.w", "a.w"), ("b.b", "a.b")]


def test_a_last_rank_of_stage_3_shows_by_its_padding(tmp_path: Path):
    root = stage3(tmp_path)
    assert "SR-ZERO-SWAPPED" not in codes(problems_of(root))
    swap(optim(root, 1), optim(root, 2))
    assert only(root, "SR-ZERO-SWAPPED").where["rank"] == 2


def test_swapped_model_files_show_by_who_records_ties(tmp_path: Path):
    root = stage3(tmp_path)
    first = root / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    edit_state(first, lambda state: state.update(shared_params={"head.w": "a.w"}))
    assert open_checkpoint(root).state.tensors["param:a.w"].aliases == ("head.w",)
    assert "SR-ZERO-SWAPPED" not in codes(problems_of(root))
    swap(first, root / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    assert only(root, "SR-ZERO-SWAPPED").where["rank"] == 1


@pytest.mark.parametrize("link", [False, True])
def test_a_copy_in_another_ranks_place_is_found_at_stage_3(link: bool, tmp_path: Path):
    root = stage3(tmp_path, 4)
    assert "SR-ZERO-SWAPPED" not in codes(problems_of(root))
    source, target = optim(root, 0), optim(root, 1)
    target.unlink()
    target.symlink_to(source.name) if link else shutil.copy(source, target)
    problem = only(root, "SR-ZERO-SWAPPED")
    assert "ranks 0 and 1 hold the same values" in problem.message
    assert problem.where["rank"] == 1


def test_ranks_that_hold_zeros_alone_are_alike_by_right(tmp_path: Path):
    root = stage3(tmp_path, 4)
    for rank in (0, 1):

        def clear(state: dict[str, Any]) -> None:
            for tensor in tensors_in(state):
                tensor.zero_()

        edit_state(optim(root, rank), clear)
    assert "SR-ZERO-SWAPPED" not in codes(problems_of(root))


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        yield from tensors_in(item)


def test_whether_ranks_are_right_stays_open_at_stage_3_unless_padding_tells(tmp_path: Path):
    assert "SR-ZERO-RANKOPEN" in codes(problems_of(stage3(tmp_path, 3), deep=True))
    report = inspect_checkpoint(open_checkpoint(stage3(tmp_path / "two", 2)), deep=True)
    assert "SR-ZERO-RANKOPEN" not in codes(report.problems)
    assert report.intact is True


def test_a_rank_without_counter_leaves_the_save_open(tmp_path: Path):
    root = stage3(tmp_path, 2)
    for rank in range(2):
        edit_state(optim(root, rank), inner(lambda state: state["optimizer_state_dict"]["state"][0].pop("step")))
    report = inspect_checkpoint(open_checkpoint(root), deep=True)
    assert "SR-FILE-GENERATION-OPEN" in codes(report.problems)
    assert report.intact is None


def bf16(root: Path, **more: Any) -> Path:
    groups = made([{"a.w": (9, 8), "b.w": (7, 9)}])
    module = {name: torch.from_numpy(values).bfloat16() for name, values in groups[0]["fp32"].items()}
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "train_batch_size": 4}
    return write_stage2(root / "global_step3", groups, 2, module=module, ds_config=config, prefix="bf16_", **more)


def test_masters_that_do_not_round_to_the_weights_are_found(tmp_path: Path):
    root = bf16(tmp_path)
    assert "SR-ZERO-MASTER" not in codes(problems_of(root, deep=True))
    edit_state(optim(root, 1), inner(lambda state: state["single_partition_of_fp32_groups"][0].mul_(1.5)))
    found = only(root, "SR-ZERO-MASTER", deep=True)
    assert found.where["file"] == str(optim(root, 1))


def test_flat_fp32_parameters_that_are_not_the_models_are_found(tmp_path: Path):
    root = stage2(tmp_path)
    edit_state(optim(root, 2), inner(lambda state: state["single_partition_of_fp32_groups"][0].mul_(1.5)))
    assert "SR-ZERO-MASTER" not in codes(problems_of(root))
    assert only(root, "SR-ZERO-MASTER", deep=True).where["file"] == str(optim(root, 2))


def test_masters_rebuilt_from_rounded_weights_are_found(tmp_path: Path):
    root = bf16(tmp_path)
    assert "SR-ZERO-ROUNDED" not in codes(problems_of(root, deep=True))
    for rank in range(2):
        edit_state(optim(root, rank), inner(_round))
    assert only(root, "SR-ZERO-ROUNDED", deep=True).where["tensor"] == "master:a.w"


def _round(state: dict[str, Any]) -> None:
    state["single_partition_of_fp32_groups"] = [
        part.bfloat16().float() for part in state["single_partition_of_fp32_groups"]
    ]


def test_buffers_that_differ_between_ranks_are_found(tmp_path: Path):
    root = stage3(tmp_path, 2)
    for rank in range(2):
        path = root / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        edit_state(path, lambda state: _add_buffer(state, torch.ones(3)))
    assert "SR-ZERO-REPLICA" not in codes(problems_of(root, deep=True))
    edit_state(path, lambda state: _add_buffer(state, torch.zeros(3)))
    found = only(root, "SR-ZERO-REPLICA", deep=True)
    assert (found.severity, found.where["tensor"]) == (Severity.WARNING, "buffer:mean")


def _add_buffer(state: dict[str, Any], values: torch.Tensor) -> None:
    state["module"]["mean"] = values
    state["buffer_names"] = ["mean"]


def test_a_parameter_neither_trained_nor_frozen_is_found(tmp_path: Path):
    root = stage2(tmp_path)
    model = root / "mp_rank_00_model_states.pt"
    edit_state(model, lambda state: state["module"].update(lost=torch.ones(4)))
    assert only(root, "SR-ZERO-UNOWNED").where["tensor"] == "lost"
    edit_state(model, lambda state: state.update(frozen_param_shapes={"lost": torch.Size([4])}))
    assert "SR-ZERO-UNOWNED" not in codes(problems_of(root))
    assert np.array_equal(open_checkpoint(root).read("param:lost"), np.ones(4))


def test_optimizer_files_without_shapes_cannot_be_read(tmp_path: Path):
    root = stage2(tmp_path)
    edit_state(root / "mp_rank_00_model_states.pt", lambda state: state.update(param_shapes=None))
    found = [problem for problem in problems_of(root) if problem.code == "SR-META-SHAPES"]
    assert len(found) == 3
    assert not inspect_checkpoint(open_checkpoint(root)).complete


def test_a_model_of_other_shapes_does_not_fill_the_buffers(tmp_path: Path):
    root = stage2(tmp_path)
    model = root / "mp_rank_00_model_states.pt"
    edit_state(model, lambda state: state["param_shapes"][0].update({"a.w": torch.Size([70, 3])}))
    assert "SR-ZERO-LAYOUT" in codes(problems_of(root))


def test_slots_of_another_shape_are_not_read_and_named(tmp_path: Path):
    root = stage2(tmp_path)
    for rank in range(3):
        edit_state(optim(root, rank), inner(_factor))
    assert "row_var" in only(root, "SR-COV-SLOT").message
    assert not inspect_checkpoint(open_checkpoint(root)).complete


def _factor(state: dict[str, Any]) -> None:
    state["base_optimizer_state"]["state"][0]["row_var"] = torch.ones(2, 3)


def test_latest_naming_an_unfinished_directory_is_said_with_the_finished_ones(tmp_path: Path):
    root = stage2(tmp_path)
    write_stage2(tmp_path / "global_step2", made(), 3)
    (tmp_path / "latest").write_text("global_step3")
    assert "SR-ZERO-LATEST" not in codes(problems_of(tmp_path))
    optim(root, 2).unlink()
    assert "global_step2" in only(tmp_path, "SR-ZERO-LATEST").hint
    (tmp_path / "latest").write_text("global_step2")
    assert "SR-ZERO-LATEST" not in codes(problems_of(tmp_path))


def test_latest_naming_nothing_lists_what_is_there(tmp_path: Path):
    stage2(tmp_path)
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(CorruptCheckpoint, match="global_step3"):
        open_checkpoint(tmp_path)


def test_the_layouts_that_deepspeed_loads_are_said(tmp_path: Path):
    checkpoint = open_checkpoint(stage2(tmp_path))
    assert isinstance(checkpoint, ZeroCheckpoint)
    assert codes(checkpoint.state.problems) == ["SR-ZERO-RIGID"]
    assert checkpoint.check_destination(Layout(dp_shard=3)) == []
    found = checkpoint.check_destination(Layout(dp_shard=5))
    assert codes(found) == ["SR-ZERO-RIGID"]
    assert "convert" in found[0].hint
    report = inspect_checkpoint(checkpoint, destination=Layout(dp_shard=2, tp=2))
    assert codes(report.problems).count("SR-ZERO-RIGID") == 2


def test_round_robin_and_unequal_groups_warn_of_deepspeeds_own_conversion(tmp_path: Path):
    assert not {"SR-ZERO-ROUNDROBIN", "SR-ZERO-GROUPZERO"} & set(codes(problems_of(stage2(tmp_path))))
    config = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}, "train_batch_size": 4}
    assert only(stage2(tmp_path / "rr", ds_config=config), "SR-ZERO-ROUNDROBIN").severity is Severity.NOTE
    groups = [[made([WIDE])[0]], [made([{"c": (3,)}])[0]]]
    root = write_stage3(tmp_path / "three" / "global_step3", groups, 2)
    assert only(root, "SR-ZERO-GROUPZERO").severity is Severity.NOTE


def test_slots_that_deepspeeds_own_conversion_would_lose_are_named(tmp_path: Path):
    root = stage2(tmp_path)
    assert "SR-ZERO-SLOTS" not in codes(problems_of(root))
    for rank in range(3):
        edit_state(optim(root, rank), inner(_keep_maximum))
    assert "max_exp_avg_sq" in only(root, "SR-ZERO-SLOTS").message
    checkpoint = open_checkpoint(root)
    assert np.array_equal(checkpoint.read("optim.max_exp_avg_sq:a.w"), checkpoint.read("optim.exp_avg_sq:a.w"))


def _keep_maximum(state: dict[str, Any]) -> None:
    for held in state["base_optimizer_state"]["state"].values():
        held["max_exp_avg_sq"] = held["exp_avg_sq"].clone()


def test_a_scheduler_that_is_not_where_the_run_is_is_named(tmp_path: Path):
    root = stage2(tmp_path, lr_scheduler={"last_batch_iteration": 2})
    assert "SR-CNT-DISAGREE" not in codes(problems_of(root))
    edit_state(
        root / "mp_rank_00_model_states.pt", lambda state: state.update(lr_scheduler={"last_batch_iteration": 9})
    )
    assert only(root, "SR-CNT-DISAGREE").found == 9


def test_samples_counted_differently_are_named(tmp_path: Path):
    assert "SR-CNT-DISAGREE" not in codes(problems_of(stage2(tmp_path, consumed_samples=12)))
    found = only(stage2(tmp_path / "b", consumed_samples=99), "SR-CNT-DISAGREE")
    assert found.severity is Severity.WARNING
    assert found.found == 99


class Strange:
    """An object of the training script's own."""


def test_classes_of_the_script_are_kept_as_records(tmp_path: Path):
    assert "SR-PKL-UNKNOWN" not in codes(problems_of(stage2(tmp_path)))
    assert "Strange" in only(stage2(tmp_path / "b", extra=Strange()), "SR-PKL-UNKNOWN").message


def two_tensor_ranks(root: Path, info: dict[str, Any] | None) -> Path:
    """A directory of two tensor-parallel ranks, each written as if alone and then told of the other."""
    for rank in (0, 1):
        part = write_stage2(root / f"part{rank}", made([{"a.w": (4, 3)}], seed=rank), 1, mp_world_size=2,
                            checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": 2},
                            **({"universal_checkpoint_info": info} if info else {}))  # fmt: skip
        (root / "global_step3").mkdir(exist_ok=True)
        for path in part.iterdir():
            path.rename(root / "global_step3" / path.name.replace("mp_rank_00", f"mp_rank_0{rank}"))
    return root / "global_step3"


def test_tensor_parallel_parts_without_description_are_kept_apart(tmp_path: Path):
    root = two_tensor_ranks(tmp_path, None)
    assert only(root, "SR-ZERO-TPUNKNOWN").severity is Severity.ERROR
    assert {"param:a.w[tp=0]", "param:a.w[tp=1]"} <= set(open_checkpoint(root).state.tensors)


@pytest.mark.parametrize(("info", "axis"), [({"universal_checkpoint_version": 0.4}, 0),
    ({"parameter_with_row_parallelism_patterns": [r"^a\.w$"]}, 1)])  # fmt: skip
def test_tensor_parallel_parts_are_joined_as_described(tmp_path: Path, info: dict[str, Any], axis: int):
    checkpoint = open_checkpoint(two_tensor_ranks(tmp_path, info))
    assert "SR-ZERO-TPUNKNOWN" not in codes(checkpoint.state.problems)
    for slot, key in (("fp32", "param:a.w"), ("exp_avg", "optim.exp_avg:a.w")):
        parts = [made([{"a.w": (4, 3)}], seed=rank)[0][slot]["a.w"] for rank in (0, 1)]
        assert np.array_equal(checkpoint.read(key), np.concatenate(parts, axis))


def test_a_replicated_tensor_that_differs_between_tensor_parallel_ranks_is_found(tmp_path: Path):
    root = two_tensor_ranks(tmp_path, {"tp_replicated_parameter_patterns": ["a.w"]})
    assert open_checkpoint(root).state.tensors["param:a.w"].shape == (4, 3)
    assert "SR-ZERO-REPLICA" in codes(problems_of(root, deep=True))


def stage0(root: Path, module: dict[str, torch.Tensor], groups: list[list[torch.Tensor]], **more: Any) -> Path:
    """A directory of stage 0 with torch's own optimizer state: the moments of parameter i are all i."""
    root.mkdir(parents=True)
    flat = [shape for group in groups for shape in group]
    numbers = iter(range(len(flat)))
    state = {i: {"step": torch.tensor(3.0), "exp_avg": torch.full(t.shape, float(i))} for i, t in enumerate(flat)}
    content = {"state": state, "param_groups": [{"lr": 0.1, "params": [next(numbers) for _ in g]} for g in groups]}
    torch.save(
        {"module": module, "buffer_names": [], "optimizer": more.pop("wrap", lambda inner: inner)(content),
         "global_steps": 3, "global_samples": 12, "skipped_steps": 0, "dp_world_size": 2, "mp_world_size": 1,
         "ds_config": {"zero_optimization": {"stage": 0}}, "ds_version": "0.19.8", **more},
        root / "mp_rank_00_model_states.pt",
    )  # fmt: skip
    return root


def test_numbered_moments_find_their_names(tmp_path: Path):
    module = {"frozen": torch.ones(3), "a": torch.ones(2, 2), "b": torch.ones(3), "c": torch.ones(2, 2)}
    root = stage0(tmp_path / "t", module, [[module["a"], module["c"]], [module["b"]]], buffer_names=["frozen"])
    checkpoint = open_checkpoint(root)
    assert [group.params for group in checkpoint.state.groups] == [("a", "c"), ("b",)]
    assert [checkpoint.read(f"optim.exp_avg:{name}").flat[0] for name in "acb"] == [0, 1, 2]
    assert "SR-OPT-POSITIONAL" not in codes(checkpoint.state.problems)
    assert checkpoint.check_destination(Layout(dp_replicate=5)) == []


def test_numbered_moments_that_fit_several_parameters_have_no_name(tmp_path: Path):
    module = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(2)}
    checkpoint = open_checkpoint(stage0(tmp_path / "t", module, [[module["a"]], [module["c"]]]))
    assert "SR-OPT-POSITIONAL" in codes(checkpoint.state.problems)
    assert {"optim.exp_avg:#0", "optim.exp_avg:c"} <= set(checkpoint.state.tensors)


def test_masters_decide_which_parameter_a_number_means(tmp_path: Path):
    rng = np.random.default_rng(0)
    full = {name: rng.standard_normal(3).astype(np.float32) for name in "ab"}
    module = {name: torch.from_numpy(values).bfloat16() for name, values in full.items()}
    masters = [[torch.from_numpy(full["b"])], [torch.from_numpy(full["a"])]]
    root = stage0(
        tmp_path / "t",
        module,
        [[module["b"]], [module["a"]]],
        wrap=lambda inner: {"optimizer_state_dict": inner, "fp32_groups": masters, "cur_scale": 1.0},
        ds_config={"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
    )
    checkpoint = open_checkpoint(root)
    assert [group.params for group in checkpoint.state.groups] == [("b",), ("a",)]
    assert np.array_equal(checkpoint.read("master:a"), full["a"])
    assert checkpoint.read("param:a").dtype == ml_dtypes.bfloat16


def test_flat_fp16_masters_are_cut_where_the_weights_say(tmp_path: Path):
    rng = np.random.default_rng(1)
    full = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in {"a": (2, 3), "b": (4,)}.items()}
    module = {name: torch.from_numpy(values).half() for name, values in full.items()}
    flat = torch.cat([torch.from_numpy(full["b"]), torch.from_numpy(full["a"]).reshape(-1)])
    state = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": flat * 2}}, "param_groups": [{"params": [0]}]}
    root = stage0(
        tmp_path / "t",
        module,
        [[torch.ones(10)]],
        wrap=lambda _: {"optimizer_state_dict": state, "fp32_groups_flat": [flat], "cur_scale": 8.0},
        ds_config={"fp16": {"enabled": True}, "zero_optimization": {"stage": 0}},
    )
    checkpoint = open_checkpoint(root)
    assert np.array_equal(checkpoint.read("master:a"), full["a"])
    assert np.array_equal(checkpoint.read("optim.exp_avg:b"), full["b"] * 2)
    assert checkpoint.state.objects["loss_scaler"]["cur_scale"] == 8.0


def expert_directory(root: Path) -> Path:
    """Two experts per layer on two ranks, one each: the same local name on both ranks."""
    name = "moe.deepspeed_moe.experts.deepspeed_experts.0.w"
    groups = [made([{"gate": (4, 3)}])[0], made([{name: (3, 2)}])[0]]
    write_stage2(root, groups, 1, module={"gate": torch.from_numpy(groups[0]["fp32"]["gate"])}, num_experts=[2])
    base = torch.load(root / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    for rank in range(2):
        own = made([{"gate": (4, 3)}])[0], made([{name: (3, 2)}], seed=rank)[0]
        inner_state = base["optimizer_state_dict"]
        inner_state["partition_count"] = [2, 1]
        inner_state["group_paddings"] = [0, 0]
        gate = {slot: torch.from_numpy(full["gate"].reshape(2, 6)[rank].copy()) for slot, full in own[0].items()}
        expert = {slot: torch.from_numpy(full[name].reshape(-1).copy()) for slot, full in own[1].items()}
        inner_state["single_partition_of_fp32_groups"] = [gate.pop("fp32"), expert.pop("fp32")]
        step = torch.tensor(3.0)
        inner_state["base_optimizer_state"]["state"] = {0: {"step": step, **gate}, 1: {"step": step, **expert}}
        inner_state["base_optimizer_state"]["param_groups"][1]["moe"] = True
        torch.save(base, root / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        weights = {name.replace("experts.0", f"experts.{rank}"): torch.from_numpy(own[1]["fp32"][name].copy())}
        torch.save(weights, root / f"layer_0_expert_{rank}_mp_rank_00_model_states.pt")
    edit_state(root / "mp_rank_00_model_states.pt", lambda state: state.update(dp_world_size=2))
    return root


def test_local_numbers_of_experts_are_made_global(tmp_path: Path):
    checkpoint = open_checkpoint(expert_directory(tmp_path / "t"))
    for rank in range(2):
        full = made([{"x": (3, 2)}], seed=rank)[0]
        name = f"moe.deepspeed_moe.experts.deepspeed_experts.{rank}.w"
        assert np.array_equal(checkpoint.read(f"param:{name}"), full["fp32"]["x"])
        assert np.array_equal(checkpoint.read(f"optim.exp_avg:{name}"), full["exp_avg"]["x"])
    assert checkpoint.state.topology.layout == Layout(dp_shard=2, ep=2)
    assert "moe" not in checkpoint.state.groups[1].hyperparameters


def test_an_expert_without_file_is_missed(tmp_path: Path):
    root = expert_directory(tmp_path / "t")
    assert "SR-FILE-MISSING" not in codes(problems_of(root))
    (root / "layer_0_expert_1_mp_rank_00_model_states.pt").unlink()
    assert "1 of 2 experts" in only(root, "SR-FILE-MISSING").message


def test_a_pipeline_layer_without_file_is_missed(tmp_path: Path):
    groups = made([{"0.w": (4, 3), "1.w": (3, 2)}])
    root = write_stage2(tmp_path / "t", groups, 1, module=None)
    for number in range(2):
        weights = {"w": torch.from_numpy(groups[0]["fp32"][f"{number}.w"].copy())}
        torch.save(weights, root / f"layer_0{number}-model_states.pt")
    checkpoint = open_checkpoint(root)
    assert np.array_equal(checkpoint.read("param:1.w"), groups[0]["fp32"]["1.w"])
    assert "SR-FILE-MISSING" not in codes(checkpoint.state.problems)
    (root / "layer_01-model_states.pt").unlink()
    assert "layer 1" in only(root, "SR-FILE-MISSING").message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nothing else", b"no archive at all" * 10])
def test_a_directory_of_rubbish_is_findings_and_no_traceback(tmp_path: Path, content: bytes):
    root = tmp_path / "global_step1"
    root.mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (root / name).write_bytes(content)
    report = inspect_checkpoint(open_checkpoint(root), deep=True)
    assert not report.complete


MALFORMED = [
    None,
    3,
    "text",
    [],
    {},
    {"module": 3, "param_shapes": [3, {"a": "b"}]},
    {"optimizer_state_dict": {"base_optimizer_state": 3, "single_partition_of_fp32_groups": [1, None]}},
    {"param_shapes": [{"a": [2, -3]}], "dp_world_size": -1, "mp_world_size": 0, "ds_config": 7},
    {"optimizer_state_dict": {"zero_stage": 3, "fp32_flat_groups": [1], "optimizer_state_dict": {"state": 5}}},
]


@pytest.mark.parametrize("value", MALFORMED)
def test_files_with_something_else_inside_are_no_traceback(tmp_path: Path, value: Any):
    root = tmp_path / "global_step1"
    root.mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save(value, root / name)
    try:
        checkpoint: Checkpoint = open_zero(root)
    except FormatError:
        return
    inspect_checkpoint(checkpoint, deep=True)
