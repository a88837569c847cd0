"""`samerun draft`: a migration manifest, filled from a checkpoint as far as that tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from samerun.cli.output import emit_json
from samerun.errors import Problem, UsageError

if TYPE_CHECKING:
    from samerun.core.mesh import Layout
    from samerun.manifest.read import Question

SCHEMA_NAME = "manifest-1.schema.json"


@click.command(name="draft")
@click.argument("path")
@click.option("--to", "to", required=True, metavar="LAYOUT", help="Destination: dp_shard=3, tp=2,dp_shard=2, dp=10.")
@click.option("--from", "source", metavar="LAYOUT", help="Source layout, where the checkpoint does not say.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; default: standard output.")
@click.option("--name", help="A name for the migration; default: the checkpoint's.")
@click.option("--schema", is_flag=True, help=f"Also write {SCHEMA_NAME} beside it, for editor completion.")
@click.option("--format", "format_name", metavar="F", help="The checkpoint's format; default: looked for.")
@click.option("--json", "as_json", is_flag=True, help="Print the open questions as one JSON document.")
def command(
    path: str,
    to: str,
    source: str | None,
    output: Path | None,
    name: str | None,
    schema: bool,
    format_name: str | None,
    as_json: bool,
) -> int:
    """Write a migration manifest from the checkpoint at PATH.

    What the checkpoint cannot tell becomes a question, marked ASK; `samerun plan`
    lists them and goes no further until all are answered. Nothing is guessed,
    and no file is replaced.

    \b
    samerun draft ckpt/step-12 --to dp_shard=3 -o move.yaml
    samerun draft ckpt/step-12 --to dp=10 --from dp_shard=16 --schema -o move.yaml
    """
    from samerun.cli.memory import parse_layout
    from samerun.formats.base import Rigid
    from samerun.formats.detect import open_checkpoint
    from samerun.manifest.draft import draft_manifest
    from samerun.manifest.read import parse_document

    if output is None and (schema or as_json):
        raise UsageError(Problem("SR-USAGE-OPTION", "--schema and --json need a file to write: -o FILE"))
    _refuse_existing(output)
    _refuse_url(path)
    checkpoint = open_checkpoint(path, format_name)
    told = None if source is None else _source_layout(source)
    destination = parse_layout(to, told or checkpoint.state.topology.layout)
    text = draft_manifest(
        checkpoint.state,
        destination,
        checkpoint=_relative(checkpoint.path, output),
        name=name or checkpoint.path.resolve().name,
        source=told,
        refused=checkpoint.check_destination(destination) if isinstance(checkpoint, Rigid) else (),
        schema=f"./{SCHEMA_NAME}" if schema else None,
    )
    if output is None:
        click.echo(text, nl=False)
        return 0
    _write(output, text, schema=schema)
    _report(output, parse_document(text, str(output)).questions, as_json)
    return 0


def _source_layout(text: str) -> Layout:
    from samerun.core.mesh import Layout

    try:
        return Layout.parse(text)
    except ValueError as error:
        raise UsageError(Problem("SR-USAGE-OPTION", str(error))) from error


def _refuse_existing(output: Path | None) -> None:
    if output is not None and os.path.lexists(output):
        hint = "a draft never replaces a file: give another name, or move that one away"
        raise UsageError(
            Problem("SR-DRAFT-EXISTS", "there is already such a file", where={"file": str(output)}, hint=hint)
        )


def _refuse_url(path: str) -> None:
    from samerun.stores.remote import is_url

    if is_url(path):
        hint = "copy the checkpoint here and draft from the copy; inspect, digest, diff, memory and convert read URLs"
        message = "a manifest names a checkpoint on this machine, not a URL"
        raise UsageError(Problem("SR-USAGE-OPTION", message, where={"file": path}, hint=hint))


def _relative(checkpoint: Path, output: Path | None) -> str:
    folder = Path.cwd() if output is None else output.resolve().parent
    return Path(os.path.relpath(checkpoint.resolve(), folder)).as_posix()


def _write(output: Path, text: str, *, schema: bool) -> None:
    from samerun.manifest.schema import schema_text

    with output.open("x", encoding="utf-8") as file:
        file.write(text)
    if schema:
        from samerun.stores.local import write_atomic

        write_atomic(output.parent / SCHEMA_NAME, schema_text())


def _report(output: Path, questions: tuple[Question, ...], as_json: bool) -> None:
    if as_json:
        emit_json("draft", {"path": str(output), "questions": [question.to_json() for question in questions]})
        return
    click.echo(f"wrote {output} with {len(questions)} open questions:")
    for question in questions:
        click.echo(f"  line {question.line:>3}  {question.key}")
    click.echo(f"answer them in the file, then: samerun plan {output}")
