"""What Accelerate writes under FSDP1 when each rank saves its own file: read with names, shapes and values, or named.

Runs where accelerate is importable; `tests/golden/statedict/accelerate-local` is for everywhere.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.core.mesh import Layout
from samerun.errors import Problem
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support import hfjob
from support.gloo import import_frameworks, run_ranks
from support.warm_ranks import HUGGING_FACE

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What every rank would import."""
    import_frameworks(*HUGGING_FACE)


Truth = dict[str, np.ndarray]
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "flat": (3, {}),
    "original": (3, {"use_orig_params": True}),
    "flat, frozen unit": (3, {"frozen": "mlp"}),
    "original, frozen norm": (2, {"use_orig_params": True, "frozen": "norm.weight"}),
    "sharded files": (3, {"kind": "SHARDED_STATE_DICT", "use_dcp": False}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns (folder, truth) of a case, written once."""
    made: dict[str, tuple[Path, Truth]] = {}

    def get(name: str) -> tuple[Path, Truth]:
        if name not in made:
            world_size, options = CASES[name]
            folder = tmp_path_factory.mktemp("fsdp") / "saved"
            made[name] = folder, run_ranks(world_size, partial(hfjob.save_fsdp, **options), folder)[0]
        return made[name]

    return get


def codes(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.code for problem in problems]


def check_equal(folder: Path, truth: Truth, *, but: str = "-") -> tuple[Problem, ...]:
    """Compares every tensor except those under `but`; returns the findings of reading."""
    checkpoint = open_checkpoint(folder)
    wanted = {key: value for key, value in truth.items() if not key.partition(":")[2].startswith(but)}
    assert {key for key in checkpoint.state.tensors if not key.partition(":")[2].startswith(but)} == wanted.keys()
    for key, value in wanted.items():
        found = checkpoint.read(key)
        assert (found.shape, found.dtype, found.tobytes()) == (value.shape, value.dtype, value.tobytes()), key
    return checkpoint.state.problems


@pytest.mark.parametrize("name", ["flat", "original", "sharded files"])
def test_names_shapes_and_values_are_those_of_the_job(saved: Any, name: str):
    folder, truth = saved(name)
    assert codes(check_equal(folder, truth)) == []
    report = inspect_checkpoint(open_checkpoint(folder), deep=True)
    assert report.complete
    assert report.state.format == "accelerate"
    assert report.state.topology.world_size == CASES[name][0]


def test_files_of_ranks_are_said_to_be_bound_to_their_number(saved: Any):
    checkpoint = open_checkpoint(saved("flat")[0])
    assert codes(tuple(checkpoint.check_destination(Layout(dp_shard=2)))) == ["SR-RANK-RIGID"]  # type: ignore[attr-defined]
    assert checkpoint.check_destination(Layout(dp_shard=3)) == []  # type: ignore[attr-defined]


def test_what_no_slot_tells_is_said_and_read_as_rows(saved: Any):
    """A frozen parameter has no moments, so nothing here knows its shape, nor where it begins in a flat one."""
    folder, truth = saved("original, frozen norm")
    problems = check_equal(folder, truth, but="norm.weight")
    assert codes(problems) == ["SR-FSDP1-SHAPES"]
    assert "1 parameters: norm.weight;" in problems[0].message
    assert np.array_equal(open_checkpoint(folder).read("param:norm.weight"), truth["param:norm.weight"])
    folder, truth = saved("flat, frozen unit")
    problems = check_equal(folder, truth, but="mlp")
    assert codes(problems) == ["SR-FSDP1-BOUNDARIES"]
    assert problems[0].where == {"tensor": "param:mlp._flat_param"}
    inside = [value.reshape(-1) for key, value in truth.items() if key.startswith("param:mlp.")]
    assert np.array_equal(open_checkpoint(folder).read("param:mlp._flat_param"), np.concatenate(inside))


@pytest.mark.parametrize("name", ["flat", "original"])
def test_without_the_optimizer_nothing_tells_shapes(saved: Any, name: str, tmp_path: Path):
    folder = shutil.copytree(saved(name)[0], tmp_path / "copy")
    shutil.rmtree(folder / "optimizer_0")
    found = codes(inspect_checkpoint(open_checkpoint(folder)).problems)
    assert ("SR-FSDP1-BOUNDARIES" if name == "flat" else "SR-FSDP1-SHAPES") in found


@pytest.mark.parametrize("name", ["flat", "original", "sharded files"])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_missing_rank_is_named_and_the_rest_is_not_called_complete(saved: Any, name: str, rank: int, tmp_path: Path):
    folder = shutil.copytree(saved(name)[0], tmp_path / "copy")
    next(folder.glob(f"pytorch_model_fsdp*_rank{rank}.bin")).unlink()
    report = inspect_checkpoint(open_checkpoint(folder))
    assert "SR-FILE-MISSING" in codes(report.problems)
    assert not report.complete


def test_swapped_rank_files_are_named(saved: Any, tmp_path: Path):
    folder = shutil.copytree(saved("flat")[0], tmp_path / "copy")
    one, two = folder / "pytorch_model_fsdp_rank0.bin", folder / "pytorch_model_fsdp_rank1.bin"
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)
    assert "SR-RANK-SWAPPED" in codes(inspect_checkpoint(open_checkpoint(folder)).problems)
