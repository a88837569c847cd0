"""What every page of samerun has in common: colours, type, tables and the contents at its side, in light and dark."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources


def base_style() -> str:
    """Returns the style sheet that all pages begin with."""
    return read_static("samerun.report", "base.css")


def shared_style() -> str:
    """Returns the base, and what the report and the explorer look alike in: verdict, findings, bars, curves."""
    return base_style() + read_static("samerun.report", "shared.css")


def read_static(package: str, name: str) -> str:
    """Returns the text of a file in the `static` folder of a package."""
    return resources.files(package).joinpath("static", name).read_text(encoding="utf-8")


def script_hash(script: str) -> str:
    """Returns what a page's policy names its only script by: no other one runs."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
