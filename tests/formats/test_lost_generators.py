"""The generator state of the last process is not there: no gap in the numbers shows it, something else may."""

from __future__ import annotations

import shutil
from pathlib import Path

from samerun.errors import Problem
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden"


def copy(name: str, tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "statedict" / name, tmp_path / name)
    return tmp_path / name


def lost(path: Path) -> list[Problem]:
    """The finding, and that the same loss is not told a second time."""
    problems = inspect_checkpoint(open_checkpoint(path)).problems
    found = [problem for problem in problems if problem.code == "SR-RNG-LOST"]
    assert not (found and any(problem.code == "SR-RNG-RANKS" for problem in problems))
    return found


def test_the_last_generator_state_of_a_trainer_is_missed(tmp_path: Path):
    """training_args.bin says how many processes there were."""
    trainer = copy("trainer", tmp_path) / "checkpoint-4"
    assert lost(trainer) == []
    last = max(trainer.glob("rng_state_*.pth"))
    last.unlink()
    assert f"of rank {last.stem[-1]} is not here" in lost(trainer)[0].message


def test_the_last_generator_state_of_accelerate_is_missed_where_the_scheduler_shows_it(tmp_path: Path):
    """Nothing else says how many data-parallel processes there were: Accelerate steps the scheduler once for each."""
    root = copy("accelerate", tmp_path)
    assert lost(root) == []
    (root / "random_states_2.pkl").unlink()
    assert [(problem.expected, problem.found) for problem in lost(root)] == [(3, 2)]
    assert "would not show" in str(open_checkpoint(root).state.topology.inferred)


def test_the_last_generator_state_of_accelerate_is_missed_where_rank_files_show_it(tmp_path: Path):
    root = copy("accelerate-local", tmp_path)
    assert lost(root) == []
    last = max(root.glob("random_states_*.pkl"))
    last.unlink()
    assert "other files are of" in lost(root)[0].message


def test_the_last_generator_state_beside_a_deepspeed_engine_is_missed(tmp_path: Path):
    shutil.copytree(GOLDEN / "wrapped" / "accelerate_z2", tmp_path / "a")
    assert lost(tmp_path / "a") == []
    (tmp_path / "a" / "random_states_1.pkl").unlink()
    assert "other files are of 2 ranks" in lost(tmp_path / "a")[0].message
