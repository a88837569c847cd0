"""Writing a trace: one rank's lines, each at once, so that a crash can cut only the last one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from samerun.errors import Problem, UsageError

SCHEMA = "samerun/trace/1"
KINDS = frozenset({"header", "state", "eval", "update", "digest", "boundary", "end"})


def file_name(rank: int) -> str:
    """Returns the name of a rank's file.

    >>> file_name(3)
    'rank-00003.jsonl'
    """
    return f"rank-{rank:05d}.jsonl"


class TraceWriter:
    """Appends a rank's lines to a new file, one write per line, so that a crash can cut only the last one.

    Raises:
        UsageError: SR-TRACE-EXISTS if the rank's file is already there; a trace is never overwritten or continued.
    """

    def __init__(self, directory: str | Path, rank: int) -> None:
        self.path = Path(directory) / file_name(rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = self.path.open("xb", buffering=0)
        except FileExistsError:
            raise UsageError(
                Problem(
                    "SR-TRACE-EXISTS",
                    f"{self.path.parent} already holds a trace",
                    where={"file": str(self.path), "rank": rank},
                    hint="a trace is never overwritten: name a new directory for each start of the job",
                )
            ) from None

    def write(self, kind: str, body: Mapping[str, Any]) -> None:
        """Writes one line. Numbers that JSON does not have become the strings "nan", "inf" and "-inf"."""
        if kind not in KINDS:
            raise ValueError(f"a trace line is one of {', '.join(sorted(KINDS))}, not {kind!r}")
        text = json.dumps({"kind": kind, **encode(body)}, ensure_ascii=False, separators=(", ", ": "))
        self._file.write(text.encode() + b"\n")

    def close(self) -> None:
        """Closes the file; writing afterwards is an error."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def encode(value: Any) -> Any:
    """Returns `value` with non-finite floats as strings, mappings with text keys, and sequences as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in cast("Sequence[Any]", value)]
    return value
