"""Pickles and archives that samerun lays out are those of torch.save, byte for byte, and anything else is refused."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.dtype import DTYPES
from samerun.core.written import FilePlan
from samerun.formats.base import numpy_dtype
from samerun.formats.torchfile import Inert, decode_pickle, read_archive, read_value
from samerun.formats.torchfile.emit import Call, Named, Number, emit_pickle
from samerun.formats.torchfile.nodes import Part, Storage, Tensor, known, size, whole
from samerun.formats.torchfile.write import Pieces, add_archive, add_tensor
from support.toy import as_numpy

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
values = st.recursive(
    scalars | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(st.characters(codec="utf-8")) | st.integers(), inner)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner).map(OrderedDict)
    ),
    max_leaves=25,
)


@settings(max_examples=100, deadline=None)
@given(values, st.booleans())
def test_plain_data_come_back(value: Any, compact: bool):
    emitted = emit_pickle(value, compact=compact)
    assert pickle.loads(emitted.pickle) == value
    assert not emitted.storages
    assert decode_pickle(emitted.pickle, "test").value == decode_pickle(pickle.dumps(value, 2), "test").value
    assert max(opcode.proto for opcode, _, _ in pickletools.genops(emitted.pickle)) <= 2
    assert emit_pickle(value, compact=compact).pickle == emitted.pickle


def test_long_collections_and_numbers():
    value = {
        "list": list(range(2_500)),
        "dict": {i: str(i) for i in range(1_001)},
        "integers": [
            s * (2**n + d) for n in (7, 8, 15, 16, 31, 32, 63, 64, 2_047) for d in (-1, 0, 1) for s in (1, -1)
        ],
        "sets": [{3, 1}, frozenset({"b", "a"}), set()],
        "complex": 1 - 2j,
        "empty": [b"", (), [], {}, OrderedDict()],
    }
    assert pickle.loads(emit_pickle(value).pickle) == value
    assert emit_pickle(value["integers"]).pickle == pickle.dumps(value["integers"], 2)


def test_values_that_are_shared_stay_shared():
    inner = [1]
    found = pickle.loads(emit_pickle({"a": inner, "b": inner}).pickle)
    assert found["a"] is found["b"]


def test_numpy_arrays():
    value = [np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 2)), np.array(2.5), np.arange(3, dtype=">i2")]
    found = pickle.loads(emit_pickle(value).pickle)
    assert [(a.shape, a.tolist()) for a in found] == [(a.shape, a.tolist()) for a in value]
    assert emit_pickle(np.float32(1.5)).pickle == emit_pickle(1.5).pickle


@pytest.mark.parametrize("value", [Inert("os.system", ("true",)), object(), np.array([object()]), np.array(["a"])])
def test_anything_else_is_refused_with_its_place(value: Any):
    with pytest.raises(TypeError, match=r"cannot write .* at outer\.1"):
        emit_pickle({"outer": [0, value]})


def test_integers_of_the_state_are_holes():
    emitted = emit_pickle({"a": Number("x"), "b": [Number("y")]})
    data = bytearray(emitted.pickle)
    for (at, _), number in zip(emitted.numbers, (5, -(1 << 40)), strict=True):
        data[at : at + 8] = number.to_bytes(8, "little", signed=True)
    assert [key for _, key in emitted.numbers] == ["x", "y"]
    assert pickle.loads(bytes(data)) == {"a": 5, "b": [-(1 << 40)]}


# ---------------------------------------------------------------- archives


def content(file: FilePlan, boxes: dict[int, bytes] | None = None) -> bytes:
    """Returns the file's bytes: literals, and what lies at the slots."""
    data = bytearray(file.size)
    for literal in file.literals:
        data[literal.at : literal.at + len(literal.content)] = literal.content
    for at, box in (boxes or {}).items():
        data[at : at + len(box)] = box
    return bytes(data)


def archive(value: Any, name: str = "archive") -> FilePlan:
    pieces = Pieces()
    add_archive(pieces, value, name)
    return pieces.file("f")


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def without_id(data: bytes) -> bytes:
    """Returns an archive with the serialization id, and the checksum of it, blanked out."""
    info = zipfile.ZipFile(io.BytesIO(data)).getinfo("archive/.data/serialization_id")
    number = zipfile.ZipFile(io.BytesIO(data)).read(info)
    return data.replace(number, bytes(40)).replace(info.CRC.to_bytes(4, "little"), bytes(4))


def twin(value: Any) -> Any:
    """Returns a value with every tensor in place of the placeholder that knows its values."""
    if isinstance(value, torch.Tensor):
        return known(as_numpy_any(value))
    if isinstance(value, OrderedDict):
        return OrderedDict((key, twin(item)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: twin(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(twin(item) for item in value)
    return value


def as_numpy_any(tensor: torch.Tensor) -> np.ndarray:
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return tensor.view(torch.uint8).numpy().view(numpy_dtype(DTYPES[name]))
    return as_numpy(tensor)


tensors = st.builds(
    lambda name, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(
        getattr(torch, name)
    ),
    st.sampled_from(sorted(set(DTYPES) - {"float8_e8m0fnu"})),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 9),
)
names = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=8)
trees = st.recursive(
    tensors | st.integers(0, 1 << 40) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4)
        | st.dictionaries(names, inner, max_size=4)
        | st.dictionaries(names, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(trees)
def test_archives_are_torch_s_own_byte_for_byte(value: Any):
    mine = content(archive(twin(value)))
    theirs = saved(value)
    assert len(mine) == len(theirs)
    assert without_id(mine) == without_id(theirs)
    assert zipfile.ZipFile(io.BytesIO(mine)).testzip() is None


def test_every_element_type_is_loaded(tmp_path: Path):
    value = {name: torch.ones(3).to(getattr(torch, name)) for name in DTYPES}
    (tmp_path / "a.pt").write_bytes(content(archive(twin(value), "a")))
    for mapped in (False, True):
        found = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mapped)
        assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in value.items()}
        for name, tensor in found.items():
            assert tensor.view(torch.uint8).equal(value[name].view(torch.uint8)), name


def test_views_and_ties_share_one_storage(tmp_path: Path):
    flat = Storage(DTYPES["float32"], 12, (Part("p", (0,), (4,), 1), Part("q", (0, 0), (2, 2), 6)))
    value = {
        "flat": Tensor(flat, (12,)),
        "p": Tensor(flat, (4,), 1),
        "q": Tensor(flat, (2, 2), 6),
        "turned": Tensor(flat, (2, 2), 6, (1, 2)),
        "size": size((2, 3)),
    }
    pieces = Pieces(64)
    add_archive(pieces, value)
    file = pieces.file("f")
    slots = {slot.key: slot for slot in pieces.slots}
    p, q = np.arange(1, 5, dtype=np.float32), np.arange(5, 9, dtype=np.float32).reshape(2, 2)
    data = content(file, {slots["p"].at: p.tobytes(), slots["q"].at: q.tobytes()})[64:]
    assert (slots["p"].at - 4) % 64 == 0
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found["flat"].tolist() == [0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 0, 0]
    assert found["turned"].tolist() == [[5, 7], [6, 8]]
    assert found["size"] == torch.Size((2, 3))
    assert len({tensor.untyped_storage().data_ptr() for name, tensor in found.items() if name != "size"}) == 1
    decoded = read_value(data, read_archive(data, Path("f"))).value
    assert decoded["q"].offset_elements == 6
    assert sorted((fill.at, fill.size) for fill in file.fills) == [
        (slots["p"].at - 4, 4),
        (slots["p"].at + 16, 4),
        (slots["q"].at + 16, 8),
    ]


def test_parts_that_overlap_or_do_not_fit_are_refused():
    for parts in [(Part("a", (0,), (4,)), Part("b", (0,), (4,), 3)), (Part("a", (0,), (9,)),)]:
        with pytest.raises(ValueError, match=r"overlaps|larger"):
            archive(Tensor(Storage(DTYPES["int8"], 8, parts), (8,)))


def test_a_stencil_is_the_archive():
    for dtype, shape in (("float32", (3, 5)), ("bfloat16", ()), ("int64", (0, 4))):
        one, other = Pieces(), Pieces()
        for pieces in (one, other):
            pieces.write(b"before")
        add_archive(one, whole("k", DTYPES[dtype], shape, (2,) * len(shape)))
        add_tensor(other, "k", DTYPES[dtype], (2,) * len(shape), shape)
        assert one.slots == other.slots
        assert one.file("f") == other.file("f")


def test_checksums_belong_where_zip_looks_for_them():
    file = archive(whole("k", DTYPES["float32"], (50,)))
    (checksum,) = file.checksums
    values = np.arange(50, dtype=np.float32).tobytes()
    data = bytearray(content(file, {checksum.start: values}))
    crc = zlib.crc32(values).to_bytes(4, "little")
    for place in checksum.places:
        assert data[place : place + 4] == bytes(4)
        data[place : place + 4] = crc
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    assert without_id(bytes(data)) == without_id(saved(torch.arange(50, dtype=torch.float32)))
    wrong = bytearray(data)
    wrong[checksum.places[1] : checksum.places[1] + 4] = bytes(4)
    assert zipfile.ZipFile(io.BytesIO(wrong)).testzip() == "archive/data/0"


def test_more_than_4_gib_is_laid_out_as_torch_does(tmp_path: Path):
    """torch writes a sparse file of the right layout when told to skip the data; ours is the same but for checksums."""
    sizes = {"a": 7, "large": (1 << 32) + 100, "behind": 3}
    real = {name: torch.empty(count, dtype=torch.uint8) for name, count in sizes.items()}
    with torch.serialization.skip_data():
        torch.save(real, tmp_path / "theirs.pt")
    value = {name: whole(name, DTYPES["uint8"], (count,)) for name, count in sizes.items()}
    file = archive(value, "theirs")
    assert (tmp_path / "theirs.pt").stat().st_size == file.size
    different = 0
    with open(tmp_path / "theirs.pt", "rb") as theirs, open(tmp_path / "mine.pt", "wb") as mine:
        mine.truncate(file.size)
        for literal in file.literals:
            theirs.seek(literal.at)
            found = theirs.read(len(literal.content))
            different += sum(a != b for a, b in zip(found, literal.content, strict=True))
            mine.seek(literal.at)
            mine.write(literal.content)
    identity, checksums = 40 + 2 * 4, 3 * 2 * 4  # the serialization id with its own checksum, and those of the data
    assert different <= identity + checksums
    infos = [
        [(info.filename, info.header_offset, info.file_size) for info in zipfile.ZipFile(tmp_path / name).infolist()]
        for name in ("mine.pt", "theirs.pt")
    ]
    assert infos[0] == infos[1]
    loaded = torch.load(tmp_path / "mine.pt", weights_only=True, mmap=True)
    assert {name: len(tensor) for name, tensor in loaded.items()} == sizes
    assert [slot.at % 64 for slot in _slots(value)] == [0, 0, 0]


def _slots(value: Any) -> list[Any]:
    pieces = Pieces()
    add_archive(pieces, value, "theirs")
    return pieces.slots


def test_calls_with_a_state():
    made = pickle.loads(emit_pickle(Call(Named("argparse", "Namespace"), (), {"a": 1})).pickle)
    assert vars(made) == {"a": 1}
