"""What a manifest claims against what its checkpoint holds, and whether its claims fit each other. All pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.schedule import position_of
from samerun.core.state import LogicalState, Role, Topology
from samerun.errors import Problem, Severity
from samerun.manifest.models import Manifest
from samerun.plan.layout import check_layout

_SAME_RUN = ("parameters", "buffers", "optimizer", "order", "batch", "schedule", "dtype")
"""What has to be exact for a run to call itself a continuation. Streams and objects may be told apart."""

_SLOTS: dict[str, frozenset[str]] = {
    "Adam": frozenset({"exp_avg", "exp_avg_sq"}),
    "AdamW": frozenset({"exp_avg", "exp_avg_sq"}),
    "NAdam": frozenset({"exp_avg", "exp_avg_sq", "mu_product"}),
    "RAdam": frozenset({"exp_avg", "exp_avg_sq"}),
    "Adamax": frozenset({"exp_avg", "exp_inf"}),
    "Adagrad": frozenset({"sum"}),
    "Adadelta": frozenset({"square_avg", "acc_delta"}),
    "RMSprop": frozenset({"square_avg"}),
    "Muon": frozenset({"momentum_buffer"}),
}
"""Slots that torch's optimizers (2.13) keep for every parameter that has had a gradient."""


def check_manifest(manifest: Manifest, state: LogicalState) -> list[Problem]:
    """Returns everything in which a decided manifest contradicts itself or its checkpoint."""
    return [
        *check_label(manifest),
        *check_claims(manifest, state),
        *check_origin(manifest, state),
        *check_progress(manifest, state),
        *check_window(manifest),
        *check_layout(state, manifest.destination.layout.to_layout(), manifest.source.layout.to_layout()),
    ]


def _at(key: str) -> dict[str, Any]:
    return {"key": key}


def _claims(manifest: Manifest) -> dict[str, Any]:
    return manifest.declare.model_dump(mode="json")


def check_label(manifest: Manifest) -> Iterator[Problem]:
    """Yields what the transition's label does not allow."""
    label, batch, claims = manifest.transition.label, manifest.batch, _claims(manifest)
    changes = batch.option == "changed-batch"
    if changes and label not in ("intentional-change", "warm-start"):
        yield Problem(
            "SR-PLAN-LABEL",
            f"a changed batch is another run: it cannot be called {label}",
            where=_at("transition.label"),
            expected="intentional-change",
            found=label,
            hint="say intentional-change, or keep the batch with another option",
        )
    if changes and claims["batch"] == "exact":
        yield _label_claim("batch", "exact", "expected-to-change", "the batch is changed on purpose")
    if changes and batch.invariant == "samples-per-update":
        yield Problem(
            "SR-PLAN-INVARIANT",
            f"samples per update are the invariant, but they go from {batch.global_batch} to "
            f"{batch.changed.global_batch if batch.changed else '?'}",
            where=_at("batch.invariant"),
            expected="valid-tokens-per-update | schedule-position",
            found=batch.invariant,
            hint="name what does stay the same, or keep the batch",
        )
    if batch.invariant == "valid-tokens-per-update" and manifest.progress.tokens is None:
        yield Problem(
            "SR-PLAN-INVARIANT",
            "valid tokens per update are the invariant, but progress.tokens says that nobody counts them",
            where=_at("progress.tokens"),
            expected="a count",
            found=None,
            hint="count them (Recorder reports tokens per update), or name another invariant",
        )
    if label in ("continuation", "approximate-continuation"):
        yield from _check_same_run(label, claims)


def _check_same_run(label: str, claims: Mapping[str, Any]) -> Iterator[Problem]:
    for part in _SAME_RUN:
        claim = claims[part]
        if claim == "exact" or (label != "continuation" and (part == "order" or isinstance(claim, dict))):
            continue
        allowed = "exact" if label == "continuation" else "exact | {bounded: number}"
        found = claim if isinstance(claim, str) else f"bounded by {claim['bounded']:g}"
        yield _label_claim(part, found, allowed, f"the run is labelled {label}")


def _label_claim(part: str, found: str, allowed: str, why: str) -> Problem:
    return Problem(
        "SR-PLAN-LABEL",
        f"declare.{part} is {found}, but {why}",
        where=_at(f"declare.{part}"),
        expected=allowed,
        found=found,
        hint="change the claim or the label: together they contradict each other",
    )


def check_claims(manifest: Manifest, state: LogicalState) -> Iterator[Problem]:
    """Yields every part that is declared to be carried over but is not in the checkpoint."""
    claims = _claims(manifest)
    roles = {entry.key.role for entry in state.tensors.values()}
    missing = {
        "parameters": not roles & {Role.PARAM, Role.MASTER},
        "optimizer": Role.OPTIM not in roles and not state.groups,
        "schedule": manifest.progress.scheduler is not None and state.scheduler is None,
        "rng": not state.rng,
    }
    for part, absent in missing.items():
        if absent and claims[part] == "exact":
            yield Problem(
                "SR-PLAN-DECLARE",
                f"declare.{part} is exact, but the checkpoint holds no {_IN_WORDS[part]}",
                where=_at(f"declare.{part}"),
                expected="expected-to-change",
                found="exact",
                hint="`samerun inspect` lists what is there; claim only what can be carried over",
            )
    before, after = manifest.source.layout.to_layout(), manifest.destination.layout.to_layout()
    if state.rng and claims["rng"] == "exact" and before != after:
        yield Problem(
            "SR-PLAN-DECLARE",
            f"declare.rng is exact, but random streams belong to ranks, and those go from {before} to {after}",
            where=_at("declare.rng"),
            expected="expected-to-change",
            found="exact",
            hint="a run without dropout or random augmentation loses nothing by it",
        )
    yield from _check_optimizer(manifest, state)


_IN_WORDS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "schedule": "scheduler state",
    "rng": "random number state",
}


def _check_optimizer(manifest: Manifest, state: LogicalState) -> Iterator[Problem]:
    name = manifest.run.optimizer.rpartition(".")[2]
    needed = _SLOTS.get(name)
    found = frozenset(entry.key.slot for entry in state.tensors.values() if entry.key.slot)
    if needed is not None and found and not needed <= found:
        yield Problem(
            "SR-PLAN-OPTIMIZER",
            f"{name} keeps {', '.join(sorted(needed))} for each parameter, "
            f"the checkpoint has {', '.join(sorted(found))}",
            where=_at("run.optimizer"),
            expected=", ".join(sorted(needed)),
            found=", ".join(sorted(found)),
            hint="name the optimizer that wrote the checkpoint",
        )


def check_origin(manifest: Manifest, state: LogicalState) -> Iterator[Problem]:
    """Yields where format, layout or world size differ from what the checkpoint records."""
    if manifest.run.format != state.format:
        yield Problem(
            "SR-PLAN-FORMAT",
            f"the manifest says {manifest.run.format}, the checkpoint is {state.format}",
            where=_at("run.format"),
            expected=state.format,
            found=manifest.run.format,
        )
    topology, said = state.topology, manifest.source.layout.to_layout()
    if topology.world_size is not None and topology.world_size != said.world_size:
        yield _source_problem("world_size", said.world_size, topology.world_size, topology)
    if topology.layout is not None and _as_cut(topology.layout) != _as_cut(said):
        yield _source_problem("layout", str(said), str(topology.layout), topology)


def _as_cut(layout: Layout) -> Layout:
    """Returns the layout whose tensors are cut alike: context-parallel ranks shard as data-parallel ones do."""
    return Layout.from_dict(layout.to_dict() | {"dp_shard": layout.dp_shard * layout.cp, "cp": 1})


def _source_problem(name: str, claimed: Any, recorded: Any, topology: Topology) -> Problem:
    concluded = topology.inferred is not None
    says = "looks like" if concluded else "says"
    return Problem(
        "SR-PLAN-SOURCE",
        f"the manifest's source has {name} {claimed}, the checkpoint {says} {recorded}",
        severity=Severity.WARNING if concluded else Severity.ERROR,
        where=_at(f"source.{name}"),
        expected=recorded,
        found=claimed,
        hint=f"how that is known: {topology.inferred}" if concluded else "",
    )


def check_progress(manifest: Manifest, state: LogicalState) -> Iterator[Problem]:
    """Yields where the progress differs from the checkpoint's, or does not add up."""
    said = manifest.progress
    for name in ("update", "samples", "tokens", "epoch"):
        recorded, claimed = getattr(state.progress, name), getattr(said, name)
        if recorded is not None and claimed != recorded:
            yield _progress(name, claimed, recorded)
    for name, claimed in (said.scheduler or {}).items():
        recorded = position_of(state.scheduler) if name == "last_epoch" else (state.scheduler or {}).get(name)
        if recorded is not None and claimed != recorded:
            yield _progress(f"scheduler.{name}", claimed, recorded)
    if said.samples != said.update * manifest.batch.global_batch:
        yield Problem(
            "SR-PLAN-SAMPLES",
            f"{said.update} updates of {manifest.batch.global_batch} samples are "
            f"{said.update * manifest.batch.global_batch}, but {said.samples} were committed",
            severity=Severity.WARNING,
            where=_at("progress.samples"),
            expected=said.update * manifest.batch.global_batch,
            found=said.samples,
            hint="right if the batch was ramped up or an epoch ended with a short batch; "
            "otherwise ranks that share a batch were counted as replicas, or padding as samples",
        )


def _progress(name: str, claimed: Any, recorded: Any) -> Problem:
    return Problem(
        "SR-PLAN-PROGRESS",
        f"the manifest says {name} {claimed}, the checkpoint {recorded}",
        where=_at(f"progress.{name}"),
        expected=recorded,
        found=claimed,
        hint="updates are counted by completion: a checkpoint at update 12 holds the state after twelve",
    )


def check_window(manifest: Manifest) -> Iterator[Problem]:
    """Yields the boundaries that the window does not cross."""
    window, done = manifest.window, manifest.progress.update
    for name in ("log_every", "eval_every"):
        every: int | None = getattr(window, name)
        if every is not None and (done + window.updates) // every == done // every:
            needed = every - done % every
            yield Problem(
                "SR-PLAN-WINDOW",
                f"updates {done + 1} to {done + window.updates} cross no multiple of {every}",
                severity=Severity.WARNING,
                where=_at(f"window.{name}"),
                expected=f"window.updates of at least {needed}",
                found=window.updates,
                hint="a boundary that is not crossed is not tested: lengthen the window, or shorten the job's interval",
            )
