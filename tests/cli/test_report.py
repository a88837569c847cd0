"""`samerun report`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from samerun.cli.report import link_base
from support.runs import unpack_run


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samerun", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("place", [None, "elsewhere/page.html"])
def test_the_page_is_written_and_its_links_lead_to_the_evidence(place: str | None, tmp_path: Path) -> None:
    root = unpack_run("promote", tmp_path / "a folder")
    if place is not None:
        (tmp_path / place).parent.mkdir()
    done = report(root, *(["-o", tmp_path / place] if place else []))
    assert done.returncode == 0, done.stderr
    target = tmp_path / place if place else root / "report.html"
    assert done.stdout.strip() == str(target)
    html = target.read_text(encoding="utf-8")
    links = [link.replace("%20", " ") for link in re.findall(r'<a href="([^"#][^"]*)"', html)]
    assert len(links) > 20
    assert all((target.parent / link).exists() for link in links)


def test_what_is_no_run_directory_is_a_usage_error(tmp_path: Path) -> None:
    done = report(tmp_path)
    assert done.returncode == 2
    assert "SR-RUN-DIRECTORY" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report.html").exists()


def test_links_go_from_the_page_to_the_run(tmp_path: Path) -> None:
    assert link_base(tmp_path / "run", tmp_path / "run" / "report.html") == ""
    assert link_base(tmp_path / "run", tmp_path / "page.html") == "run/"
    assert link_base(tmp_path / "run", tmp_path / "x" / "page.html") == "../run/"
