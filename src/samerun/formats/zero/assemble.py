"""From opened files to logical state: model, masters, optimizer, groups, progress and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samerun.core.state import LogicalState, RecordedProgress
from samerun.errors import Problem
from samerun.formats.deepspeed.client import Sections, read_sections
from samerun.formats.deepspeed.gather import Gatherer, Replica
from samerun.formats.deepspeed.masters import Gathered, add_counters, by_role, settle_masters
from samerun.formats.deepspeed.model_tensors import Cutter, Names, add_model, aliases_by_owner, collect_names
from samerun.formats.deepspeed.opened import topology
from samerun.formats.deepspeed.states import plain_value
from samerun.formats.placement import Placement
from samerun.formats.zero.checks import check_source
from samerun.formats.zero.groups import groups_of, read_groups
from samerun.formats.zero.optimizer_tensors import Flat, add_flat
from samerun.formats.zero.pipeline import read_pipeline
from samerun.formats.zero.source import Source
from samerun.formats.zero.tracker import check_tracker
from samerun.formats.zero.whole_optimizer import add_whole_optimizer


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """The logical state with what is needed to read it and to check its values.

    `replicas` are further copies of tensors: of tied weights on other pipeline stages, of tensors that every
    tensor-parallel rank holds, of buffers of other ranks, and of fp32 parameters in the optimizer's flat buffers.
    """

    state: LogicalState
    placements: Mapping[str, Placement]
    constants: Mapping[str, int | float]
    replicas: tuple[Replica, ...]
    names: Names
    flat: Flat
    source: Source


def assemble(source: Source) -> Assembled:
    """Builds the logical state of an opened directory."""
    names = collect_names(source)
    cutter = Cutter(source, names)
    gatherer = Gatherer()
    add_model(source, names, cutter, gatherer)
    add = add_whole_optimizer if source.stage == 0 else add_flat
    flat = add(source, names, cutter, gatherer)
    if source.stage > 0:
        flat.groups = read_groups(source)
    gathered = Gathered(*gatherer.finish(aliases_by_owner(names.shared)))
    settle_masters(gathered, flat.masters, names, source.config, "the optimizer's flat buffers")
    constants = add_counters(gathered, flat.counters)
    sections = read_sections(list(source.models.values()), source.degrees, source.files) if source.models else None
    problems = [*source.problems, *gatherer.problems, *_once(flat.problems)]
    problems += [
        *check_source(source, names, cutter, flat, sections),
        *check_tracker(source.root, source.problems),
    ]
    state = LogicalState(
        format="zero",
        tensors=by_role(gathered.tensors),
        groups=groups_of(flat),
        progress=sections.progress if sections else RecordedProgress(),
        scheduler=sections.scheduler if sections else None,
        rng=sections.rng if sections else {},
        data=sections.data if sections else {},
        objects=_objects(source, sections),
        topology=topology(source.degrees, sharded=source.stage > 0, pipeline=read_pipeline(source, names)),
        written_by=written_by(source),
        problems=tuple(problems),
    )
    return Assembled(state, gathered.placements, constants, tuple(gathered.replicas), names, flat, source)


def _once(problems: list[Problem]) -> list[Problem]:
    """Keeps the first finding of each kind per file."""
    seen: dict[tuple[str, str, str], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.code, problem.message, str(problem.where.get("file"))), problem)
    return list(seen.values())


def _objects(source: Source, sections: Sections | None) -> dict[str, object]:
    """Returns what is neither tensor, group, scheduler nor data: configuration, scaler, and the script's own values."""
    kept: dict[str, object] = dict(sections.objects) if sections else {}
    first = next(iter(source.optims.values()), None)
    if first is not None and first.scaler is not None:
        kept["loss_scaler"] = plain_value(first.scaler, first.file, source.files)
    for name, value in (first.extras if first else {}).items():
        kept.setdefault(f"optimizer.{name}", plain_value(value, first.file, source.files) if first else value)
    model = source.first
    wrapped = model.value.get("optimizer") if model is not None else None
    if isinstance(wrapped, dict) and "optimizer_state_dict" in wrapped and model is not None:
        scaler = {str(name): value for name, value in wrapped.items() if isinstance(value, bool | int | float)}
        kept["loss_scaler"] = plain_value(scaler, model.file, source.files)
    return kept


def written_by(source: Source) -> dict[str, str]:
    """Returns which software wrote the directory, in which layout, and how that was recognised."""
    first = source.first
    version = str(first.value.get("ds_version") or "") if first is not None else ""
    name = f"DeepSpeed ZeRO stage {source.stage}"
    found = {"format": name, "recognised": f"looks like ZeRO stage {source.stage}, because {source.because}"}
    return {**({"deepspeed": version} if version else {}), **found}
