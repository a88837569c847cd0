"""`samerun batch`: every honest way to deal a global batch to a number of replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from samerun.cli.output import emit_json, print_problems, stdout_console
from samerun.errors import Problem, UsageError, has_errors

if TYPE_CHECKING:
    from samerun.core.batch import BatchOption, Dealing, SourceBatch


@click.command(name="batch")
@click.option("--global-batch", type=int, required=True, help="Samples per update that must be kept.")
@click.option("--replicas", type=int, help="Batch replicas at the destination (dp_replicate x dp_shard; not GPUs).")
@click.option("--layout", help="Instead of --replicas: the destination's layout, such as tp=2,dp_shard=5.")
@click.option("--max-microbatch", type=int, required=True, help="Most samples one replica can take in one pass.")
@click.option("--from", "source", metavar="TEXT", help="The source's equation: replicas=16,micro=2,accum=8.")
@click.option(
    "--unit",
    type=click.Choice(["samples", "tokens"]),
    default="samples",
    show_default=True,
    help="What --global-batch counts; a number of tokens is never exact.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with every microbatch of every option.")
def command(
    global_batch: int,
    replicas: int | None,
    layout: str | None,
    max_microbatch: int,
    source: str | None,
    unit: str,
    as_json: bool,
) -> None:
    """List every honest way to deal a global batch, and what each needs and costs. Chooses none.

    Uneven shares of the same samples, fewer replicas, another batch: which are
    exact, how many passes each takes, how much of the slots it uses. Count batch
    replicas, not GPUs: tensor-, context- and pipeline-parallel ranks of one
    replica share their samples.

    \b
    samerun batch --global-batch 256 --replicas 10 --max-microbatch 2 \\
                  --from replicas=16,micro=2,accum=8
    samerun batch --global-batch 256 --layout tp=2,dp_shard=5 --max-microbatch 2
    """
    from samerun.core.batch import check_batch, plan_batch

    equation, problems = _source(source)
    count, wrong = _replicas(replicas, layout)
    problems += wrong
    problems += check_batch(global_batch, 1 if count is None else count, max_microbatch, source=equation, unit=unit)
    if has_errors(problems) or count is None:
        raise UsageError(problems)
    known_unit = "tokens" if unit == "tokens" else "samples"
    options = plan_batch(global_batch, count, max_microbatch, source=equation, unit=known_unit)
    if as_json:
        body = {"target": global_batch, "unit": unit, "replicas": count}
        found = {"options": [option.to_json() for option in options], "problems": [item.to_json() for item in problems]}
        emit_json("batch", {**body, **found})
        return
    print_equation(global_batch, count, max_microbatch, unit, equation)
    print_options(options, unit)
    print_problems(problems)


def _source(text: str | None) -> tuple[SourceBatch | None, list[Problem]]:
    """Returns the source's equation, or what is wrong with it."""
    from samerun.core.batch import SourceBatch

    try:
        return None if text is None else SourceBatch.parse(text), []
    except UsageError as error:
        return None, list(error.problems)


def _replicas(replicas: int | None, layout: str | None) -> tuple[int | None, list[Problem]]:
    """Returns the batch replicas asked for, or what is wrong with how they were asked for."""
    if (replicas is None) == (layout is None):
        hint = "a layout such as tp=2,dp_shard=5 has 5 batch replicas on 10 GPUs"
        return replicas, [Problem("SR-BATCH-INVALID", "give either --replicas or --layout", hint=hint)]
    if layout is None:
        return replicas, []
    from samerun.core.mesh import Layout

    try:
        return Layout.parse(layout).batch_replicas, []
    except ValueError as error:
        return None, [Problem("SR-BATCH-INVALID", str(error), found=layout)]


def _same(option: BatchOption, chosen: BatchOption) -> bool:
    return (option.kind, option.dealing) == (chosen.kind, chosen.dealing)


def print_equation(
    global_batch: int, replicas: int, max_microbatch: int, unit: str, source: SourceBatch | None
) -> None:
    """Prints the batch equation at the source, if known, and how many passes the destination would need."""
    if source is not None:
        click.echo(
            f"source       {source.replicas} replicas x {source.micro} x {source.accum} passes"
            f" = {source.global_batch} {unit} per update"
        )
    passes = global_batch / (replicas * max_microbatch)
    click.echo(f"destination  {global_batch} / ({replicas} replicas x {max_microbatch}) = {passes:.4g} passes\n")


def print_options(options: tuple[BatchOption, ...], unit: str, chosen: BatchOption | None = None) -> None:
    """Prints the options as a table and, below it, what each needs; `chosen` is marked."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("option", unit, "replicas", "passes", "dealt", "used", "exact"):
        table.add_column(name, justify="right" if name in (unit, "replicas", "passes", "used") else "left")
    for option in options:
        idle = f" (+{option.idle_replicas} idle)" if option.idle_replicas else ""
        table.add_row(
            f"> {option.kind}" if chosen is not None and _same(option, chosen) else option.kind,
            str(option.global_batch),
            f"{option.replicas}{idle}",
            str(option.passes),
            _dealt(option.dealing),
            f"{option.utilisation:.1%}",
            "yes" if option.exact else "no",
        )
    console = stdout_console()
    console.print(table)
    console.print()
    for option in options:
        console.print(f"{option.kind} {option.global_batch}: {'; '.join(_remarks(option))}")


def _remarks(option: BatchOption) -> list[str]:
    remarks = [option.reason]
    if option.needs:
        remarks.append(f"needs {', '.join(option.needs)}")
    if (rates := option.learning_rate) is not None:
        remarks.append(f"learning rate x1 (keep), x{rates.linear:.4g} (linear), x{rates.square_root:.4g} (square-root)")
    return remarks


def _dealt(dealing: Dealing) -> str:
    """Returns the passes in words: `12 x 2, then (2 on 6, 1 on 4)`."""
    runs: list[tuple[tuple[int, ...], int]] = []
    for row in dealing.microbatches:
        if runs and runs[-1][0] == row:
            runs[-1] = (row, runs[-1][1] + 1)
        else:
            runs.append((row, 1))
    return ", then ".join(_run(row, count) for row, count in runs)


def _run(row: tuple[int, ...], count: int) -> str:
    sizes = sorted(set(row), reverse=True)
    if len(sizes) == 1:
        return f"{count} x {sizes[0]}"
    mixed = ", ".join(f"{size} on {row.count(size)}" for size in sizes)
    return f"({mixed})" if count == 1 else f"{count} x ({mixed})"
