"""`samerun run`: the whole diagnostic sequence, cheapest first, stopping at the first failure."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samerun.cli.output import emit_json, print_problems, stderr_console
from samerun.errors import Problem

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from samerun.verify.evidence.stage import StageResult

HEARTBEAT_SECONDS = 30.0
"""How often a running job is mentioned where no line can be redrawn."""


@click.command(name="run")
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Run directory; MANIFEST's name with .run.")
@click.option("--until", metavar="STAGE", help="Stop after this stage: inspect, control, load, eval, update, window.")
@click.option("--reseal", "reason", metavar="REASON", help="Why something sealed was changed; makes a further seal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(manifest: Path, directory: Path | None, until: str | None, reason: str | None, as_json: bool) -> int:
    """Run the checks of MANIFEST, cheapest first, and judge.

    Says before each stage what it will start and what that costs. Stops at the
    first failure. Run it again after an interrupt or a crash: finished stages
    are kept. Tolerances are sealed before any candidate runs.

    \b
    samerun run move.yaml
    samerun run move.yaml --until control
    samerun run move.yaml --reseal "evaluation is in bf16, see ticket 12"
    """
    from samerun.cli.judge import print_verdict
    from samerun.runner.run import run_migration

    progress = TerminalProgress(stderr_console())
    try:
        outcome = run_migration(manifest, directory, until=until, reseal_reason=reason, progress=progress)
    finally:
        progress.close()
    body = outcome.verdict.to_json()
    if as_json:
        stages = {name: result.status for name, result in outcome.results.items()}
        head = {"directory": str(outcome.directory), "stopped_at": outcome.stopped_at, "stages": stages}
        emit_json("run", {**head, **{name: value for name, value in body.items() if name != "schema"}})
    elif outcome.stopped_at is not None:
        click.echo(f"stopped after {outcome.stopped_at}, as asked; everything until there passed")
        click.echo(f"go on with: samerun run {manifest}" + (f" --dir {directory}" if directory else ""))
    else:
        print_verdict(body, outcome.directory)
    return outcome.exit_code


class TerminalProgress:
    """Shows a run on a terminal, or in a log file: what begins, what it costs, how long it has taken, what it says."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._last_line = ""
        self._last_beat = 0.0
        self._title = ""

    def close(self) -> None:
        """Takes the moving line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def stage_begins(self, stage: str, what: str, cost: str) -> None:
        """A heading with what will be done, and below it what that costs."""
        self._say(f"\n{_label(stage)}  {what}", "bold")
        self._say(f"{'':{len(_label(stage))}}  {cost}", "dim")

    def stage_kept(self, result: StageResult) -> None:
        """One line for a stage that was finished earlier."""
        self._say(f"{_label(result.stage)}  passed earlier ({result.started}), kept", "dim")

    def stage_ends(self, result: StageResult) -> None:
        """The outcome, and its findings."""
        from samerun.cli.judge import print_grouped

        self.close()
        style = "green" if result.passed else "bold red"
        if result.stage != "07-judge":
            self._say(f"{'':{len(_label(result.stage))}}  {result.status}, {result.seconds:.1f} s", style)
            print_grouped(result.problems, self._console, f"stages/{result.stage}/result.json")

    def job_begins(self, title: str, command: str, limit_seconds: float) -> None:
        """The command line as one could type it."""
        self._title, self._last_line, self._last_beat = title, "", time.monotonic()
        self._say(f"  {title}", "")
        self._say(f"  $ {command}", "dim")
        if self._console.is_terminal:
            self._status = self._console.status(self._moving(0.0), refresh_per_second=4)
            self._status.start()

    def job_line(self, line: str) -> None:
        """Remembers the job's last line."""
        self._last_line = line

    def job_tick(self, elapsed_seconds: float) -> None:
        """Redraws the moving line, or prints one now and then where nothing can be redrawn."""
        if self._status is not None:
            self._status.update(self._moving(elapsed_seconds))
        elif time.monotonic() - self._last_beat > HEARTBEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._say(f"  {elapsed_seconds:.0f} s  {self._last_line[:160] or '(no output yet)'}", "dim")

    def job_ends(self, seconds: float, status: str) -> None:
        """How the job ended."""
        self.close()
        self._say(f"  ended after {seconds:.1f} s with {status}", "" if status == "exit status 0" else "yellow")

    def sealed(self, digest: str, tolerances: Mapping[str, Any]) -> None:
        """The limits, as they now stand."""
        self._say(f"\nsealed {digest}", "bold")
        for metric, band in tolerances.items():
            if isinstance(band, Mapping) and "limits" in band:
                limits = band["limits"]
                span = f"{limits[0]:.2g}" if limits[0] == limits[-1] else f"{limits[0]:.2g} to {limits[-1]:.2g}"
                self._say(f"  {metric:<16} within {span}  (from {band['origin']})", "")
        if noise := tolerances.get("noise"):
            self._say(f"  not compared, noise in the controls already: {', '.join(noise)}", "yellow")

    def note(self, problems: Sequence[Problem]) -> None:
        """Findings that belong to no stage."""
        print_problems(problems, self._console)

    def _moving(self, elapsed_seconds: float) -> Any:
        from rich.text import Text

        width = max(self._console.width - 16, 20)
        return Text(f"{elapsed_seconds:6.0f} s  {self._last_line or self._title}"[:width])

    def _say(self, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(text, style=style))
        sys.stderr.flush()


def _label(stage: str) -> str:
    number, _, name = stage.partition("-")
    return f"{int(number)}/7 {name:<7}"
