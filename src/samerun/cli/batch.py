"""`samerun batch`: every honest way to deal a global batch to a number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from samerun.cli.output import emit_json, print_problems, stdout_console
from samerun.errors import Problem, UsageError, has_errors

if TYPE_CHECKING:
    from samerun.core.batch import BatchOption, Dealing, OptionCost, SourceBatch


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
@click.option(
    "--lengths",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --unit tokens: a file with the measured valid tokens of each sample of one update, one number a line.",
)
@click.option("--samples-left", type=click.IntRange(min=0), help="Samples of the epoch that are not committed yet.")
@click.option("--eval-every", type=click.IntRange(min=1), help="Updates between two evaluations.")
@click.option("--schedule-updates", type=click.IntRange(min=1), help="Updates after which the schedule ends.")
@click.option("--updates-done", type=click.IntRange(min=0), default=0, help="Committed updates.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with every microbatch of every option.")
def command(
    global_batch: int,
    replicas: int | None,
    layout: str | None,
    max_microbatch: int,
    source: str | None,
    unit: str,
    lengths: Path | None,
    samples_left: int | None,
    eval_every: int | None,
    schedule_updates: int | None,
    updates_done: int,
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
    from samerun.core.batch import check_batch, cost_of, deal_tokens, plan_batch

    equation, problems = _source(source)
    count, wrong = _replicas(replicas, layout)
    problems += wrong
    problems += check_batch(global_batch, 1 if count is None else count, max_microbatch, source=equation, unit=unit)
    if has_errors(problems) or count is None:
        raise UsageError(problems)
    known_unit = "tokens" if unit == "tokens" else "samples"
    options = plan_batch(global_batch, count, max_microbatch, source=equation, unit=known_unit)
    question = {"samples_left": samples_left, "eval_every": eval_every, "schedule_updates": schedule_updates}
    asked = any(value is not None for value in question.values())
    costs = [cost_of(option, global_batch, **question, updates_done=updates_done) for option in options]
    tokens = None if lengths is None else deal_tokens(_read_lengths(lengths), count, max_microbatch)
    if tokens is not None:
        problems = [problem for problem in problems if problem.code != "SR-BATCH-TOKENS"]  # they were measured
    if as_json:
        body = {"target": global_batch, "unit": unit, "replicas": count}
        listed = [option.to_json() for option in options]
        if asked:
            listed = [each | {"cost": cost.to_json()} for each, cost in zip(listed, costs, strict=True)]
        body |= {"options": listed, "problems": [item.to_json() for item in problems]}
        emit_json("batch", body | ({"token_dealing": tokens.to_json()} if tokens else {}))
        return
    print_equation(global_batch, count, max_microbatch, unit, equation)
    print_options(options, unit)
    if asked:
        print_costs(options, costs)
    if tokens is not None:
        used = tokens.utilisation(max_microbatch)
        click.echo(
            f"measured: {tokens.num_tokens} tokens in {tokens.passes} passes, at most {tokens.max_tokens} at a time, "
            f"{used:.1%} used, {tokens.num_empty} empty passes"
        )
    print_problems(problems)


def _read_lengths(file: Path) -> list[int]:
    words = file.read_text(encoding="utf-8", errors="replace").replace(",", " ").split()
    if wrong := [word for word in words if not (word.isascii() and word.isdigit())]:
        raise UsageError(Problem("SR-BATCH-INVALID", f"{file} holds {wrong[0]!r}", expected="whole numbers of tokens"))
    return list(map(int, words))


def print_costs(options: Sequence[BatchOption], costs: Sequence[OptionCost]) -> None:
    """Prints what intervals mean under each option."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("option")
    for name in ("updates left", "eval: samples", "eval: updates", "schedule: samples", "schedule: updates"):
        table.add_column(name, justify="right")
    for option, cost in zip(options, costs, strict=True):
        values = (cost.updates_left, cost.eval_samples, cost.eval_updates, cost.schedule_samples, cost.schedule_updates)
        row = ["-" if value is None else f"{value:.10g}" for value in values]
        table.add_row(f"{option.kind} {option.global_batch}", *row)
    click.echo("\nwhat intervals in updates mean, and (updates) what keeps them in samples")
    stdout_console().print(table)


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
