"""A checkpoint inside another: its logical state taken apart again, so that it can be assembled with the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from samerun.core.state import RecordedProgress, Role, TensorEntry
from samerun.formats.base import Checkpoint
from samerun.formats.statedict.saved import SavedModel, SavedState
from samerun.formats.statedict.stored import Stored


def adopt(inner: Checkpoint, saved: SavedState) -> None:
    """Adds what a checkpoint inside holds to `saved`. Its tensors stay where they are and are read through it."""
    state = inner.state
    models: dict[Role, dict[str, Stored]] = {}
    aliases: dict[str, str] = {}
    slots: dict[str, dict[str, Stored]] = {}
    for key, entry in state.tensors.items():
        stored = Stored(entry.shape, entry.dtype, entry.tiling, (), (inner, key))
        fqn = entry.key.fqn
        if entry.key.role in (Role.OPTIM, Role.MASTER):
            slots.setdefault(fqn, {})[entry.key.slot or "master"] = stored
        else:
            models.setdefault(_family(entry), {})[fqn] = stored
            aliases |= dict.fromkeys(entry.aliases, fqn)
    sure = not any(entry.role_inferred for entry in state.tensors.values())
    buffers = frozenset(entry.key.fqn for entry in state.tensors.values() if entry.key.role is Role.BUFFER)
    for family, tensors in models.items():
        if family is Role.EMA:
            saved.models.append(SavedModel("ema", tensors, ordered=False, average=True))
        else:
            known = buffers if sure else None
            saved.models.append(SavedModel("", tensors, ordered=False, buffers=known, aliases=aliases))
    if slots or state.groups:
        groups: list[Any] = [{**group.hyperparameters, "params": list(group.params)} for group in state.groups]
        saved.optimizers.append(("", {"state": slots, "param_groups": groups}))
    _adopt_rest(inner, saved)


def _family(entry: TensorEntry) -> Role:
    return Role.EMA if entry.key.role is Role.EMA else Role.PARAM


def _adopt_rest(inner: Checkpoint, saved: SavedState) -> None:
    state = inner.state
    if state.scheduler:
        saved.schedulers.append(("scheduler", state.scheduler))
    saved.rng |= state.rng
    saved.data |= state.data
    sections = (*state.rng, *state.data)
    saved.objects |= {name: value for name, value in state.objects.items() if not name.startswith(sections)}
    saved.problems += state.problems
    told = {name: text for name, text in state.written_by.items() if name != "recognised"}
    saved.written_by = {**told, **saved.written_by}
    if state.topology.world_size is not None and saved.topology.world_size is None:
        saved.topology = state.topology
    known = saved.progress or RecordedProgress()
    counted = {name: getattr(state.progress, name) for name in ("samples", "tokens", "epoch")}
    saved.progress = replace(known, **{name: value for name, value in counted.items() if value is not None})
