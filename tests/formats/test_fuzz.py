"""Mutated checkpoints: never a traceback, never a hang, never a wrong `complete` or `intact`.

`SAMERUN_FUZZ_SECONDS` says for how long (20 by default); a failure prints the seed that repeats it.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from samerun.errors import FormatError, UsageError
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support.corpus import CORPUS
from support.dcp import job_state, save, split_tensor

SECONDS = float(os.environ.get("SAMERUN_FUZZ_SECONDS", "20"))
SLOWEST_SECONDS = 20.0


def mutate(data: bytearray, rng: random.Random) -> None:
    """Changes some bytes: flips, overwrites, cuts, repeats, moves or removes a few."""
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if not data:
            return
        at = rng.randrange(len(data))
        length = min(rng.choice((1, 1, 2, 4, 8, 64, 512)), len(data) - at)
        match rng.randrange(8):
            case 0 | 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 3:
                data[at : at + length] = bytes(length)
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = data[at : at + length]
            case 6:
                source = rng.randrange(len(data))
                data[at : at + length] = data[source : source + length].ljust(length, b"\0")
            case _:
                del data[at:]


def targets(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.is_file())
    return [*found, *(path for path in found if "metadata" in path.name)]  # metadata twice as often


def values_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {key: checkpoint.read(key).tobytes() for key in checkpoint.state.tensors}


def check(folder: Path, truth: dict[str, bytes], *, data_file: bool) -> None:
    try:
        checkpoint = open_checkpoint(folder)
    except (FormatError, UsageError):
        return
    report = inspect_checkpoint(checkpoint, deep=True)
    report.to_json()
    if report.complete:
        found = values_of(checkpoint)  # raises if a value cannot be read: then `complete` was wrong
        if data_file and report.intact is not False:
            assert found == truth


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = save(job_state(), tmp_path_factory.mktemp("whole") / "step-3")
    split = save(job_state(flatten=True), tmp_path_factory.mktemp("split") / "step-3")
    split_tensor(split, "model.0.weight", 3)
    names = ("dcp_tpfsdp_dp2tp2/ckpt", "nocoll_fsdp2_ws2/ckpt", "dcp_pp2/naive_nonflat")
    return [folder, folder, split, split, *([CORPUS / "torch" / name for name in names] if CORPUS else [])]


def test_mutated_checkpoints_are_reported_or_read_right(sources: list[Path], tmp_path: Path):
    truths = {source: values_of(open_checkpoint(source)) for source in sources}
    stop = time.monotonic() + SECONDS
    seed = 0
    with np.errstate(all="ignore"):
        while time.monotonic() < stop:
            seed += 1
            run_one(seed, sources, truths, tmp_path / "mutated")
    assert seed > 10


def run_one(seed: int, sources: list[Path], truths: dict[Path, dict[str, bytes]], folder: Path) -> None:
    rng = random.Random(seed)
    source = rng.choice(sources)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    path = rng.choice(targets(folder))
    os.chmod(path, 0o600)
    data = bytearray(path.read_bytes())
    mutate(data, rng)
    path.write_bytes(data)
    began = time.process_time()
    try:
        check(folder, truths[source], data_file="metadata" not in path.name)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {source.name}/{path.name}") from error
    assert time.process_time() - began < SLOWEST_SECONDS, f"seed {seed} took too long"
