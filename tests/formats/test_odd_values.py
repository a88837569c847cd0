"""What runs keep beside tensors in a torch.save file, and tensors that are not read: neither makes a file unreadable.

Everything is written by torch itself. The truth is the live run's.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samerun.errors import CorruptCheckpoint
from samerun.formats.detect import open_checkpoint
from samerun.formats.torchfile.values import BACKWARD, PICKLED_TENSOR, Inert
from samerun.verify.inspection.structure import inspect_checkpoint
from support.dcp import save


class Node:
    """An object that knows its parent, as nodes of a configuration do."""

    def __init__(self) -> None:
        self.parent: Any = None
        self.children: list[Any] = []

    def method(self) -> None: ...


def family() -> Node:
    parent, child = Node(), Node()
    child.parent = parent
    parent.children.append(child)
    return parent


def itself() -> dict[str, Any]:
    value: dict[str, Any] = {"a": 1}
    value["self"] = value
    return value


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 7)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}


BESIDE: dict[str, Any] = {
    "an object that knows its parent": family(),
    "a mapping in itself": itself(),
    "a bound method": family().method,
    "an array of objects": np.array([1, "a", None], dtype=object),
    "an array of structures": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "an array of times": np.array(["2026-01-01"], dtype="datetime64[D]"),
    "a time": np.datetime64("2026-01-01"),
    "a long double": np.longdouble(3),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_value_beside_the_state_does_not_hide_it(name: str, container: str, protocol: int, tmp_path: Path):
    state = trained()
    path = tmp_path / "c.pt"
    torch.save(
        {**state, "extra": BESIDE[name]},
        path,
        _use_new_zipfile_serialization=container == "zip",
        pickle_protocol=protocol,
    )
    checkpoint = open_checkpoint(path)
    for fqn, tensor in state["model"].items():
        assert checkpoint.read(f"param:{fqn}").tobytes() == tensor.numpy().tobytes()
    report = inspect_checkpoint(checkpoint, deep=True)
    assert report.complete
    assert "SR-PKL-UNKNOWN" in {problem.code for problem in report.problems}


def test_a_value_inside_itself_is_a_record_there(tmp_path: Path):
    torch.save({**trained(), "extra": {"config": family()}}, tmp_path / "c.pt")
    parent = open_checkpoint(tmp_path / "c.pt").state.objects["extra.config"]
    assert parent.state["children"][0].state["parent"] == Inert(BACKWARD)
    assert parent.state["parent"] is None


def unread_kinds() -> dict[str, torch.Tensor]:
    packed = torch.zeros(4, 2, dtype=torch.uint8)
    return {
        "float4": packed.view(torch.float4_e2m1fn_x2),
        "complex32": torch.zeros(3, dtype=torch.complex32),
        "meta": torch.empty(3, 5, device="meta"),
        "sparse": torch.eye(4).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 0, torch.qint8),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["model", "optimizer"])
@pytest.mark.parametrize("kind", ["float4", "complex32", "meta", "sparse", "quantised"])
def test_a_tensor_that_is_not_read_makes_the_checkpoint_incomplete(kind: str, place: str, tmp_path: Path):
    state = trained()
    tensor = unread_kinds()[kind]
    if place == "model":
        state["model"] = {**state["model"], "packed": tensor}
    else:
        state["optimizer"]["state"][0]["packed"] = tensor
    torch.save(state, tmp_path / "c.pt")
    report = inspect_checkpoint(open_checkpoint(tmp_path / "c.pt"))
    found = [problem for problem in report.problems if problem.code == "SR-COV-RECORD"]
    assert len(found) == 1
    assert found[0].where["tensor"] == ("model.packed" if place == "model" else "optimizer.state.0.packed")
    assert not report.complete


def test_what_is_no_tensor_does_not_make_a_checkpoint_incomplete(tmp_path: Path):
    state = trained()
    state["model"] |= {"layer._extra_state": family(), "layer.config": family()}
    torch.save(state, tmp_path / "c.pt")
    report = inspect_checkpoint(open_checkpoint(tmp_path / "c.pt"))
    assert report.complete
    assert "SR-COV-RECORD" not in {problem.code for problem in report.problems}


def test_a_plain_pickle_of_tensors_says_what_it_is(tmp_path: Path):
    (tmp_path / "c.pkl").write_bytes(pickle.dumps(trained(), protocol=4))
    report = inspect_checkpoint(open_checkpoint(tmp_path / "c.pkl"))
    unknown = next(problem for problem in report.problems if problem.code == "SR-PKL-UNKNOWN")
    assert PICKLED_TENSOR in unknown.message
    assert not report.complete


def positional(make: Any) -> tuple[dict[str, Any], nn.Module, torch.optim.Optimizer]:
    """Returns a saved run whose first parameter, as the model orders them, is not given to the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 7), nn.Linear(7, 5))
    optimizer = make([p for name, p in model.named_parameters() if name != "0.weight"])

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.randn(3, 7)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, model, optimizer


def test_adafactor_is_named_by_its_factored_shapes(tmp_path: Path):
    """Its rows and columns give the shape of a matrix, its `variance` that of a vector."""
    state, model, optimizer = positional(torch.optim.Adafactor)
    torch.save(state, tmp_path / "c.pt")
    checkpoint = open_checkpoint(tmp_path / "c.pt")
    truth = {
        f"optim.{slot}:{name}": value
        for name, p in model.named_parameters()
        for slot, value in optimizer.state.get(p, {}).items()
    }
    assert {key for key in checkpoint.state.tensors if key.startswith("optim.")} == truth.keys()
    for key, value in truth.items():
        assert checkpoint.read(key).tobytes() == value.numpy().tobytes(), key


@pytest.mark.parametrize("make", [torch.optim.LBFGS, lambda params: torch.optim.AdamW(params)])
def test_state_that_shows_no_shape_is_named_with_a_warning(make: Any, tmp_path: Path):
    """LBFGS keeps one flat state for all: which parameter position 0 is, nothing says. Adam's moments do say it."""
    state, _, _ = positional(make)
    torch.save(state, tmp_path / "c.pt")
    checkpoint = open_checkpoint(tmp_path / "c.pt")
    codes = {problem.code for problem in checkpoint.state.problems}
    if make is torch.optim.LBFGS:
        assert "SR-OPT-OPEN" in codes
    else:
        assert "SR-OPT-ORDER" in codes
        assert "SR-OPT-OPEN" not in codes


def complex_values() -> torch.Tensor:
    return torch.complex(torch.arange(6.0).reshape(2, 3), torch.ones(2, 3))


BITS = {
    "conjugate": lambda: complex_values().conj(),
    "negative": lambda: complex_values().conj().imag,
    "transposed": lambda: complex_values().conj().imag.t(),
}


@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("kind", BITS)
def test_a_tensor_that_is_another_sign_of_what_is_stored_is_not_read_as_stored(
    kind: str, container: str, tmp_path: Path
):
    """torch keeps `conj()` as a bit beside the storage: what is stored has the other sign."""
    state = trained()
    state["model"]["freqs"] = BITS[kind]()
    path = tmp_path / "c.pt"
    torch.save(state, path, _use_new_zipfile_serialization=container == "zip")
    checkpoint = open_checkpoint(path)
    assert not [key for key in checkpoint.state.tensors if key.endswith(":freqs")]
    report = inspect_checkpoint(checkpoint)
    assert [problem.where["tensor"] for problem in report.problems if problem.code == "SR-COV-RECORD"] == [
        "model.freqs"
    ]
    assert not report.complete


@pytest.mark.parametrize("kind", BITS)
def test_the_same_values_without_the_bit_are_read(kind: str, tmp_path: Path):
    state = trained()
    truth = state["model"]["freqs"] = BITS[kind]().resolve_conj().resolve_neg()
    torch.save(state, tmp_path / "c.pt")
    checkpoint = open_checkpoint(tmp_path / "c.pt")
    key = next(key for key in checkpoint.state.tensors if key.endswith(":freqs"))
    assert np.array_equal(checkpoint.read(key), truth.numpy())
    assert inspect_checkpoint(checkpoint).complete


def test_a_conjugate_in_a_dcp_directory_is_refused(tmp_path: Path):
    checkpoint = open_checkpoint(save({"model": {**trained()["model"], "freqs": BITS["conjugate"]()}}, tmp_path / "d"))
    report = inspect_checkpoint(checkpoint, deep=True)
    assert "SR-FILE-MISMATCH" in {problem.code for problem in report.problems}
    assert not report.complete
    with pytest.raises(CorruptCheckpoint):
        checkpoint.read("buffer:freqs")


NOTHING: dict[str, Any] = {
    "none": None,
    "empty": {},
    "nested nothing": {"train": None, "eval": {}, "names": [""]},
}


@pytest.mark.parametrize("kind", NOTHING)
@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_a_section_without_content_is_not_had(kind: str, form: str, tmp_path: Path):
    """A run on plain loaders saves `dataset_state` and such all the same: nothing in it restores the place."""
    names = ("dataloader", "sampler", "dataset_state", "rng_state", "scaler")
    state = {**trained(), **dict.fromkeys(names, NOTHING[kind])}
    if form == "torch":
        torch.save(state, tmp_path / "c.pt")
    path = tmp_path / "c.pt" if form == "torch" else save(state, tmp_path / "c")
    report = inspect_checkpoint(open_checkpoint(path))
    assert not {"data", "rng", "scaler"} & set(report.resumable.have)
    assert {"data", "rng"} <= set(report.resumable.lack)
    assert {"SR-DATA-MISSING", "SR-RNG-MISSING"} <= {problem.code for problem in report.problems}


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_what_describes_the_data_is_no_place_in_them(form: str, tmp_path: Path):
    about = {
        "dataset_meta": {"classes": ["cat"]},
        "data_path": "/data",
        "dataset": "imagenet",
        "data_args": {"size": 3},
    }
    for extra, there in (({}, False), ({"sampler": {"epoch": 1, "index": 24}}, True)):
        name = f"c{there}"
        if form == "torch":
            torch.save({**trained(), **about, **extra}, tmp_path / f"{name}.pt")
        path = tmp_path / f"{name}.pt" if form == "torch" else save({**trained(), **about, **extra}, tmp_path / name)
        report = inspect_checkpoint(open_checkpoint(path))
        assert ("data" in report.resumable.have) is there
        assert ("SR-DATA-MISSING" in {problem.code for problem in report.problems}) is not there


def test_a_whole_optimizer_is_not_read_and_not_said_to_be_complete(tmp_path: Path):
    """torch.save(optimizer) keeps its state by parameter: what belongs to which is lost to anything but unpickling."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "whole.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "dict.pt")
    for name, complete in (("whole.pt", False), ("dict.pt", True)):
        report = inspect_checkpoint(open_checkpoint(tmp_path / name))
        assert report.complete is complete
        found = [problem for problem in report.problems if problem.code == "SR-COV-RECORD"]
        assert [problem.where["tensor"] for problem in found] == ([] if complete else ["optimizer"])
