"""Directories and metadata that lead a reader astray."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from attacks.catalogue import attack, edit_metadata

NAMES = "names are checked before any file is opened"


def _move(folder: Path, name: str) -> None:
    """Makes the metadata look for everything in the file `name`."""
    with edit_metadata(folder) as found:
        for place in found.storage_data.values():
            place.relative_path = name


def _data_file(folder: Path) -> Path:
    return folder / "__0_0.distcp"


@attack("reads a file outside the checkpoint", NAMES, "SR-FILE-ESCAPE")
def path_climbs(folder: Path) -> None:
    _move(folder, "../../../../../../etc/passwd")


@attack("reads a file outside the checkpoint", NAMES, "SR-FILE-ESCAPE")
def path_is_absolute(folder: Path) -> None:
    _move(folder, "/etc/passwd")


@attack("a null byte ends the name early in C", NAMES, "SR-FILE-ESCAPE")
def path_holds_a_null(folder: Path) -> None:
    _move(folder, "__0_0.distcp\0.txt")


@attack("reads a file outside the checkpoint", "links are resolved and must stay inside", "SR-FILE-ESCAPE")
def link_leads_outside(folder: Path) -> None:
    _data_file(folder).unlink()
    _data_file(folder).symlink_to("/etc/passwd")


@attack("resolves for ever", "the operating system's limit, as a finding", "SR-FILE-MISSING")
def links_in_a_circle(folder: Path) -> None:
    _data_file(folder).unlink()
    _data_file(folder).symlink_to("a")
    (folder / "a").symlink_to("__0_0.distcp")


@attack("opening a pipe waits for ever", "only ordinary files are opened", "SR-FILE-SPECIAL")
def data_is_a_pipe(folder: Path) -> None:
    _data_file(folder).unlink()
    os.mkfifo(_data_file(folder))


@attack("opening a pipe waits for ever", "only ordinary files are opened", "SR-FILE-SPECIAL")
def metadata_is_a_pipe(folder: Path) -> None:
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")


@attack("reading a device never ends", "only ordinary files are opened", "SR-FILE-SPECIAL")
def metadata_is_a_device(folder: Path) -> None:
    (folder / ".metadata").unlink()
    (folder / ".metadata").symlink_to("/dev/zero")


@attack(
    "a tensor of an exabyte is allocated before it is read", "an item must be as large as its values", "SR-FILE-ITEM"
)
def huge_tensor(folder: Path) -> None:
    with edit_metadata(folder) as found:
        entry = found.state_dict_metadata["model.0.bias"]
        entry.size = type(entry.size)((1 << 58,))
        entry.chunks[0].sizes = type(entry.size)((1 << 58,))


@attack("sizes that overflow 64 bits wrap to small ones", "sizes beyond 2**62 are refused", "SR-META-ENTRY")
def overflowing_tensor(folder: Path) -> None:
    with edit_metadata(folder) as found:
        entry = found.state_dict_metadata["model.0.bias"]
        entry.size = (1 << 70, 1 << 70)


@attack("a product of sizes that overflows wraps to a small number", "products are exact", "SR-FILE-ITEM")
def overflowing_product(folder: Path) -> None:
    with edit_metadata(folder) as found:
        entry = found.state_dict_metadata["model.0.bias"]
        shape = type(entry.size)((1 << 40, 1 << 40))
        entry.size = shape
        entry.chunks[0].sizes = shape
        entry.chunks[0].offsets = type(entry.size)((0, 0))
        key = next(key for key in found.storage_data if key.fqn == "model.0.bias")
        place = found.storage_data.pop(key)
        object.__setattr__(key, "offset", type(entry.size)((0, 0)))
        found.storage_data[key] = place


@attack("offsets that overflow place an item before its file", "sums are checked for sign", "SR-FILE-TRUNCATED")
def overflowing_place(folder: Path) -> None:
    with edit_metadata(folder) as found:
        place = next(place for key, place in found.storage_data.items() if key.fqn == "model.0.bias")
        place.offset, place.length = (1 << 63) - 1, (1 << 63) - 1


@attack("one file's bytes stand for two tensors", "items may not share bytes", "SR-FILE-OVERLAP")
def shared_place(folder: Path) -> None:
    with edit_metadata(folder) as found:
        places = {key.fqn: place for key, place in found.storage_data.items()}
        places["model.1.bias"].offset = places["model.1.weight"].offset


@attack("a tracker leads out of the directory", "a tracker names a plain folder beside it", "SR-PATH-TRACKER")
def tracker_climbs(folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    for path in list(folder.iterdir()):
        if path.is_file():
            shutil.move(path, inner)
    (folder / "latest").write_text("../" + folder.name + "/inner")


@attack("a tracker that is a pipe waits for ever", "only ordinary files are read", "SR-PATH-TRACKER")
def tracker_is_a_pipe(folder: Path) -> None:
    (folder / ".metadata").unlink()
    os.mkfifo(folder / "latest")
