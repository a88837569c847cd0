"""The rules that the whole package keeps: cheap imports, catalogued findings, exit codes, no unpickling."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from samerun.catalog import load_catalog
from samerun.cli import VERBS

SOURCE = Path(__file__).parents[2] / "src" / "samerun"
CODE = re.compile(r'"(SR-[A-Z0-9]+(?:-[A-Z0-9]+)*)"')


def run_cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "samerun", *args], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("statement", ["import samerun", "from samerun.cli import main", "import samerun.cli.inspect"])
def test_imports_stay_light(statement: str) -> None:
    probe = f"{statement}\nimport sys; print([m for m in ('torch', 'numba', 'pydantic', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [("--help",), ("inspect", "--help")])
def test_help_answers_at_once(arguments: tuple[str, ...]) -> None:
    seconds: list[float] = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run_cli(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 80
    # Processor time, which a busy machine does not change much; the wall time of an idle one is about the same.
    assert min(seconds) < 0.3, seconds


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_at_80_columns(verb: str) -> None:
    done = run_cli(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert len(done.stdout.splitlines()) > 5


def test_every_code_in_the_source_is_catalogued_and_none_is_left_over() -> None:
    used = {code for file in SOURCE.rglob("*.py") for code in CODE.findall(file.read_text(encoding="utf-8"))}
    assert used == set(load_catalog())


def test_every_entry_says_something() -> None:
    for entry in load_catalog().values():
        assert entry.severity in {"error", "warning", "note"}, entry.code
        assert 10 <= len(entry.title) <= 100, entry.code
        assert min(len(entry.meaning), len(entry.see), len(entry.do)) >= 20, entry.code


def test_explain_prints_an_entry_and_knows_neighbours() -> None:
    done = run_cli("explain", "sr-io-failed")
    assert done.returncode == 0
    assert "operating system" in done.stdout
    wrong = run_cli("explain", "SR-IO-FALED")
    assert wrong.returncode == 2
    assert "SR-IO-FAILED" in wrong.stderr
    listed = json.loads(run_cli("explain", "--list", "--json").stdout)
    assert listed["schema"] == "samerun/explain/1"
    assert {row["code"] for row in listed["findings"]} == set(load_catalog())


def test_a_misspelt_verb_is_a_usage_error() -> None:
    done = run_cli("inspekt", "x")
    assert done.returncode == 2
    assert "inspect" in done.stderr
    assert "Traceback" not in done.stderr


def test_only_the_restricted_reader_unpickles() -> None:
    loading = re.compile(r"\b(?:torch|pickle|joblib|dill|cPickle)\.(?:load|loads)\(|\bUnpickler\b|allow_pickle=True")
    offenders = [
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if loading.search(file.read_text(encoding="utf-8")) and "torchfile" not in file.parts
    ]
    assert offenders == []
