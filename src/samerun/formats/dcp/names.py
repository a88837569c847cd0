"""Under which names a DCP checkpoint is written: those of the source where it has any, else those of torch's recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from samerun.core.state import LogicalState, Role, TensorEntry, normalize_fqn
from samerun.formats.statedict.optimizers import WrittenGroup, WrittenOptimizer
from samerun.formats.torchfile.nodes import Tensor

MODEL, OPTIMIZER, AVERAGE = "model", "optim", "ema"
FLATTENED = "flattened"
Path = tuple[str | int, ...]

_NAMED = frozenset({"dcp", "torch", "ranklocal", "fsdp1"})  # whose original names tell containers from names inside


def model_paths(state: LogicalState) -> Iterator[tuple[TensorEntry, Path]]:
    """Yields every tensor of a model with the paths that it is saved under: its own, then those of its aliases.

    DCP has no ties: torch writes a tied tensor once for each of its names, and a loading job asks for all of them.
    """
    default = _default_container(state)
    nested = state.format == "dcp" and (any(_split(state, entry)[0] for entry in _parameters(state)) or _joined(state))
    for entry in state.tensors.values():
        if entry.key.role in (Role.OPTIM, Role.MASTER):
            continue
        average = entry.key.role is Role.EMA
        container, name = _split(state, entry)
        if container is None:
            container, name = (AVERAGE if average else default), entry.key.fqn
        further = not container and nested and "." in name
        if further:
            container, _, name = name.partition(".")
        head = (container,) if container else ()
        yield entry, (*head, name)
        stem = name[: -len(entry.key.fqn)] if name.endswith(entry.key.fqn) else ""
        for alias in entry.aliases:
            yield entry, (*head, stem + (alias.removeprefix(f"{container}.") if further else alias))


def _joined(state: LogicalState) -> bool:
    """Whether containers went into the names of trained models, because several share names: optimizers have less."""
    slots = (entry for entry in state.tensors.values() if entry.key.role is Role.OPTIM and entry.key.slot)
    places = ((entry.key.fqn, _root_of(state, entry.key.fqn, entry.key.slot or "", entry)) for entry in slots)
    return any(place is not None and normalize_fqn(place[1]) != fqn for fqn, place in places)


def _default_container(state: LogicalState) -> str:
    found = next((_split(state, entry)[0] for entry in _parameters(state)), None)
    return MODEL if found is None else found


def _parameters(state: LogicalState) -> Iterator[TensorEntry]:
    return (entry for entry in state.tensors.values() if entry.key.role is Role.PARAM)


def _split(state: LogicalState, entry: TensorEntry) -> tuple[str | None, str]:
    """Splits an original name into container and name inside. No container is known of formats that have none."""
    if state.format not in _NAMED:
        return None, entry.key.fqn
    parts = entry.original.split(".")
    for i in range(len(parts)):
        inside = ".".join(parts[i:])
        if normalize_fqn(inside) == entry.key.fqn or (state.format == "dcp" and inside == entry.key.fqn):
            if not i and state.format != "dcp":
                return None, entry.key.fqn
            return ".".join(parts[:i]), inside if state.format == "dcp" else entry.key.fqn
    # A further model whose container went into the FQN; in DCP the same as a name of the state dict's first level.
    return ("", entry.original) if state.format == "dcp" else (None, entry.key.fqn)


class OptimizerNames:
    """The names of an optimizer's items: `<root>.state.<fqn>.<slot>` and those of the groups."""

    def __init__(self, state: LogicalState, optimizer: WrittenOptimizer) -> None:
        self._flattened = state.written_by.get("optimizer_state") == FLATTENED
        self._saved: dict[str, tuple[str, str]] = {}
        for fqn, slots in optimizer.slots.items():
            known = (_root_of(state, fqn, slot, entry) for slot, entry in slots.items())
            found = next((place for place in known if place), None)
            if found:
                self._saved[fqn] = found
        roots = [root for root, _ in self._saved.values()]
        self._default = max(dict.fromkeys(roots), key=roots.count) if roots else OPTIMIZER

    def slot(self, fqn: str, slot: str) -> Path:
        """Returns the path of one slot. Slots inside slots are nested."""
        root, name = self._saved.get(fqn, (self._default, fqn))
        if self._flattened:
            return (*_head(root), f"state.{name}.{slot}")
        return (*_head(root), "state", name, *slot.split("."))

    def groups(self, groups: tuple[WrittenGroup, ...]) -> Iterator[tuple[Path, Any]]:
        """Yields (path, value) of hyperparameters and member lists, in the source's style: nested, or per parameter."""
        numbers: dict[str, int] = {}
        for group in groups:
            places = [self._saved[fqn] for fqn in group.params if fqn in self._saved]
            root = places[0][0] if places else self._default
            names = [self._saved.get(fqn, (root, fqn))[1] for fqn in group.params]
            if self._flattened:
                for name in names:
                    stem = f"param_groups.{name}"
                    yield from (((*_head(root), f"{stem}.{key}"), value) for key, value in group.settings.items())
                continue
            head = (*_head(root), "param_groups")
            number = numbers[root] = numbers.get(root, -1) + 1
            yield from (((*head, number, key), value) for key, value in group.settings.items())
            yield (*head, number, "params"), names


def _head(root: str) -> tuple[str, ...]:
    return (root,) if root else ()


def _root_of(state: LogicalState, fqn: str, slot: str, entry: TensorEntry) -> tuple[str, str] | None:
    """Returns the optimizer's name and the parameter's name in it, as a slot's original name tells them."""
    if state.format not in _NAMED:
        return None
    parts = f".{entry.original}".split(".state.")
    places = [(".state.".join(parts[:i]), ".state.".join(parts[i:])) for i in range(1, len(parts))]
    for root, rest in places:  # an optimizer may itself lie in a mapping called `state`
        name = rest.removesuffix(f".{slot}")
        same = normalize_fqn(name) == fqn or fqn.endswith(f".{normalize_fqn(name)}")
        if name != rest and (same or name.isdecimal()):
            return root.removeprefix("."), name if same and state.format == "dcp" else fqn
    return (places[0][0].removeprefix("."), fqn) if places else None


def flatten_sections(sections: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yields (path, value) as torch flattens a state dict: mappings always, lists where tensors or mappings are inside.

    Where torch would flatten something empty away, or give two values one name (1 and "1"), it stays an object.
    """
    for key, value in sections.items():
        yield from _flatten((str(key),), value)


def _flatten(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if _is_empty(value):
        yield path, value
    elif isinstance(value, Mapping) and len({str(key) for key in value}) == len(value):
        for key, item in value.items():
            yield from _flatten((*path, str(key)), item)
    elif isinstance(value, list) and not _is_leaf(value):
        for number, item in enumerate(value):
            yield from _flatten((*path, number), item)
    else:
        yield path, value


def _is_empty(value: Any) -> bool:
    """Whether flattening would leave nothing of a value."""
    if isinstance(value, Mapping):
        return all(_is_empty(item) for item in value.values())
    return isinstance(value, list) and not _is_leaf(value) and all(_is_empty(item) for item in value)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping | Tensor):
        return False
    return not isinstance(value, list) or all(_is_leaf(item) for item in value)
