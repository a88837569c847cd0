"""The page as one value: everything that the templates show, already decided. Pure, given what was read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.catalog import Entry, load_catalog
from samerun.core.size import format_size
from samerun.errors import Problem, Severity
from samerun.plan.memory import MemoryEstimate
from samerun.report.batch import BatchView, view_batch
from samerun.report.charts import Chart, Drawing, Tick, draw_panel, name_ticks, number_text
from samerun.report.layout import Held, Mesh, Ownership, draw_mesh, plan_ownership
from samerun.report.model import Criterion, Gap, ReportModel, Stage
from samerun.report.samples import SamplesView, view_samples
from samerun.report.state import StateView, view_state
from samerun.report.updates import plan_charts
from samerun.verify.observed import Observed

MAX_SAME_FINDINGS = 10
"""Findings of one code that a stage's list spells out; the rest are counted and stay in the stage's result."""
MAX_MEMORY_RANKS = 32

_LABELS: Mapping[str, str] = {
    "continuation": "continuation: the same run, exactly",
    "approximate-continuation": "approximate continuation: the same run within declared bounds",
    "intentional-change": "intentional change: another run from here on, on purpose",
    "warm-start": "warm start: the model only",
}
_WORDS: Mapping[str | None, str] = {
    "promote": "PROMOTE",
    "reject": "REJECT",
    "abstain": "ABSTAIN",
    None: "NOT JUDGED",
}


@dataclass(frozen=True, slots=True)
class Instance:
    """One finding of a group: the finding, and its place in words."""

    problem: Problem
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Findings of one code, severity and stage, with their explanation. `more` counts those not spelled out.

    `hint` is set where it is the same for all.
    """

    code: str
    severity: str
    stage: Stage | None
    entry: Entry | None
    instances: tuple[Instance, ...]
    more: int
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The verdict in words."""

    decision: str | None
    word: str
    sentence: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One criterion as it is shown. `measure` is empty where nothing but yes or no was measured."""

    name: str
    question: str
    passed: bool | None
    measure: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BandUse:
    """How much of its band a metric used where it used most. `share` is infinite where nothing was allowed."""

    metric: str
    place: str
    passed: bool | None
    share: float
    deviation: Any
    limit: Any
    evidence: str

    @property
    def percent(self) -> float:
        """The share as the length of a bar."""
        return round(min(100 * self.share, 100.0), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What inspecting found: counts in words, whether it is whole and undamaged, and what a resume has and lacks."""

    counts: tuple[tuple[str, str], ...]
    complete: bool | None
    intact: bool | None
    resumable: str
    have: tuple[str, ...]
    lack: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Where the run was and where it goes."""

    source: Mesh
    destination: Mesh
    ownership: tuple[Ownership, ...]
    progress: tuple[tuple[str, str], ...]
    declared: tuple[tuple[str, str], ...]
    decisions: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnChart:
    """A chart with its drawings and the ticks under it."""

    chart: Chart
    drawings: tuple[Drawing, ...]
    ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One part of a bar, in percent of the picture's width."""

    name: str
    percent: float
    text: str


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """One rank, or the host in one way of loading."""

    label: str
    parts: tuple[MemoryPart, ...]
    total: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """Bars on one scale; `device_percent` is where the device ends."""

    ranks: tuple[MemoryBar, ...]
    host: tuple[MemoryBar, ...]
    names: tuple[str, ...]
    device: str | None
    device_percent: float | None
    fits: bool | None
    left_out: int
    optimizer_known: bool


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and its value in each job; `same` tells whether all agree."""

    name: str
    values: tuple[str, ...]
    same: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What was sealed, when, and what ran."""

    seals: tuple[tuple[int, str, str, str], ...]
    manifest_sha256: str | None
    controls: tuple[tuple[str, str], ...]
    jobs: tuple[str, ...]
    facts: tuple[Fact, ...]
    commands: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The whole page."""

    title: str
    model: ReportModel
    headline: Headline
    answers: tuple[Answer, ...]
    uses: tuple[BandUse, ...]
    reasons: tuple[Finding, ...]
    findings: tuple[Finding, ...]
    transition: Transition | None
    checkpoint: CheckpointFacts | None
    state: StateView | None
    batch: BatchView | None
    samples: SamplesView | None
    charts: tuple[DrawnChart, ...]
    memory: MemoryView | None
    provenance: Provenance
    gaps: tuple[Gap, ...]

    @property
    def has_marks(self) -> bool:
        """Whether some chart marks a value."""
        return any(line.outside for chart in self.charts for drawing in chart.drawings for line in drawing.lines)


def plan_page(model: ReportModel) -> Page:
    """Returns the page for what was read."""
    reasons = _reasons(model)
    return Page(
        title=model.manifest.run.name if model.manifest else model.root.name,
        model=model,
        headline=_headline(model),
        answers=tuple(_answer(item) for item in _criteria(model) if not _is_metric(item)),
        uses=tuple(_use(item) for item in _criteria(model) if _is_metric(item)),
        reasons=tuple(_group(reasons)),
        findings=tuple(_group(_further_findings(model, reasons))),
        transition=_transition(model),
        checkpoint=_checkpoint(model.inspected),
        state=view_state(model),
        batch=view_batch(model),
        samples=view_samples(model),
        charts=tuple(draw_chart(chart) for chart in plan_charts(model)),
        memory=_memory(model.plan.memory) if model.plan else None,
        provenance=_provenance(model),
        gaps=model.gaps,
    )


def draw_chart(chart: Chart) -> DrawnChart:
    """Returns the chart as paths and ticks."""
    return DrawnChart(
        chart=chart,
        drawings=tuple(draw_panel(panel) for panel in chart.panels),
        ticks=name_ticks(chart.names, numeric=chart.numeric),
    )


Staged = tuple[Stage | None, Problem]


def _reasons(model: ReportModel) -> list[Staged]:
    """Returns what led to the verdict, in its order; without a verdict, what blocks."""
    if model.verdict is None:
        return [(stage, problem) for stage, problem in model.findings if problem.severity is Severity.ERROR]
    return [(_stage_of(model, problem), problem) for problem in model.verdict.reasons]


def _stage_of(model: ReportModel, problem: Problem) -> Stage | None:
    return next((stage for stage, other in model.findings if other == problem), None)


def _further_findings(model: ReportModel, reasons: Sequence[Staged]) -> list[Staged]:
    """Returns everything that is not among the reasons, worst first."""
    told = [problem for _, problem in reasons]
    found: list[Staged] = [(stage, problem) for stage, problem in model.findings if problem not in told]
    known = [problem for _, problem in found]
    remarks = model.verdict.remarks if model.verdict else ()
    found += [(None, problem) for problem in remarks if problem not in known and problem not in told]
    return sorted(found, key=lambda item: list(Severity).index(item[1].severity))


def _group(items: Iterable[Staged]) -> Iterator[Finding]:
    """Yields findings of one code, severity and stage together, in the order of their first."""
    groups: dict[tuple[str, str, str], list[Staged]] = {}
    for stage, problem in items:
        groups.setdefault((problem.code, problem.severity.value, stage.name if stage else ""), []).append(
            (stage, problem)
        )
    catalog = load_catalog()
    for (code, severity, _), group in groups.items():
        hints = {problem.hint for _, problem in group}
        yield Finding(
            code=code,
            severity=severity,
            stage=group[0][0],
            entry=catalog.get(code),
            instances=tuple(Instance(problem, _place(problem.where)) for _, problem in group[:MAX_SAME_FINDINGS]),
            more=max(0, len(group) - MAX_SAME_FINDINGS),
            hint=hints.pop() if len(hints) == 1 else "",
        )


def _place(where: Mapping[str, Any]) -> str:
    """Returns where a finding is in words, without the stage, which its group names."""
    return ", ".join(f"{name} {value}" for name, value in where.items() if name != "stage")


_METRIC = "numerics."


def _criteria(model: ReportModel) -> tuple[Criterion, ...]:
    return model.verdict.criteria if model.verdict else ()


def _is_metric(item: Criterion) -> bool:
    return item.name.startswith(_METRIC)


def _answer(item: Criterion) -> Answer:
    value = item.value
    if item.passed is None:
        measure = ""
    elif item.name == "numerics" and isinstance(value, int | float):
        measure = f"at most {100 * value:.2g} % of a band" if math.isfinite(value) else "a band was left"
    elif item.name == "samples" and value:
        measure = f"{value} replayed or omitted, {item.limit} allowed"
    else:
        measure = f"{value} findings" if isinstance(value, int) and value > 1 else ""
    return Answer(
        name=item.name.replace("-", " "),
        question=item.question,
        passed=item.passed,
        measure=measure,
        evidence=item.evidence,
    )


def _use(item: Criterion) -> BandUse:
    value, limit = _float(item.value), _float(item.limit)
    return BandUse(
        metric=item.name.removeprefix(_METRIC).replace("_", " "),
        place=item.question,
        passed=item.passed,
        share=value / limit if limit else (math.inf if value else 0.0),
        deviation=value,
        limit=limit,
        evidence=item.evidence,
    )


def _float(value: Any) -> float:
    """Returns a number as JSON has it, where what is not finite is text; not a number counts as infinitely far."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.inf
    return math.inf if math.isnan(number) else number


def _headline(model: ReportModel) -> Headline:
    verdict = model.verdict
    decision = verdict.decision if verdict else None
    label = verdict.label if verdict else model.manifest.transition.label if model.manifest else ""
    return Headline(
        decision=decision,
        word=_WORDS.get(decision, str(decision).upper()),
        sentence=_sentence(model, decision),
        label=_LABELS.get(label, label),
    )


def _sentence(model: ReportModel, decision: str | None) -> str:
    verdict = model.verdict
    if verdict is not None and decision == "promote":
        examined = sum(1 for item in verdict.criteria if item.passed is not None)
        return (
            f"Every one of {examined} criteria was examined and holds within what was sealed before the candidate ran. "
            f"{_validated(verdict.validated)}"
        )
    failed = next((stage for stage in model.stages if stage.status == "fail"), None)
    if verdict is not None and decision == "reject":
        return _first_reason(verdict.reasons)
    if verdict is not None:
        return f"Nothing failed, but what was seen does not suffice. {_first_reason(verdict.reasons)}"
    if failed is not None:
        return f"There is no verdict yet. Stage {failed.name} failed, and later stages were not run."
    done = ", ".join(stage.name for stage in model.stages if stage.status == "pass")
    return f"There is no verdict yet; done so far: {done}." if done else "No stage has been finished yet."


def _first_reason(reasons: Sequence[Problem]) -> str:
    if not reasons:
        return "The record names no reason."
    first, others = reasons[0], len(reasons) - 1
    where = {name: str(value).rpartition("/")[2] if name == "file" else value for name, value in first.where.items()}
    entry, place = load_catalog().get(first.code), _place(where)
    text = entry.title if entry else first.message.partition("\n")[0].rstrip(":.")
    text += f" ({place})" if place else ""
    return f"{text}, and {others} further finding{'s' * (others > 1)}." if others else f"{text}."


def _validated(validated: Mapping[str, Any]) -> str:
    layout, batch = validated.get("layout"), validated.get("batch")
    if not isinstance(layout, Mapping):
        return ""
    text = ", ".join(f"{axis}={size}" for axis, size in layout.items() if size != 1) or "one rank"
    if isinstance(batch, Mapping) and "global_batch" in batch:
        text += f" with {batch['global_batch']} samples per update"
    return f"Validated for {text}, and for nothing else."


def _checkpoint(measured: Mapping[str, Any]) -> CheckpointFacts | None:
    """Returns the facts, or None if the stage measured nothing that is known here."""
    counts, resumable = measured.get("counts"), measured.get("resumable")
    if not isinstance(counts, Mapping) or not isinstance(resumable, Mapping):
        return None
    words = [("format", str(measured.get("format")))]
    words += [(str(k), format_size(v) if k == "bytes" else f"{v:,}") for k, v in counts.items() if isinstance(v, int)]
    return CheckpointFacts(
        counts=tuple(words),
        complete=measured.get("complete"),
        intact=measured.get("intact"),
        resumable=str(resumable.get("verdict")),
        have=tuple(map(str, resumable.get("have") or ())),
        lack=tuple(map(str, resumable.get("lack") or ())),
    )


def _transition(model: ReportModel) -> Transition | None:
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


_PARTS = ("parameters", "gradients", "optimizer", "masters", "ema", "buffers", "gather")


def _memory(estimate: MemoryEstimate) -> MemoryView:
    device = estimate.device_memory_bytes
    shown = estimate.per_rank[:MAX_MEMORY_RANKS]
    host = (("one process consolidates", estimate.host.consolidate_bytes), ("direct load", estimate.host.direct_bytes))
    widest = max([device or 0, 1, *(item.total_bytes for item in shown)]) * 1.02
    tallest = max(1, *(size for _, size in host)) * 1.02
    used = [part for part in _PARTS if any(getattr(item, f"{part}_bytes") for item in shown)]
    return MemoryView(
        ranks=tuple(
            MemoryBar(
                f"rank {item.rank}",
                tuple(_part(part, getattr(item, f"{part}_bytes"), widest) for part in used),
                format_size(item.total_bytes),
            )
            for item in shown
        ),
        host=tuple(MemoryBar(name, (_part("host", size, tallest),), format_size(size)) for name, size in host),
        names=tuple(used),
        device=format_size(device) if device else None,
        device_percent=round(100 * device / widest, 2) if device else None,
        fits=estimate.fits,
        left_out=len(estimate.per_rank) - len(shown),
        optimizer_known=estimate.optimizer_known,
    )


def _part(name: str, size_bytes: int, scale: float) -> MemoryPart:
    return MemoryPart(name, round(100 * size_bytes / scale, 3), format_size(size_bytes))


def _provenance(model: ReportModel) -> Provenance:
    seals = model.seals.seals if model.seals else ()
    jobs = (*model.controls, *model.candidates.values())
    return Provenance(
        seals=tuple((item.number, item.digest, item.sealed_at or "", item.reason or "") for item in seals),
        manifest_sha256=model.manifest.sha256() if model.manifest else None,
        controls=tuple((str(k), _evidence_hash(v)) for k, v in (seals[-1].controls.items() if seals else ())),
        jobs=tuple(job.name for job in jobs),
        facts=tuple(_facts([job.observed for job in jobs])),
        commands=tuple(_commands(model)),
    )


def _evidence_hash(value: Any) -> str:
    return str(value.get("trace", value)) if isinstance(value, Mapping) else str(value)


def _facts(jobs: Sequence[Observed]) -> Iterator[Fact]:
    """Yields versions and environment, job by job; those that differ explain deviations and come first."""
    rows: dict[str, list[str]] = {}
    for number, observed in enumerate(jobs):
        header = next(iter(observed.headers.values()), None)
        body: dict[str, Any] = {}
        if header is not None:
            body = {"world size": header.world_size, "layout": header.mesh(), **header.versions, **header.environment}
        for name, value in body.items():
            rows.setdefault(str(name), [""] * len(jobs))[number] = plain_text(value)
    facts = [Fact(name, tuple(values), len(set(values)) == 1) for name, values in rows.items()]
    yield from sorted(facts, key=lambda fact: fact.same)


def plain_text(value: Any) -> str:
    """Returns a value as a person writes it: lists and mappings without brackets and quotes."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain_text, value))
    return number_text(value, 9) if isinstance(value, float) else str(value)


def _commands(model: ReportModel) -> Iterator[tuple[str, str]]:
    for stage in model.stages:
        for job in stage.result.jobs if stage.result else ():
            if command := job.get("command"):
                yield stage.name, " ".join(command) if isinstance(command, list | tuple) else str(command)
