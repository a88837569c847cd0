"""What bounds from numerical analysis say of a run directory that was judged by bands from its controls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samerun.core.dtype import parse_dtype
from samerun.core.tolerance import Band, bands_from_json
from samerun.errors import Severity
from samerun.manifest.models import Manifest
from samerun.manifest.tolerances import METRICS, Tolerances
from samerun.plan.migration import MigrationPlan
from samerun.runner.assess import assess_evaluation, window_plan
from samerun.runner.evidence import control_traces, read_controls, read_evaluation, read_observed
from samerun.runner.rundir import RunDirectory
from samerun.verify.updates.bands import plan_bands, split_bands, vanishing
from samerun.verify.updates.compare import compare_window
from samerun.verify.updates.controls import Controls

ANALYSED = Tolerances.model_validate({metric: {"from": "analysis"} for metric in METRICS})
NUMBERS = (
    *("SR-UPD-LOSS", "SR-UPD-GRADNORM", "SR-UPD-UPDATENORM", "SR-UPD-GRADIENT", "SR-UPD-DELTA", "SR-UPD-CLIP"),
    *("SR-EVAL-LOSS", "SR-EVAL-LOGITS"),
)


def reassess(root: Path) -> dict[str, Any] | None:
    """Returns what both origins of bands find in the traces of a run directory; None where nothing was sealed.

    `controls` and `analysis` list the numbers that left their band, `wide` the metrics whose bound from analysis
    exceeds its ceiling (which abstains), `used` the largest part of such a bound that was used.
    """
    place = RunDirectory(root)
    record = place.read_seals() if place.sealed.exists() else None
    if record is None:
        return None
    manifest, plan = Manifest.from_data(record.current.manifest), MigrationPlan.from_json(record.current.plan)
    controls = read_controls(control_traces(manifest, place.stage("02-control")))
    bands = plan_bands(
        controls,
        ANALYSED.by_metric(),
        first_update=plan.first_update,
        num_updates=plan.window_updates,
        precision=parse_dtype(manifest.run.precision),
    )
    kept, noise, wide = split_bands(bands, vanishing(controls, bands))
    sealed = bands_from_json(record.current.tolerances)
    by_controls, _ = _find(place, manifest, plan, controls, sealed)
    by_analysis, used = _find(place, manifest, plan, controls, kept)
    return {
        "controls": by_controls,
        "analysis": by_analysis,
        "wide": sorted({str(problem.where.get("key")) for problem in wide}),
        "left_out": len(noise),
        "used": used,
    }


def _find(
    place: RunDirectory, manifest: Manifest, plan: MigrationPlan, controls: Controls, bands: Sequence[Band]
) -> tuple[list[str], float]:
    codes: dict[str, None] = {}
    used = 0.0
    for stage in ("04-eval", "05-update", "06-window"):
        folder = place.stage(stage) / "trace"
        observed = read_observed(folder) if folder.is_dir() else None
        if observed is None:
            continue
        if stage == "04-eval":
            found = assess_evaluation(manifest, controls, read_evaluation(folder, observed), bands)
            problems, worst = found.problems, found.measured.get("worst", {})
        else:
            wanted = window_plan(manifest, plan, bands, stage.partition("-")[2], None)
            report = compare_window(controls.reference, observed, wanted)
            problems, worst = report.problems, report.worst
        codes |= dict.fromkeys(p.code for p in problems if p.code in NUMBERS and p.severity is Severity.ERROR)
        used = max([used, *(float(row["used"]) for row in worst.values())])
    return list(codes), used
