"""What an attack is, and the list of all of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Build = Callable[[Path], None]


@dataclass(frozen=True)
class Attack:
    """One abuse idea. `build` turns a sound DCP directory into a hostile one.

    `elsewhere` is what it does to a reader that trusts its input, `stopped_by` what stops it here, and `codes` the
    findings of which it must give at least one.
    """

    kind: str
    name: str
    elsewhere: str
    stopped_by: str
    codes: tuple[str, ...]
    build: Build


ATTACKS: list[Attack] = []


def attack(elsewhere: str, stopped_by: str, *codes: str) -> Callable[[Build], Build]:
    """Registers the decorated function as an attack under its own name."""

    def register(build: Build) -> Build:
        kind = build.__module__.rpartition(".")[2]
        ATTACKS.append(Attack(kind, build.__name__.replace("_", " "), elsewhere, stopped_by, codes, build))
        return build

    return register


@contextmanager
def edit_metadata(folder: Path) -> Iterator[Any]:
    """Lets the block change a directory's metadata. The directory is one that the caller has just saved."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())  # noqa: S301
    yield found
    path.write_bytes(pickle.dumps(found))


def markdown() -> str:
    """Returns the table of all attacks."""
    lines = ["| attack | elsewhere | stopped here by | finding |", "|---|---|---|---|"]
    for one in sorted(ATTACKS, key=lambda one: ("pickles", "archives", "directories", "weights").index(one.kind)):
        lines.append(f"| {one.name} | {one.elsewhere} | {one.stopped_by} | {', '.join(one.codes)} |")
    return "\n".join(lines) + "\n"
