"""What DeepSpeed's model files hold beside tensors: progress, scheduler, and the training script's own state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samerun.core.state import RecordedProgress
from samerun.errors import Problem, Severity
from samerun.formats.deepspeed.model import ModelStates
from samerun.formats.deepspeed.opened import Degrees
from samerun.formats.deepspeed.states import as_count, as_dict, plain_value
from samerun.stores.local import MappedFiles

_RNG = re.compile(r"(?:^|[_.])(?:rng|random)(?:$|[_.])|rng_states?|rng_tracker|random_state", re.IGNORECASE)
_DATA = re.compile(r"(?:^|_)(?:data|dataset|dataloader|loader|sampler|batch_?sampler)(?:$|_|\d)", re.IGNORECASE)
_SAMPLES = ("consumed_samples", "consumed_train_samples", "samples_seen", "samples")
_TOKENS = ("consumed_train_tokens", "consumed_tokens", "tokens_seen", "tokens")
_UPDATES = ("iteration", "update", "global_step", "step", "completed_steps")
_EPOCHS = ("epoch", "current_epoch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """The recognised parts, as plain data."""

    progress: RecordedProgress
    scheduler: Mapping[str, Any] | None = None
    rng: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    problems: tuple[Problem, ...] = ()


def read_sections(models: Sequence[ModelStates], degrees: Degrees, files: MappedFiles) -> Sections:
    """Sorts everything that is no tensor of the model or optimizer. The first model file speaks for all ranks.

    Generators and data positions are kept per rank where several wrote their own, as `<name>.rank<number>`.
    """
    first = models[0]
    rng: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for model in models:
        suffix = f".rank{_rank_of(model, degrees)}" if len(models) > 1 else ""
        for name, value in model.client.items():
            if _RNG.search(name):
                rng[name + suffix] = plain_value(value, model.file, files)
            elif _DATA.search(name):
                data[name + suffix] = plain_value(value, model.file, files)
        if model.value.get("data_sampler") is not None:
            data[f"data_sampler{suffix}"] = plain_value(model.value["data_sampler"], model.file, files)
    scheduler = plain_value(first.value.get("lr_scheduler"), first.file, files)
    progress, problems = _progress(first, data)
    return Sections(
        progress=progress,
        scheduler=scheduler if isinstance(scheduler, dict) else None,
        rng=rng,
        data=data,
        objects=_objects(first, files),
        problems=tuple(problems),
    )


def _rank_of(model: ModelStates, degrees: Degrees) -> int:
    """Returns the global rank that wrote a model file: tensor-parallel ranks side by side, pipelines outermost."""
    stage, tensor = degrees.position(model.name.mp)
    return (stage * degrees.dp + (model.name.dp or 0)) * degrees.tp + tensor


def _objects(model: ModelStates, files: MappedFiles) -> dict[str, Any]:
    kept = {
        name: plain_value(value, model.file, files)
        for name, value in model.client.items()
        if not _RNG.search(name) and not _DATA.search(name)
    }
    for name in ("ds_config", "random_ltd", "skipped_steps", "num_experts"):
        value = model.value.get(name)
        if value is not None:
            kept[name] = plain_value(value, model.file, files)
    return kept


def _progress(model: ModelStates, data: Mapping[str, Any]) -> tuple[RecordedProgress, list[Problem]]:
    """Returns the counters. Skipped steps (overflows of the loss scale) count in `global_steps` but update nothing."""
    steps, skipped = model.count("global_steps"), model.count("skipped_steps") or 0
    problems: list[Problem] = []
    updates = [("global_steps - skipped_steps", max(0, steps - skipped))] if steps is not None else []
    updates += list(_counters(model, _UPDATES))
    if len({value for _, value in updates}) > 1 and steps not in {value for _, value in updates[1:]}:
        problems.append(_disagree("update", updates, Severity.WARNING, model))
    samples, problem = _samples(model)
    problems += [problem] if problem else []
    epochs = [*_counters(model, _EPOCHS), *_epochs_of(data)]
    tokens = list(_counters(model, _TOKENS))
    progress = RecordedProgress(
        update=updates[0][1] if updates else None,
        samples=samples,
        tokens=tokens[0][1] if tokens else None,
        epoch=epochs[0][1] if epochs else None,
    )
    return progress, problems


def _samples(model: ModelStates) -> tuple[int | None, Problem | None]:
    """Returns the samples seen: the count that most places agree on, DeepSpeed's own when none do.

    With AutoTP and no `train_batch_size`, DeepSpeed counts tensor-parallel ranks as replicas in `global_samples`.
    """
    own = model.count("global_samples")
    places = [("global_samples", own)] if own is not None else []
    places += list(_counters(model, _SAMPLES))
    derived = _derived_samples(model)
    if derived is not None:
        places.append(("global_steps x batch size", derived))
    if not places:
        return None, None
    values = [value for _, value in places]
    best = max(values, key=lambda value: (values.count(value), value == own))
    recorded = [place for place in places if place[0] != "global_steps x batch size"]
    if len({value for _, value in recorded}) > 1:
        known = derived is not None and derived == best
        return best, _disagree("sample", recorded, Severity.WARNING if known else Severity.ERROR, model)
    return recorded[0][1] if recorded else best, None


def _derived_samples(model: ModelStates) -> int | None:
    steps, replicas = model.count("global_steps"), model.count("dp_world_size")
    micro = as_count(model.config.get("train_micro_batch_size_per_gpu"))
    passes = as_count(model.config.get("gradient_accumulation_steps"))
    batch = as_count(model.config.get("train_batch_size"))
    if batch is None and micro is not None and replicas is not None:
        batch = micro * (passes or 1) * replicas
    return None if steps is None or batch is None else steps * batch


def _counters(model: ModelStates, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    for name in names:
        value = as_count(model.client.get(name))
        if value is not None:
            yield name, value


def _epochs_of(data: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, section in data.items():
        value = as_count(as_dict(section).get("epoch"))
        if value is not None:
            yield f"{name}.epoch", value


def _disagree(what: str, places: Sequence[tuple[str, int]], severity: Severity, model: ModelStates) -> Problem:
    other = next(place for place in places if place[1] != places[0][1])
    return Problem(
        "SR-CNT-DISAGREE",
        f"places that count {what}s disagree: {', '.join(f'{name} = {value}' for name, value in places)}",
        severity=severity,
        where={"file": str(model.file.path), "key": other[0]},
        expected=places[0][1],
        found=other[1],
        hint="find out which one the training script goes on from before resuming",
    )
