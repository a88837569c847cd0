"""What is written for DeepSpeed reads back equal at other degrees, and is DeepSpeed's own layout at the same one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState
from samerun.core.written import DestinationPlan
from samerun.errors import has_errors
from samerun.formats.base import Checkpoint, WriteSource, view_extent
from samerun.formats.deepspeed.states import StateFile, read_state_file
from samerun.formats.detect import open_checkpoint
from samerun.formats.torchfile import Inert, TensorRef
from samerun.formats.universal.write import lay_out as lay_out_universal
from samerun.formats.zero.write import lay_out as lay_out_zero
from samerun.stores.local import MappedFiles
from support.corpus import CORPUS, corpus, needs_corpus
from support.written import carry_out, source_of
from support.zero import codes, copy_tree, flat_parts, flip_byte, slots_of, write_stage2, write_stage3

GOLDEN = Path(__file__).parents[1] / "golden"
WRITERS = {"zero": lay_out_zero, "universal": lay_out_universal}
NATIVE = ("z0_bf16", "z1_bf16opt", "z2_align_rr", "z3_sub_bf16", "tp2dp2", "universal_z3_bf16")


def move(checkpoint: Checkpoint, target: str, layout: Layout, folder: Path, **more: Any) -> Checkpoint:
    """Writes with the naive oracle and opens the result."""
    return open_checkpoint(carry_out(WRITERS[target](source_of(checkpoint), layout, **more), checkpoint, folder))


def differing(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Returns the keys whose presence, type, shape or bits differ."""
    keys = {*first.state.tensors, *second.state.tensors}
    return sorted(key for key in keys if not _same(first, second, key))


def _same(first: Checkpoint, second: Checkpoint, key: str) -> bool:
    if key not in first.state.tensors or key not in second.state.tensors:
        return False
    a, b = first.read(key), second.read(key)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


def assert_same_run(first: Checkpoint, second: Checkpoint) -> None:
    assert differing(first, second) == []
    a, b = first.state, second.state
    assert (a.groups, a.progress, a.scheduler) == (b.groups, b.progress, b.scheduler)
    assert {e.key.fqn: e.aliases for e in a.tensors.values()} == {e.key.fqn: e.aliases for e in b.tensors.values()}
    assert not [p for p in b.problems if p.severity == "error"]


def forgotten(plan: DestinationPlan, state: LogicalState, read: set[str]) -> set[str]:
    return set(state.tensors) - {slots.key for slots in plan.tensors} - set(plan.dropped) - read


@pytest.mark.parametrize("target", WRITERS)
@pytest.mark.parametrize("case", NATIVE)
def test_golden_checkpoints_come_back_at_another_degree(case: str, target: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(GOLDEN / "deepspeed" / case)
    moved = move(checkpoint, target, Layout(dp_shard=4), tmp_path / "to4")
    assert_same_run(checkpoint, moved)
    assert moved.state.topology.layout == Layout(dp_shard=4)
    if target == "universal":  # and from there on
        assert_same_run(checkpoint, move(moved, "zero", Layout(dp_shard=2), tmp_path / "to2"))


@needs_corpus
@pytest.mark.parametrize("case", sorted(p.name for p in (CORPUS / "deepspeed").iterdir()) if CORPUS else [])
def test_real_checkpoints_come_back_at_another_degree(case: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(corpus("deepspeed") / case)
    ranks = checkpoint.state.topology.world_size or 1
    assert_same_run(checkpoint, move(checkpoint, "zero", Layout(dp_shard=ranks + 1), tmp_path))


@needs_corpus
@pytest.mark.parametrize("case", ["z1_bf16_untied_ga32_ws2", "z2_fp32_untied_offload_ws2", "z3_fp32_untied_unused_ws3"])
def test_real_checkpoints_come_back_from_a_universal_one(case: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(corpus("deepspeed") / case)
    assert_same_run(checkpoint, move(checkpoint, "universal", Layout(dp_shard=5), tmp_path))


@needs_corpus
@pytest.mark.parametrize("case", ["torch/dcp_fsdp2_ws3", "torch/dcp_tpfsdp_dp2tp2", "torch/ranklocal_fsdp2_ws3"])
def test_runs_of_torch_come_back_from_stage_3(case: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(corpus(case))
    for target in WRITERS:
        moved = move(checkpoint, target, Layout(dp_shard=2), tmp_path / target)
        assert differing(checkpoint, moved) == []
        frozen = ["frozen"]
        assert [list(g.params) for g in moved.state.groups] == [
            [name for name in g.params if name not in frozen] for g in checkpoint.state.groups
        ]
        assert moved.state.progress.update == checkpoint.state.progress.update
        assert moved.state.scheduler == checkpoint.state.scheduler


def values_of(file: StateFile, files: MappedFiles) -> Any:
    """Returns a state file's whole content, tensors as arrays."""

    def read(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return view_extent(files, file.extent(value))
        if isinstance(value, dict):
            return {key: read(item) for key, item in value.items()}
        if isinstance(value, list):
            return [read(item) for item in value]
        return (value.name, value.args, value.state) if isinstance(value, Inert) else value

    return read(file.value)


def unequal(a: Any, b: Any, path: str = "") -> list[str]:
    """Returns the paths at which two contents differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [p for key in {**a, **b} for p in unequal(a.get(key, "absent"), b.get(key, "absent"), f"{path}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [p for number, pair in enumerate(zip(a, b, strict=True)) for p in unequal(*pair, f"{path}/{number}")]
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        same = (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
        return [] if same else [path]
    return [] if type(a) is type(b) and a == b else [path]


# Where ours may differ from what DeepSpeed wrote at the same degree, and why.
LICENCE = {
    "param_slice_mappings": "DeepSpeed keeps the wrong places with round_robin_gradients",
    "fp32_flat_groups": "DeepSpeed's padding is uninitialised memory",
    "frozen_param_fragments": "the same",
    "module/mean": "stage 3 saves the buffers of every rank, which differ here; a state has one of each, rank 0's",
}


@pytest.mark.parametrize("case", ["z2_align_rr", "z3_sub_bf16", "moe4"])
def test_at_the_same_degree_files_are_what_deepspeed_wrote(case: str, tmp_path: Path) -> None:
    folder = GOLDEN / "deepspeed" / case
    checkpoint = open_checkpoint(folder)
    layout = Layout(dp_shard=4, ep=2) if case == "moe4" else Layout(dp_shard=3)
    carry_out(lay_out_zero(source_of(checkpoint), layout), checkpoint, tmp_path)
    files = MappedFiles()
    names = sorted(path.name for path in (folder / "global_step3").glob("*.pt"))
    assert names == sorted(path.name for path in (tmp_path / "global_step3").glob("*.pt"))
    for name in names:
        own, held = (
            values_of(read_state_file(root / "global_step3" / name, files), files) for root in (tmp_path, folder)
        )
        found = [path for path in unequal(held, own) if not any(part in path for part in LICENCE)]
        assert found == [], name
    assert (tmp_path / "latest").read_text() == (folder / "latest").read_text().strip()


@pytest.mark.parametrize("case", ["z2_align_rr", "z3_sub_bf16"])
def test_masters_are_equal_to_deepspeeds_outside_their_padding(case: str, tmp_path: Path) -> None:
    folder = GOLDEN / "deepspeed" / case
    checkpoint = open_checkpoint(folder)
    carry_out(lay_out_zero(source_of(checkpoint), Layout(dp_shard=3)), checkpoint, tmp_path)
    files = MappedFiles()
    for path in (folder / "global_step3").glob("bf16_*"):
        held = values_of(read_state_file(path, files), files)["optimizer_state_dict"]
        own = values_of(read_state_file(tmp_path / "global_step3" / path.name, files), files)["optimizer_state_dict"]
        key = "fp32_flat_groups" if "fp32_flat_groups" in held else "single_partition_of_fp32_groups"
        for a, b in zip(held[key], own[key], strict=True):
            assert a.shape == b.shape
            odd = np.flatnonzero(a.view(np.uint32) != b.view(np.uint32))
            assert not b[odd].any(), "only padding differs, which is zero here"
        own_frozen, frozen = (
            open_checkpoint(root).read("param:frozen") if case == "z3_sub_bf16" else np.zeros(0)
            for root in (tmp_path, folder)
        )
        assert own_frozen.tobytes() == frozen.tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_stage_2_is_numpy_concatenation(ranks: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(ranks)
    groups = [slots_of(rng, {"a": (3, 5), "b": (7,), "c": (1,)}), slots_of(rng, {"d": (2, 2), "e": (3,)})]
    checkpoint = open_checkpoint(write_stage2(tmp_path / "source", groups, 4))
    carry_out(lay_out_zero(source_of(checkpoint), Layout(dp_shard=ranks)), checkpoint, tmp_path / "out")
    files = MappedFiles()
    for rank in range(ranks):
        path = tmp_path / "out" / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        held = values_of(read_state_file(path, files), files)["optimizer_state_dict"]
        for number, group in enumerate(groups):
            gaps = [0] * len(group["fp32"])
            for slot in ("exp_avg", "exp_avg_sq"):
                expected = flat_parts(group[slot], ranks, gaps)[rank]
                assert np.array_equal(held["base_optimizer_state"]["state"][number][slot], expected)
            masters = held["single_partition_of_fp32_groups"][number]
            expected = flat_parts(group["fp32"], ranks, gaps)[rank]
            assert np.array_equal(masters, expected[: len(expected) - held["group_paddings"][number]])


@pytest.mark.parametrize("ranks", [1, 3])
def test_sub_groups_of_stage_3_follow_the_configuration(ranks: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    shapes = {name: (size,) for name, size in (("a", 5), ("b", 6), ("c", 1), ("d", 30), ("e", 2))}
    config = {"zero_optimization": {"stage": 3, "sub_group_size": 12 // ranks}}
    checkpoint = open_checkpoint(write_stage3(tmp_path / "source", [[slots_of(rng, shapes)]], 2, ds_config=config))
    moved = move(checkpoint, "zero", Layout(dp_shard=ranks), tmp_path / "out")
    assert differing(checkpoint, moved) == []
    files = MappedFiles()
    file = next((tmp_path / "out" / "global_step3").glob("*_rank_0_*model_states.pt"))
    listed = [list(group) for group in values_of(read_state_file(file, files), files)["param_shapes"]]
    expected: list[list[str]] = [[]]
    held = 0
    for name, (size,) in shapes.items():  # DeepSpeed closes a sub-group as soon as it is large enough
        expected[-1].append(name)
        held += math.ceil(size / ranks)
        if held >= 12 // ranks:
            expected.append([])
            held = 0
    assert listed == [names for names in expected if names]


def test_every_tensor_is_written_dropped_or_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(GOLDEN / "deepspeed" / "z3_sub_bf16")
    read: set[str] = set()

    def scalar(key: str) -> Any:
        read.add(key)
        return checkpoint.read(key)

    for lay_out in WRITERS.values():
        plan = lay_out(WriteSource(checkpoint.state, scalar), Layout(dp_shard=2))
        assert forgotten(plan, checkpoint.state, read) == set()
        assert not has_errors(plan.problems)


def test_any_stage_opens_the_same_universal_directory(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(GOLDEN / "deepspeed" / "z3_sub_bf16")
    moved = move(checkpoint, "universal", Layout(dp_shard=2), tmp_path)
    tag = (tmp_path / "latest_universal").read_text()
    held = {path.name for path in (tmp_path / tag).glob("*.pt")}
    assert held == {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"}
    found = codes(moved.state.problems)
    assert "SR-UNI-MODELSTATE" in found
    assert not {"SR-UNI-STAGE", "SR-UNI-GROUPZERO", "SR-UNI-SHAREDSTEP"} & set(found)


def test_a_run_can_go_to_another_stage(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(GOLDEN / "deepspeed" / "z2_align_rr")
    moved = move(checkpoint, "zero", Layout(dp_shard=2), tmp_path, stage=3)
    assert differing(checkpoint, moved) == []
    assert "stage 3" in moved.state.written_by["format"]


def test_each_rank_keeps_its_own_state_only_where_ranks_are_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    source = write_stage3(tmp_path / "source", [[slots_of(rng, {"a": (5, 3)})]], 3, epoch=4)
    import torch

    for rank in range(3):
        path = source / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        held = torch.load(path, weights_only=False)
        torch.save(held | {"torch_rng": torch.full((4,), rank, dtype=torch.uint8)}, path)
    checkpoint = open_checkpoint(source)
    same = lay_out_zero(source_of(checkpoint), Layout(dp_shard=3))
    assert "SR-DSW-PERRANK" not in codes(same.problems)
    back = open_checkpoint(carry_out(same, checkpoint, tmp_path / "same"))
    assert {name: value.tolist() for name, value in back.state.rng.items()} == {
        f"torch_rng.rank{rank}": [rank] * 4 for rank in range(3)
    }
    other = lay_out_zero(source_of(checkpoint), Layout(dp_shard=2))
    assert codes(other.problems).count("SR-DSW-PERRANK") == 1
    files = MappedFiles()
    carry_out(other, checkpoint, tmp_path / "other")
    for rank in range(2):
        path = tmp_path / "other" / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        held = values_of(read_state_file(path, files), files)
        assert [held[f"torch_rng.rank{number}"][0] for number in range(3)] == [0, 1, 2]
        assert "torch_rng" not in held
        assert held["epoch"] == 4


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    checkpoint = open_checkpoint(GOLDEN / "deepspeed" / "z2_align_rr")
    for target, lay_out in WRITERS.items():
        carry_out(lay_out(source_of(checkpoint), Layout(dp_shard=4)), checkpoint, folder / target)
    return folder


def test_what_was_written_is_clean(written: Path) -> None:
    for target in WRITERS:
        checkpoint = open_checkpoint(written / target)
        report = checkpoint.check_payloads()  # type: ignore[attr-defined]
        assert not has_errors([*checkpoint.state.problems, *report.problems])
        assert report.checked == report.total


def test_swapped_files_of_ours_are_seen(written: Path, tmp_path: Path) -> None:
    copy = copy_tree(written / "zero", tmp_path / "copy") / "global_step3"
    first, second = (copy / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    first.rename(copy / "aside")
    second.rename(first)
    (copy / "aside").rename(second)
    assert "SR-ZERO-SWAPPED" in codes(open_checkpoint(tmp_path / "copy").state.problems)


def test_a_lost_rank_of_ours_is_seen(written: Path, tmp_path: Path) -> None:
    copy = copy_tree(written / "zero", tmp_path / "copy")
    (copy / "global_step3" / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    assert "SR-FILE-MISSING" in codes(open_checkpoint(copy).state.problems)


@pytest.mark.parametrize("target", WRITERS)
def test_a_flipped_bit_of_ours_is_seen(target: str, written: Path, tmp_path: Path) -> None:
    copy = copy_tree(written / target, tmp_path / "copy")
    pattern = (
        "zero/head.weight/exp_avg.pt" if target == "universal" else "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    )
    flip_byte(next(copy.rglob(pattern)), "data/1" if target == "zero" else "data/0")
    report = open_checkpoint(copy).check_payloads()  # type: ignore[attr-defined]
    assert "SR-FILE-CRC" in codes(report.problems)
