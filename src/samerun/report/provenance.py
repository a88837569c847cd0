"""What was sealed, when, and what the jobs ran on, as they say themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.report.charts import number_text
from samerun.report.model import ReportModel
from samerun.verify.evidence.observed import Observed


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


def view_provenance(model: ReportModel) -> Provenance:
    """Returns seals, controls, versions and commands of a run."""
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
