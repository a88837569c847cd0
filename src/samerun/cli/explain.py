"""`samerun explain`: what a finding means, how to see it, what to do."""

from __future__ import annotations

import difflib

import click

from samerun.catalog import Entry, load_catalog
from samerun.cli.help import complete_codes
from samerun.cli.output import emit_json
from samerun.errors import Problem, UsageError


@click.command(name="explain")
@click.argument("code", required=False, shell_complete=complete_codes)
@click.option("--list", "list_all", is_flag=True, help="List every code with its title.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(code: str | None, list_all: bool, as_json: bool) -> None:
    """Say what the finding CODE means, how to see it for yourself, and what to do.

    Every finding that samerun prints has a code. Upper or lower case; a
    misspelt code shows its neighbours.

    \b
    samerun explain SR-COV-GAP
    samerun explain --list
    """
    catalog = load_catalog()
    if list_all or code is None:
        _print_list(list(catalog.values()), as_json)
        return
    entry = catalog.get(code.upper())
    if entry is None:
        close = ", ".join(difflib.get_close_matches(code.upper(), catalog, n=3, cutoff=0.4))
        raise UsageError(
            Problem(
                "SR-USAGE-CODE",
                f"there is no finding {code!r}",
                hint=f"closest: {close}" if close else "`samerun explain --list` shows every code",
            )
        )
    if as_json:
        emit_json("explain", _as_dict(entry))
        return
    click.echo(f"{entry.code}  ({entry.severity})\n{entry.title}\n")
    for heading, text in (("What it means", entry.meaning), ("How to see it", entry.see), ("What to do", entry.do)):
        click.echo(f"{heading}\n{click.wrap_text(text, 80, '  ', '  ', preserve_paragraphs=True)}\n")


def _print_list(entries: list[Entry], as_json: bool) -> None:
    if as_json:
        emit_json("explain", {"findings": [_as_dict(entry) for entry in entries]})
        return
    width = max((len(entry.code) for entry in entries), default=0)
    for entry in entries:
        click.echo(f"{entry.code:<{width}}  {entry.severity:<7}  {entry.title}")


def _as_dict(entry: Entry) -> dict[str, str]:
    return {
        "code": entry.code,
        "severity": entry.severity,
        "title": entry.title,
        "meaning": entry.meaning,
        "see": entry.see,
        "do": entry.do,
    }
