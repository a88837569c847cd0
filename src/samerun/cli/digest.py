"""`samerun digest`: the layout-independent digest of every tensor of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from samerun.cli.output import emit_json, printable
from samerun.errors import Problem, UsageError

if TYPE_CHECKING:
    from pathlib import Path


@click.command(name="digest")
@click.argument("path")
@click.option("--include", multiple=True, metavar="GLOB", help="Only keys like this.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="No keys like this.")
@click.option("--format", "format_name", metavar="F", help="Read PATH as this format.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    path: str, include: tuple[str, ...], exclude: tuple[str, ...], format_name: str | None, as_json: bool
) -> None:
    """Digest every tensor of the checkpoint at PATH.

    Two checkpoints that hold the same tensors have the same digests, however many
    ranks wrote them and however they cut the tensors up; a running job computes the
    same numbers without gathering anything. docs/digest.md defines them.

    \b
    samerun digest ckpt/step-100
    samerun digest ckpt/step-100 --include 'param:*' --json
    """
    import os

    from samerun.cli.progress import bytes_progress
    from samerun.core.digest import state_digest
    from samerun.formats.detect import open_checkpoint
    from samerun.verify.state.digest import digest_checkpoint, select_keys

    checkpoint = open_checkpoint(path, format_name)
    try:
        keys = select_keys(checkpoint.state.tensors, include, exclude)
        if not keys and checkpoint.state.tensors:
            raise UsageError(_nothing_chosen(checkpoint.path))
        total = sum(checkpoint.state.tensors[key].num_bytes for key in keys)
        with bytes_progress("digesting", total) as progress:
            digests = digest_checkpoint(
                checkpoint, include=include, exclude=exclude, progress=progress, threads=os.cpu_count() or 1
            )
    finally:
        checkpoint.close()
    state = state_digest(digests)
    if as_json:
        emit_json("digest", {"tensors": digests, "state": state})
        return
    for key, digest in digests.items():
        click.echo(f"{digest}  {printable(key)}")
    click.echo(f"{state}  state ({len(digests)} tensors)")


def _nothing_chosen(path: Path) -> Problem:
    """Nothing has a digest too, the same for every checkpoint: two misspelt patterns would look like equality."""
    hint = "keys look like param:layers.0.w; quote a pattern, so that the shell leaves it alone"
    return Problem("SR-USAGE-KEY", "no tensor is chosen by these patterns", where={"file": str(path)}, hint=hint)
