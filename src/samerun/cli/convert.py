"""`samerun convert`: a checkpoint written in another format or for another layout, and proved to be the same state."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from samerun.errors import Problem, SamerunError, UsageError

if TYPE_CHECKING:
    from samerun.convert.convert import Converted
    from samerun.convert.prepare import Prepared, Writer
    from samerun.core.dtype import DType
    from samerun.core.mesh import Layout
    from samerun.execute.engine import Progress, ProgressCallback
    from samerun.formats.base import Checkpoint

_FILES_SHOWN = 20


@click.command(name="convert")
@click.argument("src")
@click.argument("dest")
@click.option(
    "--to",
    "to",
    required=True,
    metavar="FORMAT",
    help="dcp, torch, safetensors, universal, zero, megatron, huggingface.",
)
@click.option("--layout", metavar="L", help="The layout to write for, e.g. dp_shard=10.")
@click.option(
    "--map", "maps", multiple=True, metavar="FILE", help="Names in SRC to names in DEST: a file or a map's name."
)
@click.option("--dtype", "dtypes", multiple=True, metavar="ROLE=DTYPE", help="Change a role's element type.")
@click.option("--allow", multiple=True, metavar="CODE", help="Accept a finding that blocks.")
@click.option("--memory-budget", default="48MiB", show_default=True, metavar="SIZE", help="For buffers.")
@click.option("--threads", type=click.IntRange(1, 256), help="Copies at once; as many as cores by default.")
@click.option("--max-shard", metavar="SIZE", help="safetensors, huggingface: the most that one file holds.")
@click.option("--flavour", metavar="F", help="huggingface: for trainer, accelerate, or both (the default).")
@click.option("--masters", type=click.Choice(["params", "slots", "drop"]), help="Where fp32 masters go.")
@click.option("--weights-only", is_flag=True, help="Parameters and buffers; no optimizer and nothing of the run.")
@click.option("--stage", type=click.IntRange(1, 3), help="zero: the stage of the job that loads it.")
@click.option("--parts", metavar="L,L", help="zero: a pipeline's stages, by their first layers.")
@click.option("--format", "format_name", metavar="F", help="Read SRC as this format.")
@click.option("--rank-timeout", default=120.0, show_default=True, metavar="S", help="Under torchrun: patience.")
@click.option("--meeting", "meeting_dir", metavar="DIR", help="Under torchrun, into a store: where ranks meet.")
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    src: str,
    dest: str,
    to: str,
    layout: str | None,
    maps: tuple[str, ...],
    dtypes: tuple[str, ...],
    allow: tuple[str, ...],
    memory_budget: str,
    threads: int | None,
    max_shard: str | None,
    flavour: str | None,
    masters: str | None,
    weights_only: bool,
    stage: int | None,
    parts: str | None,
    format_name: str | None,
    rank_timeout: float,
    meeting_dir: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the checkpoint SRC as another format at DEST, and prove it equal.

    SRC is only read. DEST appears whole, read back and proved, or not at all; the
    proof lies in it. A conversion that was killed goes on when it is run again.
    Under torchrun, the processes of the launch share the work.

    DEST may be a URL (s3://bucket/name): a marker is then removed when it is whole.

    \b
    samerun convert ckpt/step-1200 moved --to dcp
    samerun convert ds/global_step900 uni --to universal --dry-run
    samerun convert ds/global_step900 model.pt --to torch --weights-only
    samerun convert meg/iter_0000100 ds --to zero --map megatron-to-llama
    """
    import os
    from contextlib import ExitStack
    from pathlib import Path

    from samerun.cli.output import emit_json
    from samerun.convert.convert import carry_out
    from samerun.convert.prepare import prepare
    from samerun.convert.together import carry_out_together, meet
    from samerun.execute.engine import Settings
    from samerun.execute.ranks import parse_launch
    from samerun.formats.detect import open_checkpoint
    from samerun.stores.remote import is_url

    _require_codes(allow)
    settings = Settings(_parse_size("--memory-budget", memory_budget), threads or min(8, os.cpu_count() or 1))
    wanted = dict(_parse_dtype(text) for text in dtypes)
    writer = _writer(to, max_shard, flavour, stage, parts)
    launch = parse_launch(os.environ)
    first = launch is None or launch.rank == 0
    if dry_run and not first:
        return
    with ExitStack() as stack:
        if as_json and first:
            stack.enter_context(_failure_as_json("convert-plan" if dry_run else "convert", dest))
        cancel, meeting = Event(), None
        if launch is not None and not dry_run:
            meeting = stack.enter_context(meet(launch, Path(src), dest, cancel, rank_timeout, meeting_dir))
        checkpoint = open_checkpoint(src, format_name)
        stack.callback(checkpoint.close)
        prepared = prepare(
            _mapped(checkpoint, maps),
            dest,
            to=to,
            layout=_parse_layout(layout, checkpoint.state.topology.layout),
            allow=allow,
            dtype=wanted,
            settings=settings,
            given=None if is_url(src) else Path(src),
            original=checkpoint,
            writer=writer,
            payloads=first,
            masters=masters,
            weights_only=weights_only,
        )
        if dry_run:
            if as_json:
                emit_json("convert-plan", prepared.plan.to_json(copies=True))
            else:
                _print_plan(prepared)
            return
        stack.enter_context(interruptible(cancel))
        progress = stack.enter_context(stage_progress()) if first else None
        if meeting is None:
            done = carry_out(prepared, settings=settings, progress=progress, cancel=cancel)
        else:
            done = carry_out_together(prepared, meeting, settings=settings, progress=progress)
    if done is None:
        return
    if as_json:
        emit_json("convert", done.to_json())
    else:
        _print_done(prepared, done)


def _mapped(checkpoint: Checkpoint, maps: tuple[str, ...]) -> Checkpoint:
    """Returns the checkpoint under the names of its maps: each takes the names that the one before gave."""
    if maps:
        from samerun.formats.mapfile import read_name_map
        from samerun.formats.mapped import MappedCheckpoint

        for name in maps:
            checkpoint = MappedCheckpoint(checkpoint, read_name_map(name, checkpoint.state))
    return checkpoint


@contextmanager
def _failure_as_json(verb: str, dest: str) -> Generator[None]:
    """Prints the result of a conversion that findings stopped: nothing was written, and why."""
    from samerun.cli.output import emit_json

    try:
        yield
    except SamerunError as error:
        if error.exit_code != UsageError.exit_code:  # then there is no result, but a message
            nothing = {"dest": dest, "bytes_read": 0, "bytes_written": 0, "seconds": 0.0, "proof": None, "state": None}
            emit_json(verb, {**nothing, "problems": [problem.to_json() for problem in error.problems]})
        raise


def _usage(code: str, message: str, hint: str) -> UsageError:
    return UsageError(Problem(code, message, hint=hint))


def _require_codes(codes: tuple[str, ...]) -> None:
    """Raises UsageError for a code that no finding has: it would accept nothing, and nobody would notice."""
    if not codes:
        return
    from difflib import get_close_matches

    from samerun.catalog import load_catalog

    known = load_catalog()
    if unknown := [code for code in codes if code not in known]:
        close = [near for code in unknown for near in get_close_matches(code.upper(), known, n=3)]
        hint = f"closest: {', '.join(close)}" if close else "`samerun explain --list` shows every code"
        raise UsageError(Problem("SR-USAGE-CODE", f"--allow: there is no finding {', '.join(unknown)}", hint=hint))


def _parse_size(option: str, text: str) -> int:
    from samerun.core.size import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise _usage("SR-USAGE-OPTION", f"{option}: {error}", "a size looks like 48MiB or 5GB") from None


def _parse_dtype(text: str) -> tuple[str, DType]:
    from samerun.core.dtype import parse_dtype

    role, equals, name = text.partition("=")
    try:
        if not equals:
            raise ValueError(f"cannot read {text!r}")
        return role, parse_dtype(name)
    except ValueError as error:
        hint = "--dtype looks like param=bfloat16 or optim.exp_avg=float32"
        raise _usage("SR-USAGE-DTYPE", str(error), hint) from None


def _parse_layout(text: str | None, source: Layout | None) -> Layout | None:
    from samerun.core.mesh import Layout

    try:
        return Layout.parse(text, source=source) if text is not None else None
    except ValueError as error:
        raise _usage("SR-USAGE-LAYOUT", str(error), "a layout looks like dp_shard=4,tp=2 or dp=10") from None


def _writer(to: str, max_shard: str | None, flavour: str | None, stage: int | None, parts: str | None) -> Writer | None:
    options: dict[str, Any] = {}
    if stage is not None:
        if to != "zero":
            raise _usage("SR-USAGE-OPTION", "--stage is for zero only", "a universal checkpoint loads at every stage")
        options["stage"] = stage
    if parts is not None:
        if to != "zero":
            raise _usage("SR-USAGE-OPTION", "--parts is for zero only", "other formats fit any number of stages")
        if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", parts):
            raise _usage("SR-USAGE-OPTION", f"--parts {parts}", "the first layer of every stage, as in 0,4,8")
        options["parts"] = tuple(map(int, parts.split(",")))
    if max_shard is not None:
        if to not in ("safetensors", "huggingface"):
            raise _usage("SR-USAGE-OPTION", "--max-shard is for safetensors and huggingface only", "leave it out")
        options["max_shard_bytes"] = _parse_size("--max-shard", max_shard)
    if flavour is not None:
        flavours = ("trainer", "accelerate", "both")
        if to != "huggingface":
            raise _usage("SR-USAGE-OPTION", "--flavour is for huggingface only", "leave it out")
        if flavour not in flavours:
            raise _usage("SR-USAGE-OPTION", f"--flavour {flavour}", f"flavours: {', '.join(flavours)}")
        options["flavour"] = flavour
    if not options:
        return None
    from samerun.convert.prepare import load_writer

    return partial(load_writer(to), **options)


@contextmanager
def interruptible(cancel: Event | None = None) -> Generator[Event]:
    """Yields an event that Ctrl-C and a scheduler's SIGTERM set, so that work stops where it can go on later."""
    cancel = cancel or Event()

    def stop(number: int, frame: Any) -> None:
        if cancel.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: do not wait for what is being written
        cancel.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield cancel
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stage_progress() -> Generator[ProgressCallback | None]:
    """Shows a bar per stage on stderr, with rate and remaining time, where somebody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    from samerun.cli.output import stderr_console

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Bars(*columns, console=stderr_console(), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(now: Progress) -> None:
            if now.stage not in tasks:
                tasks[now.stage] = bars.add_task(now.stage, total=now.total_bytes)
            bars.update(tasks[now.stage], completed=now.done_bytes)

        yield show


def _print_plan(prepared: Prepared) -> None:
    from samerun.cli.output import print_problems, printable, stderr_console
    from samerun.core.size import format_size

    plan = prepared.plan
    rows = [
        ("destination", f"{prepared.place}  ({prepared.to}{f', {prepared.layout}' if prepared.layout else ''})"),
        ("tensors", f"{len(plan.keys) + len(plan.embedded):,} in {len(plan.destination.files):,} files"),
        ("copies", f"{len(plan.copies):,} from {len(plan.sources):,} files, {int(plan.cast.sum()):,} of them casts"),
        ("read", format_size(plan.bytes_read)),
        ("write", format_size(plan.bytes_written)),
        ("memory", f"{format_size(plan.peak_memory_bytes)} at most, beside what the process itself needs"),
        ("source", plan.source_fingerprint),
        ("plan", plan.hash),
    ]
    for label, text in rows:
        click.echo(f"{click.style(f'{label:<12}', bold=True)}{text}")
    click.echo()
    for file in plan.destination.files[:_FILES_SHOWN]:
        name = file.path if not plan.destination.single_file else prepared.place.name
        click.echo(f"{file.size:>16,}  {printable(str(name))}")
    if len(plan.destination.files) > _FILES_SHOWN:
        click.echo(f"{'':>16}  ... and {len(plan.destination.files) - _FILES_SHOWN} more (--json lists all)")
    for key, why in plan.destination.dropped.items():
        click.echo(printable(f"{'left out':>16}  {key}: {why}"))
    print_problems((*prepared.decisions, *prepared.problems), stderr_console())


def _print_done(prepared: Prepared, done: Converted) -> None:
    from samerun.cli.output import print_problems, printable, stderr_console
    from samerun.core.size import format_size

    rate = format_size(round(done.bytes_written / done.seconds)) if done.seconds else "-"
    tensors = len(prepared.plan.keys) + len(prepared.plan.embedded)
    click.echo(f"{printable(str(done.dest))}: {format_size(done.bytes_written)} in {done.seconds:.1f} s ({rate}/s)")
    click.echo(f"proved: {tensors:,} tensors read back equal, state {done.state}")
    click.echo(f"proof: {printable(str(done.proof))}")
    print_problems((*prepared.decisions, *done.problems), stderr_console())
