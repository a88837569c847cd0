"""Parameters, frozen parameters and buffers, from model files, pipeline layers and expert files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from samerun.core.dtype import DType
from samerun.core.state import Role, TensorKey, normalize_fqn
from samerun.formats.base import Extent
from samerun.formats.deepspeed.experts import FusedLayer, expert_of, fused_layers, fused_slice, is_buffer_of_expert
from samerun.formats.deepspeed.gather import Gatherer, parts_of_run, pieces_of_run, pieces_of_tensor
from samerun.formats.deepspeed.model import ModelStates, shared_storage, tensors_in
from samerun.formats.deepspeed.names import FileName
from samerun.formats.deepspeed.opened import Opened
from samerun.formats.deepspeed.slices import Slice, Slicer, whole
from samerun.formats.deepspeed.states import StateFile
from samerun.formats.torchfile import TensorRef

_LAYER_NAME = re.compile(r"(\d+)\.(.+)")
_TIED = "tied_modules."


@dataclass(slots=True)
class Names:
    """What the files say about names: parameters that are trained, buffers, ties, element types, local shapes.

    `shapes` are by (pipeline stage, name) the shape that each tensor-parallel rank holds. `order` keeps the model's
    order of names. `unplaced` collects tensors whose cut over tensor-parallel ranks is not recorded.
    """

    trained: set[str] = field(default_factory=set[str])
    buffers: set[str] = field(default_factory=set[str])
    shared: dict[str, str] = field(default_factory=dict[str, str])
    dtypes: dict[str, DType] = field(default_factory=dict[str, DType])
    shapes: dict[tuple[int, str], dict[int, tuple[int, ...]]] = field(
        default_factory=dict[tuple[int, str], dict[int, tuple[int, ...]]]
    )
    order: dict[str, None] = field(default_factory=dict[str, None])
    fused: dict[str, FusedLayer] = field(default_factory=dict[str, FusedLayer])
    unplaced: dict[str, None] = field(default_factory=dict[str, None])


def collect_names(source: Opened) -> Names:
    """Gathers what all model files say about names."""
    names = Names()
    for (mp, _), model in source.models.items():
        stage, rank = source.degrees.position(mp)
        names.buffers |= model.buffers
        names.shared |= model.shared
        names.fused |= fused_layers(model.value.get("ds_autoep_layers") or model.value.get("autoep_layers"))
        for name, shape in (pair for group in model.groups or () for pair in group):
            names.trained.add(name)
            names.shapes.setdefault((stage, name), {})[rank] = shape
        for name, shape in model.frozen.items():
            names.shapes.setdefault((stage, name), {})[rank] = shape
        for name, tensor in (model.module or {}).items():
            names.order.setdefault(name)
            names.dtypes.setdefault(name, tensor.dtype)
            if model.groups is None or 0 not in tensor.shape:
                names.shapes.setdefault((stage, name), {}).setdefault(rank, tensor.shape)
        if model.module and not _fragmented(model):
            names.shared |= {a: o for a, o in shared_storage(model.module).items() if a not in names.shared}
    return names


def _fragmented(model: ModelStates) -> bool:
    """Whether a model file is of stage 3: parameters are empty there, and only named."""
    return model.name.dp is not None


class Cutter:
    """Which part of which tensor a rank holds, over tensor-parallel ranks."""

    def __init__(self, source: Opened, names: Names) -> None:
        self._names = names
        self._degree = source.degrees.tp
        info = next((model.parallel_info for model in source.models.values() if model.parallel_info), {})
        self.slicer = Slicer(info, self._degree)

    def cut(self, name: str, stage: int, rank: int, shape: tuple[int, ...]) -> tuple[str, Slice]:
        """Returns a tensor's name and a rank's part of it. Where the cut is not recorded, ranks keep names apart."""
        if self._degree == 1:
            return name, whole(shape)
        held = self._names.shapes.get((stage, name), {})
        shapes = [held.get(number, shape) for number in range(self._degree)]
        found = self.slicer.cut(name, rank, shapes) if shapes[rank] == shape else None
        if found is not None:
            return name, found
        self._names.unplaced.setdefault(name)
        return f"{name}[tp={rank}]", whole(shape)


def add_model(source: Opened, names: Names, cutter: Cutter, gatherer: Gatherer) -> None:
    """Adds every tensor that model, layer and expert files hold as such."""
    for (mp, dp), model in source.models.items():
        stage, rank = source.degrees.position(mp)
        for name, tensor in (model.module or {}).items():
            if name in names.shared or (dp is not None and name not in names.buffers):
                continue
            _add(names, cutter, gatherer, (stage, rank, dp or 0), name, model.file.extent(tensor))
        if dp is not None:
            _add_fragments(source, names, cutter, gatherer, model, dp)
    for held in layer_tensors(source, names):
        name, (stage, rank), extent, local = held.name, held.place, held.extent, held.copy
        names.order.setdefault(name)
        names.dtypes.setdefault(name, extent.dtype)
        names.shapes.setdefault((stage, name), {}).setdefault(rank, extent.shape)
        _add(names, cutter, gatherer, (stage, rank, local), name, extent)
    for file_name, file in source.experts.items():
        _add_expert(source, names, cutter, gatherer, file_name, file)


def _add(
    names: Names, cutter: Cutter, gatherer: Gatherer, place: tuple[int, int, int], name: str, extent: Extent
) -> None:
    """Adds a rank's whole tensor. `place` is its pipeline stage, tensor-parallel rank, and the number of the copy."""
    stage, rank, number = place
    buffer = name in names.buffers
    full, cut = (name, whole(extent.shape)) if buffer else cutter.cut(name, stage, rank, extent.shape)
    key = TensorKey(Role.BUFFER if buffer else Role.PARAM, normalize_fqn(full))
    copy = (stage, rank if cut.replicated else 0, number)
    gatherer.add(key, name, extent.dtype, cut.shape, copy, pieces_of_tensor(extent, cut))


def _add_fragments(
    source: Opened, names: Names, cutter: Cutter, gatherer: Gatherer, model: ModelStates, dp: int
) -> None:
    """Adds a rank's part of every frozen parameter (stage 3): part `dp` of `ceil(elements / ranks)` each."""
    stage, rank = source.degrees.position(model.name.mp)
    for name, shape in model.frozen.items():
        tensor = model.fragments.get(name)
        extent = model.file.flat(tensor) if tensor is not None else None
        if extent is None or name in names.shared:
            continue
        full, cut = cutter.cut(name, stage, rank, shape)
        part = extent.shape[0]
        total = _product(shape)
        first = min(dp * part, total)
        parts = parts_of_run(shape, cut, first, min(part, total - first))
        names.dtypes.setdefault(name, extent.dtype)
        gatherer.add(
            TensorKey(Role.PARAM, normalize_fqn(full)),
            name,
            extent.dtype,
            cut.shape,
            (stage, rank if cut.replicated else 0, 0),
            pieces_of_run(extent, 0, shape, cut, parts, None),
        )


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensor:
    """A tensor in a pipeline layer's file: the name that it has there, and the one that the optimizer knows.

    `place` is the pipeline stage and tensor-parallel rank, `copy` the number of the copy.
    """

    layer: int
    inner: str
    name: str
    place: tuple[int, int]
    extent: Extent
    copy: int


def layer_tensors(source: Opened, names: Names) -> Iterator[LayerTensor]:
    """Yields the tensors of pipeline layers."""
    for file_name, file in source.layers.items():
        layer = file_name.layer or 0
        for inner, tensor in tensors_in(file.value).items():
            name, extent = f"{layer}.{inner}", file.extent(tensor)
            stage = _stage_of(source, names, name)
            if stage is not None or name in names.buffers:
                yield LayerTensor(layer, inner, name, (stage or 0, file_name.tp), extent, 0)
                continue
            tied = _tied_name(names, inner, tensor, file_name)
            yield LayerTensor(layer, inner, tied or name, (0, file_name.tp), extent, layer if tied else 0)


def _stage_of(source: Opened, names: Names, name: str) -> int | None:
    return next((stage for stage in range(source.degrees.pp) if (stage, name) in names.shapes), None)


def _tied_name(names: Names, inner: str, tensor: TensorRef, file_name: FileName) -> str | None:
    """Returns the tied module's name that a layer's tensor must be: the one with its name inside and its shape."""
    found = {
        name
        for (_, name), held in names.shapes.items()
        if name.startswith(_TIED)
        and name.partition(".")[2].partition(".")[2] == inner
        and held.get(file_name.tp) == tensor.shape
    }
    return found.pop() if len(found) == 1 else None


def layer_numbers(names: Names) -> set[int]:
    """Returns the pipeline layers that trained parameters and buffers belong to, by their names."""
    return {int(match[1]) for name in names.trained | names.buffers if (match := _LAYER_NAME.fullmatch(name))}


def _add_expert(
    source: Opened, names: Names, cutter: Cutter, gatherer: Gatherer, file_name: FileName, file: StateFile
) -> None:
    stage, rank = source.degrees.position(file_name.mp)
    for name, tensor in tensors_in(file.value).items():
        extent = file.extent(tensor)
        fused = fused_slice(name, extent.shape, names.fused, 0)
        full, cut = fused or cutter.cut(name, stage, rank, extent.shape)
        names.dtypes.setdefault(full, extent.dtype)
        names.order.setdefault(full)
        place = expert_of(name)
        buffer = place is not None and is_buffer_of_expert(place, names.buffers)
        gatherer.add(
            TensorKey(Role.BUFFER if buffer else Role.PARAM, normalize_fqn(full)),
            full,
            extent.dtype,
            cut.shape,
            (stage, rank if cut.replicated else 0, 0),
            pieces_of_tensor(_with_row(extent) if fused else extent, cut),
        )


def _with_row(extent: Extent) -> Extent:
    """Returns a tensor with a first dimension of 1."""
    return replace(extent, shape=(1, *extent.shape), strides=(max(1, _product(extent.shape)), *extent.strides))


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def aliases_by_owner(shared: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Returns tied names by the name that owns the values; chains are followed."""
    owners: dict[str, list[str]] = {}
    for alias in shared:
        owner, seen = shared[alias], {alias}
        while owner in shared and owner not in seen:
            seen.add(owner)
            owner = shared[owner]
        owners.setdefault(normalize_fqn(owner), []).append(normalize_fqn(alias))
    return {owner: tuple(names) for owner, names in owners.items()}
