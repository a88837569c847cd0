"""`samerun audit`: which samples a run really consumed, over all its starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samerun.cli.output import emit_json, exit_code, print_problems, stdout_console

if TYPE_CHECKING:
    from samerun.core.order import GlobalOrder, Ids
    from samerun.core.progress import Committed, LastBatch
    from samerun.errors import UsageError
    from samerun.trace import Trace
    from samerun.verify.order.runs import RunAudit


@click.command(name="audit")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--order", "order_text", help="The global order, such as keyed:samples=1000,seed=0, or a JSON file.")
@click.option("--from-sample", type=click.IntRange(min=0), help="Samples consumed before the first recorded update.")
@click.option(
    "--last-batch",
    type=click.Choice(["keep", "drop", "carry"]),
    default="keep",
    show_default=True,
    help="What the run does with samples at an epoch's end that do not fill a global batch.",
)
@click.option("--replay-bound", type=click.IntRange(min=0), default=0, help="Samples that may be replayed.")
@click.option("--omission-bound", type=click.IntRange(min=0), default=0, help="Samples that may be omitted.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    traces: tuple[Path, ...],
    order_text: str | None,
    from_sample: int | None,
    last_batch: LastBatch,
    replay_bound: int,
    omission_bound: int,
    as_json: bool,
) -> None:
    """Say which samples a run consumed twice, passed over, or gave to two ranks.

    Give one trace directory for each start of the job, in the order in which they ran. Updates that a later start made
    again count once. With --order every update is compared with the positions that it should have taken, and a ledger
    that kept only digests can be checked; without, ids are compared with each other as one epoch. Without
    --from-sample, a first update above 1 is taken to follow that many updates of the header's global batch. Exit code 1
    if the samples are not those of the order, each exactly once.

    \b
    samerun audit ledger-1 ledger-2 ledger-3 \\
                  --order distributed:samples=1000,seed=0,replicas=4
    samerun audit trace --order megatron-cyclic:samples=99840,micro=2,dp=16

    \b
    Orders, with their arguments (defaults in parentheses):
      sequential           samples
      keyed                samples, seed (0)
      distributed          samples, seed (0), shuffle (true), replicas (1),
                           drop_last (false), loader_batch
      random               samples, seed (0)
      accelerate           samples, batch, processes, seed (0), shuffle (true),
                           split, dispatch (false), even (true), drop_last
      megatron-sequential  samples, micro (1), dp (1), drop_last (true)
      megatron-cyclic      samples, micro, dp, sharding (true)

    Shards, packed rows, remainders and lists of ids do not fit on a command line. `order_spec(order)` in the job gives
    such an order as a document; write it to a file whose name ends with .json, and name that.
    """
    from samerun.trace import check_trace, read_trace
    from samerun.verify.order.runs import audit_runs, check_runs

    order = None if order_text is None else _order(order_text)
    found = [read_trace(path) for path in traces]
    begin = _begin(found, order, from_sample, last_batch) if order is not None else None
    audit = audit_runs(found, order, begin=begin, last_batch=last_batch)
    problems = [problem for trace in found for problem in check_trace(trace) if problem.code not in _NAMED_HERE]
    problems += check_runs(found, audit, replay_bound=replay_bound, omission_bound=omission_bound)
    if as_json:
        identity = order.identity() if order is not None else None
        body = audit.to_json() | {"traces": [str(path) for path in traces], "order": identity}
        emit_json("audit", {**body, "problems": [problem.to_json() for problem in problems]})
    else:
        _print(found, audit, order)
        print_problems(problems)
    raise SystemExit(exit_code(problems))


def _order(text: str) -> GlobalOrder:
    """Reads an order from its text, or from the file that the text names."""
    import json

    from samerun.core.orders import order_from_spec
    from samerun.errors import Problem, UsageError

    if not text.endswith(".json"):
        return order_from_spec(text, _draw)
    try:
        return order_from_spec(json.loads(Path(text).read_text(encoding="utf-8")), _draw)
    except (OSError, ValueError, RecursionError) as error:
        hint = "json.dump(order_spec(order), file) writes such a file"
        problem = Problem("SR-ORDER-TEXT", f"the order's file cannot be read: {error}", where={"file": text}, hint=hint)
        raise UsageError(problem) from None


def _draw(length: int, seed: int) -> Ids:
    """Draws a permutation as torch does: with torch itself where it is long and torch is there.

    Raises:
        UsageError: for one that would not fit into this machine's memory, or that only torch can draw (SR-ORDER-DRAW).
    """
    import importlib.util
    import os

    from samerun.core.orders.randperm import MAX_LENGTH, torch_randperm

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 8 * length > memory // 2:
        raise _undrawn(length, f"at most {memory // 16} samples, in half of this machine's memory")
    has_torch = importlib.util.find_spec("torch") is not None
    if length >= MAX_LENGTH and not has_torch:
        raise _undrawn(length, f"fewer than {MAX_LENGTH} samples where torch is not installed")
    if length < _LONG or not has_torch:
        return torch_randperm(length, seed)
    from samerun.train.draw import torch_draw

    return torch_draw(length, seed)


def _undrawn(length: int, expected: str) -> UsageError:
    from samerun.errors import Problem, UsageError

    hint = "audit where the job ran, or check the number of samples; a keyed order holds nothing at any size"
    message = f"a permutation of {length} samples cannot be drawn here"
    return UsageError(Problem("SR-ORDER-DRAW", message, expected=expected, found=length, hint=hint))


_LONG = 1 << 20  # from here on importing torch costs less than drawing without it
_MOST_EPOCHS = 1_000_000  # that are walked through to where a trace begins

_NAMED_HERE = frozenset({"SR-TRACE-OVERLAP", "SR-TRACE-OPEN", "SR-TRACE-NONFINITE"})


def _begin(
    traces: Sequence[Trace], order: GlobalOrder, from_sample: int | None, last_batch: LastBatch
) -> Committed | None:
    """Where the first recorded update begins."""
    from samerun.core.progress import Committed, seek
    from samerun.errors import Problem, UsageError

    first = next((index for trace in traces for index in trace.update_indices), 1)
    if from_sample is not None:
        _require_near(order, from_sample, first)
        epoch, left = 0, from_sample
        while left >= (length := order.num_samples(epoch)):
            epoch, left = epoch + 1, left - length
        return Committed(update=first - 1, epoch=epoch, samples_in_epoch=left, samples=from_sample)
    if first == 1:
        return None
    batch = (traces[0].lead.header.batch or {}).get("global_batch")
    if not isinstance(batch, int) or batch < 1:
        hint = "give --from-sample: how many samples the run had consumed before"
        message = f"the first recorded update is {first}, and the trace does not tell the global batch"
        raise UsageError(Problem("SR-AUDIT-BEGIN", message, where={"update": first}, hint=hint))
    _require_near(order, (first - 1) * batch, first)
    return seek(order, first - 1, batch, last_batch)


def _require_near(order: GlobalOrder, samples: int, update: int) -> None:
    from samerun.errors import Problem, UsageError

    if samples > (most := _MOST_EPOCHS * order.num_samples(0)):
        hint = "the order is not the run's, or the update's number or --from-sample is not right"
        message = "the first recorded update lies further along than a million epochs of the order"
        problem = Problem("SR-AUDIT-BEGIN", message, where={"update": update}, expected=most, found=samples, hint=hint)
        raise UsageError(problem)


def _print(traces: Sequence[Trace], audit: RunAudit, order: GlobalOrder | None) -> None:
    from rich.table import Table

    out = stdout_console()
    table = Table(box=None, pad_edge=False)
    for name in ("start", "updates", "ranks", "layout"):
        table.add_column(name, no_wrap=True)
    for trace in traces:
        updates = trace.update_indices
        layout = ", ".join(f"{axis}={size}" for axis, size in (trace.lead.header.layout or {}).items()) or "-"
        span = f"{updates[0]} to {updates[-1]}" if updates else "none"
        table.add_row(str(trace.path), span, str(trace.lead.header.world_size), layout)
    out.print(table)
    for seam in audit.seams:
        lost = f", {seam.rolled_back} updates ({seam.num_samples} samples) rolled back" if seam.rolled_back else ""
        out.print(f"seam after update {seam.update}{lost}")
    against = "each other" if order is None else _describe(order.identity())
    out.print(f"{audit.num_updates} updates, {audit.num_samples} samples, against {against}")
    counts = {name: len(audit.items(name)) for name in ("replayed", "omitted", "overlap", "other", "pending")}
    counts["padding"] = len(audit.padding)
    out.print(", ".join(f"{count} {name}" for name, count in counts.items()))
    out.print("exactly once" if audit.exactly_once else f"NOT exactly once: at most {audit.bound} samples off")


def _describe(identity: dict[str, Any]) -> str:
    rest = ", ".join(f"{name}={value}" for name, value in identity.items() if name != "kind")
    return f"the {identity['kind']} order ({rest})"
