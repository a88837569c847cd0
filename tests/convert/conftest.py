"""Small units, so that a small checkpoint has many; one source for all tests of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from samerun.execute import work
from support.exports import write_export


@pytest.fixture(scope="session")
def shared_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    return write_export(tmp_path_factory.mktemp("source") / "ckpt")


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "UNIT_BYTES", 32 << 10)
