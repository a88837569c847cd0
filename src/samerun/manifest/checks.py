"""What must hold between the lines of a manifest, checked section by section without the checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from samerun.errors import Problem
from samerun.manifest.models import (
    PLACEHOLDERS,
    Batch,
    Control,
    Destination,
    Launch,
    Side,
    Source,
    Transition,
    Window,
    find_placeholders,
)
from samerun.manifest.section import Section

Keys = tuple[str | int, ...]
Locate = Callable[[Keys], Mapping[str, Any]]
"""Gives `where` (file, line, key) for a key path."""

_SHAPE_WORDS = {"world_size", "layout", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"}


def check_sections(sections: Mapping[str, Section], locate: Locate) -> list[Problem]:
    """Returns every contradiction within and between the sections that are there."""
    problems: list[Problem] = []
    for name in ("source", "destination"):
        if isinstance(side := sections.get(name), Side):
            problems += _check_side(name, side, locate)
    if isinstance(batch := sections.get("batch"), Batch):
        problems += _check_batch(batch, locate)
    source = sections.get("source")
    if isinstance(source, Source):
        problems += _check_source_batch(source, batch if isinstance(batch, Batch) else None, locate)
    if isinstance(transition := sections.get("transition"), Transition):
        problems += _check_transition(transition, batch if isinstance(batch, Batch) else None, locate)
    if isinstance(control := sections.get("control"), Control):
        problems += _check_control(control, batch if isinstance(batch, Batch) else None, locate)
    if isinstance(window := sections.get("window"), Window):
        problems += _check_window(window, locate)
    if isinstance(launch := sections.get("launch"), Launch):
        destination = sections.get("destination")
        moved = (
            isinstance(source, Source)
            and isinstance(destination, Destination)
            and source.world_size != destination.world_size
        )
        problems += _check_launch(launch, moved, locate)
    return problems


def _check_side(name: str, side: Side, locate: Locate) -> Iterator[Problem]:
    try:
        layout = side.layout.to_layout()
    except ValueError as error:
        yield Problem("SR-MAN-WORLD", str(error), where=locate((name, "layout")))
        return
    if layout.world_size != side.world_size:
        yield Problem(
            "SR-MAN-WORLD",
            f"layout {layout} has {layout.world_size} ranks (which are {layout.batch_replicas} batch replicas), "
            f"but world_size says {side.world_size}",
            where=locate((name, "world_size")),
            expected=layout.world_size,
            found=side.world_size,
            hint="TP, CP and PP ranks share a batch: tp 2 x dp 4 is eight ranks and four batches",
        )


def _check_source_batch(source: Source, batch: Batch | None, locate: Locate) -> Iterator[Problem]:
    micro, passes = source.microbatch, source.accumulation
    if batch is None or micro is None or passes is None:
        return
    try:
        replicas = source.layout.to_layout().batch_replicas
    except ValueError:
        return
    if (product := replicas * micro * passes) != batch.global_batch:
        yield Problem(
            "SR-MAN-BATCH",
            f"the source dealt {replicas} replicas x microbatch {micro} x accumulation {passes} = {product} samples, "
            f"but global_batch says {batch.global_batch}",
            where=locate(("batch", "global_batch")),
            expected=product,
            found=batch.global_batch,
            hint=f"{source.world_size} ranks are {replicas} batch replicas: do not count TP, CP or PP ranks",
        )


def _check_batch(batch: Batch, locate: Locate) -> Iterator[Problem]:
    changed = batch.changed
    if (batch.option == "changed-batch") != (changed is not None):
        message = (
            "option changed-batch needs batch.changed: {global_batch, learning_rate, reason}"
            if changed is None
            else f"batch.changed is given, but the option is {batch.option or 'not chosen'}"
        )
        hint = "a changed batch is a decision of its own: state both or neither"
        yield Problem("SR-MAN-BATCH", message, where=locate(("batch", "changed")), hint=hint)
    if changed is None:
        return
    if changed.global_batch == batch.global_batch:
        where = locate(("batch", "changed", "global_batch"))
        yield Problem("SR-MAN-BATCH", f"the changed batch is the old one: {batch.global_batch}", where=where)
    rate = changed.learning_rate
    if (rate.policy == "value") != (rate.value is not None):
        yield Problem(
            "SR-MAN-BATCH",
            "a learning rate value goes with policy value, and only with it",
            where=locate(("batch", "changed", "learning_rate")),
            expected="a value" if rate.policy == "value" else "no value",
            found=f"policy {rate.policy}, value {rate.value}",
        )


def _check_transition(transition: Transition, batch: Batch | None, locate: Locate) -> Iterator[Problem]:
    bounds = {"replay_bound": transition.replay_bound, "omission_bound": transition.omission_bound}
    given = [name for name, value in bounds.items() if value is not None]
    approximate = transition.label == "approximate-continuation"
    if given and not approximate:
        yield Problem(
            "SR-MAN-TRANSITION",
            f"{' and '.join(given)} go with label approximate-continuation, not with {transition.label}",
            where=locate(("transition", given[0])),
            hint="a continuation replays and omits nothing",
        )
    if approximate and not given:
        yield Problem(
            "SR-MAN-TRANSITION",
            "an approximate continuation states its replay_bound or its omission_bound, in samples",
            where=locate(("transition", "label")),
        )
    reasoned = bool(transition.reason) or (batch is not None and batch.changed is not None)
    if transition.label != "continuation" and not reasoned:
        yield Problem(
            "SR-MAN-TRANSITION",
            f"label {transition.label} needs a reason",
            where=locate(("transition", "reason")),
            hint="one sentence for whoever reads the verdict later",
        )


def _check_control(control: Control, batch: Batch | None, locate: Locate) -> Iterator[Problem]:
    recorded = control.kind != "original-layout"
    if recorded and not control.trace:
        message = f"control kind {control.kind} needs control.trace: the directory with its record"
        yield Problem("SR-MAN-CONTROL", message, where=locate(("control", "trace")))
    if control.trace and not recorded:
        message = "control.trace is given, but kind original-layout runs the control itself"
        yield Problem("SR-MAN-CONTROL", message, where=locate(("control", "trace")))
    if control.rehearsal is not None and recorded:
        message = f"a rehearsal runs both layouts, and control kind {control.kind} reads a record"
        hint = "say original-layout: the reduced copy is resumed on the source layout too"
        yield Problem("SR-MAN-CONTROL", message, where=locate(("control", "rehearsal")), hint=hint)
    if control.oracle is not None and "checkpoint" not in find_placeholders(control.oracle):
        message = "control.oracle has no {checkpoint}, so it would not make the update that is examined"
        yield Problem("SR-MAN-CONTROL", message, where=locate(("control", "oracle")))
    if control.vary_microbatch is None:
        return
    if control.repeats < 2 or control.kind == "trace":
        message = "vary_microbatch is for the second control, which samerun runs, and there is none"
        yield Problem("SR-MAN-CONTROL", message, where=locate(("control", "vary_microbatch")))
    if batch is not None and control.vary_microbatch == batch.max_microbatch:
        yield Problem(
            "SR-MAN-CONTROL",
            f"vary_microbatch equals max_microbatch ({batch.max_microbatch}), so nothing would vary",
            where=locate(("control", "vary_microbatch")),
            hint="take another size, or null for a plain repeat",
        )


def _check_window(window: Window, locate: Locate) -> Iterator[Problem]:
    if window.at_least is not None and window.at_least > window.updates:
        yield Problem(
            "SR-MAN-WINDOW",
            "window.at_least asks for more updates than the window has",
            where=locate(("window", "at_least")),
            expected=f"at most {window.updates}",
            found=window.at_least,
        )


def _check_launch(launch: Launch, moved: bool, locate: Locate) -> Iterator[Problem]:
    commands = {"command": launch.command, "source_command": launch.source_command}
    for name, command in commands.items():
        if command is None:
            continue
        words = find_placeholders(command)
        where = locate(("launch", name))
        for word in dict.fromkeys(words):
            if word not in PLACEHOLDERS:
                yield _unknown_placeholder(word, where)
        if "checkpoint" not in words:
            yield Problem(
                "SR-MAN-LAUNCH",
                f"launch.{name} has no {{checkpoint}}, so the job would not resume what is examined",
                where=where,
            )
    if moved and launch.source_command is None and not _SHAPE_WORDS & set(find_placeholders(launch.command)):
        yield Problem(
            "SR-MAN-LAUNCH",
            "the same command line would start the source and the destination: it names neither world size nor layout",
            where=locate(("launch", "command")),
            hint="use {world_size} or {layout} in it, or give a source_command",
        )


def _unknown_placeholder(word: str, where: Mapping[str, Any]) -> Problem:
    if word in ("{", "}"):
        message = f"a lone {word} in a command line; double it ({word * 2}) where it is meant literally"
        return Problem("SR-MAN-LAUNCH", message, where=where)
    close = difflib.get_close_matches(word, PLACEHOLDERS, n=1)
    guess = f"did you mean {{{close[0]}}}? " if close else ""
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    return Problem(
        "SR-MAN-LAUNCH",
        f"there is no placeholder {{{word}}}",
        where=where,
        hint=f"{guess}known: {known}; write {{{{ and }}}} for literal braces",
    )
