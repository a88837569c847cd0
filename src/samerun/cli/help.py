"""Help as a manual page: what a verb does, its options, examples, exit codes, where to read on."""

from __future__ import annotations

import inspect
from typing import Any

import click

_BLOCKS = "0  no finding blocks", "1  a finding of severity error", "2  usage error, or input that cannot be read"
_AGAIN = "3  interrupted; the same command goes on"
_USAGE = "2  usage error, or input that cannot be read"

EXIT_CODES: dict[str, tuple[str, ...]] = {
    "inspect": _BLOCKS,
    "digest": ("0  every tensor was digested", _USAGE),
    "diff": ("0  equal", "1  different", _USAGE),
    "convert": ("0  converted, and proved equal", *_BLOCKS[1:], _AGAIN),
    "batch": ("0  the options were listed", _USAGE),
    "memory": ("0  everything fits", "1  a rank holds more than its device", _USAGE),
    "draft": ("0  the manifest was written", _USAGE),
    "plan": ("0  planned", "1  open questions, or a finding that blocks", _USAGE),
    "run": ("0  promote", "1  reject", _USAGE, _AGAIN, "4  abstain"),
    "judge": ("0  promote", "1  reject", _USAGE, "4  abstain: evidence is missing"),
    "report": ("0  the page, or the curves, were written", _USAGE),
    "trace": ("0  the trace is sound", "1  it is not", _USAGE),
    "audit": ("0  every sample once", "1  replayed, omitted or given out twice", _USAGE),
    "calibrate": ("0  the controls were measured", "1  they cannot judge anything", _USAGE, _AGAIN),
    "ui": ("0  ended by Ctrl-C", _USAGE),
    "explain": ("0  explained", "2  there is no such finding"),
    "lab": ("0  ended by Ctrl-C, or written", _USAGE),
    "demo": ("0  promote", "1  reject", _USAGE, "4  abstain"),
}
"""What each verb's exit code means; other verbs follow the general rule that `samerun --help` gives."""

PAGES: dict[str, str] = {
    "inspect": "docs/migrating.md",
    "digest": "docs/digest.md",
    "batch": "docs/batch.md",
    "memory": "docs/manifest.md",
    "draft": "docs/manifest.md",
    "plan": "docs/decisions.md",
    "calibrate": "docs/judging.md",
    "run": "docs/judging.md",
    "judge": "docs/judging.md",
    "trace": "docs/trace.md",
    "ui": "docs/explorer.md",
    "explain": "docs/findings.md",
    "demo": "docs/start.md",
}
_CHECKPOINTS = {"path", "a", "b", "src", "dest", "source", "destination"}


class Verb(click.Command):
    """A verb whose help ends like a manual page. Its examples are the lines `samerun ...` in the docstring."""

    @classmethod
    def of(cls, command: click.Command) -> Verb:
        """Returns the same verb with such a help, and with files completed where it takes a checkpoint."""
        for parameter in command.params:
            # A checkpoint's name is text, because it may be an address; the shell completes files for it all the same.
            if isinstance(parameter, click.Argument) and parameter.name in _CHECKPOINTS:
                parameter.type = click.Path() if parameter.type is click.STRING else parameter.type
        return cls(
            command.name,
            context_settings=command.context_settings,
            callback=command.callback,
            params=command.params,
            help=command.help,
            epilog=command.epilog,
        )

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the description, without the examples."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(split_examples(self.help or "")[0])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes examples, exit codes and where to read on."""
        name = self.name or ""
        page = PAGES.get(name)
        sections: list[tuple[str, list[str]]] = [
            ("Examples", split_examples(self.help or "")[1]),
            ("Exit codes", list(EXIT_CODES.get(name, ()))),
            ("See also", [page] if page else []),
        ]
        for title, lines in sections:
            if lines:
                with formatter.section(title):
                    for line in lines:
                        formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def split_examples(text: str) -> tuple[str, list[str]]:
    r"""Returns a docstring's description, and the lines of its examples: the verbatim paragraphs that begin `samerun`.

    >>> split_examples("Says it.\n\n\b\nsamerun a \\\n    --b\n")
    ('Says it.', ['samerun a \\', '    --b'])
    """
    description: list[str] = []
    examples: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        if lines[0] == "\b" and len(lines) > 1 and lines[1].startswith("samerun "):
            examples += lines[1:]
        elif lines != [""]:
            description.append("\n".join(lines))
    return "\n\n".join(description), examples


def complete_codes(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Returns the finding codes that begin like what was typed, with their titles, for the shell."""
    from click.shell_completion import CompletionItem

    from samerun.catalog import load_catalog

    wanted = incomplete.upper()
    return [CompletionItem(code, help=entry.title) for code, entry in load_catalog().items() if code.startswith(wanted)]
