"""The additive digest: its vectors, its properties, and that all three implementations are the one definition."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core import digest as core
from samerun.core.dtype import parse_dtype
from samerun.train import digest as torch_digest
from samerun.train.shards import LocalShard
from samerun.verify.state import digest as compiled
from support.memory import MemoryCheckpoint

TOP = Path(__file__).parents[2]
VECTORS = json.loads((TOP / "tests/golden/digest/vectors.json").read_text())
DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32", "int16", "uint8", "bool"]


def array_of(dtype: str, shape: tuple[int, ...], words: list[int]) -> np.ndarray:
    element = parse_dtype(dtype)
    width = element.num_bytes // 2 if element.kind == "complex" else element.num_bytes
    kind = getattr(ml_dtypes, dtype) if dtype == "bfloat16" or dtype.startswith("float8") else dtype
    return np.array(words, dtype=f"u{width}").view(kind).reshape(shape)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    name = array.dtype.name
    kind = getattr(torch, name)
    flat = np.ascontiguousarray(array).reshape(-1)
    if name == "bfloat16" or name.startswith("float8"):
        signed = torch.from_numpy(flat.view(f"i{flat.dtype.itemsize}").copy())
        return signed.view(kind).reshape(array.shape)
    return torch.from_numpy(flat.copy()).reshape(array.shape)


def random_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    count = int(np.prod(shape, dtype=int))
    raw = np.random.default_rng(seed).integers(0, 256, size=count * parse_dtype(dtype).num_bytes, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    kind = getattr(ml_dtypes, dtype) if dtype == "bfloat16" or dtype.startswith("float8") else dtype
    return raw.view(kind).reshape(shape)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['key']}-{v['dtype']}-{v['digest'][:4]}")
def test_vectors_hold_in_every_implementation(vector: dict) -> None:
    key, shape = vector["key"], tuple(vector["shape"])
    array = array_of(vector["dtype"], shape, [int(word, 16) for word in vector["bits"]])
    assert core.digest_array(key, array) == vector["digest"]
    whole = compiled.digest_array(key, array, parse_dtype(vector["dtype"]), shape, (0,) * len(shape))
    assert core.whole_digest(whole, key, parse_dtype(vector["dtype"]), shape) == vector["digest"]
    assert 0 not in shape or whole == 0  # parts without elements add nothing
    assert torch_digest.digest_tensor(key, tensor_of(array)) == vector["digest"]


def test_the_documented_vectors_are_those_that_are_tested() -> None:
    text = (TOP / "docs" / "digest.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (\S+) \| \(([^)]*)\) \| .* \| `([0-9a-f]{16})` \|$", text, re.MULTILINE)
    assert rows == [(v["key"], v["dtype"], ", ".join(map(str, v["shape"])), v["digest"]) for v in VECTORS]
    stated = re.search(r"row has the digest `([0-9a-f]{16})`\.", text)
    assert stated is not None
    assert core.state_digest({v["key"]: v["digest"] for v in (VECTORS[11], VECTORS[0])}) == stated[1]


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[str, tuple[int, ...], list[list[int]], int]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    return draw(st.sampled_from(DTYPES)), shape, cuts, draw(st.integers(0, 1000))


@settings(max_examples=150, deadline=None)
@given(cut_tensors())
def test_parts_add_up_to_the_whole(case: tuple[str, tuple[int, ...], list[list[int]], int]) -> None:
    dtype, shape, cuts, seed = case
    array = random_array(dtype, shape, seed)
    whole = core.digest_array("param:x", array)
    element = parse_dtype(dtype)
    numpy_sum = kernel_sum = torch_sum = 0
    ranges = [list(itertools.pairwise(edges)) for edges in cuts]
    for choice in np.ndindex(*(len(options) for options in ranges)):
        spans = [options[number] for options, number in zip(ranges, choice, strict=True)]
        box = array[tuple(slice(*span) for span in spans)]
        offsets = tuple(start for start, _ in spans)
        numpy_sum += core.digest_box("param:x", box, shape=shape, offsets=offsets)
        kernel_sum += compiled.digest_array("param:x", box, element, shape, offsets)
        shard = LocalShard(shape, tensor_of(box), tuple((span,) for span in spans), 0)
        torch_sum += torch_digest.digest_shard("param:x", shard)
    sums = {core.whole_digest(total, "param:x", element, shape) for total in (numpy_sum, kernel_sum, torch_sum)}
    assert sums == {whole}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES[:-1]), st.integers(1, 200), st.data())
def test_one_flipped_bit_shows(dtype: str, size: int, data: st.DataObject) -> None:
    array = random_array(dtype, (size,), 1)
    raw = array.view(np.uint8).copy()
    bit = data.draw(st.integers(0, raw.size * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    assert core.digest_array("param:x", raw.view(array.dtype)) != core.digest_array("param:x", array)


def test_order_name_type_and_shape_show() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    digests = {
        core.digest_array("param:x", array),
        core.digest_array("param:y", array),
        core.digest_array("param:x", array.reshape(6, 4)),
        core.digest_array("param:x", array.view(np.float32)),
        core.digest_array("param:x", array.astype(np.int64)),
        core.digest_array("param:x", array[::-1]),
        core.digest_array("param:x", np.roll(array, 1)),
        core.digest_array("param:x", array[:, [1, 0, 2, 3, 4, 5]]),
    }
    assert len(digests) == 8


def test_shape_type_and_name_show_without_elements() -> None:
    shapes = [(0,), (0, 5), (5, 0), (2, 0, 3)]
    arrays = [np.empty(shape, kind) for shape in shapes for kind in (np.float32, np.int64)]
    digests = [core.digest_array(key, array) for key in ("param:x", "param:y") for array in arrays]
    assert len(set(digests)) == len(digests)
    for key, array, digest in zip(["param:x"] * 8 + ["param:y"] * 8, arrays * 2, digests, strict=True):
        assert torch_digest.digest_tensor(key, tensor_of(array)) == digest
        assert compiled.digest_tensor(MemoryCheckpoint({key: array}), key) == digest


@pytest.mark.parametrize("elements", [(1 << 16) + 3, 1 << 17])
def test_long_tensors_cross_the_chunks(elements: int) -> None:
    array = random_array("float32", (elements,), 3)
    expected = core.digest_array("param:x", array)
    assert torch_digest.digest_tensor("param:x", tensor_of(array)) == expected
    one = compiled.digest_array("param:x", array, parse_dtype("float32"), array.shape, (0,))
    assert core.to_hex(one) == expected


def test_rows_longer_than_a_chunk() -> None:
    array = random_array("int16", (3, (1 << 15) + 5), 3)
    part = array[:, 1:]
    shard = LocalShard(array.shape, tensor_of(part), (((0, 3),), ((1, array.shape[1]),)), 0)
    assert torch_digest.digest_shard("k", shard) == core.digest_box("k", part, shape=array.shape, offsets=(0, 1))


def test_strided_views_are_digested_by_value() -> None:
    array = random_array("float32", (6, 10), 5)
    element = parse_dtype("float32")
    for view in (array.T, array[::2], array[:, 3:7], np.broadcast_to(array[0], (4, 10))):
        want = core.digest_array("k", np.ascontiguousarray(view))
        assert core.to_hex(compiled.digest_array("k", view, element, view.shape, (0, 0))) == want
    assert torch_digest.digest_tensor("k", tensor_of(array).T) == core.digest_array("k", array.T)


def test_strided_pieces_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_BLOCK_BYTES", 64)
    array = random_array("float32", (30, 7), 5).T
    want = core.digest_array("k", np.ascontiguousarray(array))
    assert core.to_hex(compiled.digest_array("k", array, parse_dtype("float32"), (7, 30), (0, 0))) == want


def test_a_box_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="not inside"):
        core.box_runs((4, 4), (2, 0), (3, 4))


def test_a_checkpoint_counts_replicas_once_and_sees_gaps() -> None:
    array = random_array("float32", (7, 3), 1)
    key = "param:x"
    want = core.digest_array(key, array)
    for replicas in (1, 2):
        checkpoint = MemoryCheckpoint({key: array}, cuts={key: [2, 2, 5]}, replicas=replicas)
        assert compiled.digest_checkpoint(checkpoint) == {key: want}
        assert len(checkpoint.reads) == 3
    assert compiled.digest_checkpoint(checkpoint, rekey={key: "param:y"}) == {
        "param:y": core.digest_array("param:y", array)
    }
    assert compiled.digest_checkpoint(checkpoint, exclude=["param:*"]) == {}
    assert compiled.digest_checkpoint(checkpoint, include=["buffer:*"]) == {}


def test_a_cast_is_digested_as_torch_casts() -> None:
    values = np.random.default_rng(0).normal(size=(50, 9)).astype(np.float32)
    checkpoint = MemoryCheckpoint({"master:x": values}, cuts={"master:x": [13]})
    for dtype in ("bfloat16", "float16", "float64"):
        cast = torch.from_numpy(values).to(getattr(torch, dtype))
        want = torch_digest.digest_tensor("param:x", cast)
        assert compiled.digest_cast(checkpoint, "master:x", "param:x", parse_dtype(dtype)) == want
    error = compiled.cast_error(checkpoint, "master:x", parse_dtype("bfloat16"))
    assert 0 < error <= parse_dtype("bfloat16").unit_roundoff
    assert compiled.cast_error(checkpoint, "master:x", parse_dtype("float64")) == 0.0


def test_fingerprint_sees_buffers_that_are_not_saved() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    model = Module()
    optimizer = torch.optim.AdamW(model.parameters())
    before = torch_digest.state_fingerprint(model, optimizer)
    assert torch_digest.state_fingerprint(model, optimizer) == before
    model.scratch[1] = 1.0
    after = torch_digest.state_fingerprint(model, optimizer)
    assert [key for key in before if before[key] != after[key]] == ["buffer:scratch"]


def test_large_shards_on_a_cpu_take_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_digest, "_COMPILED_FROM_ELEMENTS", 4)
    for dtype in DTYPES:
        array = random_array(dtype, (9, 5), 2)
        box = array[2:7, 1:3]
        shard = LocalShard(array.shape, tensor_of(box), (((2, 7),), ((1, 3),)), 0)
        assert torch_digest.digest_shard("k", shard) == core.digest_box("k", box, shape=array.shape, offsets=(2, 1))
    whole = random_array("float32", (6, 4), 2).view(np.complex64)
    assert torch_digest.digest_tensor("k", tensor_of(whole)) == core.digest_array("k", whole)
