"""Pickles that execute, exhaust or confuse whoever decodes them. All are written in place of `.metadata`."""

from __future__ import annotations

import struct
from pathlib import Path

from attacks.catalogue import attack

SCAN = "the opcode scan, before anything is decoded"
STUBS = "every name resolves to a stub"
_END = b"."


def _metadata(folder: Path, *parts: bytes) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x04" + b"".join(parts) + _END)


def _string(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _call(module: str, name: str, *arguments: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


@attack("runs a shell command when loaded", STUBS, "SR-META-BROKEN")
def calls_os_system(folder: Path) -> None:
    _metadata(folder, _call("os", "system", _string(f"touch {folder}/pwned")))


@attack("runs Python code when loaded", STUBS, "SR-META-BROKEN")
def calls_exec(folder: Path) -> None:
    _metadata(folder, _call("builtins", "exec", _string(f"open({str(folder / 'pwned')!r}, 'w')")))


@attack("imports and runs a module of the attacker's", STUBS, "SR-META-BROKEN")
def imports_a_module(folder: Path) -> None:
    (folder / "evil_module.py").write_text(f"open({str(folder / 'pwned')!r}, 'w')\nclass A: pass\n")
    _metadata(folder, _call("evil_module", "A"))


@attack("reaches `__globals__` and from there anything", STUBS, "SR-META-BROKEN")
def walks_attributes(folder: Path) -> None:
    _metadata(folder, _call("builtins", "getattr", b"cos\n__dict__\n", _string("system")))


@attack("changes the classes that later files are decoded with", "a metaclass that allows no change", "SR-PKL-BROKEN")
def rewrites_a_class(folder: Path) -> None:
    metadata = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    slots = b"}" + _string("version") + b"ctorch\nSize\n" + b"s"
    _metadata(folder, metadata, b"N", slots, b"\x86b")


@attack("seven bytes ask for a memo of four billion entries: 32 GB", SCAN, "SR-PKL-HOSTILE")
def huge_memo_index(folder: Path) -> None:
    _metadata(folder, b"Nr\xff\xff\xff\xff")


@attack("hashing a tuple a million deep overflows the C stack: the process dies", SCAN, "SR-PKL-HOSTILE")
def deep_tuple_as_a_key(folder: Path) -> None:
    _metadata(folder, b"}N", b"\x85" * 1_000_000, b"Ns")


@attack("a list a million deep overflows whoever walks it", SCAN, "SR-PKL-HOSTILE")
def deep_lists(folder: Path) -> None:
    _metadata(folder, b"]" * 1_000_000, b"a" * 999_999)


@attack(
    "-1 and -2 hash alike, so tuples of them make a dictionary quadratic: minutes per megabyte", SCAN, "SR-PKL-HOSTILE"
)
def colliding_tuples(folder: Path) -> None:
    keys = bytearray()
    for number in range(60_000):
        bits = (b"h\x00" if number >> place & 1 else b"h\x01" for place in range(16))
        keys += b"(" + b"".join(bits) + b"tN"
    _metadata(folder, b"J\xff\xff\xff\xffq\x00J\xfe\xff\xff\xffq\x0100}(", bytes(keys), b"u")


@attack("multiples of 2**61 - 1 hash to zero, so as keys they make a dictionary quadratic", SCAN, "SR-PKL-HOSTILE")
def colliding_integers(folder: Path) -> None:
    keys = bytearray()
    for number in range(1, 60_000):
        value = (number * ((1 << 61) - 1)).to_bytes(10, "little")
        keys += b"\x8a\x0a" + value + b"N"
    _metadata(folder, b"}(", bytes(keys), b"u")


@attack("a string declared 2**62 long is allocated before it is read", SCAN, "SR-PKL-BROKEN")
def huge_string(folder: Path) -> None:
    _metadata(folder, b"\x8d" + struct.pack("<Q", 1 << 62), b"abc")


@attack("a bytearray declared 2**40 long is allocated before it is read", SCAN, "SR-PKL-BROKEN")
def huge_bytearray(folder: Path) -> None:
    _metadata(folder, b"\x96" + struct.pack("<Q", 1 << 40), b"abc")


@attack("an integer of a million digits takes quadratic time to convert", SCAN, "SR-PKL-BROKEN", "SR-PKL-HOSTILE")
def huge_integer_in_text(folder: Path) -> None:
    _metadata(folder, b"L" + b"9" * 1_000_000 + b"L\n")


@attack("an integer of eight megabytes makes every later operation slow", SCAN, "SR-PKL-HOSTILE")
def huge_integer(folder: Path) -> None:
    _metadata(folder, b"\x8b" + struct.pack("<I", 8_000_000) + b"\x7f" * 8_000_000)


@attack("`bytearray(2**40)` allocates a terabyte", STUBS, "SR-META-BROKEN")
def calls_bytearray(folder: Path) -> None:
    _metadata(folder, _call("builtins", "bytearray", b"\x8a\x06" + (1 << 40).to_bytes(6, "little")))


@attack("the extension registry names classes by number", SCAN, "SR-PKL-HOSTILE")
def uses_the_extension_registry(folder: Path) -> None:
    _metadata(folder, b"\x82\x01")


@attack("asks the reader for an out-of-band buffer", SCAN, "SR-PKL-HOSTILE")
def asks_for_a_buffer(folder: Path) -> None:
    _metadata(folder, b"\x97")


@attack("asks the reader to resolve an identifier of the attacker's", "only storages are resolved", "SR-META-BROKEN")
def persistent_identifier(folder: Path) -> None:
    _metadata(folder, _string("file:///etc/passwd") + b"Q")


@attack(
    "a list that contains itself is walked for ever",
    "the decoder's own values are refused as metadata",
    "SR-META-BROKEN",
)
def contains_itself(folder: Path) -> None:
    _metadata(folder, b"]q\x00h\x00a")


@attack("never ends", SCAN, "SR-PKL-BROKEN")
def no_end(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x04" + b"N0" * 100_000)


@attack(
    "a terabyte of nothing is read into memory",
    "the file is mapped, and the scan stops at the first byte",
    "SR-PKL-HOSTILE",
)
def sparse_terabyte(folder: Path) -> None:
    with open(folder / ".metadata", "wb") as file:
        file.truncate(1 << 40)


def _module(name: str) -> bytes:
    return f"ctorch.distributed.checkpoint.metadata\n{name}\n".encode()


@attack(
    "one list of chunks, referred to by every tensor in six bytes each, becomes billions of chunks",
    "as many chunks as the file's length can hold, and no more",
    "SR-META-BROKEN",
)
def shared_chunks(folder: Path) -> None:
    """A thousand tensors that share a list of a hundred thousand chunks."""
    size = b"ctorch\nSize\n(K\x01t\x85R"
    chunk = b"c" + b"torch.distributed.checkpoint.metadata\nChunkStorageMetadata\n" + b")\x81"
    state = b"}(" + _string("offsets") + size + _string("sizes") + size + b"u"
    chunks = b"](" + chunk + state + b"b\x94" + b"h\x00" * 100_000 + b"e"
    tensor = _module("TensorStorageMetadata") + b")\x81}(" + _string("chunks") + chunks.replace(b"\x94", b"q\x00")
    tensor += b"ub"
    names = b"".join(_string(f"t{number}") + b"h\x01" for number in range(1_000))
    entries = b"}(" + _string("first") + tensor + b"q\x01" + names + b"u"
    state = b"}(" + _string("state_dict_metadata") + entries + _string("storage_data") + b"}u"
    _metadata(folder, _module("Metadata") + b")\x81" + state + b"b")
