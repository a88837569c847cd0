"""Mutated real checkpoints of every format: never a traceback, never a hang, never a wrong `complete` or `intact`.

Whatever lies under `tests/golden` and, where there is one, in the collection is copied, one file of it changed, and
inspected with `--deep`. `SAMERUN_FUZZ_SECONDS` says for how long (10 by default); a failure prints the seed that
repeats it.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from formats.test_fuzz import mutate, values_of
from samerun.errors import FormatError, UsageError
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support.corpus import CORPUS

SECONDS = float(os.environ.get("SAMERUN_FUZZ_SECONDS", "10"))
SLOWEST_SECONDS = 20.0
GOLDEN = Path(__file__).parent.parent / "golden"
IN_CORPUS = (
    "deepspeed/z1_bf16_untied_ga32_ws2", "deepspeed/z2_bf16_untied_rr_ws3", "deepspeed/z3_fp32_untied_unused_ws3",
    "deepspeed/z0_bf16_untied_ws2", "deepspeed-special/moe2_ws2", "deepspeed-special/pp2_ws2",
    "deepspeed-special/tp2_ws2",
    "deepspeed-universal/z1_fp32_untied_ws3", "torch/hf_trainer_ws2/checkpoint-5",
    "torch/hf_trainer_ws2/sharded_export",
    "torch/accel_ddp_stateful_ws2/state", "torch/accel_fsdp2_sharded_ws2/state", "torch/fsdp1_ws2_orig/local",
    "torch/fsdp1_ws2_flat/sharded_torchsave", "torch/hfdcp_fsdp2_ws3/sharded", "torch/ranklocal_fsdp2_ws3",
    "torch/lightning_ddp_ws2", "torch/torchsave_ddp_ws2",
)  # fmt: skip


def find_sources() -> list[Path]:
    """Returns checkpoints that open and are complete, largest left out: each run copies one."""
    folders = [path for family in ("deepspeed", "statedict", "wrapped", "dcp") for path in (GOLDEN / family).iterdir()]
    folders += [CORPUS / name for name in IN_CORPUS] if CORPUS is not None else []
    return sorted(path for path in folders if path.is_dir() and _size(path) < 4 << 20)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def targets(folder: Path) -> list[Path]:
    ours = ("truth", "samples", "PROVENANCE")
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(ours))


def has_checksums(data: bytes) -> bool:
    """Whether a file is a zip archive and nothing else, whose entries carry checksums."""
    return data.startswith(b"PK\x03\x04") and data[-22:].startswith(b"PK\x05\x06")


@pytest.fixture(scope="module")
def sources() -> dict[Path, dict[str, bytes]]:
    found: dict[Path, dict[str, bytes]] = {}
    for source in find_sources():
        try:
            checkpoint = open_checkpoint(source)
            found[source] = values_of(checkpoint)
        except (FormatError, UsageError):
            continue
    return found


def test_mutated_checkpoints_of_every_format(sources: dict[Path, dict[str, bytes]], tmp_path: Path):
    assert len(sources) > 12
    first = int(os.environ.get("SAMERUN_FUZZ_SEED", "0"))
    stop = time.monotonic() + SECONDS
    seed = first
    with np.errstate(all="ignore"):
        while time.monotonic() < stop:
            seed += 1
            run_one(seed, sources, tmp_path / "mutated")
    assert seed > first + 3


def run_one(seed: int, sources: dict[Path, dict[str, bytes]], top: Path) -> None:
    rng = random.Random(seed)
    source = rng.choice(list(sources))
    shutil.rmtree(top, ignore_errors=True)
    folder = top / source.name
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    path = rng.choice(targets(folder))
    original = path.read_bytes()
    data = bytearray(original)
    if rng.random() < 0.1:
        path.unlink()
    else:
        mutate(data, rng)
        path.write_bytes(data)
    began = time.process_time()
    try:
        check(folder, sources[source], checked=has_checksums(original) and path.is_file())
    except Exception as error:
        raise AssertionError(f"seed {seed}: {source.name}/{path.relative_to(folder)}") from error
    assert time.process_time() - began < SLOWEST_SECONDS, f"seed {seed} took too long"


def check(folder: Path, truth: dict[str, bytes], *, checked: bool) -> None:
    """`checked`: the changed file carries checksums, so values that are called complete and not damaged are right."""
    try:
        checkpoint = open_checkpoint(folder)
    except (FormatError, UsageError):
        return
    report = inspect_checkpoint(checkpoint, deep=True)
    report.to_json()
    if not report.complete:
        return
    found = values_of(checkpoint)  # raises if a value cannot be read: then `complete` was wrong
    if report.intact or (checked and report.intact is not False):
        same = {key: value for key, value in found.items() if key in truth and truth[key] != value}
        assert not same, f"{len(same)} values differ: {list(same)[:3]}"
