"""What holds for every test: no deadline for an example, slow files first, no skips where every framework is there."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

# Workers share the cores, so the time that one example takes says nothing. What CI sets otherwise stays.
settings.register_profile("samerun", settings.default, deadline=None)
settings.load_profile("samerun")

EVERYTHING_IS_HERE = os.environ.get("SAMERUN_FRAMEWORKS") == "1"
"""scripts/test.sh says so in the environment that it makes for them: a test that skips there has failed."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with slow tests first: whichever process takes one last would keep the others waiting."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _fail_if_skipped(report: Any) -> Any:
    if EVERYTHING_IS_HERE and report.skipped and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be missing (SAMERUN_FRAMEWORKS=1): {why}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """A test that skips."""
    return _fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """A module that skips."""
    return _fail_if_skipped((yield))
