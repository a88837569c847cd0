"""Faults fit the launch script that they are put into."""

from __future__ import annotations

from pathlib import Path

import pytest

from samerun.demo.faults import FAULTS, Where, damage_launcher
from samerun.demo.workspace import LAUNCHER

LAUNCHED = [fault for fault in FAULTS.values() if fault.where is not Where.FILES]


@pytest.mark.parametrize("fault", LAUNCHED, ids=lambda fault: fault.name)
def test_a_fault_changes_the_launch_script(fault, tmp_path: Path) -> None:
    launcher = tmp_path / "launch.sh"
    launcher.write_text(LAUNCHER.format(arguments="--size tiny"))
    before = launcher.read_text()
    assert damage_launcher(fault, launcher)
    assert launcher.read_text() != before


def test_a_fault_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    launcher = tmp_path / "launch.sh"
    launcher.write_text("exec python other.py\n")
    with pytest.raises(ValueError, match="no longer contains"):
        damage_launcher(FAULTS["accumulation"], launcher)
