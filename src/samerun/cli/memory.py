"""`samerun memory`: what each destination rank will hold, and what the host needs on the way there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from samerun.cli.output import emit_json, exit_code, print_problems, printable, stdout_console
from samerun.errors import Problem, UsageError

if TYPE_CHECKING:
    from samerun.core.mesh import Layout
    from samerun.plan.memory import MemoryEstimate, RankMemory

_SHOWN_ROWS = 16
_PARTS = ("parameters", "gradients", "optimizer", "masters", "ema", "buffers", "gather")


@click.command(name="memory")
@click.argument("path")
@click.option("--layout", required=True, metavar="LAYOUT", help="Destination, such as tp=2,dp_shard=4, or dp=10.")
@click.option("--stage", type=click.IntRange(0, 3), help="ZeRO's; default: a ZeRO checkpoint's own, else FSDP2.")
@click.option("--device-memory", metavar="SIZE", help="One device's memory, such as 80GiB, to compare with.")
@click.option("--dtype", metavar="DTYPE", help="Type that gathered parameters compute in; default: as stored.")
@click.option("--format", "format_name", metavar="F", help="The checkpoint's format; default: looked for.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with every rank.")
def command(
    path: str,
    layout: str,
    stage: int | None,
    device_memory: str | None,
    dtype: str | None,
    format_name: str | None,
    as_json: bool,
) -> int:
    """Estimate memory per destination rank, and on the host, from the shapes in a checkpoint.

    Counted are parameters, gradients, optimizer state, masters and the largest
    unit that is gathered at once. Activations come on top.

    \b
    samerun memory ckpt/step-12 --layout dp_shard=3 --device-memory 80GiB
    samerun memory ckpt/step-12 --layout tp=2,dp_shard=4 --dtype bfloat16
    samerun memory ckpt/global_step900 --layout dp_shard=16 --stage 2
    """
    from samerun.core.dtype import parse_dtype
    from samerun.core.size import parse_size
    from samerun.formats.deepspeed.carried import source_stage
    from samerun.formats.detect import open_checkpoint
    from samerun.plan.memory import estimate_memory
    from samerun.plan.migration import check_memory

    try:
        size_bytes = None if device_memory is None else parse_size(device_memory)
        compute_dtype = None if dtype is None else parse_dtype(dtype)
    except ValueError as error:
        raise UsageError(Problem("SR-USAGE-OPTION", str(error))) from error
    state = open_checkpoint(path, format_name).state
    destination = parse_layout(layout, state.topology.layout)
    estimate = estimate_memory(
        state,
        destination,
        stage=source_stage(state) if stage is None else stage,
        compute_dtype=compute_dtype,
        device_memory_bytes=size_bytes,
    )
    problems = check_memory(estimate)
    if as_json:
        emit_json("memory", {**estimate.to_json(), "problems": [problem.to_json() for problem in problems]})
    else:
        print_memory(estimate)
        print_problems(problems)
    return exit_code(problems)


def parse_layout(text: str, source: Layout | None) -> Layout:
    """Returns the layout that `text` means for a run whose checkpoint has layout `source`.

    Raises:
        UsageError: if it is no layout, or is `dp=N` and nobody knows how the source was sharded.
    """
    from samerun.core.mesh import Layout

    try:
        parsed = Layout.parse(text, source=source)
    except ValueError as error:
        raise UsageError(Problem("SR-USAGE-OPTION", str(error))) from error
    if source is None and any(part.strip().startswith("dp=") for part in text.split(",")):
        raise UsageError(
            Problem(
                "SR-DRAFT-LAYOUT",
                f"{text} means: sharded as the source was, and the checkpoint does not say how that is",
                hint="give it in full, such as dp_shard=3, or say what the source was, such as --from dp_shard=4",
            )
        )
    return parsed


def print_memory(estimate: MemoryEstimate) -> None:
    """Prints ranks that hold the same as one row, largest first, and the two host peaks."""
    from rich.table import Table

    from samerun.core.size import format_size

    parts = [part for part in _PARTS if any(getattr(rank, f"{part}_bytes") for rank in estimate.per_rank)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ranks")
    for name in (*parts, "total"):
        table.add_column(name, justify="right")
    rows = sorted(_alike(estimate), key=lambda ranks: -ranks[0].total_bytes)
    for ranks in rows[:_SHOWN_ROWS]:
        sizes = [getattr(ranks[0], f"{part}_bytes") for part in parts]
        table.add_row(_runs([rank.rank for rank in ranks]), *map(format_size, [*sizes, ranks[0].total_bytes]))
    stdout_console().print(table)
    if len(rows) > _SHOWN_ROWS:
        click.echo(f"and {len(rows) - _SHOWN_ROWS} smaller kinds of rank")
    click.echo(_sharding(estimate))
    if unit := estimate.largest.gather_unit:
        click.echo(f"gather is the largest unit gathered at once: {printable(unit)}")
    if not estimate.optimizer_known:
        click.echo("the checkpoint holds no optimizer state, so none is counted")
    consolidated, direct = estimate.host.consolidate_bytes, estimate.host.direct_bytes
    click.echo(
        f"host peak: {format_size(consolidated)} to consolidate in one process; "
        f"{format_size(direct)} to load shards directly, all {estimate.layout.world_size} ranks on one host"
    )
    if (device := estimate.device_memory_bytes) is not None:
        share = estimate.largest.total_bytes / device
        click.echo(f"largest rank: {share:.0%} of {format_size(device)}, before activations")


def _sharding(estimate: MemoryEstimate) -> str:
    if estimate.stage is not None:
        return f"sharded as by ZeRO stage {estimate.stage}"
    alone = estimate.layout.dp_shard * estimate.layout.cp == 1
    return "not sharded over data-parallel ranks, as by DDP" if alone else "sharded as by FSDP2"


def _alike(estimate: MemoryEstimate) -> list[list[RankMemory]]:
    """Returns the ranks grouped by what they hold."""
    groups: dict[tuple[int, ...], list[RankMemory]] = {}
    for rank in estimate.per_rank:
        groups.setdefault(tuple(getattr(rank, f"{part}_bytes") for part in _PARTS), []).append(rank)
    return list(groups.values())


def _runs(ranks: list[int]) -> str:
    """Returns numbers in ascending order as text: `0-3, 8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more runs" if len(texts) > 4 else "")
