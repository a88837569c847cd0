"""From a sorted saved state to logical state: names, roles, slots, groups, ties, objects, and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samerun.core.dtype import DTYPES
from samerun.core.schedule import number_schedulers
from samerun.core.state import (
    WRAPPERS,
    LogicalState,
    ParamGroup,
    RecordedProgress,
    Role,
    TensorEntry,
    TensorKey,
    Tiling,
    normalize_fqn,
)
from samerun.errors import FormatError, Problem, Severity
from samerun.formats.base import Checkpoint
from samerun.formats.statedict.averages import name_averages, prefixes_of
from samerun.formats.statedict.checkpoint import Held, StateDictCheckpoint
from samerun.formats.statedict.naming import Named, name_optimizers
from samerun.formats.statedict.optimizer import MASTER_SLOTS, check_slots, parse_optimizer
from samerun.formats.statedict.progress import read_progress
from samerun.formats.statedict.recognise import is_parameter_name, looks_like_model, looks_other
from samerun.formats.statedict.records import check_read, unread_tensor
from samerun.formats.statedict.roles import assign_roles
from samerun.formats.statedict.saved import SavedModel, SavedState
from samerun.formats.statedict.stored import Stored, read_stored
from samerun.formats.statedict.ties import find_copies, find_shared
from samerun.formats.statedict.tree import flatten, number_of, to_plain
from samerun.stores.local import MappedFiles

_COUNTERS_READ = 64


def assemble(
    path: Path,
    format: str,
    saved: SavedState,
    files: MappedFiles,
    inners: tuple[Checkpoint, ...] = (),
    *,
    per_rank: bool = False,
) -> StateDictCheckpoint:
    """Builds the opened checkpoint. Reads small objects and counters, no large tensor.

    `inners` are the checkpoints inside that hold some of its tensors; with `per_rank` each rank loads its own file.
    """
    assembly = _Assembly(saved, files)
    state = assembly.build(path, format)
    return StateDictCheckpoint(path, state, assembly.held, files, tuple(saved.files), inners, per_rank=per_rank)


class _Assembly:
    """The steps of building one state; each leaves its result for the next."""

    def __init__(self, saved: SavedState, files: MappedFiles) -> None:
        self.saved = saved
        self.files = files
        self.problems = list(saved.problems)
        self.tensors: dict[str, TensorEntry] = {}
        self.held: dict[str, Held] = {}

    def build(self, path: Path, format: str) -> LogicalState:
        models, rest = _choose_models(self.saved.models)
        named = self.name_optimizers(models)
        averages, problems = name_averages(self.saved.averages, [model for model in models if not model.average], named)
        self.problems += problems
        models += averages
        prefixes = _prefixes(models, named) | prefixes_of([model for model in models if model.average])
        groups = self.add_optimizers(named, prefixes)
        known = frozenset(fqn for group in groups for fqn in group.params) | {
            entry.key.fqn for entry in self.tensors.values()
        }
        for model in models:
            self.add_model(model, prefixes.get(id(model), ""), known, has_optimizer=bool(named), groups=bool(groups))
        for model in rest:
            self.saved.objects |= {f"{model.name}.{name}": tensor for name, tensor in model.tensors.items()}
        self.report_wrappers(models)
        self.report_unknown(path)
        self.problems += check_read(self.saved.unread, str(path))
        return self.state(format, groups)

    def name_optimizers(self, models: Sequence[SavedModel]) -> list[Named]:
        mains = [model for model in models if not model.average]
        known = frozenset(name for model in mains for name in model.tensors)
        parsed = [parse_optimizer(name, node, known) for name, node in self.saved.optimizers]
        named = name_optimizers(parsed, mains)
        for one in named:
            self.problems.extend(one.problems)
        return named

    def add_optimizers(self, named: Sequence[Named], prefixes: Mapping[int, str]) -> tuple[ParamGroup, ...]:
        groups: list[ParamGroup] = []
        for one in named:
            self.problems += check_slots(one.optimizer)
        for one in named:
            prefix = prefixes.get(id(one.model), "")
            names = {key: name if name.startswith("#") else prefix + name for key, name in one.names.items()}
            for key, member in one.optimizer.members.items():
                for slot, value in member.slots.items():
                    original = f"{one.optimizer.name}.state.{key}.{slot}".lstrip(".")
                    self.add_slot(names[key], slot, value, original, open_name=key in one.open)
            for group in one.optimizer.groups:
                settings = to_plain(dict(group.hyperparameters), self.files)
                groups.append(ParamGroup(tuple(names[key] for key in group.keys), settings))
                self.spread_step(groups[-1])
        return tuple(groups)

    def add_slot(self, fqn: str, slot: str, value: Any, original: str, *, open_name: bool) -> None:
        key = TensorKey(Role.MASTER, fqn) if slot in MASTER_SLOTS else TensorKey(Role.OPTIM, fqn, slot)
        number = number_of(value)
        if isinstance(value, Stored):
            self.add(key, value, original, open_name=open_name)
        elif number is not None:
            self.add_number(key, number, original)
        elif value is not None:
            self.saved.objects[original] = value
            if (kind := unread_tensor(value)) is not None:
                self.saved.unread[original] = kind

    def spread_step(self, group: ParamGroup) -> None:
        """Gives each parameter of a group the step that some optimizers keep once per group."""
        number = number_of(group.hyperparameters.get("step"))
        if number is None:
            return
        for fqn in group.params:
            key = TensorKey(Role.OPTIM, fqn, "step")
            if str(key) not in self.tensors:
                self.add_number(key, number, "param_groups.step")

    def add_number(self, key: TensorKey, number: tuple[int | float, str], original: str) -> None:
        self.tensors[str(key)] = TensorEntry(key, (), DTYPES[number[1]], Tiling.whole(()), original)
        self.held[str(key)] = number[0]

    def add(
        self,
        key: TensorKey,
        tensor: Stored,
        original: str,
        aliases: tuple[str, ...] = (),
        *,
        inferred: bool = False,
        open_name: bool = False,
    ) -> None:
        """Files a tensor under its key; two that meet under one key are a finding, and both are kept."""
        text = str(key)
        if text in self.tensors:
            self.problems.append(_twice(text, self.tensors[text].original, original))
            key = TensorKey(key.role, original, key.slot)
            text = str(key)
        self.tensors[text] = TensorEntry(
            key, tensor.shape, tensor.dtype, tensor.tiling, original, aliases, inferred, open_name
        )
        self.held[text] = tensor

    def add_model(
        self, model: SavedModel, prefix: str, known: frozenset[str], *, has_optimizer: bool, groups: bool
    ) -> None:
        inside = frozenset(name for name in model.tensors if prefix + normalize_fqn(name) in known)
        ties = find_shared(model.tensors, inside)
        for alias, owner in model.aliases.items():
            ties[owner] = (*ties.get(owner, ()), alias)
        hidden = {alias for names in ties.values() for alias in names}
        left = {name: tensor for name, tensor in model.tensors.items() if name not in hidden}
        copies = find_copies(left, inside, self.files, has_optimizer=has_optimizer)
        for owner, names in copies.items():
            ties[owner] = (*ties.get(owner, ()), *names)
            hidden.update(names)
        shown = {name: tensor for name, tensor in model.tensors.items() if name not in hidden}
        roles = assign_roles(model, shown, inside, groups=groups)
        for name, tensor in shown.items():
            role, inferred = roles[name]
            aliases = tuple(prefix + normalize_fqn(alias) for alias in ties.get(name, ()))
            original = f"{model.name}.{name}" if model.name else name
            self.add(TensorKey(role, prefix + normalize_fqn(name)), tensor, original, aliases, inferred=inferred)

    def report_wrappers(self, models: Sequence[SavedModel]) -> None:
        for model in models:
            found = [
                wrapper for wrapper in WRAPPERS if model.tensors and all(wrapper in name for name in model.tensors)
            ]
            if found and not model.average:
                self.problems.append(_wrapped(model, found))

    def report_unknown(self, path: Path) -> None:
        names = sorted(self.saved.unknown)
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            self.problems.append(
                Problem(
                    "SR-PKL-UNKNOWN",
                    f"objects of classes that samerun does not know are kept as inert records: {shown}",
                    severity=Severity.NOTE,
                    where={"file": str(path)},
                    hint="nothing of them was executed; torch.load with weights_only=False would",
                )
            )

    def state(self, format: str, groups: tuple[ParamGroup, ...]) -> LogicalState:
        saved = self.saved
        sections = {**saved.objects, **dict(saved.schedulers), **saved.rng, **saved.data}
        plain = {name: to_plain(node, self.files) for name, node in sections.items()}
        objects = {flat: value for name, node in plain.items() for flat, value in flatten(node, name)}
        data = {name: plain[name] for name in saved.data}
        progress, problems = read_progress(objects, data)
        self.problems.extend(problems)
        schedulers = {name: plain[name] for name, _ in saved.schedulers if isinstance(plain[name], Mapping)}
        return LogicalState(
            format=format,
            tensors=self.tensors,
            groups=groups,
            progress=self.complete(_merge_progress(saved.progress, progress)),
            scheduler=number_schedulers(_of_first_list(schedulers)),
            rng={name: plain[name] for name in saved.rng},
            data=data,
            objects=objects,
            topology=saved.topology,
            written_by=saved.written_by,
            problems=tuple(self.problems),
        )

    def complete(self, progress: RecordedProgress) -> RecordedProgress:
        """Falls back to the optimizer's own step where nothing else counts updates."""
        if progress.update is not None:
            return progress
        keys = [key for key, entry in self.tensors.items() if entry.key.slot == "step"][:_COUNTERS_READ]
        steps = [step for step in map(self.step_of, keys) if step is not None]
        if not steps:
            return progress
        return _merge_progress(progress, RecordedProgress(update=int(max(steps))))

    def step_of(self, key: str) -> float | None:
        held = self.held[key]
        if not isinstance(held, Stored):
            return float(held)
        if held.num_elements != 1 or held.dtype.kind not in ("float", "int"):
            return None
        try:
            return float(read_stored(held, self.files).astype("float64").reshape(-1)[0])
        except FormatError:
            return None


def _choose_models(models: Sequence[SavedModel]) -> tuple[list[SavedModel], list[SavedModel]]:
    """Splits state dicts into models (and averages of them) and other collections of tensors."""
    kept = [model for model in models if model.average or not looks_other(model.name) or not model.name]
    mains = [model for model in kept if not model.average]
    largest = max(mains, key=lambda model: (looks_like_model(model.name), _elements(model)), default=None)
    chosen = [model for model in kept if model is largest or model.average or _is_layered(model)]
    return chosen, [model for model in models if model not in chosen]


def _elements(model: SavedModel) -> int:
    return sum(tensor.num_elements for tensor in model.tensors.values())


def _is_layered(model: SavedModel) -> bool:
    return any(is_parameter_name(name) for name in model.tensors)


def _prefixes(models: Sequence[SavedModel], named: Sequence[Named]) -> dict[int, str]:
    """Returns, by model, what its names must begin with: nothing for the model that is trained, or the only one.

    Names in any further model begin with that model's own, and so do all if trained models share names.
    """
    mains = [model for model in models if not model.average]
    driven = list({id(one.model): one.model for one in named if one.model is not None}.values())
    chief = driven or sorted(mains, key=lambda model: (looks_like_model(model.name), _elements(model)))[-1:]
    names = [normalize_fqn(name) for model in chief for name in model.tensors]
    clash = len(names) > len(set(names))
    bare = set[int]() if clash else {id(model) for model in chief}
    return {id(model): "" if id(model) in bare or not model.name else f"{model.name}." for model in mains}


def _of_first_list(schedulers: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the first scheduler, with those that lie in one list with it (`schedulers.0`, `schedulers.1`)."""
    first = next(iter(schedulers), "")
    place, _, number = first.rpartition(".")
    if not number.isdecimal():
        return [schedulers[first]] if first else []
    return [
        value
        for name, value in schedulers.items()
        if name.rpartition(".")[0] == place and name[len(place) + 1 :].isdecimal()
    ]


def _merge_progress(first: RecordedProgress | None, second: RecordedProgress) -> RecordedProgress:
    """Returns what `first` says, completed by `second`."""
    if first is None:
        return second
    return RecordedProgress(
        update=second.update if first.update is None else first.update,
        samples=second.samples if first.samples is None else first.samples,
        tokens=second.tokens if first.tokens is None else first.tokens,
        epoch=second.epoch if first.epoch is None else first.epoch,
    )


def _twice(key: str, first: str, second: str) -> Problem:
    return Problem(
        "SR-KEY-TWICE",
        f"two stored tensors are both {key}",
        where={"tensor": key},
        expected=first,
        found=second,
        hint="a model was saved both wrapped and bare, or two optimizers share names; only one can be resumed from",
    )


def _wrapped(model: SavedModel, wrappers: Sequence[str]) -> Problem:
    return Problem(
        "SR-NAME-WRAPPED",
        f"every name of {model.name or 'the model'} carries {', '.join(wrappers)}: it was saved from inside a wrapper",
        severity=Severity.NOTE,
        where={"tensor": next(iter(model.tensors))},
        hint="load it into a model wrapped in the same way, or take the prefix off: with strict=False a bare model "
        "ignores every tensor without a word",
    )
