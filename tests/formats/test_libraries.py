"""What libraries for averages and adapters save, against the live objects (tests/golden/libraries)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden" / "libraries"


@pytest.mark.parametrize("name", ["ema_pytorch.pt", "peft.pt"])
def test_every_tensor_of_the_live_run_is_there_under_its_name(name: str):
    with np.load(GOLDEN / "truth.npz") as truth:
        held = {key.removeprefix(f"{name}/"): truth[key] for key in truth if key.startswith(f"{name}/")}
    checkpoint = open_checkpoint(GOLDEN / name)
    assert checkpoint.state.tensors.keys() == held.keys()
    for key, value in held.items():
        assert checkpoint.read(key).tobytes() == value.tobytes(), key
    report = inspect_checkpoint(checkpoint, deep=True)
    assert report.complete
    assert not {"SR-OPT-OPEN", "SR-EMA-NAMES", "SR-EMA-SAME"} & {problem.code for problem in report.problems}


def test_what_ema_pytorch_counts_is_kept():
    objects = open_checkpoint(GOLDEN / "ema_pytorch.pt").state.objects
    assert (objects["ema.initted"], objects["ema.step"]) == (True, 3)


def test_an_average_of_ema_pytorch_that_lost_a_name_is_named(tmp_path: Path):
    state = torch.load(GOLDEN / "ema_pytorch.pt", weights_only=True)
    del state["ema"]["ema_model.0.bias"]
    torch.save(state, tmp_path / "c.pt")
    codes = {problem.code for problem in inspect_checkpoint(open_checkpoint(tmp_path / "c.pt")).problems}
    assert "SR-EMA-NAMES" in codes


def test_originals_are_named_where_the_optimizer_holds_them_too(tmp_path: Path):
    """A script that gives every parameter to its optimizer: nothing is left out of its positions."""
    state = torch.load(GOLDEN / "peft.pt", weights_only=True)
    names = [name for name in state["model"] if "running" not in name and "num_batches" not in name]
    moments = {
        number: {slot: torch.full_like(state["model"][name], number) for slot in ("exp_avg", "exp_avg_sq")}
        for number, name in enumerate(names)
    }
    state["optimizer"]["state"] = moments
    state["optimizer"]["param_groups"][0]["params"] = list(moments)
    torch.save(state, tmp_path / "c.pt")
    checkpoint = open_checkpoint(tmp_path / "c.pt")
    for number, name in enumerate(names):
        assert np.all(checkpoint.read(f"optim.exp_avg:{name}") == number), name
