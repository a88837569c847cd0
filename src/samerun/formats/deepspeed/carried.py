"""What a model file holds beside the model: counters, scheduler, configuration, and the training script's own state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from samerun.core.plain import plain, same_plain
from samerun.core.state import LogicalState, RecordedProgress
from samerun.errors import Problem, Severity
from samerun.formats.deepspeed.model import OWN_KEYS, stage_of
from samerun.formats.deepspeed.records import WRITTEN_VERSION
from samerun.formats.deepspeed.states import as_count, as_dict
from samerun.formats.deepspeed.training import OWN_FORMATS, STEP, Training
from samerun.formats.statedict.carry import carry_objects

_RANK = re.compile(r"(.+)\.rank(\d+)")
_OF_DEEPSPEED = frozenset({"ds_config", "skipped_steps", "loss_scaler", "random_ltd", "num_experts"})
_DEFAULT_SUB_GROUP = 1_000_000_000


@dataclass(slots=True)
class Carried:
    """`client` is the training script's state on every rank, `by_rank` what each rank has of its own beside it."""

    client: dict[str, Any] = field(default_factory=dict[str, Any])
    by_rank: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    scheduler: Any = None
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Returns what goes into the model file of a rank."""
        return {**self.client, **self.by_rank.get(rank, {})}


@dataclass(frozen=True, slots=True)
class Settings:
    """What of a DeepSpeed configuration decides where values lie. `stage` is 1, 2 or 3; `ranks` is the DP degree.

    With `data_first` (`use_data_before_expert_parallelism`) neighbouring ranks hold the same experts.
    """

    stage: int
    ranks: int
    round_robin: bool = False
    parameter_alignment: bool = False
    sub_group_size: int = _DEFAULT_SUB_GROUP
    data_first: bool = False


def read_settings(state: LogicalState, ranks: int, stage: int) -> Settings:
    """Takes from the source's configuration what the destination's job will have in its own."""
    config = as_dict(state.objects.get("ds_config"))
    zero = as_dict(config.get("zero_optimization"))
    return Settings(
        stage,
        ranks,
        round_robin=zero.get("round_robin_gradients") is True,
        parameter_alignment=zero.get("parameter_alignment") is True,
        sub_group_size=_number(zero.get("sub_group_size")) or _DEFAULT_SUB_GROUP,
        data_first=config.get("use_data_before_expert_parallelism") is True,
    )


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 else None


def source_stage(state: LogicalState) -> int | None:
    """Returns the ZeRO stage of a DeepSpeed source, None for any other."""
    return stage_of(as_dict(state.objects.get("ds_config"))) if state.format in OWN_FORMATS else None


def write_config(state: LogicalState, training: Training, settings: Settings) -> dict[str, Any]:
    """Returns the configuration that the files are laid out for. How the global batch is dealt is the job's."""
    config = dict(as_dict(state.objects.get("ds_config")))
    zero = dict(as_dict(config.get("zero_optimization")))
    micro, passes = as_count(config.get("train_micro_batch_size_per_gpu")), config.get("gradient_accumulation_steps")
    held = state.topology.layout.batch_replicas if state.topology.layout is not None else None
    if held != settings.ranks:
        config.pop("train_micro_batch_size_per_gpu", None)
        config.pop("gradient_accumulation_steps", None)
        if micro and held and "train_batch_size" not in config:
            config["train_batch_size"] = micro * (as_count(passes) or 1) * held
    if training.precision:
        config[training.precision] = {**as_dict(config.get(training.precision)), "enabled": True}
    return {**config, "zero_optimization": {**zero, "stage": settings.stage}}


def updates_of(state: LogicalState, training: Training) -> int:
    """Returns how many updates the run completed; the optimizer's own step where the source does not count them."""
    if state.progress.update is not None:
        return state.progress.update
    steps = [group.scalars[STEP] for group in training.groups if STEP in group.scalars]
    return int(max((values.item() for values in steps), default=0))


def write_common(
    state: LogicalState,
    ranks: int,
    updates: int,
    config: Mapping[str, Any],
    carried: Carried,
    rank: int = 0,
    stages: int = 1,
) -> dict[str, Any]:
    """Returns a model file but for the model: counters, settings and the script's own state.

    The first are those of `DeepSpeedEngine._common_checkpoint_state`. `rank` says whose own values go with them;
    `stages` is the number of pipeline stages.
    """
    skipped = as_count(state.objects.get("skipped_steps")) or 0
    client = carried.of_rank(rank)
    sampler = client.pop("data_sampler", None)
    return {
        "lr_scheduler": carried.scheduler,
        "data_sampler": sampler,
        "random_ltd": state.objects.get("random_ltd"),
        "skipped_steps": skipped,
        "global_steps": updates + skipped,
        **({"global_samples": state.progress.samples} if state.progress.samples is not None else {}),
        "dp_world_size": ranks,
        "mp_world_size": stages,
        "checkpoint_parallel_dimensions": {"pp_degree": stages, "tp_degree": 1},
        "ds_config": dict(config),
        "ds_version": WRITTEN_VERSION,
        **client,
    }


def carry(state: LogicalState, ranks: int, *, files_by_rank: bool, every: int = 1) -> Carried:
    """Sorts scheduler, generators, data positions and objects for `ranks` ranks.

    Ranks' own copies become one if they are equal, go to the same ranks if every rank of as many has a file of its own,
    and otherwise stay apart under `<name>.rank<number>` in every file, which is a finding. Of pipelines, the first rank
    of each stage has a file: every so many ranks of the source.
    """
    if state.format not in OWN_FORMATS:
        return _carry_foreign(state)
    carried = Carried()
    shared, apart = _by_rank(state)
    for name, values in apart.items():
        if files_by_rank and sorted(values) == list(range(0, ranks * every, every)):
            for rank, value in values.items():
                carried.by_rank.setdefault(rank // every, {}).update(_writable(state, {name: value}, carried))
            continue
        shared |= {f"{name}.rank{rank}": value for rank, value in values.items()}
        carried.problems.append(_apart(name, len(values), ranks))
    carried.client = _writable(state, shared, carried)
    carried.scheduler = _writable(state, {"lr_scheduler": state.scheduler}, carried).get("lr_scheduler")
    return carried


def _by_rank(state: LogicalState) -> tuple[dict[str, Any], dict[str, dict[int, Any]]]:
    """Returns what holds for all ranks, and by name what differs between them."""
    shared = {
        name: value
        for name, value in state.objects.items()
        if name not in _OF_DEEPSPEED and not name.startswith("optimizer.")
    }
    apart: dict[str, dict[int, Any]] = {}
    for name, value in {**state.rng, **state.data}.items():
        match = _RANK.fullmatch(name)
        if match is None:
            shared[name] = value
        else:
            apart.setdefault(match[1], {})[int(match[2])] = value
    for name, values in list(apart.items()):
        first, *others = [plain(value) for value in values.values()]
        if all(same_plain(first, other) for other in others):
            shared[name] = next(iter(values.values()))
            del apart[name]
    return shared, apart


def _writable(state: LogicalState, values: Mapping[str, Any], carried: Carried) -> dict[str, Any]:
    """Makes values ready to be pickled, under names that may hold dots."""
    names = list(values)
    numbered = {f"value{number}": values[name] for number, name in enumerate(names)}
    bare = replace(state, objects=numbered, rng={}, data={}, scheduler=None, progress=RecordedProgress())
    found = carry_objects(bare, numpy=True)
    carried.problems += found.problems
    carried.dropped |= found.dropped
    return {name: found.sections[key] for name, key in zip(names, numbered, strict=True) if key in found.sections}


def _carry_foreign(state: LogicalState) -> Carried:
    progress = replace(state.progress, update=None, samples=None)  # DeepSpeed counts these itself
    found = carry_objects(replace(state, progress=progress), numpy=True)
    carried = Carried(dropped=found.dropped, problems=list(found.problems))
    sections = dict(found.sections)
    if found.scheduler is not None:
        carried.scheduler = _take(sections, found.scheduler)
    carried.client = {f"{name}_objects" if name in OWN_KEYS else name: value for name, value in sections.items()}
    return carried


def _take(sections: dict[str, Any], name: str) -> Any:
    """Takes a section out, which may lie inside others by the dots in its name."""
    if name in sections or "." not in name:
        return sections.pop(name, None)
    first, rest = name.split(".", 1)
    inner = sections.get(first)
    taken = _take(inner, rest) if isinstance(inner, dict) else None
    if inner == {}:
        del sections[first]
    return taken


def _apart(name: str, count: int, ranks: int) -> Problem:
    return Problem(
        "SR-DSW-PERRANK",
        f"{count} ranks each have their own {name}, and the destination has {ranks} ranks",
        severity=Severity.WARNING,
        where={"key": name},
        hint=f"all are kept, as {name}.rank0, {name}.rank1 and so on in the client state; none is given to a rank. "
        "Say in "
        "the manifest what the new ranks begin with",
    )
