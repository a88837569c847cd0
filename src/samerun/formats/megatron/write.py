"""Lays out a Megatron distributed checkpoint: torch_dist, optimizer state `fully_reshardable`.

The destination is what `--load` names: `iter_NNNNNNN` with `.metadata`, data files, `common.pt` and `metadata.json`,
and the tracker beside it. Every tensor has its logical shape, so any TP, PP and DP loads it; only the groups of experts
depend on the layout, and so do states of random number generators (megatron.core 0.16).
"""

from __future__ import annotations

import json
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role, TensorEntry, TensorKey
from samerun.core.written import DestinationPlan
from samerun.errors import PlanError, Problem
from samerun.formats.base import WriteSource
from samerun.formats.dcpfile.directory import Directory
from samerun.formats.mcore.checks import TRACKER
from samerun.formats.mcore.run import parse_run
from samerun.formats.megatron.common import grids_of_extra_state, plan_common
from samerun.formats.megatron.require import check_writable
from samerun.formats.megatron.settings import plan_settings
from samerun.formats.megatron.stack import adapt
from samerun.formats.megatron.streams import deal_streams
from samerun.formats.torchfile.write import Pieces, add_archive, gather_slots

__all__ = ["adapt", "lay_out"]

_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def lay_out(source: WriteSource, layout: Layout | None = None) -> DestinationPlan:
    """Plans the directory. Without a layout, groups and random states are those of the source's own.

    Raises:
        PlanError: if the state has optimizer tensors that no distributed optimizer takes, or two items of one name.
    """
    state = source.state
    run = parse_run(state.objects.get("args"))
    wanted = layout or state.topology.layout or Layout()
    problems = check_writable(state, run, wanted)
    name = "release" if state.progress.update is None else f"iter_{state.progress.update:07d}"
    directory = Directory(wanted, f"{name}/")
    dropped = {str(entry.key): "Megatron keeps no averages" for entry in _averages(state)}
    for key, entry in _stored(state).items():
        directory.add_tensor((key,), entry)
    settings = plan_settings(state, wanted.ep, _steps(source))
    streams = deal_streams(state, run, wanted)
    common = plan_common(state, run, wanted, settings)
    for key, value in {**grids_of_extra_state(state, run), **common.shards, **streams.shards}.items():
        directory.add_object((key,), [value])
    if state.groups and not any(settings.chain):
        dropped["groups"] = "they are none of Megatron's"
    found = [*problems, *settings.problems, *streams.problems, *common.problems]
    data = directory.finish()
    beside = Pieces()
    add_archive(beside, common.value, "common")
    backend, tracker = Pieces(), Pieces()
    backend.write(json.dumps(_BACKEND).encode())
    tracker.write(str(state.progress.update if state.progress.update is not None else "release").encode())
    return DestinationPlan(
        format="megatron",
        files=(
            *data,
            beside.file(f"{name}/common.pt"),
            backend.file(f"{name}/metadata.json"),
            tracker.file(TRACKER),
        ),
        tensors=gather_slots([pieces.slots for pieces in directory.written]),
        dropped={**dropped, **settings.changed, **common.dropped},
        problems=tuple(found),
    )


def _averages(state: LogicalState) -> list[TensorEntry]:
    return [entry for entry in state.tensors.values() if entry.key.role is Role.EMA]


def _stored(state: LogicalState) -> dict[str, TensorEntry]:
    """Returns every tensor by the name under which it is stored. A master that is missing is the fp32 weight itself."""
    stored: dict[str, TensorEntry] = {}
    twice: list[Problem] = []
    masters = {entry.key.fqn for entry in state.tensors.values() if entry.key.role is Role.MASTER}
    trained: dict[str, None] = {}
    for entry in state.tensors.values():
        key = entry.key
        if key.role is Role.EMA or key.slot == "step":
            continue
        prefix = "" if key.role in (Role.PARAM, Role.BUFFER) else f"optimizer.state.{key.slot or 'param'}."
        if key.role in (Role.OPTIM, Role.MASTER):
            trained[key.fqn] = None
        _put(stored, twice, prefix + key.fqn, entry)
    for fqn in trained:
        if fqn not in masters and (weight := state.tensors.get(str(TensorKey(Role.PARAM, fqn)))) is not None:
            if weight.dtype.name != "float32":
                twice.append(_no_master(fqn, weight))
            _put(stored, twice, f"optimizer.state.param.{fqn}", weight)
    if twice:
        raise PlanError(twice)
    return stored


def _put(stored: dict[str, TensorEntry], problems: list[Problem], name: str, entry: TensorEntry) -> None:
    if name in stored:
        problems.append(
            Problem(
                "SR-WRITE-TWICE",
                f"two values of the source would both be called {name}",
                where={"key": name},
                hint="rename one of them with --map",
            )
        )
    stored[name] = entry


def _no_master(fqn: str, weight: TensorEntry) -> Problem:
    return Problem(
        "SR-MGW-MASTER",
        f"{fqn} is kept in {weight.dtype.name} and has no fp32 master, which Megatron's distributed optimizer loads",
        where={"tensor": str(weight.key)},
        hint="a master made of a rounded weight is not what the run had. Convert a checkpoint that holds masters, or "
        "ask for fp32 weights: --dtype param=float32",
    )


def _steps(source: WriteSource) -> Any:
    """Returns what gives a parameter's step, read once from the state; None for one without."""
    steps = {
        entry.key.fqn: source.scalar(text).reshape(-1)[0].item()
        for text, entry in source.state.tensors.items()
        if entry.key.role is Role.OPTIM and entry.key.slot == "step" and entry.num_elements == 1
    }
    return steps.get
