"""From opened files to logical state: model, masters, optimizer, groups, progress and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from samerun.core.dtype import DType
from samerun.core.state import LogicalState, RecordedProgress, Role, TensorEntry, TensorKey, Tiling
from samerun.errors import Problem, Severity
from samerun.formats.deepspeed.client import Sections, read_sections
from samerun.formats.deepspeed.gather import Gatherer, Replica
from samerun.formats.deepspeed.model import enabled
from samerun.formats.deepspeed.states import plain_value
from samerun.formats.placement import Placement, place_whole
from samerun.formats.zero.checks import check_source
from samerun.formats.zero.model_tensors import Cutter, Names, add_model, aliases_by_owner, collect_names
from samerun.formats.zero.optimizer_tensors import Flat, add_flat, counter_dtype, groups_of
from samerun.formats.zero.source import Source, topology_of
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
    tensors, placements, replicas = gatherer.finish(aliases_by_owner(names.shared))
    masters_as_parameters(flat, names, source, tensors, placements, replicas)
    constants = add_counters(flat, tensors, placements)
    sections = read_sections(list(source.models.values()), source.files) if source.models else None
    problems = [*source.problems, *gatherer.problems, *_once(flat.problems)]
    problems += check_source(source, names, cutter, flat, sections)
    state = LogicalState(
        format="zero",
        tensors=_ordered(tensors),
        groups=groups_of(flat),
        progress=sections.progress if sections else RecordedProgress(),
        scheduler=sections.scheduler if sections else None,
        rng=sections.rng if sections else {},
        data=sections.data if sections else {},
        objects=_objects(source, sections),
        topology=topology_of(source),
        written_by=written_by(source),
        problems=tuple(problems),
    )
    return Assembled(state, placements, constants, tuple(replicas), names, flat, source)


def _once(problems: list[Problem]) -> list[Problem]:
    """Keeps the first finding of each kind per file."""
    seen: dict[tuple[str, str, str], Problem] = {}
    for problem in problems:
        seen.setdefault((problem.code, problem.message, str(problem.where.get("file"))), problem)
    return list(seen.values())


def masters_as_parameters(
    flat: Flat,
    names: Names,
    source: Source,
    tensors: dict[str, TensorEntry],
    placements: dict[str, Placement],
    replicas: list[Replica],
) -> None:
    """Gives every parameter its values.

    A run in fp32 has no masters: its flat buffers are the parameters, and a second copy of those that the model file
    holds too. In other runs the masters stay, and parameters that no model file holds are the masters' cast.
    """
    for fqn, (name, dtype) in flat.masters.items():
        master, key = f"master:{fqn}", TensorKey(Role.PARAM, fqn)
        text = str(key)
        entry = tensors.get(master)
        if entry is None:
            continue
        held = tensors.get(text)
        own = held.dtype if held is not None else names.dtypes.get(name) or _trained_dtype(source, dtype)
        aliases = aliases_by_owner(names.shared).get(fqn, ()) if names.shared else ()
        tensors[master] = replace(entry, aliases=aliases)
        if held is None:
            cast = None if own == dtype else own
            tensors[text] = replace(entry, key=key, dtype=own, aliases=aliases)
            placements[text] = replace(placements[master], cast=cast)
            replicas += [replace(copy, key=text, placement=replace(copy.placement, cast=cast)) for copy in replicas if copy.key == master]
        if own == dtype:
            if held is not None:
                replicas.append(Replica(text, placements[master], "the optimizer's flat buffers"))
            del tensors[master], placements[master]
            replicas[:] = [copy for copy in replicas if copy.key != master]


def _trained_dtype(source: Source, master: DType) -> DType:
    """Returns the type that the run trains in, from its configuration; the masters' own if it names none."""
    from samerun.core.dtype import DTYPES

    if enabled(source.config, "bf16", "bfloat16"):
        return DTYPES["bfloat16"]
    return DTYPES["float16"] if enabled(source.config, "fp16") else master


def add_counters(
    flat: Flat, tensors: dict[str, TensorEntry], placements: dict[str, Placement]
) -> dict[str, int | float]:
    """Adds the counters that optimizers keep per shard, to each of its parameters. Returns those kept as plain numbers."""
    constants: dict[str, int | float] = {}
    for text, (key, counter) in flat.counters.items():
        if text in tensors or counter.value is None:
            continue
        if counter.extent is not None:
            placements[text] = place_whole(counter.extent)
            tensors[text] = TensorEntry(
                key, counter.extent.shape, counter.extent.dtype, placements[text].tiling, key.fqn
            )
        else:
            constants[text] = counter.value
            tensors[text] = TensorEntry(key, (), counter_dtype(counter.value), Tiling.whole(()), key.fqn)
    return constants


def _ordered(tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns tensors by role: parameters, buffers, masters, optimizer."""
    order = {Role.PARAM: 0, Role.BUFFER: 1, Role.MASTER: 2, Role.EMA: 3, Role.OPTIM: 4}
    return dict(sorted(tensors.items(), key=lambda item: order[item[1].key.role]))


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


def unknown_classes(source: Source) -> list[Problem]:
    """Names the classes of objects that are kept as inert records."""
    names = source.unknown_classes()
    if not names:
        return []
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [
        Problem(
            "SR-PKL-UNKNOWN",
            f"objects of classes that samerun does not know are kept as inert records: {shown}",
            where={"file": str(source.root)},
            severity=Severity.NOTE,
            hint="nothing of them was executed; torch.load with weights_only=False would",
        )
    ]
