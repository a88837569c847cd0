"""`samerun trace`: check and summarise what a job recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samerun.cli.curves import chosen, curve_options
from samerun.cli.output import emit_json, exit_code, print_problems, stdout_console

if TYPE_CHECKING:
    from rich.table import Table

    from samerun.trace import Trace, UpdateLine

_SHOWN = 10  # updates shown at each end of a long trace


@click.command(name="trace")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--all", "show_all", is_flag=True, help="Show every update, not only the first and last ten.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@curve_options("Also write its curves there")
def command(trace: Path, show_all: bool, as_json: bool, **folders: Path | None) -> None:
    """Check the trace in the directory TRACE and summarise it, update by update.

    Says which ranks wrote it, on which layout and with which batch, whether the ranks tell one story, and every loss,
    norm and learning rate. Exit code 1 if something is wrong with it.

    \b
    samerun trace run/stages/06-window/trace
    samerun trace ledger --json
    samerun trace ledger --tensorboard curves
    """
    from samerun.trace import check_trace, read_trace

    curves = chosen(folders)
    found = read_trace(trace)
    problems = check_trace(found)
    if curves is not None:
        from samerun.report.curves import write_curves
        from samerun.verify.evidence.observed import observe

        updates = {trace.resolve().name: observe(found).updates}
        write_curves(updates, curves[1], to=curves[0], began=trace.stat().st_mtime)
    if as_json:
        emit_json("trace", {**_summary(found), "problems": [problem.to_json() for problem in problems]})
    else:
        _print(found, show_all)
        print_problems(problems)
    raise SystemExit(exit_code(problems))


def _summary(trace: Trace) -> dict[str, Any]:
    lead = trace.lead
    return {
        "path": str(trace.path),
        "stage": lead.header.stage,
        "world_size": lead.header.world_size,
        "ranks": [rank.header.rank for rank in trace.ranks],
        "layout": lead.header.layout,
        "declared_layout": lead.header.declared_layout,
        "batch": lead.header.batch,
        "versions": lead.header.versions,
        "environment": lead.header.environment,
        "updates": [_update_json(trace, line) for line in lead.updates],
        "evals": [
            {"update": line.update, "num_examples": line.num_examples, "mean_loss": _mean(line.losses)}
            | {"state_unchanged": line.state_unchanged, "rng_unchanged": line.rng_unchanged}
            for line in lead.evals
        ],
        "states": [
            {"when": line.when, "update": line.update, "digest": line.body.get("state")} for line in lead.states
        ],
        "boundaries": [{"what": line.what, "update": line.update} for line in lead.boundaries],
        "ended": all(rank.end is not None for rank in trace.ranks),
    }


def _update_json(trace: Trace, line: UpdateLine) -> dict[str, Any]:
    samples, tokens = trace.global_totals(line.update)
    return {
        "update": line.update,
        "loss": line.loss,
        "grad_norm": line.grad_norm,
        "update_norm": line.update_norm,
        "lr": list(line.lr),
        "loss_scale": line.loss_scale,
        "skipped": line.skipped,
        "finite": line.finite,
        "samples": samples,
        "tokens": tokens,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _print(trace: Trace, show_all: bool) -> None:
    out = stdout_console()
    lead = trace.lead
    layout = ", ".join(f"{axis}={size}" for axis, size in (lead.header.layout or {}).items()) or "layout not recorded"
    out.print(f"{trace.path}: {lead.header.stage or 'ledger'}, {lead.header.world_size} ranks, {layout}")
    if batch := lead.header.batch:
        out.print(
            f"global batch {batch.get('global_batch')} in {batch.get('passes')} passes on "
            f"{batch.get('replicas')} replicas, at most {batch.get('max_microbatch')} samples each"
        )
    for state in lead.states:
        out.print(f"state {state.when} at update {state.update}: digest {state.body.get('state', 'not recorded')}")
    for line in lead.evals:
        same = "changed nothing" if line.state_unchanged and line.rng_unchanged else "CHANGED the state"
        loss = _number(_mean(line.losses))
        out.print(f"evaluation at update {line.update}: {line.num_examples} examples, mean loss {loss}, {same}")
    if lead.updates:
        out.print(_table(trace, show_all))
    crossed = ", ".join(f"{line.what} {line.update}" for line in lead.boundaries[-12:])
    if crossed:
        out.print(f"boundaries: {'... ' if len(lead.boundaries) > 12 else ''}{crossed}")


def _table(trace: Trace, show_all: bool) -> Table:
    from rich.table import Table

    lines = trace.lead.updates
    table = Table(box=None, pad_edge=False)
    for name in ("update", "loss", "gradient", "change", "rate", "samples", "tokens", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    cut = not show_all and len(lines) > 2 * _SHOWN + 1
    for line in [*lines[:_SHOWN], *lines[-_SHOWN:]] if cut else lines:
        if cut and line is lines[-_SHOWN]:
            table.add_row("...")
        samples, tokens = trace.global_totals(line.update)
        table.add_row(
            str(line.update),
            _number(line.loss),
            _number(line.grad_norm),
            _number(line.update_norm),
            _number(line.lr[0] if line.lr else None),
            str(samples),
            "-" if tokens is None else str(tokens),
            "skipped" if line.skipped else "" if line.finite else "NOT FINITE",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
