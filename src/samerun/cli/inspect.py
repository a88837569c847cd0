"""`samerun inspect`: what is in a checkpoint, is it complete, can a run go on from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from samerun.cli.output import printable
from samerun.errors import Problem, Severity, UsageError

if TYPE_CHECKING:
    from samerun.core.mesh import Layout
    from samerun.core.state import LogicalState
    from samerun.verify.inspection.structure import InspectReport
    from samerun.verify.state.against import Against
    from samerun.verify.state.checksums import Checksums

_ALIKE_SHOWN = 3


@click.command(name="inspect")
@click.argument("path")
@click.option("--deep", is_flag=True, help="Read every byte: checksums, finiteness, moments, replicas.")
@click.option("--against", metavar="PREVIOUS", help="An earlier checkpoint of the run: say what did not move since.")
@click.option("--to", "to", metavar="LAYOUT", help="Say what this layout would do to it, e.g. dp_shard=3.")
@click.option("--format", "format_name", metavar="F", help="Read it as this format instead of looking.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(
    ctx: click.Context,
    path: str,
    deep: bool,
    against: str | None,
    to: str | None,
    format_name: str | None,
    as_json: bool,
) -> None:
    """Say what the checkpoint at PATH holds, whether it is complete, and whether a run can resume from it.

    No GPU, no process group and no torch are needed, and nothing that the checkpoint contains is executed.

    \b
    samerun inspect ckpt/step-1200
    samerun inspect ckpt/step-1200 --deep --to dp_shard=10 --json
    samerun inspect ckpt/step-1200 --against ckpt/step-1100
    """
    from samerun.cli.output import emit_json, exit_code
    from samerun.cli.progress import bytes_progress
    from samerun.formats.detect import open_checkpoint
    from samerun.verify.inspection.structure import inspect_checkpoint

    checkpoint = open_checkpoint(path, format_name)
    previous = open_checkpoint(against) if against is not None else None
    destination = _parse_layout(to, checkpoint.state) if to is not None else None
    total = sum(entry.num_bytes for entry in checkpoint.state.tensors.values()) if deep else 0
    with bytes_progress("checking", total) as progress:
        advance = partial(progress, "checksums") if progress else None
        report = inspect_checkpoint(checkpoint, deep=deep, destination=destination, previous=previous, advance=advance)
    if as_json:
        emit_json("inspect", report.to_json())
    else:
        _print(report, deep=deep)
    ctx.exit(exit_code(report.problems))


def _parse_layout(text: str, state: LogicalState) -> Layout:
    from samerun.core.mesh import Layout

    try:
        return Layout.parse(text, source=state.topology.layout)
    except ValueError as error:
        raise UsageError(
            Problem("SR-USAGE-LAYOUT", str(error), hint="a layout looks like dp_shard=4,tp=2 or dp=10")
        ) from None


def _print(report: InspectReport, *, deep: bool) -> None:
    from samerun.cli.output import print_problems, stdout_console

    for label, text in _facts(report, deep=deep):
        click.echo(f"{click.style(f'{label:<11}', bold=True)}{text}")
    click.echo()
    for line in _table(report.state):
        click.echo(line)
    if report.problems:
        click.echo()
        print_problems(condense(report.problems), stdout_console())


def _facts(report: InspectReport, *, deep: bool) -> Iterator[tuple[str, str]]:
    state = report.state
    yield "checkpoint", printable(f"{report.path}  ({state.format})")
    if recognised := state.written_by.get("recognised"):
        yield "format", printable(recognised)
    yield "written by", _written_by(state)
    yield "progress", _progress(state)
    if state.groups:
        yield "groups", printable(_groups(report))
    pieces = sum(len(entry.tiling) for entry in state.tensors.values())
    where = f"{pieces:,} pieces in {report.num_files} files"
    yield (
        "complete",
        _verdict("yes" if report.complete else "no")
        + (
            f"  every value is there once, {where}"
            if report.complete
            else f"  values are missing or unreadable, {where}"
        ),
    )
    yield "intact", _intact(report.intact, report.checksums, report.evidence, deep=deep)
    if report.checksums is not None:
        yield "checksums", _checksums(report.checksums, report.intact)
    if state.rng:
        from samerun.verify.state.generators import describe_generators, saved_generators

        yield "randomness", describe_generators(saved_generators(state))
    resumable = report.resumable
    lack = f"; lacks {', '.join(resumable.lack)}" if resumable.lack else ""
    yield "resumable", f"{_verdict(resumable.verdict)}  has {', '.join(resumable.have) or 'nothing'}{lack}"
    if report.destination is not None:
        yield "at", _destination(report)
    if report.against is not None:
        yield "against", printable(_against(report.against))


def _verdict(text: str) -> str:
    return click.style(text, fg={"yes": "green", "partial": "yellow"}.get(text, "red"), bold=True)


def _written_by(state: LogicalState) -> str:
    topology = state.topology
    if topology.world_size is None:
        return "an unknown number of ranks"
    ranks = f"{topology.world_size} rank{'s' if topology.world_size > 1 else ''}"
    layout = f", {topology.layout}" if topology.layout else ", layout unknown"
    return f"{ranks}{layout}" + (f"  (inferred {topology.inferred})" if topology.inferred else "")


def _progress(state: LogicalState) -> str:
    progress = state.progress
    parts = [f"update {progress.update:,}"] if progress.update is not None else ["update unknown"]
    parts += [f"{count:,} {name}" for name in ("samples", "tokens") if (count := getattr(progress, name)) is not None]
    parts += [f"epoch {progress.epoch}"] if progress.epoch is not None else []
    return ", ".join(parts)


def _groups(report: InspectReport) -> str:
    state = report.state
    lost = next((item.follows_from for item in report.problems if item.code.startswith("SR-GROUP-")), None)
    if lost:
        return f"not readable, because of {lost}"

    def setting(values: Any, name: str) -> str:
        value = values.get(name)
        return f"{name} {value:.6g}" if isinstance(value, int | float) else f"{name} {value}"

    return "; ".join(
        f"{len(group.params)} parameters, {setting(group.hyperparameters, 'lr')}, "
        f"{setting(group.hyperparameters, 'weight_decay')}"
        for group in state.groups[:6]
    ) + (f"; {len(state.groups) - 6} more" if len(state.groups) > 6 else "")


def _intact(intact: bool | None, sums: Checksums | None, evidence: tuple[str, ...], *, deep: bool) -> str:
    if intact is not None:
        agree = f"every value is as recorded in {' and '.join(evidence)}" if evidence else "every checksum agrees"
        return _verdict("yes" if intact else "no") + (f"  {agree}" if intact else "  see below")
    if not deep:
        return "not checked  (--deep reads every byte)"
    checked, total = (sums.checked or 0, sums.total or 0) if sums is not None else (0, 0)
    if not checked:
        return "undecided  these files record nothing that bytes could be compared with"
    if checked < total:
        return f"undecided  only {checked:,} of {total:,} payloads have a checksum; those agree"
    return "undecided  every checksum agrees; nothing shows that all files are of one save"


def _checksums(sums: Checksums, intact: bool | None) -> str:
    """Says what recorded checksums gave, and whether they were compared with the bytes or only put together."""
    if sums.fingerprint is not None:
        combined = f"fingerprint {sums.fingerprint} from the recorded CRC-32 of {len(sums.tensors):,} tensors"
    else:
        combined = f"no fingerprint: {sums.why}"
    if sums.checked is None:
        return f"{combined}; no values read"
    if not sums.total or not sums.checked:
        return f"{combined}; every byte read, no checksum recorded to compare with"
    agree = "they do not all agree" if intact is False else "all agree"
    return f"{combined}; compared with the bytes: {sums.checked:,} of {sums.total:,} payloads, {agree}"


def _against(against: Against) -> str:
    how = {"digest": "by digest, every byte read", "crc32": "by recorded CRC-32, not read", "read": "small, read"}
    before, now = (f"update {update:,}" if update is not None else "an unknown update" for update in against.update)
    told = ", ".join(f"{count:,} {how.get(name, 'not compared')}" for name, count in against.by.items())
    return (
        f"{against.path}: from {before} to {now}; {against.moved:,} tensors moved, {len(against.unchanged):,} should "
        f"have and did not, {len(against.still):,} need not have ({told})"
    )


def _destination(report: InspectReport) -> str:
    destination = report.destination
    if destination is None:
        return ""
    spread = f"{destination.smallest_rank_elements:,} to {destination.largest_rank_elements:,} parameters per rank"
    uneven, empty = len(destination.uneven), len(destination.empty)
    return f"{destination.layout}: {spread}; {uneven} uneven, {empty} with empty shards"


def _table(state: LogicalState) -> Iterator[str]:
    rows: dict[str, list[Any]] = {}
    order = ("param", "master", "ema", "buffer", "optim")
    for entry in sorted(state.tensors.values(), key=lambda entry: order.index(entry.key.role)):
        name = printable(f"{entry.key.role}.{entry.key.slot}") if entry.key.slot else entry.key.role.value
        row = rows.setdefault(name, [0, 0, 0, {}])
        row[0] += 1
        row[1] += entry.num_elements
        row[2] += entry.num_bytes
        row[3][entry.dtype.name] = None
    width = max((len(name) for name in rows), default=0)
    yield click.style(f"{'':<{width}}  {'tensors':>8}  {'elements':>16}  {'bytes':>10}  type", dim=True)
    for name, (tensors, elements, num_bytes, dtypes) in rows.items():
        yield f"{name:<{width}}  {tensors:>8,}  {elements:>16,}  {_size(num_bytes):>10}  {', '.join(dtypes)}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def condense(problems: Iterable[Problem]) -> list[Problem]:
    """Keeps the first few findings of each code, and says in one line each how many more there are and what follows."""
    alike: dict[str, list[Problem]] = {}
    consequences: dict[str, dict[str, int]] = {}
    for problem in problems:
        if problem.follows_from:
            counts = consequences.setdefault(problem.follows_from, {})
            counts[problem.code] = counts.get(problem.code, 0) + 1
        else:
            alike.setdefault(problem.code, []).append(problem)
    kept: list[Problem] = []
    for code, found in alike.items():
        kept += found[:_ALIKE_SHOWN]
        if len(found) > _ALIKE_SHOWN:
            more = len(found) - _ALIKE_SHOWN
            kept.append(Problem(code, f"and {more} more of these (--json lists all)", severity=found[-1].severity))
        if code in consequences:
            kept.append(_consequences(code, consequences[code]))
    return kept


def _consequences(code: str, counts: dict[str, int]) -> Problem:
    shown = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())
    return Problem(code, f"these follow from it: {shown} (--json lists all)", severity=Severity.NOTE)
