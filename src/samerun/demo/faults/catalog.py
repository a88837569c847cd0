"""What a fault is, and the list that the modules of this package fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Where(StrEnum):
    """What a fault is put into."""

    FILES = "files"
    LAUNCHER = "launcher"
    JOB = "job"


class Kind(StrEnum):
    """What goes wrong in a resume, as the field's reports group it."""

    FILES = "files"
    LAYOUT = "fused and strided layouts"
    OPTIMIZER = "optimizer state"
    GROUPS = "parameter groups"
    COUNTERS = "counters"
    SCHEDULE = "scheduler"
    BATCH = "global batch"
    DATA = "data"
    RNG = "random numbers"
    DTYPE = "dtype and masters"
    TIED = "tied, frozen, never stepped"
    NAMES = "names"
    NORMALISATION = "loss normalisation"
    REPLICAS = "after load"
    ARCHITECTURE = "settings that shapes do not show"
    SCALER = "fp16 scaler"
    AVERAGE = "averages of the model"
    JOB = "the job itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way in which a resume goes wrong.

    Attributes:
        codes: findings of which at least one must be among the reasons of the rejection.
        story: what happens, in words.
        layout: the destination that the fault needs, when not every one can have it.
        precisions: those in which it is a fault at all; None for every one.
        replace: parts of the launch script and what they become.
        inject: puts the fault into the libraries that the training script calls; runs on every rank.
        damage: damages the demonstration's own checkpoint; returns what was done, in words.
        writes: whether the job writes into its checkpoint, which must then be a copy.
    """

    name: str
    where: Where
    kind: Kind
    codes: tuple[str, ...]
    story: str
    layout: str | None = None
    precisions: tuple[str, ...] | None = None
    replace: tuple[tuple[str, str], ...] = ()
    inject: Callable[[], None] | None = None
    damage: Callable[[Path], str] | None = None
    writes: bool = False

    @property
    def changes_files(self) -> bool:
        """Whether the checkpoint is another one afterwards."""
        return self.writes or self.damage is not None


FAULTS: dict[str, Fault] = {}
"""All faults by name, in the order in which a resume would meet them."""

TRAIN = "../../../example/train.py"
"""The training script as the launcher names it, relative to a move's folder."""

LOW = ("float32", "mixed")
"""Precisions with weights and moments in float32, which a cast can spoil."""


def in_job(
    name: str,
    kind: Kind,
    *codes: str,
    layout: str | None = None,
    precisions: tuple[str, ...] | None = None,
    writes: bool = False,
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Lists the decorated function as a fault of the running job; its docstring is the story."""

    def register(inject: Callable[[], None]) -> Callable[[], None]:
        FAULTS[name] = Fault(
            name=name,
            where=Where.JOB,
            kind=kind,
            codes=codes,
            story=_story(inject),
            layout=layout,
            precisions=precisions,
            inject=inject,
            writes=writes,
        )
        return inject

    return register


def in_files(name: str, kind: Kind, *codes: str) -> Callable[[Callable[[Path], str]], Callable[[Path], str]]:
    """Lists the decorated function as a fault of the checkpoint's files; its docstring is the story."""

    def register(damage: Callable[[Path], str]) -> Callable[[Path], str]:
        FAULTS[name] = Fault(name=name, where=Where.FILES, kind=kind, codes=codes, story=_story(damage), damage=damage)
        return damage

    return register


def in_launcher(name: str, kind: Kind, *codes: str, story: str, replace: tuple[tuple[str, str], ...]) -> None:
    """Lists a fault of the launch script."""
    FAULTS[name] = Fault(name=name, where=Where.LAUNCHER, kind=kind, codes=codes, story=story, replace=replace)


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


def _story(function: Callable[..., object]) -> str:
    first = (function.__doc__ or "").strip().splitlines()[0]
    return first[0].lower() + first[1:].rstrip(".")
