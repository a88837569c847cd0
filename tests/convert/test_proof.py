"""The proof that a conversion leaves decides, at every later deep inspection, whether bytes changed since."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.convert.convert import convert
from samerun.core.digest import to_hex
from samerun.core.dtype import DTYPES
from samerun.execute.engine import Settings
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint
from samerun.verify.state.digest import digest_array
from samerun.verify.state.proof import proof_path
from support.exports import write_export


def converted(source: Path, dest: Path, to: str = "safetensors") -> Path:
    checkpoint = open_checkpoint(source)
    convert(checkpoint, dest, to=to, settings=Settings(threads=1))
    checkpoint.close()
    return dest


def deep(path: Path) -> InspectReport:
    checkpoint = open_checkpoint(path)
    try:
        return inspect_checkpoint(checkpoint, deep=True)
    finally:
        checkpoint.close()


def codes(report: InspectReport) -> set[str]:
    return {problem.code for problem in report.problems if problem.code.startswith("SR-PROOF")}


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads(proof_path(path).read_text())
    change(body)
    proof_path(path).write_text(json.dumps(body))


def flip(file: Path, offset: int) -> None:
    body = bytearray(file.read_bytes())
    body[offset] ^= 1
    file.write_bytes(body)


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch"])
def test_a_destination_is_intact(shared_source: Path, tmp_path: Path, to: str) -> None:
    report = deep(converted(shared_source, tmp_path / "dest", to))
    assert report.intact is True
    assert report.evidence == ("the conversion's proof",)
    assert codes(report) == set()


def test_without_the_proof_nothing_is_decided(shared_source: Path, tmp_path: Path) -> None:
    dest = converted(shared_source, tmp_path / "dest")
    proof_path(dest).unlink()
    report = deep(dest)
    assert report.intact is None
    assert report.evidence == ()
    assert codes(report) == set()


def test_a_flipped_bit_is_found_and_named(shared_source: Path, tmp_path: Path) -> None:
    dest = converted(shared_source, tmp_path / "dest")
    flip(dest / "state.safetensors", -5)
    report = deep(dest)
    assert report.intact is False
    found = next(problem for problem in report.problems if problem.code == "SR-PROOF-VALUE")
    assert found.where["file"] == str(dest / "state.safetensors")
    assert found.message.startswith("1 of 12 tensors")


def test_a_counter_in_another_type_is_compared_as_a_number(shared_source: Path, tmp_path: Path) -> None:
    """Formats differ in the type and shape that they keep a step in; the proof has the source's."""
    dest = converted(shared_source, tmp_path / "dest")
    key = "optim.step:head.w"

    def proved(value: int) -> Callable[[dict[str, Any]], None]:
        total = digest_array(key, np.array([value], np.int64), DTYPES["int64"], (1,), (0,))
        row = {"digest": to_hex(total), "dtype": "int64", "shape": [1]}
        return lambda body: body["tensors"].update({key: row})

    edit(dest, proved(5))
    assert deep(dest).intact is True
    edit(dest, proved(4))
    report = deep(dest)
    assert report.intact is False
    assert codes(report) == {"SR-PROOF-VALUE"}


def test_tied_tensors_that_are_written_twice(tmp_path: Path) -> None:
    """A torch.save file keeps a tied tensor under both names; the proof lists both places."""
    import torch

    embedding = torch.nn.Embedding(7, 5)
    model = torch.nn.ModuleDict({"embedding": embedding, "head": torch.nn.Linear(5, 7, bias=False)})
    model["head"].weight = embedding.weight  # type: ignore[assignment]
    torch.save({"model": model.state_dict(), "step": 3}, tmp_path / "a.pt")
    for to in ("torch", "dcp", "safetensors"):
        checkpoint = open_checkpoint(tmp_path / "a.pt")
        allowed = {p.code for p in inspect_checkpoint(checkpoint).problems} | {"SR-WRITE-GROUPLESS"}
        convert(checkpoint, tmp_path / to, to=to, allow=allowed)
        checkpoint.close()
        assert deep(tmp_path / to).intact is True, to


def test_a_proof_of_another_checkpoint_decides_nothing(shared_source: Path, tmp_path: Path) -> None:
    dest = converted(shared_source, tmp_path / "dest")
    later = write_export(tmp_path / "later", seed=1)
    shutil.copy(proof_path(dest), proof_path(later))
    assert codes(deep(later)) == {
        "SR-PROOF-VALUE"
    }  # same update, other values: which of the two is wrong shows nowhere
    edit(later, lambda body: body["destination"].update(update=4))
    report = deep(later)
    assert codes(report) == {"SR-PROOF-FOREIGN"}
    assert report.intact is None

    def rename(body: dict[str, Any]) -> None:
        body["tensors"] = {f"{key}.x": row for key, row in body["tensors"].items()}

    edit(dest, rename)
    report = deep(dest)
    assert codes(report) == {"SR-PROOF-FOREIGN"}
    assert report.intact is None


def test_tensors_that_were_taken_away(shared_source: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    dest = converted(shared_source, tmp_path / "dest")
    tensors = load_file(dest / "state.safetensors")
    del tensors["optim.exp_avg:head.w"]
    save_file(tensors, dest / "state.safetensors")
    report = deep(dest)
    assert report.intact is False
    assert "SR-PROOF-MISSING" in codes(report)


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body.update(schema="samerun/other/1"),
        lambda body: body.update(tensors=[]),
        lambda body: body.update(destination=None),
        lambda body: body["tensors"].update({"nothing": {}}),
        lambda body: body["tensors"]["param:head.w"].update(shape=[-1]),
        lambda body: body["tensors"]["param:head.w"].update(dtype="float9"),
        lambda body: body["tensors"]["param:head.w"].update(digest=7),
        lambda body: body["tensors"]["param:head.w"].update(copies="head"),
        lambda body: body["tensors"]["param:head.w"].update(destination_key=[]),
    ],
)
def test_a_damaged_proof_is_said_to_be(
    shared_source: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], None]
) -> None:
    dest = converted(shared_source, tmp_path / "dest")
    edit(dest, damage)
    report = deep(dest)
    assert codes(report) == {"SR-PROOF-BROKEN"}
    assert report.intact is None


def test_a_proof_that_is_no_json(shared_source: Path, tmp_path: Path) -> None:
    dest = converted(shared_source, tmp_path / "dest")
    for text in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        proof_path(dest).write_bytes(text)
        assert codes(deep(dest)) == {"SR-PROOF-BROKEN"}


def test_a_counter_of_absurd_shape_is_no_traceback(shared_source: Path, tmp_path: Path) -> None:
    dest = converted(shared_source, tmp_path / "dest")
    edit(dest, lambda body: body["tensors"]["optim.step:head.w"].update(shape=[1] * 100))
    report = deep(dest)
    assert codes(report) == set()
    assert report.intact is None
