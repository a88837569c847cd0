"""A destination that is one file: its proof lies beside it, and a kill between the two renames can be gone on with."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from samerun.convert.convert import Converted, carry_out
from samerun.convert.prepare import prepare
from samerun.core.mesh import Layout
from samerun.core.written import DestinationPlan, FilePlan, Literal
from samerun.errors import SamerunError, UsageError
from samerun.execute.engine import Settings
from samerun.execute.partial import leftovers
from samerun.formats.base import WriteSource
from samerun.formats.detect import open_checkpoint
from samerun.formats.safetensors.write import lay_out
from samerun.verify.inspection.structure import inspect_checkpoint
from support.exports import in_child


def lay_out_model(source: WriteSource, layout: Layout | None) -> DestinationPlan:
    """The model alone, under its own names, as one safetensors file."""
    whole = lay_out(source, layout)
    file = whole.files[0]
    size = int.from_bytes(file.literals[0].content[:8], "little")
    header = json.loads(file.literals[0].content[8 : 8 + size])
    renamed = {key.removeprefix("param:").removeprefix("buffer:"): entry for key, entry in header.items()}
    text = json.dumps(renamed, separators=(",", ":")).encode().ljust(size)
    assert len(text) == size
    head = Literal(0, size.to_bytes(8, "little") + text)
    return replace(whole, files=(FilePlan(path="model", size=file.size, literals=(head,)),), single_file=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "model.safetensors"
    random = np.random.default_rng(3)
    save_file({f"layers.{n}.weight": random.random((200, 64), dtype=np.float32) for n in range(4)}, file)
    return file


def run(source: Path, dest: Path) -> Converted:
    checkpoint = open_checkpoint(source)
    allow = {problem.code for problem in inspect_checkpoint(checkpoint).problems}
    prepared = prepare(checkpoint, dest, to="safetensors", allow=allow, writer=lay_out_model)
    done = carry_out(prepared, settings=Settings(threads=1))
    checkpoint.close()
    return done


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_proof_lies_beside_the_file(model: Path, tmp_path: Path) -> None:
    done = run(model, tmp_path / "out.safetensors")
    assert names(tmp_path) == ["out.safetensors", "out.safetensors.samerun-proof.json"]
    assert done.proof == tmp_path / "out.safetensors.samerun-proof.json"
    assert len(json.loads(done.proof.read_text())["tensors"]) == 4
    before, after = load_file(model), load_file(tmp_path / "out.safetensors")
    assert all(np.array_equal(before[name], after[name]) for name in before)
    with pytest.raises(UsageError, match="SR-CONVERT-EXISTS"):
        run(model, tmp_path / "out.safetensors")


@pytest.mark.parametrize("call", ["replace", "rename"])
@pytest.mark.parametrize("after", [False, True])
def test_killed_around_the_two_renames(call: str, after: bool, model: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out.safetensors"
    real = getattr(os, call)

    def work() -> None:
        def killed(*args: object) -> None:
            if after:
                real(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, call, killed)
        run(model, dest)

    assert in_child(work) == -signal.SIGKILL
    if (call, after) == ("rename", True):  # committed; only the scaffold is left
        assert dest.exists()
        with pytest.raises(UsageError, match="SR-CONVERT-EXISTS"):
            run(model, dest)
    else:
        assert not dest.exists()
        run(model, dest)
    assert names(tmp_path) == ["out.safetensors", "out.safetensors.samerun-proof.json"]
    assert leftovers(dest) == []


def test_a_file_that_is_no_proof_is_not_replaced(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "out.safetensors.samerun-proof.json"
    other.write_text('{"mine": true}')
    with pytest.raises(SamerunError, match="SR-CONVERT-EXISTS"):
        run(model, tmp_path / "out.safetensors")
    assert other.read_text() == '{"mine": true}'
    other.write_text('{"schema": "samerun/convert-proof/1"}')  # left by an attempt that never finished
    run(model, tmp_path / "out.safetensors")
    assert len(json.loads(other.read_text())["tensors"]) == 4
