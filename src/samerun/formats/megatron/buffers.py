"""Planning the flat buffers of a torch_dist directory: whose they are, in which order, confirmed by what is stored.

The order of parameters is not stored. It is that of the model's modules, which differ between Megatron's own layers and
Transformer Engine's; both are tried. A plan holds if parameters begin where stored chunks do, and if the masters at a
sample of places round to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from samerun.errors import FormatError
from samerun.formats.base import Array, Extent, view_extent
from samerun.formats.dcpfile.index import StoredTensor
from samerun.formats.mcore.flat import Buffer, Local, Segment, Slot
from samerun.formats.mcore.joined import split_dtypes
from samerun.formats.mcore.order import registration_key
from samerun.formats.mcore.run import Run
from samerun.formats.megatron.model import ModelTensor, Place, locals_of, rename_local
from samerun.formats.megatron.source import Source

_SAMPLED_SLOTS = 64
_SAMPLED_ELEMENTS = 64

# Places ordered parameters of a pipeline rank's model chunk in buckets of these lengths.
Placing = Callable[[Sequence[Local], int, int, Sequence[int]], list[Slot] | None]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose buffers they are: one optimizer of a chain on one model-parallel rank."""

    pp: int
    tp: int
    ep: int
    expert: bool

    def __str__(self) -> str:
        return f"pp={self.pp}, tp={self.tp}{f', ep={self.ep}' if self.expert else ''}"


def owner_of(run: Run, group: int, *, expert: bool) -> Owner | None:
    """Returns the owner of `dp_group_idx_<group>`: its rank among those that hold different weights, TP fastest."""
    if not expert:
        pp, tp = divmod(group, run.tp)
        return Owner(pp, tp, 0, False) if pp < run.pp else None
    rest, tp = divmod(group, run.etp)
    pp, ep = divmod(rest, run.ep)
    return Owner(pp, tp, ep, True) if pp < run.pp else None


@dataclass(slots=True)
class Plan:
    """A placing of one owner's parameters: slots by buffer number, and how many of the sampled places agreed."""

    slots: dict[int, list[Slot]]
    agreed: int = 0
    sampled: int = 0


@dataclass(slots=True, eq=False)
class Planner:
    """Plans buffers of one directory. `stages` are the layers of every pipeline rank and model chunk."""

    source: Source
    models: Sequence[ModelTensor]
    stages: Mapping[tuple[int, int], range]
    _stored: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])

    def __post_init__(self) -> None:
        self._stored.update((model.name, model.stored) for model in self.models)

    def chunks_of(self, owner: Owner, *, local_spec: bool) -> list[tuple[int, str, list[Local]]] | None:
        """Returns, in the order of buffers, the model chunk, element type and ordered parameters of each."""
        found: list[tuple[int, str, list[Local]]] = []
        run = self.source.run
        for chunk in range(run.vpp):
            place = Place(owner.pp, chunk, owner.tp, owner.ep)
            params = locals_of(self.models, run, self.stages, place, expert=owner.expert)
            if params is None:
                return None
            params = rename_local(params) if local_spec else params
            params.sort(key=lambda local: registration_key(local.name))
            found += [(chunk, dtype, held) for dtype, held in split_dtypes(params)]
        return found

    def plan(
        self,
        owner: Owner,
        lengths: Mapping[int, Sequence[int]],
        masters: Mapping[tuple[int, int], Buffer],
        place: Placing,
        *,
        aligned: bool,
    ) -> Plan | None:
        """Returns the best plan, None if no order fills the buffers.

        `lengths` are, by buffer number, the lengths of its buckets; `masters` the masters by buffer and bucket. With
        `aligned`, parameters must begin where a segment of their buffer does.
        """
        known = self.source.run.local_spec
        best: Plan | None = None
        for local_spec in [known] if known is not None else [True, False]:
            plan = self._try(owner, lengths, place, local_spec=local_spec)
            if plan is None or (aligned and not _begins_with_segments(plan, masters)):
                continue
            self._confirm(plan, masters)
            if best is None or plan.agreed > best.agreed:
                best = plan
        return best

    def _try(
        self,
        owner: Owner,
        lengths: Mapping[int, Sequence[int]],
        place: Placing,
        *,
        local_spec: bool,
    ) -> Plan | None:
        chunks = self.chunks_of(owner, local_spec=local_spec)
        if chunks is None or len(chunks) != len(lengths):
            return None
        slots: dict[int, list[Slot]] = {}
        for number, (chunk, _, params) in zip(sorted(lengths), chunks, strict=True):
            placed = place(params, owner.pp, chunk, lengths[number])
            if placed is None:
                return None
            slots[number] = placed
        return Plan(slots)

    def _confirm(self, plan: Plan, masters: Mapping[tuple[int, int], Buffer]) -> None:
        every = [(number, slot) for number, slots in plan.slots.items() for slot in slots]
        for number, slot in every[:: max(1, -(-len(every) // _SAMPLED_SLOTS))]:
            same = self._agrees(slot, masters.get((number, slot.bucket)))
            if same is not None:
                plan.sampled += 1
                plan.agreed += same

    def _agrees(self, slot: Slot, masters: Buffer | None) -> bool | None:
        """Whether the first values of a master round to the weight's; None if they cannot be read."""
        run = next(masters.runs(slot.start, slot.stop), None) if masters else None
        try:
            weights = self._first_values(slot.local)
            held = self._values(run[0]) if run else None
        except FormatError:
            return None
        if weights is None or held is None or run is None or run[1] != slot.start:
            return None
        at = run[1] - run[0].start
        count = min(len(weights), run[2] - run[1], _SAMPLED_ELEMENTS)
        with np.errstate(all="ignore"):
            rounded = held[at : at + count].astype(weights.dtype)
        return np.array_equal(rounded.view(np.uint8), weights[:count].view(np.uint8))

    def _values(self, segment: Segment) -> Array:
        if isinstance(segment.source, Extent):
            return view_extent(self.source.files, segment.source)
        return self.source.items.view(segment.source, segment.chunk).reshape(-1)

    def _first_values(self, local: Local) -> Array | None:
        """Returns the first values of a parameter as the rank had them, from the model's own tensor."""
        target = local.targets[0]
        tensor = self._stored.get(target.fqn)
        if tensor is None or not target.blocks:
            return None
        here = np.flatnonzero((tensor.tiling.offsets == target.blocks[0].target).all(axis=1))
        if not len(here):
            return None
        piece = int(here[-1])
        view = self.source.items.view(tensor, piece)
        row = view.reshape(-1, view.shape[-1])[0] if view.ndim else view.reshape(-1)
        return np.ascontiguousarray(row[:_SAMPLED_ELEMENTS])


def _begins_with_segments(plan: Plan, masters: Mapping[tuple[int, int], Buffer]) -> bool:
    for number, slots in plan.slots.items():
        starts: dict[int, list[int]] = {}
        for slot in slots:
            starts.setdefault(slot.bucket, []).append(slot.start)
        for bucket, wanted in starts.items():
            buffer = masters.get((number, bucket))
            if buffer is None or not np.isin(wanted, buffer.start).all():
                return False
    return True
