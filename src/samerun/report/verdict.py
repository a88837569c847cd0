"""The verdict in words, every criterion, and how much of its band each metric used. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.catalog import load_catalog
from samerun.errors import Problem
from samerun.report.findings import place_in_words
from samerun.report.model import Criterion, ReportModel

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


_METRIC = "numerics."


def _criteria(model: ReportModel) -> tuple[Criterion, ...]:
    return model.verdict.criteria if model.verdict else ()


def _is_metric(item: Criterion) -> bool:
    return item.name.startswith(_METRIC)


def view_answers(model: ReportModel) -> tuple[Answer, ...]:
    """Returns every criterion that is no metric of its own, in causal order."""
    return tuple(_answer(item) for item in _criteria(model) if not _is_metric(item))


def view_uses(model: ReportModel) -> tuple[BandUse, ...]:
    """Returns how much of its band each metric used."""
    return tuple(_use(item) for item in _criteria(model) if _is_metric(item))


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


def write_headline(model: ReportModel) -> Headline:
    """Returns the verdict, or how far the run has come without one."""
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
    entry, place = load_catalog().get(first.code), place_in_words(where)
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
    rehearsal = validated.get("rehearsal")
    if isinstance(rehearsal, Mapping):
        return (
            f"This was a rehearsal of {rehearsal.get('of')}, with a reduced copy on CPU processes, for {text}: the "
            "real move has not been run."
        )
    return f"Validated for {text}, and for nothing else."
