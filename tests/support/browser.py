"""What a page in a real browser complained about and asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

SCRIPTS = {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parents[1] / "browser").glob("*.js")}
WIDTHS = (1280, 390)
THEMES = ("light", "dark")


@dataclass
class View:
    """An open page."""

    page: Any
    complaints: list[str] = field(default_factory=list[str])
    requests: list[str] = field(default_factory=list[str])


class Opener(Protocol):
    """Opens an address in a browser window of its own, closed when the test ends."""

    def __call__(self, url: str, width: int = 1280, theme: str = "light", **options: Any) -> View: ...
