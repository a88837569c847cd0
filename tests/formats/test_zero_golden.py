"""Small checkpoints written by stock DeepSpeed, kept here: equal to the running job, and damaged on purpose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.core.box import check_tilings
from samerun.core.mesh import Layout
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from samerun.formats.torchfile import read_archive
from samerun.verify.inspection.structure import inspect_checkpoint
from support.packed import unpack
from support.zero import codes, copy_tree, flip_byte, read_state, rewrite_record

GOLDEN = Path(__file__).parents[1] / "golden" / "deepspeed"
PLAIN = ("z0_bf16", "z1_bf16opt", "z2_align_rr", "z3_sub_bf16")
PACKED = ("z3_still", "z3_pair", "universal_z1_even")
DATED = ("SR-FILE-GENERATION", "SR-ZERO-SWAPPED", "SR-ZERO-MASTER")


def key_of(checkpoint: Checkpoint, role: str, name: str) -> str:
    if role == "fp32":
        return f"master:{name}" if f"master:{name}" in checkpoint.state.tensors else f"param:{name}"
    return {"module": f"param:{name}", "buffer": f"buffer:{name}"}.get(role, f"optim.{role}:{name}")


def values_of(checkpoint: Checkpoint, item: str) -> np.ndarray:
    role, _, name = item.partition("/")
    return checkpoint.read(key_of(checkpoint, role, name))


def assert_covered(checkpoint: Checkpoint) -> None:
    tensors = checkpoint.state.tensors.values()
    assert all(cover.exact for cover in check_tilings([(entry.shape, entry.tiling) for entry in tensors]))


@pytest.mark.parametrize("case", [*PLAIN, "universal_z3_bf16", *PACKED])
def test_data_parallel_checkpoints_equal_the_running_job(case: str, tmp_path: Path):
    folder = unpack(GOLDEN / f"{case}.tar.xz", tmp_path) if case in PACKED else GOLDEN / case
    checkpoint = open_checkpoint(folder)
    truth = np.load(folder / "truth.npz")
    for item in truth.files:
        found = values_of(checkpoint, item)
        assert found.shape == truth[item].shape
        assert np.array_equal(found.astype(truth[item].dtype), truth[item]), item
    assert {entry.key.fqn for entry in checkpoint.state.tensors.values()} == {i.partition("/")[2] for i in truth.files}
    assert_covered(checkpoint)
    assert checkpoint.state.progress.update == (5 if case == "universal_z3_bf16" else 3)
    assert checkpoint.state.progress.epoch == (None if case == "universal_z1_even" else 1)


def test_parameters_frozen_unused_and_shared_have_their_roles():
    state = open_checkpoint(GOLDEN / "z3_sub_bf16").state
    assert "optim.exp_avg:frozen" not in state.tensors
    assert state.tensors["param:frozen"].shape == (5,)
    assert state.tensors["optim.exp_avg:unused"].shape == (3, 2)
    assert set(state.groups[0].params) >= {"emb.weight", "unused", "head.weight"}
    assert len(state.rng) == 3


def test_stage_0_names_its_numbers_and_its_early_step():
    report = inspect_checkpoint(open_checkpoint(GOLDEN / "z0_bf16"))
    assert "SR-CNT-OPTIMIZER" in codes(report.problems)
    assert report.state.topology.layout == Layout(dp_replicate=3)


def cut(values: np.ndarray, held: np.ndarray, name: str, rank: int) -> np.ndarray:
    """Cuts a whole tensor as AutoTP did for a rank: fused parts each by themselves."""
    if values.shape == held.shape:
        return values
    axis = next(i for i, (whole, part) in enumerate(zip(values.shape, held.shape, strict=True)) if whole != part)
    count = 3 if "qkv" in name else 2 if "gate_up" in name else 1
    parts = [np.split(part, 2, axis)[rank] for part in np.split(values, count, axis)]
    return np.concatenate(parts, axis)


def global_name(name: str, rank: int) -> str:
    match = re.fullmatch(r"(.*deepspeed_experts\.)(\d+)(\..*)", name)
    return f"{match[1]}{rank * 2 + int(match[2])}{match[3]}" if match else name


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("pp2dp2bf16", Layout(pp=2, dp_shard=2)),
        ("moe4", Layout(dp_shard=4, ep=2)),
        ("tp2dp2", Layout(dp_shard=2, tp=2)),
    ],
)
def test_what_each_rank_held_is_in_the_whole(case: str, layout: Layout):
    checkpoint = open_checkpoint(GOLDEN / case)
    names: set[str] = set()
    for path in sorted((GOLDEN / case).glob("truth_rank*.npz")):
        rank = int(path.stem[-1])
        truth = np.load(path)
        for item in truth.files:
            role, _, local = item.partition("/")
            name = global_name(local, rank)
            names.add(name)
            held = truth[item]
            found = cut(checkpoint.read(key_of(checkpoint, role, name)), held, name, rank % 2)
            assert np.array_equal(found.astype(held.dtype), held), item
    assert {entry.key.fqn for entry in checkpoint.state.tensors.values()} == names
    assert_covered(checkpoint)
    assert checkpoint.state.topology.layout == layout


@pytest.mark.parametrize("case", [*PLAIN, "pp2dp2bf16", "moe4", "tp2dp2", "universal_z3_bf16"])
def test_nothing_is_found_wrong_with_them(case: str):
    report = inspect_checkpoint(open_checkpoint(GOLDEN / case), deep=True)
    blocking = [problem for problem in report.problems if problem.severity == "error"]
    assert blocking == []
    assert report.complete
    assert report.intact in (True, None)
    assert not set(codes(report.problems)) & set(DATED)


def swap(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def optims(root: Path) -> list[Path]:
    return sorted(root.glob("*_optim_states.pt"))


def test_swapped_files_are_found_by_their_maps_and_their_values(tmp_path: Path):
    root = copy_tree(GOLDEN / "z1_bf16opt" / "global_step3", tmp_path / "global_step3")
    swap(*optims(root)[:2])
    found = codes(inspect_checkpoint(open_checkpoint(root)).problems)
    assert found.count("SR-ZERO-SWAPPED") == 2
    report = inspect_checkpoint(open_checkpoint(root), deep=True)
    assert "SR-ZERO-MASTER" in codes(report.problems)
    assert report.intact is not True


def test_swapped_files_are_found_with_round_robin_gradients_and_alignment(tmp_path: Path):
    root = copy_tree(GOLDEN / "z2_align_rr" / "global_step3", tmp_path / "global_step3")
    swap(*optims(root)[1:])
    assert codes(inspect_checkpoint(open_checkpoint(root)).problems).count("SR-ZERO-SWAPPED") == 2


def test_a_swapped_last_rank_of_stage_3_is_found_by_padding(tmp_path: Path):
    root = copy_tree(GOLDEN / "z3_sub_bf16" / "global_step3", tmp_path / "global_step3")
    swap(*optims(root)[1:])
    assert codes(inspect_checkpoint(open_checkpoint(root)).problems).count("SR-ZERO-SWAPPED") == 1


@pytest.mark.parametrize("case", ["z1_bf16opt", "z3_sub_bf16", "tp2dp2", "pp2dp2bf16", "moe4"])
def test_every_missing_optimizer_file_is_missed(tmp_path: Path, case: str):
    for number, lost in enumerate(optims(GOLDEN / case / "global_step3")):
        root = copy_tree(GOLDEN / case / "global_step3", tmp_path / str(number) / "global_step3")
        (root / lost.name).unlink()
        report = inspect_checkpoint(open_checkpoint(root))
        assert [p.where["file"] for p in report.problems if p.code == "SR-FILE-MISSING"] == [str(root / lost.name)]
        assert not report.complete


@pytest.mark.parametrize("case", ["z2_align_rr", "z3_sub_bf16", "moe4"])
def test_every_flipped_bit_is_found(tmp_path: Path, case: str):
    for number, path in enumerate(sorted((GOLDEN / case / "global_step3").iterdir())[:6]):
        root = copy_tree(GOLDEN / case / "global_step3", tmp_path / str(number) / "global_step3")
        records = read_archive(path.read_bytes(), path).records
        flip_byte(root / path.name, max(records, key=lambda name: records[name].num_bytes), 1)
        report = inspect_checkpoint(open_checkpoint(root), deep=True)
        found = {p.where["file"] for p in report.problems if p.code in ("SR-FILE-CRC", "SR-PKL-CRC")}
        assert found == {str(root / path.name)}
        assert report.intact is False


def test_values_changed_with_a_right_checksum_are_found_against_the_weights(tmp_path: Path):
    root = copy_tree(GOLDEN / "z2_align_rr" / "global_step3", tmp_path / "global_step3")
    path = optims(root)[1]
    masters = read_state(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    rewrite_record(path, f"data/{masters.storage}", lambda data: (np.frombuffer(data, "<f4") * 2).tobytes())
    report = inspect_checkpoint(open_checkpoint(root), deep=True)
    assert "SR-FILE-CRC" not in codes(report.problems)
    assert [p.where["file"] for p in report.problems if p.code == "SR-ZERO-MASTER"] == [str(path)]
    assert report.intact is None


def test_a_tied_weight_that_differs_between_stages_is_found(tmp_path: Path):
    root = copy_tree(GOLDEN / "pp2dp2bf16" / "global_step3", tmp_path / "global_step3")
    path = next(path for path in optims(root) if "rank_0_mp_rank_01" in path.name)
    masters = read_state(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    rewrite_record(path, f"data/{masters.storage}", lambda data: (np.frombuffer(data, "<f4") * 2).tobytes())
    found = [p for p in inspect_checkpoint(open_checkpoint(root), deep=True).problems if p.code == "SR-ZERO-REPLICA"]
    assert [problem.where["tensor"] for problem in found] == ["master:tied_modules.emb.weight"]


def test_a_universal_checkpoint_of_the_wrong_rank_is_found(tmp_path: Path):
    root = copy_tree(GOLDEN / "universal_z3_bf16" / "uc", tmp_path / "uc")
    path = root / "zero" / "emb.weight" / "exp_avg.pt"
    rewrite_record(path, "data/0", lambda data: np.roll(np.frombuffer(data, "<f4"), 1).tobytes())
    found: Any = [p for p in inspect_checkpoint(open_checkpoint(root)).problems if p.code == "SR-UNI-VALUES"]
    assert [problem.where["tensor"] for problem in found] == ["optim.exp_avg:emb.weight"]
