"""The restricted reader: plain data from what torch.save writes, and nothing executed."""

from __future__ import annotations

import argparse
import contextlib
import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.errors import CorruptCheckpoint
from samerun.formats.base import view_extent
from samerun.formats.torchfile import Inert, TensorRef, decode_pickle, read_archive, read_value
from samerun.formats.torchfile.scan import OK, scan_compiled, scan_interpreted
from samerun.stores.local import MappedFiles

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(plain_values, st.integers(2, 5))
def test_plain_data_come_back(value: Any, protocol: int):
    assert decode_pickle(pickle.dumps(value, protocol), "test").value == value


@settings(max_examples=200, deadline=None)
@given(plain_values, st.integers(2, 5))
def test_both_scans_agree(value: Any, protocol: int):
    data = pickle.dumps(value, protocol)
    assert scan_interpreted(data) == scan_compiled(data) == (OK, len(data))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=40))
def test_both_scans_agree_on_anything(data: bytes):
    assert scan_interpreted(data) == scan_compiled(data)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda body: b"\x80\x04" + body + b"."))
def test_anything_decodes_or_is_refused(data: bytes):
    with contextlib.suppress(CorruptCheckpoint):
        decode_pickle(data, "test")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_known_classes_become_plain(protocol: int):
    value = {
        "ordered": OrderedDict(a=1, b=OrderedDict()),
        "default": defaultdict(list, {"x": [1]}),
        "counter": Counter("aab"),
        "deque": deque([1, 2]),
        "set": {3},
        "frozen": frozenset({4}),
        "tuple": (1, (2, 3)),
        "complex": 1 + 2j,
        "bytes": b"\x00\xff",
        "array": bytearray(b"ab"),
        "path": Path("/data/run"),
        "namespace": argparse.Namespace(lr=0.1),
        "size": torch.Size((2, 3)),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "none": None,
    }
    found = decode_pickle(pickle.dumps(value, protocol), "test")
    assert found.value == {
        "ordered": {"a": 1, "b": {}},
        "default": {"x": [1]},
        "counter": {"a": 2, "b": 1},
        "deque": [1, 2],
        "set": [3],
        "frozen": [4],
        "tuple": [1, [2, 3]],
        "complex": 1 + 2j,
        "bytes": b"\x00\xff",
        "array": b"ab",
        "path": "/data/run",
        "namespace": {"lr": 0.1},
        "size": [2, 3],
        "dtype": "torch.bfloat16",
        "device": "cuda:1",
        "none": None,
    }
    assert found.unknown == ()


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([1.5, 2.5], ">f8"),
        np.zeros((0, 3), np.int16),
        np.array(True),
    ],
)
def test_arrays_come_back(array: np.ndarray, protocol: int):
    found = decode_pickle(pickle.dumps(array, protocol), "test").value
    assert found.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(found, array)


def test_generator_states_come_back():
    import random

    state = np.random.RandomState(7).get_state()
    found = decode_pickle(pickle.dumps(state), "test").value
    assert found[0] == "MT19937"
    assert np.array_equal(found[1], state[1])
    version, internal, gauss = random.Random(3).getstate()
    assert decode_pickle(pickle.dumps(random.Random(3).getstate()), "test").value == [version, list(internal), gauss]
    assert decode_pickle(pickle.dumps(np.float64(2.5)), "test").value == 2.5


class Unknown:
    def __init__(self) -> None:
        self.field = (1, {"a": 2})


def test_unknown_classes_are_inert_records():
    found = decode_pickle(pickle.dumps([Unknown(), Unknown]), "test")
    record, reference = found.value
    assert isinstance(record, Inert)
    assert record.name.endswith("Unknown")
    assert record.state == {"field": [1, {"a": 2}]}
    assert reference == Inert(record.name)
    assert found.unknown == (record.name,)


TENSORS = {
    "float32": torch.randn(3, 4),
    "bfloat16": torch.randn(5).bfloat16(),
    "float16": torch.randn(2, 2).half(),
    "float64": torch.randn(2, 2).double(),
    "float8": torch.randn(7).to(torch.float8_e4m3fn),
    "int64": torch.arange(4),
    "uint8": torch.arange(4, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "complex64": torch.randn(3, dtype=torch.complex64),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 4).t(),
    "strided": torch.randn(8, 8)[1::2, 3:6],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "parameter": torch.nn.Parameter(torch.randn(2)),
}


def test_every_tensor_is_an_extent_of_the_file(tmp_path: Path):
    path = tmp_path / "file.pt"
    torch.save({"tensors": TENSORS, "shared": TENSORS["float32"][1]}, path)
    files = MappedFiles()
    archive = read_archive(files.map(path), path)
    found = read_value(files.map(path), archive).value
    for name, tensor in TENSORS.items():
        ref = found["tensors"][name]
        assert isinstance(ref, TensorRef)
        values = view_extent(files, archive.extent(ref))
        assert not values.flags.writeable
        raw = tensor.detach().contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)
        assert values.shape == tuple(tensor.shape)
        assert values.tobytes() == raw.numpy().tobytes(), name
    assert found["shared"].storage == found["tensors"]["float32"].storage


def test_an_archive_inside_a_file_is_found_by_its_window(tmp_path: Path):
    body = io.BytesIO()
    torch.save(torch.arange(5), body)
    data = b"x" * 13 + body.getvalue() + b"y" * 7
    archive = read_archive(data, tmp_path / "file", 13, len(body.getvalue()))
    ref = read_value(data, archive).value
    extent = archive.extent(ref)
    assert np.frombuffer(data, np.int64, 5, extent.offset_bytes).tolist() == [0, 1, 2, 3, 4]
    for start, length in ((12, len(body.getvalue())), (13, len(body.getvalue()) - 1), (0, len(data)), (13, 10)):
        with pytest.raises(CorruptCheckpoint, match="SR-PKL-ZIP"):
            read_archive(data, tmp_path / "file", start, length)


def test_a_changed_pickle_is_seen_by_its_checksum(tmp_path: Path):
    path = tmp_path / "file.pt"
    torch.save({"step": 77}, path)
    data = bytearray(path.read_bytes())
    data[data.index(b"step") + 1] ^= 4
    archive = read_archive(bytes(data), path)
    with pytest.raises(CorruptCheckpoint, match="SR-PKL-CRC"):
        read_value(bytes(data), archive)
