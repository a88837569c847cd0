"""Every attack ends in a finding, with nothing executed, in little memory and little time."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.dcp import job_state, save

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
for _name in ("pickles", "archives", "directories", "weights"):
    importlib.import_module(f"attacks.{_name}")
from attacks.catalogue import ATTACKS, markdown  # noqa: E402

MEMORY_BYTES = 3 << 30  # address space; libraries map about one before anything is read
SECONDS = 60


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(job_state(), tmp_path_factory.mktemp("sound") / "step-3")


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda one: one.name)
def test_attack_ends_in_a_finding(attack, sound: Path, tmp_path: Path):
    folder = Path(shutil.copytree(sound, tmp_path / "step-3"))
    attack.build(folder)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{folder}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "samerun", "inspect", str(folder), "--json"],
        capture_output=True,
        text=True,
        timeout=3 * SECONDS,
        preexec_fn=limit,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert "SR-INTERNAL" not in done.stderr
    if done.returncode == 2:
        found = {code for code in attack.codes if code in done.stderr}
    else:
        report = json.loads(done.stdout)
        found = {problem["code"] for problem in report["problems"]} & set(attack.codes)
        assert done.returncode == 0 or not report["complete"]
    assert found, done.stderr or done.stdout
    assert not list(tmp_path.rglob("pwned"))
    assert not Path("/tmp/pwned").exists()


def test_the_sound_directory_itself_has_no_finding(sound: Path):
    done = subprocess.run(
        [sys.executable, "-m", "samerun", "inspect", str(sound), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["problems"] == []


def test_the_page_lists_every_attack():
    assert markdown() in (ROOT / "attacks" / "README.md").read_text(encoding="utf-8")
