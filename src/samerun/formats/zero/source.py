"""Everything a checkpoint directory holds, opened, with the degrees of parallelism that it records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samerun.errors import Problem
from samerun.formats.deepspeed.model import ModelStates, enabled, read_model, stage_of
from samerun.formats.deepspeed.names import FileName, model_name
from samerun.formats.deepspeed.opened import Degrees, model_degrees, sequence_degree
from samerun.formats.deepspeed.shards import OptimStates, read_optim
from samerun.formats.deepspeed.states import (
    KNOWN_CLASSES,
    StateFile,
    as_dict,
    missing_file,
    read_state_files,
)
from samerun.formats.zero.directory import (
    Directory,
    check_optimizer_files,
    check_other_precision,
    check_stale,
    choose_precision,
    read_directory,
)
from samerun.stores.local import MappedFiles

_ON_NODES = (
    "the run kept its checkpoints on each node's own disk (use_node_local_storage): what is not here lies on other "
    "nodes. Gather the files of all nodes into one directory; names do not clash, the model file is the same on each"
)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An opened directory. Models are by (model-parallel rank, data-parallel rank or None), optimizers by both ranks.

    `stage` is the ZeRO stage, and `because` what it was recognised by.
    """

    root: Path
    files: MappedFiles
    models: Mapping[tuple[int, int | None], ModelStates]
    optims: Mapping[tuple[int, int], OptimStates]
    layers: Mapping[FileName, StateFile]
    experts: Mapping[FileName, StateFile]
    expert_optims: Mapping[FileName, StateFile]
    degrees: Degrees
    stage: int
    because: str
    problems: tuple[Problem, ...]

    @property
    def first(self) -> ModelStates | None:
        """The model file that speaks for the whole run: of the lowest ranks that can be read."""
        return next(iter(self.models.values()), None)

    @property
    def config(self) -> dict[Any, Any]:
        """The DeepSpeed configuration, from whichever file has it."""
        first = self.first
        if first is not None:
            return first.config
        return next((as_dict(as_dict(optim.file.value).get("ds_config")) for optim in self.optims.values()), {})

    def model_of(self, mp: int) -> ModelStates | None:
        """Returns the model file of a model-parallel rank, of its lowest data-parallel rank."""
        return next((model for (rank, _), model in self.models.items() if rank == mp), None)

    def state_files(self) -> list[StateFile]:
        """Returns every opened file."""
        return [
            *(model.file for model in self.models.values()),
            *(optim.file for optim in self.optims.values()),
            *self.layers.values(),
            *self.experts.values(),
            *self.expert_optims.values(),
        ]

    def unknown_classes(self) -> list[str]:
        """Returns the names of classes in the files that are neither known nor DeepSpeed's usual ones."""
        found = {name for file in self.state_files() for name in file.unknown}
        return sorted(name for name in found if not name.startswith(KNOWN_CLASSES))


def read_source(root: Path, files: MappedFiles) -> Source:
    """Opens every file of a directory that belongs to the save. Reads pickles, no tensor of the model."""
    directory = read_directory(root)
    models, problems = _read_models(directory, files)
    first = next(iter(models.values()), None)
    wanted = None if first is None else "bf16" if enabled(first.config, "bf16", "bfloat16") else ""
    names, others = choose_precision(directory.optims, wanted)
    problems += check_other_precision(directory, others)
    opened, unreadable = read_state_files({name: directory.path(name) for name in names}, files)
    optims = {(name.mp, name.dp or 0): read_optim(name, file) for name, file in opened.items()}
    degrees = _degrees(directory, models, optims)
    stage, because = _stage(directory, models, optims)
    problems += _check_files(directory, names, degrees, stage, models)
    problems += [problem for problem in unreadable if _of_this_save(problem, directory, degrees)]
    layers, layer_problems = read_state_files({name: directory.path(name) for name in directory.layers}, files)
    experts, expert_problems = read_state_files({name: directory.path(name) for name in directory.experts}, files)
    others_opened, other_problems = read_state_files(
        {name: directory.path(name) for name in directory.expert_optims}, files
    )
    problems += [*layer_problems, *expert_problems, *other_problems]
    return Source(
        root,
        files,
        {place: model for place, model in models.items() if (place[1] or 0) < degrees.dp and place[0] < degrees.mp},
        {place: optim for place, optim in optims.items() if place[1] < degrees.dp and place[0] < degrees.mp},
        layers,
        experts,
        others_opened,
        degrees,
        stage,
        because,
        tuple(problems),
    )


def _of_this_save(problem: Problem, directory: Directory, degrees: Degrees) -> bool:
    """Whether an unreadable file is one that the save had; a broken left-over is not worth two findings."""
    name = Path(str(problem.where.get("file", ""))).name.partition(" ")[0]
    return all(found.name != name or (found.dp or 0) < degrees.dp for found in directory.optims)


def _read_models(
    directory: Directory, files: MappedFiles
) -> tuple[dict[tuple[int, int | None], ModelStates], list[Problem]]:
    """Opens the model files. With files of both kinds (whole, and by rank) those of the optimizer's stage are kept."""
    opened, problems = read_state_files({name: directory.path(name) for name in directory.models}, files)
    models = {(name.mp, name.dp): read_model(name, file) for name, file in opened.items()}
    kinds = Counter(place[1] is None for place in models)
    if len(kinds) == 2:
        by_rank = any(stage_of(model.config) == 3 for place, model in models.items() if place[1] is not None)
        models = {place: model for place, model in models.items() if (place[1] is not None) == by_rank}
    return models, problems


def _degrees(
    directory: Directory,
    models: Mapping[tuple[int, int | None], ModelStates],
    optims: Mapping[tuple[int, int], OptimStates],
) -> Degrees:
    first = next(iter(models.values()), None)
    held = {name.mp for name in (*directory.models, *directory.optims)}
    pipeline = _pipeline_degree(directory, max(held, default=0) + 1) if directory.layers else None
    mp, tp, pp = model_degrees(first, max(held, default=0) + 1, pipeline)
    dp = _data_degree(first, optims, directory)
    ep = max((_expert_degree(optim, dp) for optim in optims.values()), default=1)
    return Degrees(dp, mp, tp, pp, ep, sequence_degree(first, dp))


def _pipeline_degree(directory: Directory, mp: int) -> int:
    tensor = max((name.tp for name in directory.layers), default=0) + 1
    return max(1, mp // tensor)


def _data_degree(first: ModelStates | None, optims: Mapping[tuple[int, int], OptimStates], directory: Directory) -> int:
    """Returns the number of ranks that shared the optimizer: as the lowest rank's own file says.

    Rank 0 takes part in every save, so of two saves in one place its files are the newer one's.
    """
    recorded = (first.count("dp_world_size") if first else None) or 0
    lowest = next((optims[place] for place in sorted(optims, key=lambda place: (place[1], place[0]))), None)
    counted = max(lowest.partitions, default=0) if lowest else 0
    if counted and recorded and recorded % counted == 0 and lowest is not None and _all_expert(lowest):
        return recorded
    if counted or recorded:
        return counted or recorded
    return max((name.dp or 0 for name in (*directory.models, *directory.optims)), default=0) + 1


def _all_expert(optim: OptimStates) -> bool:
    return bool(optim.groups) and all(group.get("moe") is True for group in optim.groups)


def _expert_degree(optim: OptimStates, dp: int) -> int:
    degrees = [1]
    for group, members in zip(optim.groups, optim.members, strict=False):
        for number in members:
            if is_expert_group(group) and number < len(optim.partitions) and optim.partitions[number]:
                degrees.append(max(1, dp // optim.partitions[number]))
    return max(degrees)


def is_expert_group(group: Mapping[str, Any]) -> bool:
    """Returns whether a parameter group is one of DeepSpeed's for experts."""
    return group.get("moe") is True


def without_role(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's hyperparameters without what says that it is one for experts, and at which degree."""
    left = {name: value for name, value in settings.items() if name != "moe"}
    if is_expert_group(settings) and re.fullmatch(r"ep_size_\d+", str(left.get("name", ""))):
        del left["name"]
    return left


def _stage(
    directory: Directory,
    models: Mapping[tuple[int, int | None], ModelStates],
    optims: Mapping[tuple[int, int], OptimStates],
) -> tuple[int, str]:
    by_rank = any(place[1] is not None for place in models)
    shown = directory.optims[0].name if directory.optims else ""
    for optim in optims.values():
        if optim.stage is not None:
            return optim.stage, f"{shown} records it"
        if optim.layout == "bf16-optimizer":
            return 1, f"{shown} keeps padded fp32 partitions and records no stage, as BF16_Optimizer does"
    for model in models.values():
        stage = stage_of(model.config)
        if stage is not None and (stage > 0 or not directory.optims):
            found = "there are no optimizer files of ranks and " if not directory.optims else ""
            return stage, f"{found}the configuration in {model.name.name} says so"
    if by_rank:
        return 3, "every rank has a model file of its own"
    return (1, f"there are optimizer files of ranks such as {shown}") if shown else (0, "no rank has an optimizer file")


def _check_files(
    directory: Directory,
    optims: tuple[FileName, ...],
    degrees: Degrees,
    stage: int,
    models: Mapping[tuple[int, int | None], ModelStates],
) -> list[Problem]:
    problems: list[Problem] = []
    if stage:
        precision = optims[0].precision if optims else _precision(models)
        missing, _ = check_optimizer_files(directory, optims, range(degrees.mp), degrees.dp, precision)
        problems += missing
    wanted: list[tuple[int, int | None]] = [(mp, None) for mp in range(degrees.mp)]
    if stage == 3:
        wanted = [(mp, dp) for mp in range(degrees.mp) for dp in range(degrees.dp)]
    held = {(name.mp, name.dp) for name in directory.models}
    for mp, dp in wanted:
        if (mp, dp) not in held:
            path = directory.root / model_name(mp, dp)
            problems.append(missing_file(path, f"the model file of {_rank_text(mp, dp)} is not there"))
    if any(as_dict(model.config.get("checkpoint")).get("use_node_local_storage") is True for model in models.values()):
        problems = [replace(problem, hint=_ON_NODES) for problem in problems]
    by_rank = [name for name in (*directory.models, *optims) if stage == 3 or name in optims]
    return [*problems, *check_stale(directory, by_rank, degrees.dp)]


def _precision(models: Mapping[tuple[int, int | None], ModelStates]) -> str:
    return "bf16" if any(enabled(model.config, "bf16", "bfloat16") for model in models.values()) else ""


def _rank_text(mp: int, dp: int | None) -> str:
    return f"model-parallel rank {mp}" if dp is None else f"data-parallel rank {dp}, model-parallel rank {mp}"
