"""From opened rank files to logical state: model, masters, optimizer, groups, counters and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from samerun.core.state import LogicalState
from samerun.formats.deepspeed.states import as_dict
from samerun.formats.mcore.checks import check_state, unknown_classes
from samerun.formats.mcore.destination import check_encoding
from samerun.formats.mcore.groups import Member, assign_groups, merge_groups, settings_problem
from samerun.formats.mcore.held import Collector, Held, Replica, Storage, add_steps
from samerun.formats.mcore.ranks import Coordinate, spread_states
from samerun.formats.mcore.vocab import crop_vocabulary
from samerun.formats.megatron_legacy.model import Models, add_models, read_models
from samerun.formats.megatron_legacy.optimizer import OptimizerState, read_optimizer
from samerun.formats.megatron_legacy.source import Place, Source

_OWN_SECTIONS = ("model", "optimizer", "opt_param_scheduler", "rng_state", "iteration")


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """The logical state with what is needed to read it and to judge it."""

    state: LogicalState
    placed: Mapping[str, Held]
    constants: Mapping[str, int | float]
    replicas: tuple[Replica, ...]
    source: Source
    models: Models
    optimizer: OptimizerState


def assemble(source: Source) -> Assembled:
    """Builds the logical state of an opened directory."""
    run = source.run
    models = read_models(source)
    collector = Collector()
    optimizer = read_optimizer(source, models, collector)
    add_models(models, collector, optimizer.trained)
    tensors, placed, replicas = collector.finish()
    vocabulary = crop_vocabulary(run, tensors, placed, replicas, Storage(source.files))
    saved, agree = merge_groups(optimizer.groups)
    members = [
        Member(fqn, held.ndim, held.expert and run.ep > 1)
        for fqn, held in models.members().items()
        if fqn in optimizer.trained
    ]
    groups, problems = assign_groups(saved, members, str(source.root))
    constants = add_steps(tensors, optimizer.steps)
    first = source.first
    scheduler = as_dict(source.plain(first, "opt_param_scheduler")) if first else {}
    state = LogicalState(
        format="megatron-legacy",
        tensors=tensors,
        groups=groups,
        progress=run.progress(first.value.get("iteration") if first else None),
        scheduler={str(key): value for key, value in scheduler.items()} or None,
        rng=_random_states(source),
        data=run.data(),
        objects=_objects(source),
        topology=run.topology(),
        written_by=_written_by(source, optimizer),
        problems=(
            *vocabulary,
            *source.problems,
            *models.problems,
            *collector.problems,
            *optimizer.problems,
            *problems,
            *([] if agree else [settings_problem(str(source.root))]),
        ),
    )
    problems = [
        *state.problems,
        *check_state(state, run, source.root),
        *check_encoding({"legacy"}, run, source.root),
        *unknown_classes(source.root, {name for file in source.opened() for name in file.unknown}),
    ]
    state = replace(state, problems=tuple(problems))
    return Assembled(state, placed, constants, tuple(replicas), source, models, optimizer)


def _random_states(source: Source) -> dict[str, Any]:
    held = {
        place: value for place, rank in source.ranks.items() if (value := source.plain(rank, "rng_state")) is not None
    }
    if not held:
        return {}

    def state_at(place: Coordinate) -> Any:
        return held.get(Place(place.pp, place.tp, place.ep))

    return spread_states(source.run, state_at)


def _objects(source: Source) -> dict[str, Any]:
    first = source.first
    if first is None:
        return {}
    kept = {
        str(name): value
        for name in first.value
        if str(name) not in _OWN_SECTIONS
        and not str(name).startswith("model")
        and (value := source.plain(first, name)) is not None
    }
    optimizer = first.value.get("optimizer")
    scaler = as_dict(optimizer).get("grad_scaler")
    return kept if scaler is None else {**kept, "optimizer.grad_scaler": scaler}


def _written_by(source: Source, optimizer: OptimizerState) -> dict[str, str]:
    found = {"format": "Megatron, one torch.save file per rank"}
    first = source.first
    version = first.value.get("checkpoint_version") if first else None
    found |= {"checkpoint_version": str(version)} if version is not None else {}
    return found | ({"optimizer_encoding": optimizer.encoding} if optimizer.encoding else {})
