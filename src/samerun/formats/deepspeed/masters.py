"""From masters to parameters, and from counters to tensors: the last steps that both DeepSpeed formats share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from samerun.core.dtype import DTYPES, DType
from samerun.core.state import Role, TensorEntry, TensorKey, Tiling
from samerun.formats.base import Extent
from samerun.formats.deepspeed.gather import Replica
from samerun.formats.deepspeed.model import enabled
from samerun.formats.deepspeed.model_tensors import Names, aliases_by_owner
from samerun.formats.placement import Placement, place_whole


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that an optimizer keeps for many parameters at once, and the tensor that holds it if one does."""

    value: int | float
    extent: Extent | None = None


@dataclass(slots=True)
class Gathered:
    """Tensors under construction, by key: entry, place, and further copies."""

    tensors: dict[str, TensorEntry]
    placements: dict[str, Placement]
    replicas: list[Replica]


def settle_masters(
    gathered: Gathered, masters: Mapping[str, tuple[str, DType]], names: Names, config: Mapping[Any, Any], label: str
) -> None:
    """Gives every parameter its values. `masters` are, by FQN, the original name and the masters' element type.

    A run in fp32 has no masters: what the optimizer keeps are the parameters, and a second copy of those that a model
    file holds too. In other runs masters stay, and parameters that no model file holds are the masters' cast.
    """
    aliases = aliases_by_owner(names.shared)
    for fqn, (name, dtype) in masters.items():
        master, key = f"master:{fqn}", TensorKey(Role.PARAM, fqn)
        entry, held = gathered.tensors.get(master), gathered.tensors.get(str(key))
        if entry is None:
            continue
        own = held.dtype if held is not None else names.dtypes.get(name) or trained_dtype(config, dtype)
        entry = gathered.tensors[master] = replace(entry, aliases=aliases.get(fqn, ()))
        if held is None:
            _cast_from(gathered, entry, key, None if own == dtype else own)
        if own == dtype:
            _drop(gathered, master, str(key) if held is not None else None, label)


def _cast_from(gathered: Gathered, master: TensorEntry, key: TensorKey, cast: DType | None) -> None:
    """Adds a parameter that is its masters, in another type where `cast` is given."""
    text, source = str(key), str(master.key)
    gathered.tensors[text] = replace(master, key=key, dtype=cast or master.dtype)
    gathered.placements[text] = replace(gathered.placements[source], cast=cast)
    gathered.replicas += [
        replace(copy, key=text, placement=replace(copy.placement, cast=cast))
        for copy in gathered.replicas
        if copy.key == source
    ]


def _drop(gathered: Gathered, master: str, parameter: str | None, label: str) -> None:
    """Takes masters away that are the parameters; with `parameter`, keeps them as a copy to compare it with."""
    if parameter is not None:
        gathered.replicas.append(Replica(parameter, gathered.placements[master], label))
    del gathered.tensors[master], gathered.placements[master]
    gathered.replicas[:] = [copy for copy in gathered.replicas if copy.key != master]


def trained_dtype(config: Mapping[Any, Any], master: DType) -> DType:
    """Returns the type that the run trains in, from its configuration; the masters' own if it names none."""
    if enabled(config, "bf16", "bfloat16"):
        return DTYPES["bfloat16"]
    return DTYPES["float16"] if enabled(config, "fp16") else master


def add_counters(gathered: Gathered, counters: Mapping[str, tuple[TensorKey, Counter]]) -> dict[str, int | float]:
    """Adds counters to each parameter that they hold for. Returns, by key, those kept as plain numbers."""
    constants: dict[str, int | float] = {}
    for text, (key, counter) in counters.items():
        if text in gathered.tensors:
            continue
        extent = counter.extent
        if extent is not None:
            gathered.placements[text] = place_whole(extent)
            tiling = gathered.placements[text].tiling
            gathered.tensors[text] = TensorEntry(key, extent.shape, extent.dtype, tiling, key.fqn)
            continue
        constants[text] = counter.value
        dtype = DTYPES["int64" if isinstance(counter.value, int) else "float64"]
        gathered.tensors[text] = TensorEntry(key, (), dtype, Tiling.whole(()), key.fqn)
    return constants


def by_role(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns tensors in order of role: parameters, buffers, masters, optimizer."""
    order = {Role.PARAM: 0, Role.BUFFER: 1, Role.MASTER: 2, Role.EMA: 3, Role.OPTIM: 4}
    return dict(sorted(tensors.items(), key=lambda item: order[item[1].key.role]))
