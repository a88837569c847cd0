"""fp32 masters where the destination has no place for them: the user chooses, and each choice is what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.convert.convert import Converted, carry_out
from samerun.convert.prepare import prepare
from samerun.errors import UndecidedError, UsageError
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint

SOURCE = Path(__file__).parents[1] / "golden" / "deepspeed" / "z3_sub_bf16"
ALLOW = ("SR-WRITE-OBJECT", "SR-CONVERT-OBJECT")


@pytest.fixture
def source() -> Any:
    checkpoint = open_checkpoint(SOURCE)
    yield checkpoint
    checkpoint.close()


def run(source: Checkpoint, dest: Path, to: str, masters: str | None) -> Converted:
    return carry_out(prepare(source, dest, to=to, allow=ALLOW, masters=masters))


def masters_of(source: Checkpoint) -> list[str]:
    return [entry.key.fqn for entry in source.state.tensors.values() if entry.key.role == "master"]


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_it_is_asked_for(to: str, source: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UndecidedError, match="SR-WRITE-MASTERS"):
        run(source, tmp_path / "dest", to, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_masters_become_the_parameters(to: str, source: Checkpoint, tmp_path: Path) -> None:
    done = run(source, tmp_path / "dest", to, "params")
    assert "SR-CONVERT-MASTERS" in {problem.code for problem in done.problems}
    found = open_checkpoint(tmp_path / "dest")
    names = masters_of(source)
    assert names
    assert masters_of(found) == []
    for name in names:
        value, master = found.read(f"param:{name}"), source.read(f"master:{name}")
        assert (value.dtype, value.tobytes()) == (np.dtype(np.float32), master.tobytes())
        assert not np.array_equal(master, source.read(f"param:{name}").astype(np.float32))  # rounding lost something
    found.close()


def test_masters_are_left_out_or_slots(source: Checkpoint, tmp_path: Path) -> None:
    done = run(source, tmp_path / "drop", "torch", "drop")
    assert [p.severity for p in done.problems if p.code == "SR-CONVERT-MASTERS"] == ["warning"]
    done = run(source, tmp_path / "slots", "torch", "slots")
    assert "SR-CONVERT-MASTERS" not in {problem.code for problem in done.problems}
    dropped, kept = open_checkpoint(tmp_path / "drop"), open_checkpoint(tmp_path / "slots")
    assert masters_of(dropped) == []
    assert sorted(masters_of(kept)) == sorted(names := masters_of(source))
    for found in (dropped, kept):
        assert {found.state.tensors[f"param:{name}"].dtype.name for name in names} == {"bfloat16"}
        found.close()


@pytest.mark.parametrize(("to", "masters"), [("zero", "params"), ("megatron", "drop"), ("torch", "elsewhere")])
def test_choices_that_make_no_sense(to: str, masters: str, source: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SR-USAGE-OPTION"):
        run(source, tmp_path / "dest", to, masters)


def test_a_source_without_masters(shared_source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shared_source)
    with pytest.raises(UsageError, match="no masters"):
        run(checkpoint, tmp_path / "dest", "torch", "params")
    checkpoint.close()
