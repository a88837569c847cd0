"""A pipeline to be written natively: which stage of the destination holds what, and the files of its layers (0.19.8).

Each stage flattens its own parameters: tied modules first, then its layers. A weight that stages share is in the
optimizers of all of them. `PipelineModule` decides by its own rules where a stage begins, and no file records that:
with as many stages as before it is the source's own division, with others the user's (`parts`).
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Pipeline
from samerun.errors import PlanError, Problem
from samerun.formats.deepspeed.carried import Carried, carry
from samerun.formats.deepspeed.modelfile import write_tensor
from samerun.formats.deepspeed.training import TrainedGroup, Training

_LAYER = re.compile(r"(\d+)\.")
_TIED = re.compile(r"tied_modules\.([^.]+)\.")
_FAR = 1 << 30  # a layer after all that have files


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A pipeline as the destination has it: each stage's part of the run, and by number the layers' state dicts."""

    stages: tuple[Training, ...]
    layers: dict[int, dict[str, Any]]

    def text(self) -> str:
        """Says which layers begin a stage, as far as they train anything."""
        return "; ".join(f"stage {number}: {_shown(stage)}" for number, stage in enumerate(self.stages))


def stage_pipeline(
    state: LogicalState, training: Training, layout: Layout | None, parts: Sequence[int] | None
) -> Staged | None:
    """Divides a pipeline's run among the stages of the destination; None for a run that is no pipeline.

    Args:
        state: the source.
        training: its whole run.
        layout: ranks of the destination; those of the source where none is given.
        parts: the first layer of every stage, where it is not the source's own division.

    Raises:
        PlanError: if the division is not known, or a stage's order of parameters.
    """
    pipeline = state.topology.pipeline
    chosen = layout or state.topology.layout or Layout()
    if pipeline is None:
        if parts is not None:
            raise PlanError(_unknown("--parts divides a DeepSpeed pipeline, and the source has no layers of one"))
        return None
    held = len(pipeline.stages)
    if parts is None and chosen.pp == 1 != held:
        parts = (0,)
    if parts is None:
        if held != chosen.pp:
            raise PlanError(_unknown(f"the source has {held} stages, and no file says where {chosen.pp} would begin"))
        orders = [list(order) for order in pipeline.stages]
        starts = [min(_layers_of(order), default=_FAR if number else 0) for number, order in enumerate(orders)]
    else:
        _require_parts(parts, chosen.pp)
        orders = _divide(pipeline, training, parts)
        starts = list(parts)
    stages = [_stage(training, order) for order in orders]
    for buffer in training.buffers:
        layer = _layer_of(buffer.entry.key.fqn)
        number = max(0, bisect_right(starts, 0 if layer is None else layer) - 1)
        stages[number].buffers.append(buffer)
    return Staged(tuple(stages), dict(_layer_files(state, pipeline)))


def carry_staged(state: LogicalState, staged: Staged, ranks: int) -> Carried:
    """Sorts what is no tensor for a pipeline of `ranks` replicas: a stage's own values go to the stage it was."""
    stages, held = len(staged.stages), state.topology.layout or Layout()
    if held.pp == stages:
        return carry(state, stages, files_by_rank=True, every=held.batch_replicas * held.cp)
    return carry(state, stages * ranks, files_by_rank=False)


def _layer_of(fqn: str) -> int | None:
    match = _LAYER.match(fqn)
    return int(match[1]) if match else None


def _layers_of(fqns: Collection[str]) -> list[int]:
    return [layer for fqn in fqns if (layer := _layer_of(fqn)) is not None]


def _tie_of(fqn: str) -> str | None:
    match = _TIED.match(fqn)
    return match[1] if match else None


def _require_parts(parts: Sequence[int], pp: int) -> None:
    if len(parts) != pp:
        raise PlanError(_unknown(f"--parts names the first layers of {len(parts)} stages, the layout has {pp}"))
    if parts[0] != 0 or any(first >= second for first, second in itertools.pairwise(parts)):
        raise PlanError(_unknown(f"--parts must begin with layer 0 and rise, unlike {','.join(map(str, parts))}"))


def _divide(pipeline: Pipeline, training: Training, parts: Sequence[int]) -> list[list[str]]:
    """Returns what each stage of another division trains, in its order."""
    if odd := next((order for order in pipeline.stages if not _in_order(training, order)), None):
        raise PlanError(_unknown(f"a stage's groups do not follow the model's order ({odd[0]} first)"))
    ties = {tie: _stages_of_tie(pipeline, tie, parts) for tie in _ties(pipeline)}
    orders: list[list[str]] = [[] for _ in parts]
    for group in training.groups:
        for member in group.members:
            fqn = member.weights.key.fqn
            layer = _layer_of(fqn)
            held = ties.get(_tie_of(fqn) or "", set[int]()) if layer is None else {bisect_right(parts, layer) - 1}
            if not held:
                raise PlanError(_unknown(f"{fqn} is in no layer"))
            for number in held:
                orders[number].append(fqn)
    for number, order in enumerate(orders):
        if not order:
            raise PlanError(_unknown(f"stage {number} from layer {parts[number]} on would train nothing"))
        if number and len({tie for fqn in order if (tie := _tie_of(fqn))}) > 1:
            raise PlanError(_unknown(f"stage {number} has several tied modules, whose order there is not known"))
    return orders


def _in_order(training: Training, order: Sequence[str]) -> bool:
    """Whether every group lists a stage's tied modules first, then its layers one after the other."""
    for group in training.groups:
        members = {member.weights.key.fqn for member in group.members}
        layers = [-1 if (layer := _layer_of(fqn)) is None else layer for fqn in order if fqn in members]
        if layers != sorted(layers):
            return False
    return True


def _ties(pipeline: Pipeline) -> list[str]:
    return list(dict.fromkeys(tie for order in pipeline.stages for fqn in order if (tie := _tie_of(fqn))))


def _stages_of_tie(pipeline: Pipeline, tie: str, parts: Sequence[int]) -> set[int]:
    """Returns the stages that use a tied module.

    A use through a function of its own (`forward_fn`) has no file: it is a layer without one, in a stage of the source
    that holds the module. A module that is used once is tied to nothing, so there is a second use.
    """
    found: set[int] = set()
    uses = 0
    spans = list(_spans(pipeline))
    hidden: list[set[int]] = []
    for order, (first, last) in zip(pipeline.stages, spans, strict=True):
        if not any(_tie_of(fqn) == tie for fqn in order):
            continue
        known = [
            layer
            for layer, names in pipeline.layers.items()
            if first <= layer <= last and any(_tie_of(fqn) == tie for fqn in names.values())
        ]
        uses += len(known) or 1
        found |= {bisect_right(parts, layer) - 1 for layer in known}
        if not known:
            hidden.append(_without_file(pipeline, first, last))
    if uses == 1 and not hidden:
        hidden.append(_without_file(pipeline, 0, _FAR))
    for layers in hidden:
        stages = {bisect_right(parts, layer) - 1 for layer in layers}
        if len(stages) != 1:
            raise PlanError(
                _unknown(f"the tied module {tie} is used by a layer that has no file, and which stage has it is open")
            )
        found |= stages
    return found


def _spans(pipeline: Pipeline) -> Iterator[tuple[int, int]]:
    """Yields the layers that each stage of the source may have had, by what its neighbours trained."""
    trained = [_layers_of(order) for order in pipeline.stages]
    for number in range(len(trained)):
        before = [layer for layers in trained[:number] for layer in layers]
        after = [layer for layers in trained[number + 1 :] for layer in layers]
        yield max(before, default=-1) + 1, min(after, default=_FAR + 1) - 1


def _without_file(pipeline: Pipeline, first: int, last: int) -> set[int]:
    """Returns layers of a span that have no file; beyond all that have one, the next and a far one."""
    end = max(pipeline.layers, default=-1) + 1
    found = {layer for layer in range(first, min(last, end - 1) + 1) if layer not in pipeline.layers}
    return found | ({max(first, end), last} if last >= end else set())


def _stage(training: Training, order: Sequence[str]) -> Training:
    """Returns a stage's part of a run. DeepSpeed takes groups without parameters out of its optimizer."""
    groups: list[TrainedGroup] = []
    for group in training.groups:
        members = {member.weights.key.fqn: member for member in group.members}
        held = tuple(members[fqn] for fqn in order if fqn in members)
        if held:
            groups.append(replace(group, members=held))
    return Training(groups=groups, precision=training.precision)


def _layer_files(state: LogicalState, pipeline: Pipeline) -> Iterator[tuple[int, dict[str, Any]]]:
    for layer, names in pipeline.layers.items():
        held: dict[str, Any] = {}
        for inner, fqn in names.items():
            entry = state.tensors.get(f"param:{fqn}") or state.tensors.get(f"buffer:{fqn}")
            if entry is None:
                raise PlanError(_unknown(f"layer {layer} holds {inner}, of which the source has no tensor"))
            held[inner] = write_tensor(entry)
        yield layer, held


def _shown(stage: Training) -> str:
    fqns = [member.weights.key.fqn for group in stage.groups for member in group.members]
    layers = sorted(_layers_of(fqns))
    ties = sorted({tie for fqn in fqns if (tie := _tie_of(fqn))})
    text = [f"layers {layers[0]} to {layers[-1]}"] if layers else []
    return " and ".join([*text, *ties])


def _unknown(what: str) -> Problem:
    return Problem(
        "SR-DSW-STAGES",
        what,
        where={"key": "pp"},
        hint="say where every stage of the job begins, as in `--layout pp=3,dp=2 --parts 0,4,8`: DeepSpeed prints it "
        "when the job starts (`stage=1 layers=4`). With the source's number of stages, or one stage, nothing need be "
        "said; `--to universal` fits every number",
    )
