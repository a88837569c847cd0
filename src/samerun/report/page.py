"""The page as one value: everything that the templates show, already decided. Pure, given what was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samerun.core.size import format_size
from samerun.report.batch import BatchView, view_batch
from samerun.report.charts import Chart, Drawing, Tick, draw_panel, name_ticks
from samerun.report.findings import Finding, find_reasons, further_findings, group_findings
from samerun.report.memory import MemoryView, view_memory
from samerun.report.model import Gap, ReportModel
from samerun.report.provenance import Provenance, view_provenance
from samerun.report.samples import SamplesView, view_samples
from samerun.report.state import StateView, view_state
from samerun.report.transition import Transition, view_transition
from samerun.report.updates import plan_charts
from samerun.report.verdict import Answer, BandUse, Headline, view_answers, view_uses, write_headline


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
class DrawnChart:
    """A chart with its drawings and the ticks under it."""

    chart: Chart
    drawings: tuple[Drawing, ...]
    ticks: tuple[Tick, ...]


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
    reasons = find_reasons(model)
    return Page(
        title=model.manifest.run.name if model.manifest else model.root.name,
        model=model,
        headline=write_headline(model),
        answers=view_answers(model),
        uses=view_uses(model),
        reasons=tuple(group_findings(reasons)),
        findings=tuple(group_findings(further_findings(model, reasons))),
        transition=view_transition(model),
        checkpoint=_checkpoint(model.inspected),
        state=view_state(model),
        batch=view_batch(model),
        samples=view_samples(model),
        charts=tuple(draw_chart(chart) for chart in plan_charts(model)),
        memory=view_memory(model.plan.memory) if model.plan else None,
        provenance=view_provenance(model),
        gaps=model.gaps,
    )


def draw_chart(chart: Chart) -> DrawnChart:
    """Returns the chart as paths and ticks."""
    return DrawnChart(
        chart=chart,
        drawings=tuple(draw_panel(panel) for panel in chart.panels),
        ticks=name_ticks(chart.names, numeric=chart.numeric),
    )


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
