"""What a trace holds, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samerun.core.mesh import Layout
from samerun.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a rank said about itself before it did anything.

    `layout` is the mesh as the job has it; `declared_layout` is what the script claimed, when that differs. `batch`
    has `global_batch`, `max_microbatch`, `passes`, `replicas` and `microbatches` (samples by pass, then replica), or
    is None when the job does not say how it deals.
    """

    rank: int
    world_size: int
    stage: str | None
    coordinate: Mapping[str, int]
    layout: Mapping[str, int] | None
    declared_layout: Mapping[str, int] | None
    batch: Mapping[str, Any] | None
    versions: Mapping[str, str]
    environment: Mapping[str, Any]

    def mesh(self) -> Layout | None:
        """Returns the layout as a value, or None when the header has none that makes sense."""
        try:
            return Layout.from_dict(self.layout) if self.layout else None
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLine:
    """One completed (or skipped) update as one rank recorded it.

    `loss`, `grad_norm` (before clipping), `update_norm` and `lr` (per parameter group, as the step used it) are global
    and equal on every rank; `samples`, `tokens` and `sample_ids` are this rank's. `deltas` are the L2 norms of the
    change of a few named parameters; `moved` those of every parameter (rank 0, first update of a job), and `gradients`
    those of their gradients before clipping; `moved_direction` and `gradients_direction` their projections, over their
    norms (`samerun.core.sketch`). `step_norm` is the norm of the whole gradient that the step used, after
    clipping. `inputs` are the rows that this rank's model was given in the first update of a job, and the sum of their
    digests, `autocast` the type that its forward pass was cast to. None: not measured. `ids_digest` is the set digest
    of this rank's ids (`samerun.core.idset`), which stands also where the ids themselves were not kept. `line` is the
    line of the file, counted from 1.
    """

    update: int
    loss: float | None
    grad_norm: float | None
    update_norm: float | None
    lr: tuple[float, ...]
    loss_scale: float | None
    skipped: bool
    samples: int
    tokens: int | None
    sample_ids: tuple[int | str, ...]
    finite: bool
    deltas: Mapping[str, float]
    moved: Mapping[str, float] | None
    steps: int
    seconds: float | None
    ids_digest: str | None = None
    gradients: Mapping[str, float] | None = None
    line: int = 0
    step_norm: float | None = None
    inputs: tuple[int, int] | None = None
    autocast: str | None = None
    moved_direction: Mapping[str, tuple[float, ...]] | None = None
    gradients_direction: Mapping[str, tuple[float, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalLine:
    """A fixed-example evaluation, and whether it left the state bit-identical.

    `losses` has one value per example. `logits` names a `.npy` file beside the trace (rank 0 only). `changed` lists the
    keys, RNG streams and cursors that were different afterwards. `modules` has a row (name, L2 norm of its output,
    elements) per module in the order of the forward pass, of what rank 0 saw; `details` the norm of its output's
    projection on fixed signs, which the order of features changes, and its element type.
    """

    update: int
    num_examples: int
    losses: tuple[float, ...]
    logits: Mapping[str, Any] | None
    state_unchanged: bool
    rng_unchanged: bool
    changed: tuple[str, ...]
    modules: tuple[tuple[str, float, int], ...] = ()
    details: Mapping[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLine:
    """The logical state as the job had it in memory (`when`: "loaded" or "end"). `body` is what was captured."""

    when: str
    update: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryLine:
    """The job crossed a boundary after update `update`: "log", "eval", "save" or a name of its own."""

    what: str
    update: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLine:
    """The job ended on its own; without this line it was killed or crashed. `updates` were recorded."""

    reason: str
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """Everything one rank wrote, in order within each kind."""

    file: Path
    header: Header
    updates: tuple[UpdateLine, ...] = ()
    evals: tuple[EvalLine, ...] = ()
    digests: tuple[Mapping[str, Any], ...] = ()
    states: tuple[StateLine, ...] = ()
    boundaries: tuple[BoundaryLine, ...] = ()
    end: EndLine | None = None
    _last: dict[int, UpdateLine] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_last", {line.update: line for line in self.updates})

    def update(self, index: int) -> UpdateLine | None:
        """Returns the line of the completed update `index`, or the last skipped one of that index, or None."""
        return self._last.get(index)

    def state(self, when: str) -> StateLine | None:
        """Returns the last captured state of that kind, or None."""
        lines = [line for line in self.states if line.when == when]
        return lines[-1] if lines else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole job's trace: ranks in order, and what was wrong with the files themselves."""

    path: Path
    ranks: tuple[RankTrace, ...]
    problems: tuple[Problem, ...] = ()
    _replicas: dict[int, RankTrace] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        chosen: dict[int, RankTrace] = {}
        for rank in self.ranks:
            chosen.setdefault(self.replica_of(rank), rank)
        object.__setattr__(self, "_replicas", dict(sorted(chosen.items())))

    @property
    def lead(self) -> RankTrace:
        """The lowest rank that was read: rank 0 of a whole trace. It carries the global values and the states."""
        return self.ranks[0]

    @property
    def layout(self) -> Layout | None:
        """The job's layout, or None when the header has none."""
        return self.lead.header.mesh()

    @property
    def update_indices(self) -> tuple[int, ...]:
        """Update indices in the order recorded by the lead rank, skipped ones included."""
        return tuple(line.update for line in self.lead.updates)

    def replica_of(self, rank: RankTrace) -> int:
        """Returns which batch replica a rank belongs to, from its own mesh coordinate."""
        layout, at = self.layout, rank.header.coordinate
        if layout is None or not at:
            return rank.header.rank
        return at.get("dp_replicate", 0) * layout.dp_shard + at.get("dp_shard", 0)

    def replicas(self) -> dict[int, RankTrace]:
        """Returns the one rank per batch replica whose sample ids count (lowest pp, cp and tp), by replica."""
        return dict(self._replicas)

    def sample_ids(self, index: int) -> dict[int, tuple[int | str, ...]]:
        """Returns the ids that update `index` consumed, by batch replica, each in the order of consumption."""
        lines = {replica: rank.update(index) for replica, rank in self.replicas().items()}
        return {replica: line.sample_ids for replica, line in lines.items() if line is not None}

    def global_totals(self, index: int) -> tuple[int, int | None]:
        """Returns (samples, valid tokens) of update `index` over all batch replicas; tokens None if not recorded."""
        lines = [line for rank in self.replicas().values() if (line := rank.update(index)) is not None]
        tokens = [line.tokens for line in lines]
        known = [count for count in tokens if count is not None]
        return sum(line.samples for line in lines), sum(known) if len(known) == len(tokens) else None
