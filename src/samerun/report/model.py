"""What a run directory says, read into values. A partial one is read as far as it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from samerun.core.tolerance import Band, bands_from_json
from samerun.errors import Problem, SamerunError, UsageError
from samerun.manifest.models import Manifest
from samerun.manifest.seal import SealRecord
from samerun.plan.migration import MigrationPlan
from samerun.report.files import Gap, RunFiles
from samerun.trace import StateLine, read_trace
from samerun.verify.evidence.observed import Observed, observe
from samerun.verify.evidence.stage import (
    CONTROL,
    CONVERT,
    EVAL,
    LOAD,
    STAGES,
    UPDATE,
    WINDOW,
    StageResult,
    problem_from_json,
    stages_of,
)

Status = Literal["pass", "fail", "skipped", "absent"]

STAGE_TITLES = (
    ("Inspect", "Is the checkpoint whole, counted in values, and can it resume at all?"),
    ("Control", "What does the run do on its own layout, and how much does it vary by itself?"),
    ("Convert", "Does the converted checkpoint hold, tensor by tensor, what the source holds?"),
    ("Load", "Does the destination hold, tensor by tensor, what the checkpoint holds?"),
    ("Evaluate", "Do fixed examples give the same losses and logits, and does evaluating change nothing?"),
    ("First update", "Is the first update after the move the one that the control makes?"),
    ("Window", "Do the following updates stay in their bands, on the same samples?"),
    ("Judge", "Promote, reject or abstain."),
)
"""A title and the question that it answers, for each of `samerun.verify.evidence.stage.STAGES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage. `absent` means that there is no result: it was not reached, or was not finished."""

    name: str
    title: str
    question: str
    status: Status
    result: StageResult | None
    log: str | None

    @property
    def evidence(self) -> str:
        """Path of its result, relative to the run directory."""
        return f"stages/{self.name}/result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job's own account. `folder` is its trace, relative to the run directory."""

    name: str
    folder: str
    observed: Observed

    def state(self, when: str = "loaded") -> StateLine | None:
        """Returns the state that it captured, or None."""
        return self.observed.state(when)


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One line of the verdict. `passed` is None where it was never examined."""

    name: str
    question: str
    passed: bool | None
    value: Any
    limit: Any
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """`verdict.json`."""

    decision: str
    label: str
    criteria: tuple[Criterion, ...]
    reasons: tuple[Problem, ...]
    remarks: tuple[Problem, ...]
    first_divergence: Mapping[str, Any] | None
    validated: Mapping[str, Any]
    sealed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportModel:
    """Everything that a report shows.

    `controls` starts with the reference. `candidates` is by stage name. `bands` are the sealed ones; `noise` lists the
    tensors whose change no band could judge. `files` are the paths that exist, relative to `root`.
    """

    root: Path
    manifest: Manifest | None
    seals: SealRecord | None
    plan: MigrationPlan | None
    bands: tuple[Band, ...]
    noise: tuple[str, ...]
    stages: tuple[Stage, ...]
    controls: tuple[Job, ...]
    candidates: Mapping[str, Job]
    verdict: Ruling | None
    gaps: tuple[Gap, ...]
    files: frozenset[str]

    @property
    def control(self) -> Job | None:
        """The reference, if there is one."""
        return self.controls[0] if self.controls else None

    @property
    def loaded(self) -> Job | None:
        """The candidate's job that first captured its state."""
        jobs = (self.candidates.get(name) for name in (LOAD, EVAL, UPDATE, WINDOW))
        return next((job for job in jobs if job is not None and job.state() is not None), None)

    @property
    def followed(self) -> Job | None:
        """The candidate's job that made the most updates."""
        jobs = [self.candidates[name] for name in (WINDOW, UPDATE) if name in self.candidates]
        return max(jobs, key=lambda job: len(job.observed.updates), default=None)

    @property
    def inspected(self) -> Mapping[str, Any]:
        """What the first stage measured of the checkpoint; empty if it did not finish."""
        result = self.stages[0].result
        return result.measured if result else {}

    @property
    def findings(self) -> tuple[tuple[Stage, Problem], ...]:
        """Every stage's findings in order. The judge's are those of the others."""
        stages = (stage for stage in self.stages if stage.name != STAGES[-1])
        return tuple((stage, item) for stage in stages if stage.result for item in stage.result.problems)


def read_run(root: Path) -> ReportModel:
    """Reads a run directory, whatever of it is there.

    Raises:
        UsageError: SR-RUN-DIRECTORY if nothing in it is a run's.
    """
    _require_run(root)
    files = RunFiles(root)
    listed = files.list()
    seals = _read_seals(files)
    results = _read_results(files)
    manifest = _read_manifest(files, seals)
    bands, noise = _read_bands(files, seals)
    ran = next((True for result in results.values() if result.stage != STAGES[0]), False)
    controls = _read_controls(files, listed, ran)
    return ReportModel(
        root=root,
        manifest=manifest,
        seals=seals,
        plan=_read_plan(files, seals),
        bands=bands,
        noise=noise,
        stages=tuple(_stage(name, results, listed) for name in _stages(manifest, results)),
        controls=controls,
        candidates=_read_candidates(files, results),
        verdict=_read_verdict(files),
        gaps=tuple(files.gaps),
        files=listed,
    )


def _stages(manifest: Manifest | None, results: Mapping[str, StageResult]) -> tuple[str, ...]:
    wanted = manifest is not None and manifest.convert is not None
    return stages_of(converts=wanted or CONVERT in results)


def _require_run(root: Path) -> None:
    if any((root / name).exists() for name in ("manifest.yaml", "sealed.json", "stages", "verdict.json")):
        return
    found = ", ".join(sorted(item.name for item in root.iterdir())[:8]) if root.is_dir() else "nothing there"
    raise UsageError(
        Problem(
            "SR-RUN-DIRECTORY",
            "this is not a run directory",
            where={"file": str(root)},
            expected="manifest.yaml and stages/",
            found=found or "an empty directory",
            hint="`samerun run m.yaml --dir RUNDIR` makes one",
        )
    )


def _read_seals(files: RunFiles) -> SealRecord | None:
    return files.parse(
        "sealed.json",
        SealRecord.from_json,
        "Nothing was sealed, so there are no bands to judge by and no plan that binds.",
        "the control stage seals them: `samerun run` goes on where it stopped",
    )


def _read_manifest(files: RunFiles, seals: SealRecord | None) -> Manifest | None:
    """The sealed content is what was judged; the file beside it only counts while nothing is sealed."""
    effect = "The declared transition is not known."
    if seals is not None:
        try:
            return Manifest.from_data(seals.current.manifest)
        except ValueError as error:
            files.broken("sealed.json (manifest)", error, effect)
    from samerun.manifest.read import read_document

    try:
        document = read_document(files.root / "manifest.yaml")
    except (SamerunError, OSError) as error:
        files.broken("manifest.yaml", error, effect)
        return None
    if document.manifest is None:
        missing = len(document.problems) + len(document.questions)
        files.gaps.append(
            Gap("manifest.yaml", f"{missing} entries are open or wrong. {effect}", "`samerun plan` lists")
        )
    return document.manifest


def _read_plan(files: RunFiles, seals: SealRecord | None) -> MigrationPlan | None:
    """The sealed plan binds; before anything is sealed there is the one that was made after inspecting."""
    effect = "Memory on the destination is not shown."
    if seals is None:
        return files.parse("plan.json", MigrationPlan.from_json, effect, "`samerun run` makes it after inspecting")
    try:
        return MigrationPlan.from_json(seals.current.plan)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        files.broken("sealed.json (plan)", error, effect)
        return None


def _read_bands(files: RunFiles, seals: SealRecord | None) -> tuple[tuple[Band, ...], tuple[str, ...]]:
    if seals is None:
        return (), ()
    body = seals.current.tolerances
    try:
        return bands_from_json(body), tuple(map(str, body.get("noise", ())))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        files.broken("sealed.json (tolerances)", error, "No band is drawn.")
        return (), ()


def _read_results(files: RunFiles) -> dict[str, StageResult]:
    found: dict[str, StageResult] = {}
    for name in STAGES:
        path, effect = f"stages/{name}/result.json", "What this stage found is not shown."
        if (files.root / path).exists() and (result := files.parse(path, StageResult.from_json, effect, "")):
            found[name] = result
    return found


def _stage(name: str, results: Mapping[str, StageResult], listed: frozenset[str]) -> Stage:
    title, question = STAGE_TITLES[STAGES.index(name)]
    result = results.get(name)
    log = f"stages/{name}/log.txt"
    return Stage(
        name=name,
        title=title,
        question=question,
        status=result.status if result else "absent",
        result=result,
        log=log if log in listed else None,
    )


def _read_controls(files: RunFiles, listed: frozenset[str], ran: bool) -> tuple[Job, ...]:
    """Records made elsewhere come first, then the stage's own `trace/`, then the repeats in folders of their own."""
    base = f"stages/{CONTROL}/"
    folders = [path.removesuffix("/") for path in listed if path.startswith(base) and path.endswith("/trace/")]
    jobs = [
        _read_job(files, f"control {folder.removeprefix(base).removesuffix('trace').strip('/')}".strip(), folder)
        for folder in sorted(folders, key=_control_order)
    ]
    found = tuple(job for job in jobs if job is not None)
    if not found and (ran or files.root.joinpath(base).is_dir()):
        files.gaps.append(
            Gap(f"{base}trace", "There is no control to draw candidates over.", "the control stage records it")
        )
    return found


def _control_order(folder: str) -> tuple[int, int]:
    kind, _, number = folder.rsplit("/", 2)[-2].rpartition("-")
    order = {"recorded": 0, "repeat": 2}.get(kind, 1)
    return order, int(number) if order != 1 and number.isdecimal() else 0


def _read_candidates(files: RunFiles, results: Mapping[str, StageResult]) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    for name in (LOAD, EVAL, UPDATE, WINDOW):
        folder = f"stages/{name}/trace"
        if (files.root / folder).is_dir():
            job = _read_job(files, f"candidate {name[3:]}", folder)
            if job is not None:
                jobs[name] = job
        elif name in results and results[name].status != "skipped":
            files.gaps.append(
                Gap(folder, "What this job recorded is not shown.", "the stage was run and left no trace")
            )
    return jobs


def _read_job(files: RunFiles, name: str, folder: str) -> Job | None:
    try:
        return Job(name=name, folder=folder, observed=observe(read_trace(files.root / folder)))
    except (SamerunError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        files.broken(folder, error, "What this job recorded is not shown.")
        return None


def _read_verdict(files: RunFiles) -> Ruling | None:
    return files.parse(
        "verdict.json", _parse_verdict, "Nothing has been judged yet.", "`samerun run` goes on; `samerun judge` judges"
    )


def _parse_verdict(body: Mapping[str, Any]) -> Ruling:
    return Ruling(
        decision=str(body["verdict"]),
        label=str(body.get("label") or ""),
        criteria=tuple(_parse_criterion(item) for item in body["criteria"]),
        reasons=_parse_problems(body.get("reasons") or ()),
        remarks=_parse_problems(body.get("remarks") or ()),
        first_divergence=body.get("first_divergence"),
        validated=body.get("validated") or {},
        sealed=body.get("sealed"),
    )


def _parse_problems(items: Sequence[Mapping[str, Any]]) -> tuple[Problem, ...]:
    return tuple(problem_from_json(item) for item in items)


def _parse_criterion(item: Mapping[str, Any]) -> Criterion:
    return Criterion(
        name=str(item["name"]),
        question=str(item.get("question") or ""),
        passed=item["pass"],
        value=item.get("value"),
        limit=item.get("limit"),
        evidence=str(item.get("evidence") or ""),
    )
