"""A trainer's page shows what its example does: the same names from samerun, the same methods of what they make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.blocks import read_blocks

TOP = Path(__file__).parents[2]
TRAINERS = ["accelerate", "deepspeed", "huggingface", "lightning"]
_IMPORT = re.compile(r"^from samerun[\w.]* import ([^#\n]+)", re.MULTILINE)
_METHOD = re.compile(r"\b(recorder|sampler|mean|update|microbatch|engine)\.([a-z_]+)")
_OF_THE_FRAMEWORK = {
    "save_checkpoint",
    "load_checkpoint",
    "backward",
    "step",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
}


def used(script: str) -> set[str]:
    """Returns names that a script imports from samerun, and methods and attributes of what they make."""
    names = {name.strip() for found in _IMPORT.findall(script) for name in found.split(",")}
    return names | {f"{thing}.{name}" for thing, name in _METHOD.findall(script) if name not in _OF_THE_FRAMEWORK}


def shown(trainer: str) -> set[str]:
    return used("\n".join(block.text for block in read_blocks(TOP / "docs" / "guides" / f"{trainer}.md")))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_page_and_the_example_use_the_same(trainer: str) -> None:
    in_example = used((TOP / "examples" / trainer / "train.py").read_text(encoding="utf-8"))
    assert in_example, "nothing was found"
    assert shown(trainer) == in_example
