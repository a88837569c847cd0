"""Code blocks of the documentation, and how each is to be tried.

A comment above a block says what it needs: `<!-- block: setup=trainer exit=1 -->`, or why it is not executed:
`<!-- block: skip="trains for minutes" -->`, or which package it needs: `<!-- block: needs=tensorboard -->`. It shows
neither in the site nor on a repository's web page.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- block:(?P<directive>.*?)-->\n)?^(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
KINDS = {"sh", "python", "yaml", "text"}
"""What a block may be; `text` is what nobody types."""
_WORDS = {"setup", "exit", "skip", "needs"}


@dataclass(frozen=True)
class Block:
    """One fenced block. `line` is that of its first line of text, 1-based."""

    file: Path
    line: int
    kind: str
    text: str
    directive: dict[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}"


def read_blocks(file: Path) -> list[Block]:
    """Returns the blocks of a page, in order.

    Raises:
        ValueError: for a directive that says something unknown.
    """
    text = file.read_text(encoding="utf-8")
    blocks: list[Block] = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        directive = dict(word.partition("=")[::2] for word in shlex.split(match["directive"] or ""))
        if not set(directive) <= _WORDS:
            raise ValueError(f"{file.name}:{line}: a block may say {', '.join(sorted(_WORDS))}, not {directive}")
        blocks.append(Block(file, line, match["kind"], match["text"], directive))
    return blocks
