"""Reading a run directory that may be incomplete: what is there is used, what is not becomes a `Gap`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from samerun.errors import SamerunError

T = TypeVar("T")

_LISTED = ("*", "stages/*", "stages/*/*", "stages/*/*/*")
"""Where evidence lies: the run's own files, each stage's, and the traces of its jobs."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that the page would show if it were there.

    `what` names it, `effect` says what cannot be shown without it, `remedy` what makes it.
    """

    what: str
    effect: str
    remedy: str


class RunFiles:
    """A run directory, read-only. Nothing missing or broken in it raises: it is kept in `gaps`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gaps: list[Gap] = []

    def list(self) -> frozenset[str]:
        """Returns the paths of all evidence, relative, folders with a slash at the end."""
        found = (path for pattern in _LISTED for path in self.root.glob(pattern) if not path.is_symlink())
        return frozenset(f"{path.relative_to(self.root).as_posix()}{'/' * path.is_dir()}" for path in found)

    def parse(self, name: str, parse: Callable[[dict[str, Any]], T], effect: str, remedy: str) -> T | None:
        """Returns `parse(content)` of a JSON file, or None with a gap if it is absent or is not what it should be."""
        path = self.root / name
        if not path.is_file():
            self.gaps.append(Gap(name, effect, remedy))
            return None
        try:
            body = json.loads(path.read_bytes())
            return parse(_mapping(body))
        except (ValueError, KeyError, TypeError, AttributeError, SamerunError) as error:
            self.broken(name, error, effect)
            return None

    def broken(self, name: str, error: Exception, effect: str) -> None:
        """Notes a file that is there and cannot be used."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.gaps.append(Gap(name, f"it cannot be read ({reason}). {effect}", "restore it, or run the stage again"))


def _mapping(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise TypeError(f"a JSON object was expected, not {type(body).__name__}")
    return cast("dict[str, Any]", body)
