"""A universal checkpoint's directory, opened: model files, one folder per parameter, the common optimizer state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samerun.errors import Problem
from samerun.formats.deepspeed.model import ModelStates, read_model, stage_of
from samerun.formats.deepspeed.names import FileName, Kind, parse_name
from samerun.formats.deepspeed.opened import Degrees, model_degrees, sequence_degree
from samerun.formats.deepspeed.shards import OptimStates, read_optim
from samerun.formats.deepspeed.states import (
    KNOWN_CLASSES,
    StateFile,
    as_count,
    as_dict,
    enum_number,
    list_names,
    missing_file,
    read_state_files,
)
from samerun.stores.local import MappedFiles

FOLDER = "zero"
COMMON = "optimizer_state.pt"
GROUPS = "samerun_param_groups"
"""Where samerun keeps every group's hyperparameters in model files, for jobs at stage 3 to set after loading."""
_MOST_FOLDERS = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An opened directory. `slots` are by parameter and slot (`fp32`, `exp_avg`, `step`, ...).

    `spare` is the model file for stage 3 beside the one for stages 1 and 2: samerun writes both, with the same content
    but the tensors, so that every stage finds its own. `common` is what the converter kept of one rank's optimizer
    file: groups, scaler and, from stage 3, that rank's own shard of everything. `unreadable` are the (parameter, slot)
    whose file could not be read.
    """

    root: Path
    files: MappedFiles
    models: Mapping[tuple[int, int | None], ModelStates]
    slots: Mapping[str, Mapping[str, StateFile]]
    common: OptimStates | None
    degrees: Degrees
    stage: int
    problems: tuple[Problem, ...]
    unreadable: frozenset[tuple[str, str]] = frozenset()
    layers: Mapping[FileName, StateFile] = field(default_factory=dict[FileName, StateFile])
    experts: Mapping[FileName, StateFile] = field(default_factory=dict[FileName, StateFile])
    spare: ModelStates | None = None

    @property
    def any_stage(self) -> bool:
        """Whether every stage's loader finds what it looks for."""
        return self.spare is not None

    @property
    def first(self) -> ModelStates | None:
        """The model file that speaks for the whole run."""
        return next(iter(self.models.values()), None)

    @property
    def config(self) -> dict[Any, Any]:
        """The DeepSpeed configuration of the run that was converted."""
        return self.first.config if self.first is not None else {}

    @property
    def group_settings(self) -> list[dict[str, Any]]:
        """The parameter groups' hyperparameters, members left out."""
        whole = as_dict(self.common.file.value) if self.common is not None else {}
        listed = whole.get("param_groups")
        groups = listed if isinstance(listed, list) else []
        return [{str(key): value for key, value in as_dict(group).items() if key != "params"} for group in groups]

    def state_files(self) -> list[StateFile]:
        """Returns every opened file."""
        common = [self.common.file] if self.common is not None else []
        slots = [file for held in self.slots.values() for file in held.values()]
        spare = [self.spare.file] if self.spare is not None else []
        return [*(model.file for model in self.models.values()), *spare, *common, *slots]

    def unknown_classes(self) -> list[str]:
        """Returns the names of classes in the files that are neither known nor DeepSpeed's usual ones."""
        found = {name for file in self.state_files() for name in file.unknown}
        return sorted(name for name in found if not name.startswith(KNOWN_CLASSES))


def looks_like(root: Path) -> str | None:
    """Returns why a directory looks like a universal checkpoint, None if it does not."""
    folder = root / FOLDER
    if not folder.is_dir() or any(_is_optimizer(name) for name in list_names(root)):
        return None
    example = next((name for name in _folders(folder, 8) if (folder / name / "fp32.pt").is_file()), None)
    if example is None and not (folder / COMMON).is_file():
        return None
    return f"{FOLDER}/ holds one folder per parameter, such as {example}" if example else f"it holds {FOLDER}/{COMMON}"


def _is_optimizer(name: str) -> bool:
    found = parse_name(name)
    return found is not None and found.kind is Kind.OPTIM


def _folders(folder: Path, limit: int = _MOST_FOLDERS) -> list[str]:
    names: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    names.append(entry.name)
                    if len(names) >= limit:
                        break
    except OSError:
        return []
    return sorted(names)


def read_source(root: Path, files: MappedFiles) -> Source:
    """Opens every file. Reads pickles, no tensor."""
    listed = [found for name in list_names(root) if (found := parse_name(name)) and found.kind is Kind.MODEL]
    names = sorted(listed, key=lambda name: (name.mp, -1 if name.dp is None else name.dp))
    opened, problems = read_state_files({name: root / name.name for name in names}, files)
    models = {(name.mp, name.dp): read_model(name, file) for name, file in opened.items()}
    spare = models.pop((0, 0), None) if (0, None) in models else None
    common, common_problems = _read_common(root, files)
    slots, unreadable, slot_problems = _read_slots(root / FOLDER, files)
    first = next(iter(models.values()), None)
    mp, tp, pp = model_degrees(first, max((name.mp for name in names), default=0) + 1, None)
    dp = (first.count("dp_world_size") if first else None) or 1
    if first is None and not problems:
        problems.append(missing_file(root / "mp_rank_00_model_states.pt", "the directory holds no model file"))
    return Source(
        root,
        files,
        models,
        slots,
        common,
        Degrees(dp, mp, tp, pp, 1, sequence_degree(first, dp)),
        _stage(models, common, files),
        (*problems, *common_problems, *slot_problems),
        unreadable,
        spare=spare,
    )


def _read_common(root: Path, files: MappedFiles) -> tuple[OptimStates | None, list[Problem]]:
    path = root / FOLDER / COMMON
    if not path.is_file():
        message = "the parameter groups, their hyperparameters and the loss scale are not there"
        return None, [missing_file(path, message)]
    opened, problems = read_state_files({COMMON: path}, files)
    file = opened.get(COMMON)
    return (read_optim(FileName(name=COMMON, kind=Kind.OPTIM, dp=0), file) if file else None), problems


def _read_slots(
    folder: Path, files: MappedFiles
) -> tuple[dict[str, dict[str, StateFile]], frozenset[tuple[str, str]], list[Problem]]:
    paths = {
        (name, slot.removesuffix(".pt")): folder / name / slot
        for name in _folders(folder)
        for slot in list_names(folder / name)
        if slot.endswith(".pt")
    }
    opened, problems = read_state_files(paths, files)
    found: dict[str, dict[str, StateFile]] = {}
    for name, slot in paths:
        held = found.setdefault(name, {})
        if (name, slot) in opened:
            held[slot] = opened[(name, slot)]
    return found, frozenset(paths.keys() - opened.keys()), problems


def _stage(models: Mapping[tuple[int, int | None], ModelStates], common: OptimStates | None, files: MappedFiles) -> int:
    """Returns the ZeRO stage of the run that was converted."""
    recorded = as_dict(common.file.value).get("zero_stage") if common is not None else None
    stage = enum_number(recorded, common.file, files) if common is not None else None
    if isinstance(stage, int):
        return stage
    configured = next((stage for model in models.values() if (stage := stage_of(model.config)) is not None), None)
    return as_count(configured) or (3 if any(place[1] is not None for place in models) else 1)
