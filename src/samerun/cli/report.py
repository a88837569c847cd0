"""`samerun report`: one self-contained HTML page with the pictures."""

from __future__ import annotations

import os
from pathlib import Path

import click

from samerun.cli.curves import chosen, curve_options


@click.command(name="report")
@click.argument("rundir", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Where to write it; report.html in RUNDIR by default."
)
@curve_options("Write the curves of controls and candidates there instead")
def command(rundir: Path, output: Path | None, **folders: Path | None) -> None:
    """Write what RUNDIR holds as one HTML page that opens from disk.

    Verdict and reasons first, then the declared transition, state coverage,
    batch options, samples across the seam, the candidate's numbers over the
    control's with their sealed bands, memory, findings, and where the evidence
    lies. Works on an unfinished run directory too and says what is missing.
    The page fetches nothing.

    \b
    samerun report move/
    samerun report move/ -o move.html
    samerun report move/ --tensorboard curves
    """
    from samerun.report.html import render_html
    from samerun.report.model import read_run
    from samerun.stores.local import write_atomic

    curves = chosen(folders)
    if output is not None and curves is not None:
        raise click.UsageError(f"-o names the page, --{curves[0]} the curves: one at a time")
    model = read_run(rundir)
    if curves is not None:
        from samerun.report.curves import curves_of, write_curves

        for folder in write_curves(curves_of(model), curves[1], to=curves[0], began=rundir.stat().st_mtime):
            click.echo(folder)
        return
    target = output or rundir / "report.html"
    write_atomic(target, render_html(model, base=link_base(rundir, target)))
    click.echo(target)


def link_base(rundir: Path, target: Path) -> str:
    """Returns the path from the page's folder to the run directory, with a slash at its end; empty inside it."""
    relative = Path(os.path.relpath(rundir.resolve(), target.resolve().parent)).as_posix()
    return "" if relative == "." else f"{relative}/"
