"""What `common.pt` of a written checkpoint holds, and the objects beside it: arguments, groups, schedule, counters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role
from samerun.errors import Problem, Severity
from samerun.formats.mcore.flat import align
from samerun.formats.mcore.run import Run
from samerun.formats.megatron.revive import revive, revive_arguments
from samerun.formats.megatron.settings import Settings
from samerun.formats.statedict.carry import Unwritable, writable
from samerun.formats.torchfile.nodes import Instance, Named

ENCODING = "fully_reshardable"
_NAMESPACE = Named("argparse", "Namespace")
_SHARD = re.compile(r".+/shard_[\d.]+_[\d.]+")
_RERUN = "rerun_state_machine"
_OWN = ("args", "content_metadata", "iteration", "opt_param_scheduler")
_LINEAR = re.compile(r"((?:.*\.)?linear_\w+)\.weight(?:_w)?")
_STACKED = re.compile(r"(?:^|\.)layers\.(?!\d)")
_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")


@dataclass(slots=True)
class Common:
    """The value of `common.pt`, objects by name, what was left out with why, findings."""

    value: dict[str, Any]
    shards: dict[str, Any] = field(default_factory=dict[str, Any])
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])


def plan_common(state: LogicalState, run: Run, wanted: Layout, settings: Settings) -> Common:
    """Collects everything that is neither tensor nor random state."""
    common = Common({})
    _add_args(common, run, wanted)
    common.value["checkpoint_version"] = 3.0
    common.value["iteration"] = state.progress.update or 0
    optimizer: dict[str, Any] = {}
    own = state.format in ("megatron", "megatron-legacy")
    for name, value in state.objects.items():
        if name in _OWN:
            continue
        if name.startswith(_RERUN) and wanted != state.topology.layout:
            common.dropped[name] = "it belongs to the source's ranks"
            continue
        try:
            ready = revive(value)
            if not own:  # `common.pt` is loaded with weights_only=True, which takes no array
                ready = writable(ready)
        except Unwritable as error:
            common.dropped[name] = str(error)
            continue
        if _SHARD.fullmatch(name):
            common.shards[name] = ready
        elif name.startswith("optimizer."):
            optimizer[name.removeprefix("optimizer.")] = ready
        else:
            common.value[name] = ready
    if state.scheduler and "num_steps" in state.scheduler:
        common.value["opt_param_scheduler"] = revive(state.scheduler)
    elif state.scheduler:
        common.dropped["scheduler"] = "it is none of Megatron's: the job's own schedule has to be set"
    if any(settings.chain):
        one = [
            {"optimizer": {"param_groups": groups}, **optimizer, "param_state_sharding_type": ENCODING}
            for groups in settings.chain
        ]
        common.value["optimizer"] = one[0] if len(one) == 1 else dict(enumerate(one))
    common.value["content_metadata"] = {
        "distrib_optim_sharding_type": ENCODING,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": _are_single(state),
        "chained_optim_avoid_prefix": True,
    }
    if common.dropped:
        common.problems.append(_left_out(common.dropped))
    return common


def _add_args(common: Common, run: Run, wanted: Layout) -> None:
    if not run.args:
        return
    args, left_out = revive_arguments(run.args)
    common.dropped |= left_out
    new: dict[str, Any] = {
        "ckpt_format": "torch_dist",
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True,
        "expert_model_parallel_size": wanted.ep,
    }
    size, multiple = run.count("vocab_size"), run.count("make_vocab_size_divisible_by")
    if size and multiple:
        new["padded_vocab_size"] = align(size, multiple * wanted.tp)
    changed = [name for name, value in new.items() if args.get(name) != value]
    common.value["args"] = Instance(_NAMESPACE, {**args, **new})
    if changed:
        common.problems.append(
            Problem(
                "SR-MGW-CHANGED",
                f"saved args that describe the checkpoint itself are set anew: {', '.join(changed)}",
                severity=Severity.NOTE,
                where={"key": "args"},
                expected={name: run.args.get(name) for name in changed},
                found={name: new[name] for name in changed},
                hint="TP, PP, world size and everything else stay as the source had them",
            )
        )


def _are_single(state: LogicalState) -> bool:
    content = state.objects.get("content_metadata")
    return isinstance(content, Mapping) and content.get("singleton_local_shards") is True


def grids_of_extra_state(state: LogicalState, run: Run) -> dict[str, Any]:
    """Returns an empty extra state for every layer that a job asks one of: linear layers, and fused attention."""
    found: dict[str, Any] = {}
    for entry in state.tensors.values():
        match = _LINEAR.fullmatch(entry.key.fqn)
        if match is None or entry.key.role not in (Role.PARAM, Role.BUFFER):
            continue
        name = match[1]
        ndim = (_STACKED.search(name) is not None) + (_EXPERTS.search(name) is not None)
        grid = entry.shape[:ndim]
        names = [name]
        if run.local_spec is False and name.endswith("self_attention.linear_qkv"):
            names.append(name.replace("linear_qkv", "core_attention"))
        for at in _cells(grid):
            where = f"{_dots(at)}_{_dots(grid)}" if grid else "0_1"
            found |= {f"{one}._extra_state/shard_{where}": None for one in names}
    return found


def _cells(grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    cells: list[tuple[int, ...]] = [()]
    for size in grid:
        cells = [(*cell, number) for cell in cells for number in range(size)]
    return cells


def _dots(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _left_out(dropped: Mapping[str, str]) -> Problem:
    name, why = next(iter(dropped.items()))
    more = f", and {len(dropped) - 1} more" if len(dropped) > 1 else ""
    return Problem(
        "SR-MGW-LEFTOUT",
        f"{len(dropped)} objects of the source are not written: {name}: {why}{more}",
        severity=Severity.WARNING,
        where={"key": name},
        hint="Megatron goes on without them; they stay in the source",
    )
