"""Names in a checkpoint are whatever someone put there: a terminal shows them and obeys none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samerun.cli.output import printable

# A window's title, an eight-bit control, text that runs backwards, a line that overwrites the one before, a new line.
EVIL = "w\x1b]0;owned\x07\x9b2J\u202e\rok\nsecond"
OBEYED = ("\x1b]", "\x07", "\x9b", "\u202e", "\r")


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files whose names, slots, settings, objects and findings all carry it, with different values."""
    folder = tmp_path_factory.mktemp("evil")
    for number in (1, 2):
        names = ["a", f"b{EVIL}"]
        slots = {name: {"exp_avg": torch.ones(3) * number, EVIL: torch.ones(3)} for name in names}
        state = {
            "model": {name: torch.ones(3) * number for name in [*names, f"only{number}{EVIL}"]},
            "optimizer": {"state": slots, "param_groups": [{"params": names, "lr": EVIL, f"x{EVIL}": number}]},
            f"config{EVIL}": {"name": EVIL, "seed": number},
            "global_step": number, "train_state": {"step": 5},
        }  # fmt: skip
        torch.save(state, folder / f"{number}.pt")
    return folder / "1.pt", folder / "2.pt"


def run(*args: str) -> str:
    result = subprocess.run([sys.executable, "-m", "samerun", *args], capture_output=True, timeout=120)
    shown = (result.stdout + result.stderr).decode()  # as bytes: reading text would turn \r into \n
    assert "Traceback" not in shown
    return shown


@pytest.mark.parametrize("verb", ["inspect", "deep", "against", "digest", "diff", "convert", "memory", "format"])
def test_nothing_that_a_checkpoint_names_reaches_the_terminal_as_it_is(verb: str, saves: tuple[Path, Path]):
    first, second = map(str, saves)
    command = {
        "inspect": ["inspect", first],
        "deep": ["inspect", first, "--deep"],
        "against": ["inspect", first, "--against", second],
        "digest": ["digest", first],
        "diff": ["diff", first, second],
        "convert": ["convert", first, f"{first}.out", "--to", "torch", "--dry-run"],
        "memory": ["memory", first, "--layout", "dp_shard=2"],
        "format": ["inspect", first, "--format", EVIL],
    }[verb]
    shown = run(*command)
    assert not [mark for mark in OBEYED if mark in shown]
    if verb in ("inspect", "digest", "diff", "format"):
        assert "\\x1b]0;owned\\x07\\x9b2J\\u202e\\rok\\nsecond" in shown  # shown, as what it is


def test_plain_text_is_left_alone():
    for text in ("param:layers.0.w", "größe 東京 🙂", "a  b", ""):
        assert printable(text) == text
    assert printable(EVIL) == "w\\x1b]0;owned\\x07\\x9b2J\\u202e\\rok\\nsecond"
