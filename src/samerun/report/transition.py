"""The declared transition: where the run was, where it goes, and which rank owns what before and after. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samerun.report.layout import Held, Mesh, Ownership, draw_mesh, plan_ownership
from samerun.report.model import ReportModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Where the run was and where it goes."""

    source: Mesh
    destination: Mesh
    ownership: tuple[Ownership, ...]
    progress: tuple[tuple[str, str], ...]
    declared: tuple[tuple[str, str], ...]
    decisions: tuple[tuple[str, str, str], ...]


def view_transition(model: ReportModel) -> Transition | None:
    """Returns the transition, or None where no manifest declares one."""
    manifest = model.manifest
    if manifest is None:
        return None
    try:
        source = model.plan.source.layout if model.plan else manifest.source.layout.to_layout()
        destination = model.plan.destination.layout if model.plan else manifest.destination.layout.to_layout()
    except ValueError:
        return None
    progress = manifest.progress
    facts = [
        ("update", str(progress.update)),
        ("samples", f"{progress.samples:,}"),
        ("valid tokens", "not counted" if progress.tokens is None else f"{progress.tokens:,}"),
        ("epoch", "none" if progress.epoch is None else str(progress.epoch)),
    ]
    declared = manifest.to_data()["declare"]
    return Transition(
        source=draw_mesh(source),
        destination=draw_mesh(destination, idle_ranks=model.plan.destination.idle_ranks if model.plan else 0),
        ownership=plan_ownership(source, destination, *_held(model)),
        progress=tuple(facts),
        declared=tuple((name, _claim(value)) for name, value in declared.items()),
        decisions=tuple((item.key, item.chosen, item.consequence) for item in model.plan.decisions)
        if model.plan
        else (),
    )


def _claim(value: Any) -> str:
    return f"bounded by {value['bounded']:g}" if isinstance(value, Mapping) else str(value)


def _held(model: ReportModel) -> tuple[dict[str, Held], dict[str, Held]]:
    """Returns the parameters by name as the control has them, and as the candidate has or would have them."""
    control = next((state.body for job in model.controls if (state := job.state()) is not None), None)
    candidate = state.body if model.loaded and (state := model.loaded.state()) else None
    before, after = _parameters(control or {}), _parameters(candidate or {})
    usual = {name: Held(item.shape) for name, item in (before or after).items()}
    return before or usual, after or usual


def _parameters(body: Mapping[str, Any]) -> dict[str, Held]:
    facts: Mapping[str, Any] = body.get("tensors") or {}
    return {
        key.removeprefix("param:"): Held(
            shape=tuple(fact["shape"]),
            cuts=None
            if fact.get("cuts") is None
            else tuple((str(axis), dim, strided) for axis, dim, strided in fact["cuts"]),
            lead=int(fact.get("lead", 0)),
        )
        for key, fact in facts.items()
        if key.startswith("param:")
    }
