"""safetensors files and their index: headers that lie, an index that leads astray."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from attacks.catalogue import attack

F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
INDEX = "model.safetensors.index.json"


def _write(
    folder: Path, header: dict[str, Any] | bytes, body: bytes = bytes(32), name: str = "model.safetensors"
) -> None:
    """Replaces the directory's content by one safetensors file (and keeps what was written this way before)."""
    if (folder / ".metadata").exists():
        shutil.rmtree(folder)
        folder.mkdir()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + body)


@attack("allocates what the length says", "the length must lie inside the file", "SR-FILE-HEADER", "SR-FILE-TRUNCATED")
def header_longer_than_its_file(folder: Path) -> None:
    _write(folder, {"w": F32})
    (folder / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


@attack("overflows the parser's stack", "nesting is a finding", "SR-FILE-HEADER")
def header_nested_deeply(folder: Path) -> None:
    _write(folder, b'{"w":' * 200_000 + b"1" + b"}" * 200_000)


@attack("two tensors share bytes: one write changes both", "places must not overlap", "SR-FILE-HEADER")
def tensors_that_overlap(folder: Path) -> None:
    _write(folder, {"a.weight": F32, "b.weight": {**F32, "data_offsets": [8, 24]}})


@attack("the last of two tensors of one name wins", "names must be unique", "SR-FILE-HEADER")
def one_name_twice(folder: Path) -> None:
    row = json.dumps(F32)
    _write(folder, f'{{"w": {row}, "w": {row}}}'.encode(), bytes(16))


@attack("allocates an exabyte", "a place must be as large as shape and type say", "SR-FILE-HEADER")
def shape_larger_than_its_place(folder: Path) -> None:
    _write(folder, {"w": {**F32, "shape": [1 << 40, 1 << 20]}})


@attack("reads a file outside the checkpoint", "names in an index are plain file names", "SR-FILE-ESCAPE")
def index_climbs(folder: Path) -> None:
    _write(folder, {"a.weight": F32}, bytes(16), "model-00001-of-00002.safetensors")
    places = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "../../../../etc/passwd"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@attack("resolves for ever", "the operating system's limit, as a finding", "SR-FILE-MISSING", "SR-IO-FAILED")
def index_names_a_link_in_a_circle(folder: Path) -> None:
    _write(folder, {"a.weight": F32}, bytes(16), "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors").symlink_to("model-00002-of-00002.safetensors")
    places = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
