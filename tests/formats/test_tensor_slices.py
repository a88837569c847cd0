"""Tensor-parallel slices, described every way that DeepSpeed does, against cutting with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.flat import row_major_strides
from samerun.formats.deepspeed.gather import parts_of_run
from samerun.formats.deepspeed.slices import Slice, Slicer


def join(cuts: list[Slice], parts: list[np.ndarray]) -> np.ndarray:
    """Puts the parts of all ranks together as their slices say; what none holds stays -1."""
    whole = np.full(cuts[0].shape, -1.0)
    for cut, part in zip(cuts, parts, strict=True):
        for block in cut.blocks:
            source = tuple(slice(a, a + n) for a, n in zip(block.source, block.sizes, strict=True))
            target = tuple(slice(a, a + n) for a, n in zip(block.target, block.sizes, strict=True))
            whole[target] = part[source]
    return whole


def cut_all(info: dict[str, Any], name: str, parts: list[np.ndarray]) -> list[Slice]:
    slicer = Slicer(info, len(parts))
    found = [slicer.cut(name, rank, [part.shape for part in parts]) for rank in range(len(parts))]
    assert all(cut is not None for cut in found)
    return [cut for cut in found if cut is not None]


def array(*shape: int) -> np.ndarray:
    return np.arange(float(np.prod(shape))).reshape(shape)


@pytest.mark.parametrize(("axis", "pattern"), [(0, "none"), (1, r".*\.down\.weight$")])
def test_a_cut_dimension(axis: int, pattern: str):
    whole = array(6, 8)
    parts = np.split(whole, 2, axis)
    info = {"parameter_with_row_parallelism_patterns": [pattern], "universal_checkpoint_version": 0.4}
    assert np.array_equal(join(cut_all(info, "layers.0.down.weight", parts), parts), whole)


def test_uneven_parts():
    whole = array(7, 3)
    parts = [whole[:4], whole[4:]]
    assert np.array_equal(join(cut_all({"x": 1}, "w", parts), parts), whole)


def test_replicated_tensors_are_one():
    cuts = cut_all({"tp_replicated_parameter_patterns": [r"^norm\.weight$"]}, "norm.weight", [array(5), array(5)])
    assert [cut.replicated for cut in cuts] == [True, True]
    assert cuts[0].shape == (5,)


def fused_parts(whole: np.ndarray, count: int, axis: int = 0) -> list[np.ndarray]:
    thirds = np.split(whole, count, axis)
    return [np.concatenate([np.split(third, 2, axis)[rank] for third in thirds], axis) for rank in range(2)]


def test_fused_parts_of_equal_size():
    whole = array(12, 4)
    parts = fused_parts(whole, 3)
    record = {"patterns": [r".*qkv.*"], "shape": [3, -1], "partition_dim": 0}
    assert np.array_equal(join(cut_all({"parameter_with_sub_params": [record]}, "a.qkv.w", parts), parts), whole)


def test_fused_parts_of_recorded_widths():
    whole = array(10, 2)  # query of 6 rows, key and value of 2
    parts = [np.concatenate([whole[r * 3 : r * 3 + 3], whole[6 + r : 7 + r], whole[8 + r : 9 + r]]) for r in range(2)]
    info = {
        "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": [[6, 2, 2], -1], "partition_dim": 0}],
        "sub_param_shard_widths": {"qkv": [[3, 3], [1, 1], [1, 1]]},
    }
    assert np.array_equal(join(cut_all(info, "qkv", parts), parts), whole)


def test_gate_and_up_in_one():
    whole = array(8, 3)
    parts = fused_parts(whole, 2)
    info = {"parameter_with_2_sub_params_cat_dim_0": ["mlp"]}
    assert np.array_equal(join(cut_all(info, "mlp.w", parts), parts), whole)


def test_rows_that_pad_a_vocabulary_are_no_values():
    whole = array(8, 3)
    parts = np.split(whole, 2)
    info = {"vocabulary_parameter_patterns": ["embed"], "original_vocab_size": 7}
    assert np.array_equal(join(cut_all(info, "embed.w", parts), parts), whole[:7])


def affine(whole: tuple[int, ...], pieces: dict[int, list[dict[str, Any]]], shards: dict[int, list[int]]) -> dict:
    ranks = {rank: {"shard_shape": shards[rank], "pieces": found} for rank, found in pieces.items()}
    return {"affine_map": {"version": 1, "params": {r"^w$": {"logical_shape": list(whole), "ranks": ranks}}}}


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1]))
def test_affine_maps_of_a_cut(first: int, second: int, other: int, axis: int):
    shape = (first + second, other) if axis == 0 else (other, first + second)
    whole = array(*shape)
    parts = [np.take(whole, range(first), axis), np.take(whole, range(first, first + second), axis)]
    strides = row_major_strides(shape)
    pieces = {
        rank: [
            {
                "shape": list(part.shape),
                "source": [rank * first * strides[axis], list(strides)],
                "dest": [0, list(row_major_strides(part.shape))],
                "locations": [rank],
            }
        ]
        for rank, part in enumerate(parts)
    }
    info = affine(shape, pieces, {rank: list(part.shape) for rank, part in enumerate(parts)})
    assert np.array_equal(join(cut_all(info, "w", parts), parts), whole)


def test_a_scale_is_undone_with_the_power_of_the_slot():
    piece = {"shape": [4], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1], "scale": 0.5}
    cuts = cut_all(affine((4,), {0: [piece], 1: [piece]}, {0: [4], 1: [4]}), "w", [array(4), array(4)])
    assert cuts[0].replicated
    assert [cuts[0].divisor(0, slot) for slot in (None, "exp_avg", "exp_avg_sq", "step")] == [0.5, 2.0, 4.0, 1.0]


def test_a_newer_map_is_not_believed():
    info = {"affine_map": {"version": 9, "params": {"^w$": {}}}, "universal_checkpoint_version": 0.9}
    slicer = Slicer(info, 2)
    assert slicer.newer_map
    cut = slicer.cut("w", 1, [(2, 3), (2, 3)])
    assert cut is not None
    assert cut.shape == (4, 3)


def test_nothing_recorded_is_nothing_known():
    assert Slicer({}, 2).cut("w", 0, [(2,), (2,)]) is None


@pytest.mark.parametrize("pattern", ["(" * 20, r"(a+)+$", ".*.*.*.*x", "a" * 2000, 7, r"(a|b)*c"])
def test_patterns_that_are_broken_or_slow_match_nothing(pattern: Any):
    info = {"tp_replicated_parameter_patterns": [pattern], "universal_checkpoint_version": 0.4}
    cut = Slicer(info, 2).cut("a" * 60, 0, [(2,), (2,)])
    assert cut is not None
    assert not cut.replicated


def test_runs_of_a_cut_tensor_are_boxes_of_the_whole_one():
    cut = Slicer({"parameter_with_row_parallelism_patterns": ["w"]}, 2).cut("w", 1, [(3, 2), (3, 2)])
    assert cut is not None
    parts = parts_of_run((3, 2), cut, 1, 4)
    assert [(part.offsets, part.sizes, part.start) for part in parts] == [
        ((0, 3), (1, 1), 0),
        ((1, 2), (1, 2), 1),
        ((2, 2), (1, 1), 3),
    ]
