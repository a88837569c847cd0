"""A migration plan: everything that a run will do, as one frozen value that can be printed, stored and sealed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from samerun.core.batch import BatchOption, Dealing, OptionCost, deal
from samerun.core.dtype import parse_dtype
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState
from samerun.errors import PlanError, Problem, SamerunError, Severity, UndecidedError, has_errors
from samerun.manifest.models import Bounded, Declare, Manifest
from samerun.plan.batch import LearningRatePlan, choose_option, effective_layout, list_options, plan_learning_rate
from samerun.plan.checks import check_manifest
from samerun.plan.consequences import check_rates_known, plan_costs, plan_window_rates
from samerun.plan.memory import MemoryEstimate, estimate_memory
from samerun.plan.schedule import PlannedRates
from samerun.plan.sharding import manifest_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCheckpoint:
    """The checkpoint that is moved. `path` is as the manifest has it; the runner fills in the fingerprint."""

    path: str
    format: str
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSide:
    """Where a job is launched. `idle_ranks` are those of the manifest's layout that are left out."""

    layout: Layout
    idle_ranks: int = 0

    @property
    def world_size(self) -> int:
        """Ranks that are launched."""
        return self.layout.world_size

    @property
    def batch_replicas(self) -> int:
        """Of which so many see different samples."""
        return self.layout.batch_replicas

    def to_json(self) -> dict[str, Any]:
        """Returns the layout with the numbers that follow from it."""
        return {
            "layout": self.layout.to_dict(),
            "world_size": self.world_size,
            "batch_replicas": self.batch_replicas,
            "idle_ranks": self.idle_ranks,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads `to_json` back."""
        return cls(layout=Layout.from_dict(body["layout"]), idle_ranks=body["idle_ranks"])


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision that the manifest made, and what follows from it."""

    key: str
    chosen: str
    consequence: str

    def to_json(self) -> dict[str, str]:
        """Returns the fields."""
        return {"key": self.key, "chosen": self.chosen, "consequence": self.consequence}


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """One migration, planned.

    `batch` is the chosen option of `options`, dealt to the destination. `source_batch` deals the unchanged global batch
    to the source's replicas: that is what a control on the original layout runs. `first_update` is the index of the
    first update after the checkpoint; the candidate runs `window_updates` of them, with `next_rates` as their learning
    rates (None in plans that were sealed before these were planned). `costs` has what each of `options` costs, and at
    last what `batch` does; empty in such plans. `problems` holds warnings and notes only: with an
    error there is no plan.
    """

    manifest_sha256: str
    checkpoint: PlannedCheckpoint
    source: PlannedSide
    destination: PlannedSide
    batch: BatchOption
    source_batch: Dealing
    options: tuple[BatchOption, ...]
    label: str
    first_update: int
    window_updates: int
    learning_rate: LearningRatePlan
    memory: MemoryEstimate
    next_rates: PlannedRates | None = None
    costs: tuple[OptionCost, ...] = ()
    decisions: tuple[Decision, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def last_update(self) -> int:
        """Index of the last update of the window."""
        return self.first_update + self.window_updates - 1

    def to_json(self) -> dict[str, Any]:
        """Returns the document that `samerun plan --json` prints and a seal covers."""
        checkpoint = self.checkpoint
        return {
            "schema": "samerun/plan/1",
            "manifest_sha256": self.manifest_sha256,
            "checkpoint": {
                "path": checkpoint.path,
                "format": checkpoint.format,
                "fingerprint": checkpoint.fingerprint,
            },
            "source": self.source.to_json(),
            "destination": self.destination.to_json(),
            "batch": _with_cost(self.batch, self.costs[-1:]),
            "source_batch": {
                "global_batch": self.source_batch.global_batch,
                "replicas": self.source_batch.replicas,
                "passes": self.source_batch.passes,
                "max_microbatch": self.source_batch.max_microbatch,
                "microbatches": self.source_batch.to_json(),
            },
            "options": [_with_cost(option, self.costs[place : place + 1]) for place, option in enumerate(self.options)],
            "label": self.label,
            "first_update": self.first_update,
            "window_updates": self.window_updates,
            "learning_rate": self.learning_rate.to_json(),
            "memory": self.memory.to_json(),
            **({"next_rates": self.next_rates.to_json()} if self.next_rates is not None else {}),
            "decisions": [decision.to_json() for decision in self.decisions],
            "problems": [problem.to_json() for problem in self.problems],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads `to_json` back.

        Raises:
            KeyError: if a field is missing. ValueError: if one makes no sense.
        """
        return cls(
            manifest_sha256=body["manifest_sha256"],
            checkpoint=PlannedCheckpoint(**body["checkpoint"]),
            source=PlannedSide.from_json(body["source"]),
            destination=PlannedSide.from_json(body["destination"]),
            batch=BatchOption.from_json(body["batch"]),
            source_batch=Dealing.from_json(body["source_batch"]["microbatches"]),
            options=tuple(BatchOption.from_json(option) for option in body["options"]),
            costs=tuple(
                OptionCost(**option["cost"]) for option in (*body["options"], body["batch"]) if "cost" in option
            ),
            label=body["label"],
            first_update=body["first_update"],
            window_updates=body["window_updates"],
            learning_rate=LearningRatePlan(**body["learning_rate"]),
            memory=MemoryEstimate.from_json(body["memory"]),
            next_rates=PlannedRates.from_json(body["next_rates"]) if "next_rates" in body else None,
            decisions=tuple(Decision(**decision) for decision in body["decisions"]),
            problems=tuple(_problem_from_json(problem) for problem in body["problems"]),
        )


def _with_cost(option: BatchOption, cost: Sequence[OptionCost]) -> dict[str, Any]:
    return option.to_json() | ({"cost": cost[0].to_json()} if cost else {})


def _problem_from_json(body: Mapping[str, Any]) -> Problem:
    return Problem(
        body["code"],
        body["message"],
        severity=Severity(body["severity"]),
        where=body["where"],
        hint=body["hint"],
        expected=body.get("expected"),
        found=body.get("found"),
    )


def plan_migration(manifest: Manifest, state: LogicalState) -> MigrationPlan:
    """Returns the plan that the manifest asks for.

    Args:
        manifest: the decided manifest.
        state: the checkpoint's logical state, read without payloads.

    Raises:
        UndecidedError: if all that is missing are decisions.
        PlanError: with every finding that blocks.
    """
    problems = check_manifest(manifest, state)
    destination = manifest.destination.layout.to_layout()
    options: tuple[BatchOption, ...] = ()
    try:
        options = list_options(manifest.batch, destination, manifest.source)
        chosen = choose_option(manifest.batch, options, destination)
        launched = effective_layout(destination, chosen)
    except SamerunError as error:
        raise _refusal([*problems, *error.problems]) from error
    memory = plan_memory(manifest, state, launched)
    problems += check_memory(memory)
    if has_errors(problems):
        raise _refusal(problems)
    source = manifest.source.layout.to_layout()
    rate = plan_learning_rate(manifest.batch)
    rates = plan_window_rates(manifest, state, rate, chosen)
    return MigrationPlan(
        manifest_sha256=manifest.sha256(),
        checkpoint=PlannedCheckpoint(path=manifest.run.checkpoint, format=manifest.run.format),
        source=PlannedSide(layout=source),
        destination=PlannedSide(layout=launched, idle_ranks=destination.world_size - launched.world_size),
        batch=chosen,
        source_batch=deal(
            manifest.batch.global_batch,
            source.batch_replicas,
            manifest.source.microbatch or manifest.batch.max_microbatch,
        ),
        options=options,
        label=manifest.transition.label,
        first_update=manifest.progress.update + 1,
        window_updates=manifest.window.updates,
        learning_rate=rate,
        memory=memory,
        next_rates=rates,
        costs=tuple(plan_costs(manifest, state, (*options, chosen))),
        decisions=tuple(_decisions(manifest, chosen)),
        problems=(*problems, *check_rates_known(rate, rates)),
    )


def plan_memory(manifest: Manifest, state: LogicalState, layout: Layout) -> MemoryEstimate:
    """Returns the memory estimate at `layout` for the manifest's framework, precision and device."""
    return estimate_memory(
        state,
        layout,
        stage=manifest_stage(manifest, state),
        compute_dtype=parse_dtype(manifest.run.precision),
        device_memory_bytes=manifest.destination.device_memory_bytes,
    )


def check_memory(memory: MemoryEstimate) -> list[Problem]:
    """Returns a finding if pipeline stages would be empty, and one if some rank's lower bound is above its device."""
    problems: list[Problem] = []
    if memory.num_blocks is not None and memory.layout.pp > max(1, memory.num_blocks):
        problems.append(_empty_stages(memory.layout.pp, memory.num_blocks))
    if memory.fits is not False:
        return problems
    largest = memory.largest
    return [
        *problems,
        Problem(
            "SR-PLAN-MEMORY",
            f"rank {largest.rank} needs at least {largest.total_bytes} bytes before any activation",
            where={"key": "destination.device_memory", "rank": largest.rank},
            expected=f"at most {memory.device_memory_bytes}",
            found=largest.total_bytes,
            hint="shard over more ranks (dp_shard, tp, pp), or name a larger device",
        ),
    ]


def _empty_stages(pp: int, blocks: int) -> Problem:
    return Problem(
        "SR-PLAN-STAGES",
        f"the model has {blocks} blocks, so {pp - blocks} of {pp} pipeline stages would have none",
        where={"key": "destination.layout"},
        expected=f"pp of at most {max(1, blocks)}",
        found=f"pp={pp}",
        hint="blocks are counted by the first number in parameters' names, or by the rows of Megatron's stacked layers",
    )


def _refusal(problems: list[Problem]) -> PlanError:
    """Returns the refusal with every error; undecided if decisions are all that is missing."""
    errors = [problem for problem in problems if problem.severity is Severity.ERROR]
    undecided = all(problem.code == "SR-PLAN-BATCH-UNDECIDED" for problem in errors)
    return UndecidedError(errors) if undecided else PlanError(errors)


_INVARIANTS = {
    "samples-per-update": "every update takes as many samples as before",
    "valid-tokens-per-update": "every update takes as many valid tokens as before",
    "schedule-position": "the schedule goes on where it stood",
}
_LABELS = {
    "continuation": "the same run",
    "approximate-continuation": "the same run up to stated samples",
    "intentional-change": "another run from here on",
    "warm-start": "a new run that begins with these weights",
}


def _decisions(manifest: Manifest, chosen: BatchOption) -> Iterator[Decision]:
    batch, transition = manifest.batch, manifest.transition
    dealt = (
        f"{chosen.global_batch} samples over {chosen.replicas} replicas in {chosen.passes} passes "
        f"of at most {chosen.max_microbatch}"
    )
    yield Decision("batch.invariant", batch.invariant, _INVARIANTS[batch.invariant])
    yield Decision("batch.option", chosen.kind, dealt)
    if batch.changed is not None:
        rate = plan_learning_rate(batch)
        text = f"base rate {rate.value}" if rate.factor is None else f"every rate times {rate.factor:g}"
        yield Decision("batch.changed.learning_rate", str(rate.policy), f"{text}: {batch.changed.reason}")
        seen = batch.changed.global_batch / batch.global_batch
        kept = f"each update is {seen:g} of its steps" if rate.schedule == "samples" else "each update is one step"
        yield Decision("batch.changed.learning_rate.schedule", rate.schedule, f"position by {rate.schedule}: {kept}")
    label = "; ".join(filter(None, (_LABELS[transition.label], *_bounds(manifest), transition.reason)))
    yield Decision("transition.label", transition.label, label)
    for name in Declare.model_fields:
        claim: str | Bounded = getattr(manifest.declare, name)
        if isinstance(claim, Bounded):
            yield Decision(f"declare.{name}", "bounded", f"by {claim.bounded:g}")
        elif claim != "exact":
            yield Decision(f"declare.{name}", claim, "is not compared")
    control = manifest.control
    again = f"resumed on {manifest.source.layout.to_layout()}, {control.repeats} runs"
    yield Decision("control.kind", control.kind, f"recorded in {control.trace}" if control.trace else again)
    for metric, tolerance in manifest.tolerances.by_metric().items():
        if tolerance.source == "user":
            yield Decision(f"tolerances.{metric}", f"{tolerance.limit:g}", tolerance.reason)


def _bounds(manifest: Manifest) -> Iterator[str]:
    for does, bound in (
        ("replayed", manifest.transition.replay_bound),
        ("omitted", manifest.transition.omission_bound),
    ):
        if bound is not None:
            yield f"at most {bound} samples {does}"


_FOLLOWS: tuple[tuple[str, Callable[[MigrationPlan], Any]], ...] = (
    ("source", lambda plan: plan.source),
    ("destination", lambda plan: plan.destination),
    ("batch", lambda plan: plan.batch),
    ("source_batch", lambda plan: plan.source_batch),
    ("options", lambda plan: plan.options),
    ("costs", lambda plan: plan.costs),
    ("label", lambda plan: plan.label),
    ("first_update", lambda plan: plan.first_update),
    ("window_updates", lambda plan: plan.window_updates),
    ("learning_rate", lambda plan: plan.learning_rate),
    ("memory", lambda plan: plan.memory),
    ("next_rates", lambda plan: plan.next_rates),
)


def check_plan(plan: MigrationPlan, manifest: Manifest, state: LogicalState) -> list[Problem]:
    """Returns every way in which a plan is not, or is no longer, the plan of this manifest and checkpoint."""
    problems = [*_check_dealing(plan)]
    if plan.manifest_sha256 != manifest.sha256():
        problems.append(_stale("manifest_sha256", manifest.sha256(), plan.manifest_sha256))
    try:
        fresh = plan_migration(manifest, state)
    except PlanError as error:
        return [*problems, *error.problems]
    for field, value in _FOLLOWS:
        if value(plan) != value(fresh):
            problems.append(_stale(field, value(fresh), value(plan)))
    if replace(plan.checkpoint, fingerprint=None) != fresh.checkpoint:
        problems.append(_stale("checkpoint", fresh.checkpoint, plan.checkpoint))
    return problems


def _stale(field: str, expected: Any, found: Any) -> Problem:
    return Problem(
        "SR-PLAN-STALE",
        f"the plan's {field} is not what the manifest and the checkpoint give now",
        where={"key": field},
        expected=str(expected),
        found=str(found),
        hint="plan again with `samerun plan`",
    )


def _check_dealing(plan: MigrationPlan) -> Iterator[Problem]:
    """Yields what is wrong with the dealing taken by itself, whoever made it."""
    replicas = plan.destination.batch_replicas
    if plan.batch.replicas != replicas:
        message = f"the batch is dealt to {plan.batch.replicas} replicas, the destination has {replicas}"
        where = {"key": "batch.microbatches"}
        yield Problem("SR-PLAN-BROKEN", message, where=where, expected=replicas, found=plan.batch.replicas)
    if plan.batch.exact and plan.batch.global_batch != plan.source_batch.global_batch:
        yield Problem(
            "SR-PLAN-BROKEN",
            "an exact option has another global batch than the source",
            where={"key": "batch.global_batch"},
            expected=plan.source_batch.global_batch,
            found=plan.batch.global_batch,
        )
