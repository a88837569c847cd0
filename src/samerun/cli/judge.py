"""`samerun judge`: promote, reject or abstain, from what lies in a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samerun.cli.output import emit_json, print_problems, stdout_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from samerun.errors import Problem

SHOWN_PER_CODE = 3

_STYLE = {"promote": "bold green", "reject": "bold red", "abstain": "bold yellow"}
_MARK = {True: ("holds", "green"), False: ("fails", "bold red"), None: ("not reached", "dim")}


@click.command(name="judge")
@click.argument("rundir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(rundir: Path, as_json: bool) -> int:
    """Judge RUNDIR again from its evidence: promote, reject or abstain.

    Starts no process. The traces are assessed again under the sealed
    tolerances. Exits 0 for promote, 1 for reject, 4 for abstain.

    \b
    samerun judge move.run
    samerun judge move.run --json
    """
    from samerun.runner.judging import judge_run
    from samerun.runner.rundir import RunDirectory

    directory = RunDirectory(rundir)
    directory.require()
    with directory.lock():
        verdict = judge_run(directory)
    body = verdict.to_json()
    if as_json:
        emit_json("judge", {name: value for name, value in body.items() if name != "schema"})
    else:
        print_verdict(body, rundir)
    return verdict.exit_code


def print_verdict(body: Mapping[str, Any], rundir: Path) -> None:
    """Prints a verdict for people: the criteria, the reasons with causes first, and the decision last."""
    from rich.text import Text

    from samerun.verify.evidence.stage import problem_from_json

    out = stdout_console()
    out.print()
    out.print(_criteria_table(body))
    if body["reasons"]:
        out.print(Text("\nreasons, causes first", style="bold"))
        print_grouped([problem_from_json(reason) for reason in body["reasons"]], out, "verdict.json")
    warnings = [problem_from_json(item) for item in body["remarks"] if item["severity"] == "warning"]
    if warnings:
        out.print(Text("\nto be looked at", style="bold"))
        print_grouped(warnings, out, "verdict.json")
    out.print(Text(f"\n{body['verdict'].upper()}", style=_STYLE[body["verdict"]]).append(_tail(body), style="default"))
    out.print(Text(f"record {rundir / 'verdict.json'}; pictures: samerun report {rundir}", style="dim"))


def print_grouped(problems: Sequence[Problem], console: Console, record: str) -> None:
    """Prints findings in their order, but of each code only a few: one cause can make a finding of every tensor."""
    from rich.text import Text

    for code in dict.fromkeys(problem.code for problem in problems):
        group = [problem for problem in problems if problem.code == code]
        print_problems(group[:SHOWN_PER_CODE], console)
        if len(group) > SHOWN_PER_CODE:
            more = len(group) - SHOWN_PER_CODE
            console.print(Text(f"        and {more} more of {code}, all in {record}", style="dim"))


def _criteria_table(body: Mapping[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    rows = [_criterion_row(item) for item in body["criteria"]]
    table = Table(box=None, pad_edge=False, show_edge=False)
    for place, heading in enumerate(("criterion", "", "value", "limit")):
        width = max(len(heading), *(len(row[place]) for row in rows))
        table.add_column(heading, justify="right" if place > 1 else "left", min_width=width)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for name, word, value, limit, question, style in rows:
        table.add_row(name, Text(word, style=style), value, limit, Text(question, style="dim"))
    return table


def _criterion_row(item: Mapping[str, Any]) -> tuple[str, str, str, str, str, str]:
    word, style = _MARK[item["pass"]]
    measured = item["pass"] is not None and (item["value"] or item["limit"])
    value, limit = (_number(item["value"]), _number(item["limit"])) if measured else ("", "")
    return item["name"], word, value, limit, item["question"], style


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def _tail(body: Mapping[str, Any]) -> str:
    validated = body["validated"]
    if body["verdict"] == "promote":
        axes = ",".join(f"{axis}={size}" for axis, size in validated["layout"].items())
        batch = validated["batch"]
        return (
            f"  {body['label']} on {axes}, {batch['global_batch']} samples per update "
            f"({batch['option']}, {batch['passes']} passes), invariant {batch['invariant']}{_rehearsed(validated)}"
        )
    if body["verdict"] == "abstain":
        return "  the evidence does not suffice to judge; this is not a pass"
    first = body["first_divergence"]
    return f"  first divergence: {first['criterion']} at {first['stage'] or 'the evidence'} ({first['code']})"


def _rehearsed(validated: Mapping[str, Any]) -> str:
    rehearsal = validated.get("rehearsal")
    if not rehearsal:
        return ""
    return f"\n  a REHEARSAL of {rehearsal['of']}: a reduced copy on CPU processes, not the real move"
