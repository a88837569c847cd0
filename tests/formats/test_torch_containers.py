"""Both containers of torch.save, written by torch itself: every kind of tensor, damage, and what is refused."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samerun.errors import CorruptCheckpoint, FormatError, UnsupportedVersion
from samerun.formats.base import view_extent
from samerun.formats.statedict.stored import Stored
from samerun.formats.statedict.tree import open_file
from samerun.formats.torchfile.container import read_torch_file
from samerun.formats.torchfile.legacy import MAGIC
from samerun.formats.torchfile.values import Inert
from samerun.stores.local import MappedFiles

BASE = torch.arange(30.0).reshape(5, 6)
TENSORS: dict[str, torch.Tensor] = {
    "plain": BASE,
    "transposed": BASE.t(),
    "view": BASE[2:, 1:3],
    "strided": BASE[::2, ::3],
    "expanded": torch.ones(1).expand(4),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 7),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "float64": torch.randn(3, dtype=torch.float64),
    "float16": torch.randn(3).half(),
    "bfloat16": torch.randn(7).bfloat16(),
    "e4m3": torch.randn(5).to(torch.float8_e4m3fn),
    "e5m2": torch.randn(5).to(torch.float8_e5m2),
    "complex": torch.randn(3, dtype=torch.complex64),
    "int8": torch.arange(-3, 3, dtype=torch.int8),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "bool": torch.tensor([True, False, True]),
}


def raw(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().contiguous().clone()
    return bytes(tensor.untyped_storage())[: tensor.numel() * tensor.element_size()]


def save(value: Any, path: Path, container: str) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=container == "zip")
    return path


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_every_kind_of_tensor_reads_equal(container: str, tmp_path: Path):
    path = save(TENSORS, tmp_path / "t.pt", container)
    files = MappedFiles()
    opened = read_torch_file(files.map(path), path)
    assert opened.container == container
    assert opened.decoded.unknown == ()
    for name, tensor in TENSORS.items():
        ref = opened.decoded.value[name]
        found = view_extent(files, opened.archive.extent(ref))
        assert found.shape == tuple(tensor.shape), name
        assert np.ascontiguousarray(found).tobytes() == raw(tensor), name


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_names_that_share_a_tensor_share_its_place(container: str, tmp_path: Path):
    path = save({"a": BASE, "b": BASE, "c": BASE.clone()}, tmp_path / "t.pt", container)
    tree = open_file(path, MappedFiles()).tree
    places = {name: tree[name].extents[0].offset_bytes for name in tree}
    assert places["a"] == places["b"] != places["c"]


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_types_without_a_plain_form_are_records_and_the_rest_is_read(container: str, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = {
            "half complex": torch.randn(3).to(torch.complex32),
            "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
            "sparse": torch.eye(3).to_sparse(),
            "plain": BASE,
        }
        path = save(value, tmp_path / "t.pt", container)
    bound = open_file(path, MappedFiles())
    assert isinstance(bound.tree["plain"], Stored)
    assert all(isinstance(bound.tree[name], Inert) for name in value if name != "plain")
    assert bound.unknown


def test_only_the_legacy_container_has_no_checksums(tmp_path: Path):
    for container in ("zip", "legacy"):
        tree = open_file(save({"a": BASE}, tmp_path / container, container), MappedFiles()).tree
        assert (tree["a"].extents[0].crc32 is None) == (container == "legacy")


def test_a_legacy_file_cut_off_among_its_storages_keeps_what_lies_before(tmp_path: Path):
    path = save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "t.pt", "legacy")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    bound = open_file(path, MappedFiles())
    assert [problem.code for problem in bound.problems] == ["SR-FILE-TRUNCATED"]
    assert sorted(len(item.extents) for item in bound.tree.values()) == [0, 1]


@pytest.mark.parametrize("size", [5, 20, 60, 200])
def test_a_legacy_file_cut_off_before_them_is_refused(size: int, tmp_path: Path):
    path = save({"a": torch.ones(10)}, tmp_path / "t.pt", "legacy")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FormatError):
        open_file(path, MappedFiles())


def test_a_legacy_file_with_another_protocol_is_refused(tmp_path: Path):
    path = tmp_path / "t.pt"
    path.write_bytes(MAGIC + pickle.dumps(1002, 2))
    with pytest.raises(UnsupportedVersion, match="SR-PKL-LEGACY"):
        open_file(path, MappedFiles())


def test_legacy_parts_that_disagree_are_refused(tmp_path: Path):
    path = save({"a": torch.ones(10)}, tmp_path / "t.pt", "legacy")
    data = bytearray(path.read_bytes())
    data[-48:-40] = (11).to_bytes(8, "little")  # the number of elements before the storage
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptCheckpoint, match="SR-PKL-LEGACY"):
        open_file(path, MappedFiles())


def test_a_legacy_pickle_larger_than_the_first_window_is_read(tmp_path: Path):
    value = {f"some.longer.name.of.a.module.{i}.weight": torch.ones(1) for i in range(2000)}
    tree = open_file(save(value, tmp_path / "t.pt", "legacy"), MappedFiles()).tree
    assert len(tree) == 2000


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "SR-FILE-EMPTY"),
        (b"hello world, this is text", "SR-PKL-CONTAINER"),
        (b"\x80\x02cos\nsystem\n(S'x'\ntR.", "SR-PKL"),
    ],
)
def test_other_files_are_refused(content: bytes, error: str, tmp_path: Path):
    path = tmp_path / "t.pt"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=error):
        open_file(path, MappedFiles())


def test_the_tar_container_is_named(tmp_path: Path):
    import tarfile

    path = tmp_path / "t.pt"
    (tmp_path / "storages").write_bytes(b"x")
    with tarfile.open(path, "w") as archive:
        archive.add(tmp_path / "storages", "storages")
    with pytest.raises(UnsupportedVersion, match=r"0\.1\.10"):
        open_file(path, MappedFiles())


def test_a_bare_pickle_of_plain_values_is_read(tmp_path: Path):
    path = tmp_path / "t.pkl"
    path.write_bytes(pickle.dumps({"step": 5, "array": np.arange(3)}))
    tree = open_file(path, MappedFiles()).tree
    assert tree["step"] == 5
    assert tree["array"].tolist() == [0, 1, 2]


def test_getattr_in_a_pickle_names_a_class_and_reads_nothing(tmp_path: Path):
    """A pickle names a class inside a class by `getattr`; on anything that is no class it only makes a record."""
    for argument, kept in ((b"X\x02\x00\x00\x00hi", "hi"), (b"]", []), (b"K\x01", 1)):
        path = tmp_path / "t.pkl"
        path.write_bytes(b"\x80\x02cbuiltins\ngetattr\n" + argument + b"X\x05\x00\x00\x00upper\x86R.")
        assert open_file(path, MappedFiles()).tree == Inert("builtins.getattr", (kept, "upper"))
