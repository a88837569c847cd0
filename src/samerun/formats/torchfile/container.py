"""Any file that torch.save or pickle wrote, in whichever container: what it holds, and where its tensors lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samerun.errors import CorruptCheckpoint, Problem, UnsupportedVersion
from samerun.formats.torchfile.archive import Archive, read_archive, read_value
from samerun.formats.torchfile.legacy import is_legacy, read_legacy
from samerun.formats.torchfile.unpickle import Decoded, decode_pickle
from samerun.stores.remote import Buffer

_TAR_MARK_AT = 257


@dataclass(frozen=True, slots=True)
class TorchFile:
    """One opened file. `container` is `zip`, `legacy` or `pickle`; a bare pickle has no storages."""

    archive: Archive
    decoded: Decoded
    container: str
    problems: tuple[Problem, ...] = ()


def looks_like_torch_file(head: bytes) -> bool:
    """Whether a file that begins with `head` (a few hundred bytes) could be read by `read_torch_file`."""
    return head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 2)


def read_torch_file(buffer: Buffer, file: Path) -> TorchFile:
    """Decodes a file without torch and without calling anything it names. No payload of a tensor is read.

    Raises:
        CorruptCheckpoint: if it is damaged, hostile or no such file.
        UnsupportedVersion: for the tar container that torch wrote before 0.1.10.
    """
    if not len(buffer):
        raise CorruptCheckpoint(_empty(file))
    if bytes(buffer[:4]) == b"PK\x03\x04":
        archive = read_archive(buffer, file)
        return TorchFile(archive, read_value(buffer, archive), "zip")
    if is_legacy(buffer):
        archive, decoded, problems = read_legacy(buffer, file)
        return TorchFile(archive, decoded, "legacy", problems)
    if bytes(buffer[_TAR_MARK_AT : _TAR_MARK_AT + 5]) == b"ustar":
        raise UnsupportedVersion(_not_ours(file, "this is the tar container that torch wrote before 0.1.10"))
    if not looks_like_torch_file(bytes(buffer[:16])):
        raise CorruptCheckpoint(_not_ours(file, "this is neither a torch.save file nor a pickle"))
    return TorchFile(Archive(file, {}, False), decode_pickle(bytes(buffer), str(file)), "pickle")


def _empty(file: Path) -> Problem:
    return Problem(
        "SR-FILE-EMPTY",
        "the file is empty: whatever wrote it failed before the first byte",
        where={"file": str(file)},
        hint="the save did not finish, or the disk was full; use the checkpoint before this one",
    )


def _not_ours(file: Path, message: str) -> Problem:
    return Problem(
        "SR-PKL-CONTAINER",
        message,
        where={"file": str(file)},
        hint="check what wrote it; a file of the first torch releases must be loaded and saved again by a later one",
    )
