"""An explorer over a whole checkpoint, a run directory and a folder, with what must stay out of reach beside them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.explorer import HOSTILE, WHOLE, serving, write_gap, write_safetensors
from support.runs import unpack_run

if TYPE_CHECKING:
    from samerun.web.explorer.server import ExplorerServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to be named, and beside it what must stay out of reach."""
    torch = pytest.importorskip("torch")
    top = tmp_path_factory.mktemp("explorer")
    (top / "secret.txt").write_text("secret")
    shutil.copytree(WHOLE, top / "outside")
    named = top / "named"
    named.mkdir()
    write_gap(named / "gap")
    (named / "link").symlink_to(top / "outside")
    write_safetensors(named / "hostile.safetensors", {f"param:{HOSTILE}": torch.ones(3)})
    return named


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = unpack_run("reject", tmp_path_factory.mktemp("run"))
    (root.parent / "secret.txt").write_text("secret")
    (root / "stages" / "link.txt").symlink_to(root.parent / "secret.txt")
    (root / "stages" / "page.html").write_text("<script>alert(1)</script>")
    (root / "report.html").write_text("<script>alert(1)</script>")
    return root


@pytest.fixture(scope="module")
def server(folder: Path, run: Path) -> Iterator[ExplorerServer]:
    with serving([WHOLE, run, folder]) as server:
        yield server
