"""`samerun diff`: two checkpoints, in any formats and layouts, compared as logical state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from samerun.cli.output import emit_json
from samerun.errors import Problem, UsageError

if TYPE_CHECKING:
    from samerun.core.rename import NameMap
    from samerun.verify.compare import Comparison

_MOST_ROWS = 20


@click.command(name="diff")
@click.argument("a")
@click.argument("b")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Relative to A's element.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Absolute.")
@click.option("--map", "map_file", metavar="FILE", help="YAML or JSON: names in A to names in B.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, a: str, b: str, rtol: float, atol: float, map_file: str | None, as_json: bool) -> None:
    """Compare checkpoint A with checkpoint B: tensors, groups, progress, scheduler.

    Values are compared element by element, block by block, never a whole checkpoint
    in memory. Exit code 0: equal; 1: different.

    \b
    samerun diff ckpt/step-100 moved/step-100
    samerun diff a b --rtol 1e-5 --map names.yaml --json
    """
    from samerun.cli.progress import bytes_progress
    from samerun.formats.detect import open_checkpoint
    from samerun.verify.compare import compare_checkpoints

    names = read_name_map(map_file) if map_file else None
    left = open_checkpoint(a)
    try:
        right = open_checkpoint(b)
        try:
            if names is not None:
                require_used(names, list(left.state.tensors), map_file or "")
            total = sum(entry.num_bytes for entry in left.state.tensors.values())
            with bytes_progress("comparing", total) as progress:
                result = compare_checkpoints(left, right, rtol=rtol, atol=atol, names=names, progress=progress)
        finally:
            right.close()
    finally:
        left.close()
    if as_json:
        emit_json("diff", result.to_json())
    else:
        _print(result)
    ctx.exit(0 if result.equal else 1)


def read_name_map(file: str) -> NameMap:
    """Reads a name map from a YAML (or JSON) file.

    Raises:
        UsageError: if the file is not a mapping of names to names.
    """
    from pathlib import Path

    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    from samerun.core.rename import NameMap

    try:
        rules: Any = YAML(typ="safe", pure=True).load(Path(file))
        if not isinstance(rules, dict) or not all(isinstance(x, str) for pair in rules.items() for x in pair):
            raise ValueError("a name map is a mapping of names to names")
        return NameMap.of(rules)
    except (YAMLError, ValueError) as error:
        raise UsageError(
            Problem(
                "SR-USAGE-MAP",
                f"cannot read the name map: {error}",
                where={"file": file},
                hint="one `name in A: name in B` per line, with one * on each side or none",
            )
        ) from None


def require_used(names: NameMap, keys: list[str], file: str) -> None:
    """Raises UsageError if a rule of the map fits no key: it is usually a misspelt one."""
    unused = names.unused(keys)
    if unused:
        raise UsageError(
            Problem(
                "SR-USAGE-MAP",
                f"no tensor of A fits {', '.join(unused)}",
                where={"file": file},
                hint="the left sides are names in A; `samerun inspect A --json` lists them",
            )
        )


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
        click.echo(f"  {key}  {text}".rstrip())
    if len(rows) > _MOST_ROWS:
        click.echo(f"  ... and {len(rows) - _MOST_ROWS} more (--json lists all)")
