"""`samerun diff`: two checkpoints, in any formats and layouts, compared as logical state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from samerun.cli.output import emit_json, printable
from samerun.errors import Problem, UsageError

if TYPE_CHECKING:
    from samerun.verify.state.compare import Comparison

_MOST_ROWS = 20


@click.command(name="diff")
@click.argument("a")
@click.argument("b")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Relative to A's element.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Absolute.")
@click.option("--map", "map_file", metavar="FILE", help="Names in A to names in B: a file or a map's name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, a: str, b: str, rtol: float, atol: float, map_file: str | None, as_json: bool) -> None:
    """Compare checkpoint A with checkpoint B: tensors, groups, progress, scheduler.

    Values are compared element by element, block by block, never a whole checkpoint
    in memory. Exit code 0: equal; 1: different.

    \b
    samerun diff ckpt/step-100 moved/step-100
    samerun diff a b --rtol 1e-5 --map names.yaml --json
    samerun diff iter_0000100 hf-model --map megatron-to-llama,heads=32,groups=8
    """
    _require_finite(rtol=rtol, atol=atol)
    from samerun.cli.progress import bytes_progress
    from samerun.formats.detect import open_checkpoint
    from samerun.formats.mapfile import read_name_map
    from samerun.formats.mapped import MappedCheckpoint
    from samerun.verify.state.compare import compare_checkpoints

    left = open_checkpoint(a)
    try:
        right = open_checkpoint(b)
        try:
            if map_file is not None:
                left = MappedCheckpoint(left, read_name_map(map_file, left.state))
            total = sum(entry.num_bytes for entry in left.state.tensors.values())
            with bytes_progress("comparing", total) as progress:
                result = compare_checkpoints(left, right, rtol=rtol, atol=atol, progress=progress)
        finally:
            right.close()
    finally:
        left.close()
    if as_json:
        emit_json("diff", result.to_json())
    else:
        _print(result)
    ctx.exit(0 if result.equal else 1)


def _require_finite(**tolerances: float) -> None:
    """Raises UsageError for nan, within which nothing lies, and inf, within which everything does."""
    for name, value in tolerances.items():
        if not math.isfinite(value):
            raise UsageError(Problem("SR-USAGE-OPTION", f"--{name} must be a number that ends, not {value}"))


def _print(result: Comparison) -> None:
    if result.equal:
        click.echo(f"equal: {result.compared} tensors, parameter groups, progress and scheduler")
    for title, keys in (("only in A", result.only_in_a), ("only in B", result.only_in_b)):
        _print_rows(title, [(key, "") for key in keys])
    _print_rows("shape", [(item.key, f"{item.a} -> {item.b}") for item in result.shape])
    _print_rows("dtype", [(item.key, f"{item.a} -> {item.b}") for item in result.dtype])
    _print_rows(
        "values",
        [
            (item.key, f"max {item.max_abs:.3g}, relative L2 {item.rel_l2:.3g}, {item.changed} elements")
            for item in result.values
        ],
    )
    _print_rows("settings", [(item.key, f"{item.a} -> {item.b}") for item in result.settings])
    _print_rows("objects (for information)", [(item.key, f"{item.a} -> {item.b}") for item in result.objects])


def _print_rows(title: str, rows: list[tuple[str, str]]) -> None:
    if not rows:
        return
    click.echo(f"{title}: {len(rows)}")
    for key, text in rows[:_MOST_ROWS]:
        click.echo(printable(f"  {key}  {text}".rstrip()))
    if len(rows) > _MOST_ROWS:
        click.echo(f"  ... and {len(rows) - _MOST_ROWS} more (--json lists all)")
