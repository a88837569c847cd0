"""The faults that `samerun demo --break` injects, and the findings that must name them.

A fault is put where it happens in real life: into the checkpoint's files, into the script that launches the job, or
into the running job (`samerun.demo.sabotage`). It is put there after the tolerances were sealed, and never into a
trace.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Where(StrEnum):
    """What a fault is put into."""

    FILES = "files"
    LAUNCHER = "launcher"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a resume goes wrong.

    `codes` are the findings of which at least one must be among the reasons of the rejection. `replace` rewrites
    parts of the launch script. `layout` is the destination that the fault needs, when not every one can have it.
    """

    name: str
    where: Where
    codes: tuple[str, ...]
    story: str
    replace: tuple[tuple[str, str], ...] = ()
    layout: str | None = None


_ALL = (
    Fault(
        "optimizer-reset",
        Where.JOB,
        ("SR-LOAD-OPT-RESET",),
        "the weights are loaded, the optimizer starts from nothing",
    ),
    Fault(
        "shard-missing",
        Where.FILES,
        ("SR-FILE-MISSING",),
        "one rank's shard was never copied",
    ),
    Fault(
        "shard-corrupt",
        Where.FILES,
        ("SR-FILE-CRC",),
        "one bit of one tensor changed on disk; torch loads it without a word",
    ),
    Fault(
        "sampler-restart",
        Where.JOB,
        ("SR-LOAD-OBJECT", "SR-SAMPLE-REPLAYED"),
        "the sampler's position is not restored, the epoch begins again",
    ),
    Fault(
        "batch-drift",
        Where.LAUNCHER,
        ("SR-JOB-BATCH",),
        "microbatch and accumulation are kept, so the global batch shrinks with the number of ranks",
        replace=(('--global-batch "$global_batch"', '--global-batch "$((global_batch * world_size / 4))"'),),
    ),
    Fault(
        "scheduler-ahead",
        Where.JOB,
        ("SR-LOAD-SCHED",),
        "the schedule is restored and then stepped once more",
    ),
    Fault(
        "replica-diverged",
        Where.JOB,
        ("SR-LOAD-REPLICA",),
        "one replica continues from a slightly different weight; its loss looks normal",
        layout="dp_replicate=2,dp_shard=2",
    ),
    Fault(
        "learning-rate-doubled",
        Where.JOB,
        ("SR-LOAD-LR",),
        "somebody tuned the learning rate while restarting",
    ),
    Fault(
        "weight-nan",
        Where.JOB,
        ("SR-LOAD-NONFINITE",),
        "one weight is not a number after loading",
    ),
    Fault(
        "gradient-nan",
        Where.JOB,
        ("SR-UPD-NONFINITE",),
        "a gradient overflows in the third update after the move",
    ),
    Fault(
        "world-size",
        Where.LAUNCHER,
        ("SR-JOB-WORLD",),
        "the launcher starts another number of processes than the plan says",
        replace=(("world_size=$2 layout=$3", "world_size=2 layout=dp_shard=2"),),
    ),
    Fault(
        "accumulation",
        Where.LAUNCHER,
        ("SR-JOB-BATCH",),
        "another microbatch than planned, and with it another number of accumulation passes",
        replace=(('--max-microbatch "$max_microbatch"', "--max-microbatch 1"),),
    ),
)

TRAIN = "../../../example/train.py"
"""The training script as the launcher names it, relative to a move's folder."""

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}


def damage_files(fault: Fault, checkpoint: Path) -> str:
    """Damages a checkpoint that is the demonstration's own, and returns what was done in words."""
    if fault.name == "shard-missing":
        shard = max(checkpoint.glob("*.distcp"), key=lambda file: file.name)
        shutil.move(shard, checkpoint.parent / f"lost-{shard.name}")
        return f"{shard.name} taken away"
    return flip_bit(checkpoint)


def flip_bit(checkpoint: Path) -> str:
    """Flips one bit in the middle of the largest parameter; returns what was done in words."""
    from samerun.formats.detect import open_checkpoint

    opened = open_checkpoint(checkpoint)
    key, entry = max(opened.state.tensors.items(), key=lambda item: (item[1].key.role == "param", item[1].num_bytes))
    extent = opened.locate(key, len(entry.tiling) - 1)
    opened.close()
    offset = extent.offset_bytes + extent.num_bytes // 2
    with extent.file.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
    return f"one bit of {key} flipped, at byte {offset} of {extent.file.name}"


def damage_launcher(fault: Fault, launcher: Path) -> str:
    """Rewrites the launch script so that the job it starts has the fault; returns what was done in words."""
    text = launcher.read_text(encoding="utf-8")
    replace = fault.replace
    if fault.where is Where.JOB:
        replace = ((TRAIN, f"-m samerun.demo.sabotage {fault.name} {TRAIN}"),)
    for old, new in replace:
        if old not in text:
            raise ValueError(f"the launch script no longer contains {old!r}, which the fault {fault.name} replaces")
        text = text.replace(old, new)
    launcher.write_text(text, encoding="utf-8")
    return "; ".join(f"{old} became {new}" for old, new in replace)
