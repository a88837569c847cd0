"""`samerun demo`: the whole of it on a small real run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from samerun.cli.output import emit_json
from samerun.errors import Problem, SamerunError, UsageError

if TYPE_CHECKING:
    from samerun.demo.faults import Fault
    from samerun.demo.flow import DemoOutcome
    from samerun.demo.workspace import DemoSettings


@click.command(name="demo")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("samerun-demo"),
    show_default=True,
    help="Where everything is kept; what is there is used again.",
)
@click.option("--to", "to", metavar="LAYOUT", help="Destination layout.  [default: dp_shard=3]")
@click.option("--break", "fault_name", metavar="KIND", help="Inject a fault; the move must be rejected for it.")
@click.option("--list-breaks", is_flag=True, help="List the faults and stop.")
@click.option(
    "--size", type=click.Choice(["tiny", "slim", "small"]), default="small", show_default=True, help="Model size."
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "mixed", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of the training run.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the training run.")
@click.option(
    "--updates", type=click.IntRange(min=10), default=20, show_default=True, help="How long the window of a move is."
)
@click.option("--json", "as_json", is_flag=True, help="Print the judge document; everything else goes to stderr.")
def command(
    directory: Path,
    to: str | None,
    fault_name: str | None,
    list_breaks: bool,
    size: str,
    precision: str,
    seed: int,
    updates: int,
    as_json: bool,
) -> int:
    """Train a small model on 4 ranks, move it to 3, and prove or reject it.

    A real run on CPU: FSDP2 under torchrun and gloo, on Python's own sources,
    checkpointed with DCP. Exits 0 on PROMOTE, 1 on REJECT, 4 on ABSTAIN.

    \b
    samerun demo
    samerun demo --to dp_replicate=2,dp_shard=2
    samerun demo --break scheduler-ahead
    """
    from samerun.core.mesh import Layout
    from samerun.demo.faults import FAULTS
    from samerun.demo.workspace import DemoSettings

    if list_breaks:
        _list_breaks(as_json)
        return 0
    _require_torch()
    fault = _fault(fault_name)
    try:
        destination = Layout.parse(to or (fault.layout if fault and fault.layout else "dp_shard=3"))
    except ValueError as error:
        raise UsageError(Problem("SR-USAGE-OPTION", f"--to: {error}")) from error
    settings = DemoSettings(
        directory=directory, destination=destination, fault=FAULTS[fault.name] if fault else None,
        size=size, precision=precision, seed=seed, window_updates=updates,
    )  # fmt: skip
    _check_fault_fits(settings)
    return _run(settings, as_json)


def _run(settings: DemoSettings, as_json: bool) -> int:
    from samerun.demo.flow import run_demo

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        outcome = run_demo(settings, _verb, _Lines(), _say)
        if not as_json:
            _summarise(settings, outcome)
    if as_json and outcome.verdict:
        body = {name: value for name, value in outcome.verdict.items() if name != "schema"}
        emit_json("judge", body | {"fault": settings.fault.name if settings.fault else None, "named": outcome.named})
    return outcome.exit_code


def _verb(arguments: Sequence[str]) -> int:
    """Runs another verb as if it had been typed, and shows it being typed."""
    from samerun.cli import root
    from samerun.cli.output import report_failure

    click.secho(f"\n$ samerun {' '.join(arguments)}", bold=True)
    try:
        code = root.main(args=list(arguments), prog_name="samerun", standalone_mode=False)
    except SamerunError as error:
        return report_failure(error)
    return code if isinstance(code, int) else 0


class _Lines:
    """Shows a training job's own output, indented."""

    def job_line(self, line: str) -> None:
        """Prints the line on stderr."""
        click.echo(f"    {line}", err=True)

    def job_tick(self, elapsed_seconds: float) -> None:
        """Nothing to show between lines."""


def _say(text: str) -> None:
    click.echo(text)


def _summarise(settings: DemoSettings, outcome: DemoOutcome) -> None:
    decision = str(outcome.verdict.get("verdict", "no verdict")).upper()
    colour = {"PROMOTE": "green", "REJECT": "red"}.get(decision, "yellow")
    click.echo()
    click.secho(decision, fg=colour, bold=True, nl=False)
    if settings.fault is None:
        click.echo(f"  {settings.source} -> {settings.destination}")
    elif outcome.named:
        click.echo(f"  the injected fault {settings.fault.name} was named: {', '.join(outcome.named)}")
    else:
        wanted = " or ".join(settings.fault.codes)
        click.echo(f"  the injected fault {settings.fault.name} was NOT named (wanted {wanted})")
    if outcome.report:
        click.echo(f"report: {outcome.report}")


def _list_breaks(as_json: bool) -> None:
    from samerun.demo.faults import FAULTS

    if as_json:
        emit_json("demo", {"breaks": [
            {"name": fault.name, "into": fault.where.value, "codes": list(fault.codes), "story": fault.story,
             "kind": fault.kind.value, "layout": fault.layout, "precisions": list(fault.precisions or ()) or None}
            for fault in FAULTS.values()
        ]})  # fmt: skip
        return
    width = max(map(len, FAULTS))
    for fault in FAULTS.values():
        click.echo(f"{fault.name:<{width}}  {fault.story}")


def _fault(name: str | None) -> Fault | None:
    from difflib import get_close_matches

    from samerun.demo.faults import FAULTS

    if name is None or name in FAULTS:
        return FAULTS[name] if name else None
    close = get_close_matches(name, FAULTS, n=1)
    hint = f"did you mean {close[0]}?" if close else "`samerun demo --list-breaks` shows them"
    raise UsageError(Problem("SR-USAGE-OPTION", f"there is no fault {name!r}", hint=hint))


def _check_fault_fits(settings: DemoSettings) -> None:
    fault, problems = settings.fault, list[Problem]()
    if fault and fault.layout and settings.destination.dp_replicate < 2:
        problems.append(
            Problem(
                "SR-USAGE-OPTION",
                f"the fault {fault.name} needs a destination with replicas",
                expected=fault.layout,
                found=str(settings.destination),
                hint=f"leave --to out, or use --to {fault.layout}",
            )
        )
    if fault and fault.precisions and settings.precision not in fault.precisions:
        problems.append(
            Problem(
                "SR-USAGE-OPTION",
                f"the fault {fault.name} changes nothing at this precision",
                expected=" or ".join(fault.precisions),
                found=settings.precision,
                hint=f"use --precision {fault.precisions[0]}",
            )
        )
    if problems:
        raise UsageError(problems)


def _require_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        hint = "pip install 'samerun[torch]'"
        raise UsageError(Problem("SR-USAGE-TORCH", "the demonstration trains with torch, which is missing", hint=hint))
