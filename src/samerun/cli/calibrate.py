"""`samerun calibrate`: how much a run varies by itself, and which bands that would seal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samerun.cli.output import emit_json, stderr_console, stdout_console

if TYPE_CHECKING:
    from samerun.core.tolerance import Band


@click.command(name="calibrate")
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="Where; MANIFEST's name with .calibration by default."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, every update of every band.")
def command(manifest: Path, directory: Path | None, as_json: bool) -> int:
    """Run the controls of MANIFEST only, and show the bands that they give.

    The controls run on the source's layout, as often as `control.repeats` says, every
    second one with `control.vary_microbatch`: the same batch, added up in another order.
    Nothing is moved. The run that is judged later runs and seals its own controls, or
    takes these: `control: {kind: trace, trace: MANIFEST.calibration/stages/02-control}`.

    \b
    samerun calibrate move.yaml
    samerun calibrate move.yaml --json
    """
    from samerun.cli.run import TerminalProgress
    from samerun.core.tolerance import bands_from_json
    from samerun.runner.run import run_migration
    from samerun.runner.rundir import RunDirectory

    place = directory or manifest.with_suffix(".calibration")
    progress = TerminalProgress(stderr_console())
    try:
        outcome = run_migration(manifest, place, until="control", progress=progress)
    finally:
        progress.close()
    record = RunDirectory(place).read_seals() if outcome.stopped_at is not None else None
    tolerances = record.current.tolerances if record else {}
    bands = bands_from_json(tolerances) if record else ()
    problems = [problem for result in outcome.results.values() for problem in result.problems]
    if as_json:
        body = {
            "directory": str(place),
            "bands": [band.to_json() for band in bands],
            "noise": list(tolerances.get("noise", ())),
            "problems": [problem.to_json() for problem in problems],
        }
        emit_json("calibrate", body)
    elif record is not None:
        _print_bands(bands, tolerances.get("noise", ()), place)
    return 0 if record is not None else 1


def _print_bands(bands: Sequence[Band], noise: Sequence[str], place: Path) -> None:
    from rich.table import Table

    out = stdout_console()
    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("metric", "controls differ by", "floor", "band", "from"):
        table.add_column(heading, justify="left" if heading in ("metric", "from") else "right", no_wrap=True)
    each: dict[str, list[Band]] = {}
    for band in bands:
        if band.tensor is not None:
            each.setdefault(band.metric, []).append(band)
    widest = [max(rows, key=lambda band: band.limits[-1]) for rows in each.values()]
    for band in [*(band for band in bands if band.tensor is None), *widest]:
        name = band.metric if band.tensor is None else f"{band.metric}, widest of {len(each[band.metric])}"
        seen = max(band.observed) if band.observed else None
        table.add_row(name, _number(seen), _number(band.floor), _span(band), band.origin)
    out.print()
    out.print(table)
    if noise:
        out.print(f"not compared, noise in the controls already: {', '.join(noise)}", style="yellow")
    out.print(f"relative unless the manifest says absolute; every update: --json; traces: {place}/stages/02-control")


def _number(value: Any) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.2g}"


def _span(band: Band) -> str:
    first, last = band.limits[0], band.limits[-1]
    return _number(first) if first == last else f"{_number(first)} to {_number(last)}"
