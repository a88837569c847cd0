"""The catalogue of findings: what each code means, how to see it for oneself, and what to do.

One TOML file per family of codes lies beside this module; `samerun explain` and the page `docs/findings.md` are both
made from them. An entry looks like this:

    [SR-COV-GAP]
    severity = "error"
    title = "Part of a tensor is in no file"
    meaning = '''What it means for the run, in two or three sentences.'''
    see = '''How to see it: a command, a number to compare.'''
    do = '''What to do about it.'''
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True)
class Entry:
    """One catalogued code. `severity` is the usual one; a finding may carry a milder or sharper one in context."""

    code: str
    severity: str
    title: str
    meaning: str
    see: str
    do: str


@cache
def load_catalog() -> dict[str, Entry]:
    """Returns every catalogued finding by code, in alphabetical order."""
    entries: dict[str, Entry] = {}
    for file in sorted(resources.files(__name__).iterdir(), key=lambda item: item.name):
        if not file.name.endswith(".toml"):
            continue
        for code, body in tomllib.loads(file.read_text(encoding="utf-8")).items():
            if code in entries:
                raise ValueError(f"{code} is catalogued twice, the second time in {file.name}")
            entries[code] = Entry(code, **{name: str(text).strip() for name, text in body.items()})
    return dict(sorted(entries.items()))
