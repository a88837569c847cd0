"""Flat layouts of every kind, written by concatenation, read back equal: random shapes, groups, ranks, paddings."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samerun.core.box import check_tilings
from samerun.formats.base import Checkpoint
from samerun.formats.deepspeed.layout import (
    Segment,
    concatenated_segments,
    partitioned_padding,
    partitioned_segments,
)
from samerun.formats.detect import open_checkpoint
from support.zero import Full, codes, slots_of, write_stage2, write_stage3

shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=5)
groups = st.lists(shapes, min_size=1, max_size=3)
quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def named(found: list[list[tuple[int, ...]]]) -> list[dict[str, tuple[int, ...]]]:
    return [{f"g{g}.p{p}": shape for p, shape in enumerate(group)} for g, group in enumerate(found)]


def make(found: list[list[tuple[int, ...]]]) -> list[dict[str, Full]]:
    rng = np.random.default_rng(0)
    return [dict(slots_of(rng, group)) for group in named(found)]


def assert_reads(checkpoint: Checkpoint, made: list[dict[str, Full]], masters: str = "param") -> None:
    for group in made:
        for slot, full in group.items():
            for name, values in full.items():
                key = f"{masters}:{name}" if slot == "fp32" else f"optim.{slot}:{name}"
                assert np.array_equal(checkpoint.read(key), values), key
    tensors = checkpoint.state.tensors.values()
    assert all(cover.exact for cover in check_tilings([(entry.shape, entry.tiling) for entry in tensors]))


@quick
@given(groups, st.integers(1, 4), st.data())
def test_stage_2_reads_back(tmp_path_factory: pytest.TempPathFactory, found: list, ranks: int, data: st.DataObject):
    made = make(found)
    elastic, padded = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    space = st.integers(0, 3) if not padded and not elastic else st.just(0)
    gaps = [[data.draw(space) for _ in group] for group in found]
    root = write_stage2(
        tmp_path_factory.mktemp("z") / "global_step3", made, ranks, gaps=gaps, elastic=elastic, padded=padded
    )
    checkpoint = open_checkpoint(root)
    assert_reads(checkpoint, made)
    assert checkpoint.state.problems == tuple(p for p in checkpoint.state.problems if p.severity == "note")
    assert [group.params for group in checkpoint.state.groups] == [tuple(group) for group in named(found)]


@quick
@given(st.lists(groups, min_size=1, max_size=2), st.integers(1, 4), st.booleans())
def test_stage_3_reads_back(tmp_path_factory: pytest.TempPathFactory, found: list, ranks: int, bf16: bool):
    flat = [sub for group in found for sub in group]
    made = make(flat)
    nested = [made[sum(map(len, found[:g])) :][: len(group)] for g, group in enumerate(found)]
    dtype = torch.bfloat16 if bf16 else torch.float32
    checkpoint = open_checkpoint(
        write_stage3(tmp_path_factory.mktemp("z") / "global_step3", nested, ranks, dtype=dtype)
    )
    assert_reads(checkpoint, made, "master" if bf16 else "param")
    for group in made if bf16 else ():
        for name, values in group["fp32"].items():
            assert np.array_equal(checkpoint.read(f"param:{name}"), values.astype(ml_dtypes.bfloat16))
    names = [[name for sub in group for name in sub["fp32"]] for group in nested]
    assert [list(group.params) for group in checkpoint.state.groups] == names


@given(shapes, st.integers(1, 5), st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_concatenated_segments_cover_every_element_once(found: list, ranks: int, gaps: list[int]):
    group = tuple((f"p{number}", shape) for number, shape in enumerate(found))
    total = sum(math.prod(shape) for shape in found) + sum(gaps[: len(found)])
    part = -(-total // (2 * ranks)) * 2
    segments = [s for rank in range(ranks) for s in concatenated_segments(group, gaps, part, rank)]
    assert_once(group, segments)
    assert all(segment.start + segment.count <= part for segment in segments)


@given(shapes, st.integers(1, 5))
def test_partitioned_segments_and_padding_fill_every_shard(found: list, ranks: int):
    group = tuple((f"p{number}", shape) for number, shape in enumerate(found))
    segments = [list(partitioned_segments(group, ranks, rank)) for rank in range(ranks)]
    assert_once(group, [segment for held in segments for segment in held])
    length = sum(-(-math.prod(shape) // ranks) for shape in found)
    for rank, held in enumerate(segments):
        used = {i for segment in held for i in range(segment.start, segment.start + segment.count)}
        padding = {
            i for _, start, count in partitioned_padding(group, ranks, rank) for i in range(start, start + count)
        }
        assert used | padding == set(range(length))
        assert not used & padding


def assert_once(group: tuple[tuple[str, tuple[int, ...]], ...], segments: list[Segment]) -> None:
    for name, shape in group:
        held = [i for s in segments if s.name == name for i in range(s.first, s.first + s.count)]
        assert sorted(held) == list(range(math.prod(shape)))


def test_a_step_kept_by_the_group_counts_for_each_of_its_parameters(tmp_path: Path):
    from support.zero import edit_state

    made = make([[(3, 2), (4,)]])
    root = write_stage2(tmp_path / "global_step3", made, 2)
    for path in root.glob("*optim*"):
        edit_state(path, lambda state: _step_to_group(state["optimizer_state_dict"]["base_optimizer_state"]))
    checkpoint = open_checkpoint(root)
    assert [checkpoint.read(f"optim.step:g0.p{p}").item() for p in (0, 1)] == [3, 3]


def _step_to_group(base: dict) -> None:
    for state in base["state"].values():
        del state["step"]
    for group in base["param_groups"]:
        group["step"] = 3


def test_a_step_that_is_a_number_is_one(tmp_path: Path):
    checkpoint = open_checkpoint(write_stage2(tmp_path / "global_step3", make([[(3,)]]), 2, step=3))
    assert checkpoint.read("optim.step:g0.p0") == 3
    assert checkpoint.state.tensors["optim.step:g0.p0"].dtype.name == "int64"


def test_fp16_masters_and_weights_are_read_and_said_to_be_unverified(tmp_path: Path):
    made = make([[(4, 3), (5,)]])
    module = {name: torch.from_numpy(values).half() for name, values in made[0]["fp32"].items()}
    config = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}, "train_batch_size": 4}
    checkpoint = open_checkpoint(write_stage2(tmp_path / "global_step3", made, 2, module=module, ds_config=config))
    assert_reads(checkpoint, made, "master")
    assert checkpoint.state.tensors["param:g0.p0"].dtype.name == "float16"
    assert "SR-ZERO-UNVERIFIED" in codes(checkpoint.state.problems)
    assert not checkpoint.check_payloads().problems
