"""What every verb shares: JSON on stdout, findings as text, failures as one clear message and an exit code."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from samerun.errors import Problem, SamerunError, Severity, has_errors

if TYPE_CHECKING:
    from rich.console import Console

_STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


# Control characters, marks that turn the direction of text, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_HALVES = re.compile("[\\ud800-\\udfff]")


def printable(text: str) -> str:
    r"""Returns text on one line that a terminal only shows: names in a checkpoint are whatever someone put there.

    >>> printable("new\nline \x1b[31m")
    'new\\nline \\x1b[31m'
    """
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)


def _lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


def stdout_console() -> Console:
    """Returns the console for results. Colours only on a terminal; at least 80 columns when piped."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """Returns the console for progress and logs."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else int(os.environ.get("COLUMNS", "100"))
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=not stream.isatty())


def emit_json(verb: str, body: Mapping[str, Any]) -> None:
    """Prints one JSON document with its schema key. Non-finite numbers become strings: JSON has none."""
    text = json.dumps({"schema": f"samerun/{verb}/1", **_finite(body)}, indent=1, ensure_ascii=False)
    click.echo(_HALVES.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _finite(value: Any) -> Any:  # JSON in, JSON out: the shape is the caller's
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)


def print_problems(problems: Iterable[Problem], console: Console | None = None) -> None:
    """Prints findings, worst first, with place, the two values that disagree, and the hint."""
    from rich.text import Text

    order = [Severity.ERROR, Severity.WARNING, Severity.NOTE]
    out = console or stdout_console()
    for problem in sorted(problems, key=lambda item: order.index(item.severity)):
        head = Text(f"{problem.severity.value:<8}", style=_STYLE[problem.severity])
        head.append(problem.code, style="bold")
        head.append(f"  {_lines(problem.message)}", style="default")
        out.print(head)
        place = ", ".join(f"{name} {value}" for name, value in problem.where.items())
        for label, text in (("at", printable(place)), ("", _disagreement(problem)), ("do", problem.hint)):
            if text:
                out.print(Text(f"        {label:<3} {_lines(text)}", style="dim" if label == "at" else ""))


def _disagreement(problem: Problem) -> str:
    values = {"expected": problem.expected, "found": problem.found}
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def exit_code(problems: Iterable[Problem]) -> int:
    """Returns 1 when a finding of severity error exists, else 0."""
    return 1 if has_errors(problems) else 0


def report_failure(error: BaseException) -> int:
    """Prints why a verb could not finish and returns the exit code. Never a bare traceback."""
    if isinstance(error, SamerunError):
        print_problems(error.problems, stderr_console())
        return error.exit_code
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        error.show(sys.stderr)
        return 2
    if isinstance(error, KeyboardInterrupt | click.Abort):
        click.echo("interrupted; run the same command again to resume", err=True)
        return 3
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, OSError):
        where = {"file": str(error.filename)} if error.filename else {}
        print_problems([Problem("SR-IO-FAILED", str(error.strerror or error), where=where)], stderr_console())
        return 2
    return _report_defect(error)


def _report_defect(error: BaseException) -> int:
    last = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = {"file": os.path.basename(last.filename), "line": last.lineno} if last else {}
    hint = "this is a defect in samerun; SAMERUN_TRACEBACK=1 shows where it came from"
    problem = Problem("SR-INTERNAL", f"{type(error).__name__}: {error}", where=where, hint=hint)
    print_problems([problem], stderr_console())
    if os.environ.get("SAMERUN_TRACEBACK"):
        traceback.print_exception(error)
    return 2
