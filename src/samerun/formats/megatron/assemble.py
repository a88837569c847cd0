"""From an opened torch_dist directory to logical state: model, masters, optimizer, groups, counters and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from samerun.core.state import LogicalState, Role, TensorKey
from samerun.formats.mcore.checks import check_state
from samerun.formats.mcore.groups import Member, assign_groups, merge_groups, settings_problem
from samerun.formats.mcore.held import Collector, Held, Replica, Storage, add_steps
from samerun.formats.mcore.stages import plan_stages
from samerun.formats.mcore.vocab import crop_vocabulary
from samerun.formats.megatron.buffers import Planner
from samerun.formats.megatron.checks import check_source
from samerun.formats.megatron.fsdp import is_fsdp, read_fsdp
from samerun.formats.megatron.model import ModelTensor, num_layers, split_model
from samerun.formats.megatron.objects import random_states, rest_of
from samerun.formats.megatron.optimizer import OptimizerState, read_optimizer
from samerun.formats.megatron.source import Source


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """The logical state with what is needed to read it and to judge it."""

    state: LogicalState
    placed: Mapping[str, Held]
    constants: Mapping[str, int | float]
    replicas: tuple[Replica, ...]
    source: Source
    models: tuple[ModelTensor, ...]
    optimizer: OptimizerState


def assemble(source: Source) -> Assembled:
    """Builds the logical state of an opened directory. Reads small objects and a sample of flat buffers."""
    models = split_model(source.index.tensors)
    run = source.run
    stages = plan_stages(run, num_layers(models)) or {}
    collector = Collector()
    if is_fsdp(source):
        models = []
        optimizer, named = read_fsdp(source, collector)
    else:
        optimizer, named = read_optimizer(source, Planner(source, models, stages), collector), ()
    trained = _add_models(models, collector)
    tensors, placed, replicas = collector.finish(optimizer.slots_alike)
    vocabulary = crop_vocabulary(run, tensors, placed, replicas, Storage(source.files, source.items))
    saved, agree = merge_groups(optimizer.groups)
    members = [Member(m.name, m.ndim, m.is_expert and run.ep > 1) for m in models if m.name in trained]
    groups, problems = assign_groups(saved, members, str(source.root))
    groups = (*groups, *named)
    steps = {fqn: group.hyperparameters.get("step", optimizer.step) for group in groups for fqn in group.params}
    constants = add_steps(tensors, {fqn: steps.get(fqn, optimizer.step) for fqn in trained or steps})
    state = LogicalState(
        format="megatron",
        tensors=tensors,
        groups=groups,
        progress=run.progress(source.common.get("iteration")),
        scheduler=_scheduler(source.common),
        rng=random_states(source),
        data=run.data(),
        objects=rest_of(source),
        topology=run.topology(),
        written_by=_written_by(source, optimizer),
        problems=(
            *vocabulary,
            *source.problems,
            *collector.problems,
            *optimizer.problems,
            *problems,
            *([] if agree else [settings_problem(str(source.root))]),
        ),
    )
    problems = [*state.problems, *check_state(state, run, source.root), *check_source(source, optimizer)]
    state = replace(state, problems=tuple(problems))
    return Assembled(state, placed, constants, tuple(replicas), source, tuple(models), optimizer)


def _add_models(models: list[ModelTensor], collector: Collector) -> set[str]:
    """Files the model's tensors and returns the names of those that the optimizer trains."""
    trained = {m.name for m in models if _has_state(m.name, collector)}
    for model in models:
        known = model.is_buffer or bool(trained)
        buffer = model.is_buffer or (bool(trained) and model.name not in trained)
        role = Role.BUFFER if buffer else Role.PARAM
        collector.add_stored(TensorKey(role, model.name), model.stored, inferred=not known)
    return trained


def _has_state(name: str, collector: Collector) -> bool:
    keys = (TensorKey(Role.MASTER, name), TensorKey(Role.OPTIM, name, "exp_avg"))
    return any(key in collector for key in keys) or TensorKey(Role.OPTIM, name, "momentum_buffer") in collector


def _scheduler(common: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    found = common.get("opt_param_scheduler")
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) and found else None


def _written_by(source: Source, optimizer: OptimizerState) -> dict[str, str]:
    named = source.content.get("distrib_optim_sharding_type")
    encoding = str(named) if isinstance(named, str) else ", ".join(sorted(optimizer.encodings))
    found = {"format": "Megatron torch_dist", "common_state": "object" if not source.has_common_file else "common.pt"}
    return found | ({"optimizer_encoding": encoding} if encoding else {})
