"""What Trainer keeps beside model and optimizer: `trainer_state.json` and its pickled arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samerun.core.state import RecordedProgress
from samerun.errors import Problem, Severity
from samerun.formats.statedict.saved import SavedState
from samerun.formats.statedict.sidefiles import numbered, open_beside, read_json
from samerun.formats.torchfile.values import Inert
from samerun.stores.local import MappedFiles


@dataclass(frozen=True, slots=True, eq=False)
class Trainer:
    """The counters and arguments of a Trainer run, as far as the files have them.

    `world_size` is the number of processes that `training_args.bin` records; `accumulation` the passes per update.
    """

    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    world_size: int | None = None

    @property
    def plain_data_parallel(self) -> bool:
        """Whether every process held the whole model, as far as the arguments tell."""
        return bool(self.arguments) and not self.arguments.get("fsdp") and not self.arguments.get("deepspeed")

    @property
    def objects(self) -> dict[str, Any]:
        """The state and the arguments, as objects of the checkpoint."""
        found: dict[str, Any] = {}
        if self.state:
            found["trainer_state"] = dict(self.state)
        if self.arguments:
            found["training_args"] = dict(self.arguments)
        return found

    @property
    def global_batch(self) -> int | None:
        """Samples per update, None if the files do not say it."""
        size = _integer(self.state.get("train_batch_size")) or _integer(
            self.arguments.get("per_device_train_batch_size")
        )
        passes = _integer(self.arguments.get("gradient_accumulation_steps"))
        return size * passes * self.world_size if size and passes and self.world_size else None

    @property
    def progress(self) -> RecordedProgress | None:
        """The update, epoch, samples and tokens so far; samples follow from the batch where that is known."""
        update = _integer(self.state.get("global_step"))
        if update is None:
            return None
        epoch = self.state.get("epoch")
        tokens = _integer(self.state.get("num_input_tokens_seen"))
        batch = self.global_batch
        return RecordedProgress(
            update=update,
            epoch=int(epoch) if isinstance(epoch, int | float) and not isinstance(epoch, bool) and epoch >= 0 else None,
            samples=update * batch if batch is not None else None,
            tokens=tokens or None,
        )

    @property
    def data(self) -> dict[str, Any]:
        """What Trainer finds its place in the data by: batches per process."""
        if "global_step" not in self.state:
            return {}
        names = ("global_step", "epoch", "train_batch_size")
        settings = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "seed",
            "data_seed",
            "dataloader_drop_last",
        )
        found = {name: self.state[name] for name in names if name in self.state}
        found |= {name: self.arguments[name] for name in settings if name in self.arguments}
        return found | ({"num_processes": self.world_size} if self.world_size else {})


def _integer(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def read_trainer(path: Path, saved: SavedState, files: MappedFiles) -> Trainer:
    """Reads the files that are there. One that is damaged is a finding."""
    state_file, arguments_file = path / "trainer_state.json", path / "training_args.bin"
    state = read_json(state_file, saved) if state_file.is_file() else {}
    pickled = open_beside(arguments_file, saved, files, known=False) if arguments_file.is_file() else None
    arguments = pickled.state if isinstance(pickled, Inert) and isinstance(pickled.state, dict) else {}
    distributed = arguments.get("distributed_state")
    fields = distributed.state if isinstance(distributed, Inert) and isinstance(distributed.state, dict) else {}
    return Trainer(state, arguments, _integer(fields.get("num_processes")))


def check_trainer(path: Path, trainer: Trainer, saved: SavedState) -> list[Problem]:
    """Checks counters, leftovers of more processes, and says what the recorded place in the data is bound to."""
    problems: list[Problem] = []
    world = trainer.world_size
    stale = [file for rank, file in numbered(path, r"rng_state_(\d+)\.pth").items() if world and rank >= world]
    if stale:
        problems.append(_stale(stale, world or 0))
    if saved.optimizers and not trainer.state and not (path / "trainer_state.json").exists():
        problems.append(_no_state(path))
    elif trainer.state and trainer.progress is None:
        problems.append(_no_updates(path, trainer.state.get("global_step")))
    epoch = trainer.state.get("epoch")
    mid_epoch = isinstance(epoch, float) and not epoch.is_integer()
    if trainer.data and mid_epoch:
        problems.append(_cursor(trainer))
    return problems


def _stale(stale: list[Path], world: int) -> Problem:
    return Problem(
        "SR-FILE-STALE",
        f"{len(stale)} generator states are of ranks that did not save this checkpoint: "
        f"{', '.join(file.name for file in stale[:4])}",
        severity=Severity.WARNING,
        where={"file": str(stale[0])},
        expected=world,
        found=world + len(stale),
        hint="an earlier save with more processes wrote here before; on as many processes they would be used again",
    )


def _no_state(path: Path) -> Problem:
    return Problem(
        "SR-HF-STATE",
        "trainer_state.json is not here: the number of updates and the place in the data are lost",
        severity=Severity.WARNING,
        where={"file": str(path / "trainer_state.json")},
        hint="Trainer starts at update 0 with this optimizer; restore the file, or write global_step and epoch by hand",
    )


def _no_updates(path: Path, found: Any) -> Problem:
    return Problem(
        "SR-HF-STATE",
        "trainer_state.json does not say after how many updates this was saved",
        where={"file": str(path / "trainer_state.json"), "key": "global_step"},
        expected="a whole number, not negative",
        found="nothing" if found is None else repr(found)[:40],
        hint="Trainer goes on from what stands there; restore the file, or write global_step and epoch by hand",
    )


def _cursor(trainer: Trainer) -> Problem:
    batch, world = trainer.global_batch, trainer.world_size
    known = f" ({batch} samples per update on {world} processes)" if batch else ""
    return Problem(
        "SR-HF-CURSOR",
        f"Trainer's place in the data is a number of batches per process{known}; it holds only for the same number of "
        "processes and the same batch size",
        severity=Severity.WARNING,
        where={"key": "trainer_state.global_step"},
        hint="with fewer processes samples are seen again, with more some are never seen, without a message. Keep the "
        "samples per update equal, or rewrite the place to the samples consumed",
    )
