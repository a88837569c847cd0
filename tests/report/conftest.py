"""Real run directories, unpacked once."""

from __future__ import annotations

from pathlib import Path

import pytest

from samerun.report.model import ReportModel, read_run
from support.runs import unpack_run


@pytest.fixture(scope="session")
def promote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_run("promote", tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def reject(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_run("reject", tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def promote_model(promote: Path) -> ReportModel:
    return read_run(promote)


@pytest.fixture(scope="session")
def reject_model(reject: Path) -> ReportModel:
    return read_run(reject)
