"""Reading a trace: every rank's lines, and what is wrong with single lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from samerun.core.sketch import NUM_PROJECTIONS
from samerun.errors import Problem, Severity, UsageError
from samerun.trace.fields import (
    BadField,
    Body,
    anything,
    digest,
    list_of,
    mapping_of,
    number,
    optional_number,
    parse_json,
    positive,
    sample_id,
    size,
    text,
    truth,
    value_of,
    whole,
)
from samerun.trace.model import BoundaryLine, EndLine, EvalLine, Header, RankTrace, StateLine, Trace, UpdateLine
from samerun.trace.state_line import check_state
from samerun.trace.write import KINDS, SCHEMA

_IDS_DIGEST = re.compile("[0-9a-f]{32}")


def read_trace(directory: str | Path) -> Trace:
    """Reads every rank's file.

    What is wrong with single lines is in `Trace.problems` (SR-TRACE-CUT, SR-TRACE-LINE, SR-TRACE-HEADER); a file
    without a usable header is reported and left out. `check_trace` finds what is wrong with the trace as a whole.

    Raises:
        UsageError: SR-TRACE-NONE if there is no trace at all, SR-TRACE-HEADER if no file has a usable header.
    """
    path = Path(directory)
    files = sorted(path.glob("rank-*.jsonl")) if path.is_dir() else []
    if not files:
        raise UsageError(
            Problem(
                "SR-TRACE-NONE",
                f"{path} holds no trace",
                where={"file": str(path)},
                hint="a trace is a directory of rank-00000.jsonl, rank-00001.jsonl, ... as `Recorder` writes it",
            )
        )
    problems: list[Problem] = []
    ranks = [rank for file in files if (rank := _read_rank(file, problems)) is not None]
    if not ranks:
        raise UsageError(problems)
    return Trace(
        path=path,
        ranks=tuple(sorted(ranks, key=lambda rank: rank.header.rank)),
        problems=tuple(problems),
    )


def _read_rank(file: Path, problems: list[Problem]) -> RankTrace | None:
    lines = list(_parse_lines(file, problems))
    header = _parse_header(file, lines[0][1] if lines else None, problems)
    if header is None:
        return None
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for line, body in lines[1:]:
        kind = body["kind"]
        try:
            if found["end"]:
                raise BadField("it comes after the end line")
            if kind == "header":
                raise BadField("it is a second header")
            if kind in _PARSERS:  # any other is a later version's, which this reader does not know and need not
                found[kind].append(_PARSERS[kind](body, line))
        except BadField as error:
            problems.append(_bad_line(file, line, f"{error} ({kind})"))
    return RankTrace(
        file=file,
        header=header,
        updates=tuple(found["update"]),
        evals=tuple(found["eval"]),
        digests=tuple(found["digest"]),
        states=tuple(found["state"]),
        boundaries=tuple(found["boundary"]),
        end=found["end"][-1] if found["end"] else None,
    )


def _parse_lines(file: Path, problems: list[Problem]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        raw = file.read_bytes().split(b"\n")
    except OSError as error:
        problems.append(_bad_line(file, 1, error.strerror or type(error).__name__))
        return
    cut = raw.pop()  # what follows the last newline: nothing, unless the writer was cut off
    if cut:
        problems.append(
            Problem(
                "SR-TRACE-CUT",
                f"the last line of {file.name} is cut off after {len(cut)} bytes and is ignored",
                severity=Severity.WARNING,
                where={"file": str(file), "line": len(raw) + 1},
                hint="the job was killed while it wrote; everything before that line counts",
            )
        )
    for line, content in enumerate(raw, start=1):
        try:
            body = parse_json(content)
            if not isinstance(body, dict) or not isinstance(cast("dict[str, Any]", body).get("kind"), str):
                raise BadField('no JSON object with a "kind"')
        except BadField as error:
            problems.append(_bad_line(file, line, str(error)))
            continue
        yield line, cast("dict[str, Any]", body)


def _bad_line(file: Path, line: int, what: str) -> Problem:
    return Problem(
        "SR-TRACE-LINE",
        f"line {line} of {file.name} cannot be read: {what}",
        where={"file": str(file), "line": line},
        hint="a trace is written line by line and never edited; record it again",
    )


def _parse_header(file: Path, body: dict[str, Any] | None, problems: list[Problem]) -> Header | None:
    if body is None or body["kind"] != "header" or body.get("schema") != SCHEMA:
        found = None if body is None else body.get("schema", body["kind"])
        problems.append(
            Problem(
                "SR-TRACE-HEADER",
                f"{file.name} does not begin with a header of this schema",
                where={"file": str(file), "line": 1},
                hint="the job ended before `Recorder.attach`, or another version wrote the trace",
                expected=SCHEMA,
                found=found,
            )
        )
        return None
    try:
        return Header(
            rank=value_of(body, "rank", whole),
            world_size=value_of(body, "world_size", positive),
            stage=value_of(body, "stage", text, default=None),
            coordinate=value_of(body, "coordinate", mapping_of(whole), default={}),
            layout=value_of(body, "layout", mapping_of(positive), default=None),
            declared_layout=value_of(body, "declared_layout", mapping_of(positive), default=None),
            batch=value_of(body, "batch", _batch, default=None),
            versions=value_of(body, "versions", mapping_of(text), default={}),
            environment=value_of(body, "environment", mapping_of(anything), default={}),
        )
    except BadField as error:
        problems.append(_bad_line(file, 1, f"{error} (header)"))
        return None


def _batch(value: Any) -> dict[str, Any]:
    found = mapping_of(anything)(value)
    for name in ("global_batch", "max_microbatch", "passes", "replicas"):
        value_of(found, name, positive, default=None)
    value_of(found, "microbatches", list_of(list_of(whole)), default=None)
    return found


def _ids_digest(value: Any) -> str:
    if not _IDS_DIGEST.fullmatch(text(value)):
        raise BadField(f"{value!r} is no set digest of 32 hexadecimal digits")
    return value


_norms = mapping_of(size)


def _projections(value: Any) -> tuple[float, ...]:
    found = list_of(number)(value)
    if len(found) != NUM_PROJECTIONS or not all(map(math.isfinite, found)):
        raise BadField(f"a direction has {NUM_PROJECTIONS} finite numbers, not {value!r:.60}")
    return found


_directions = mapping_of(_projections)


def _inputs(value: Any) -> tuple[int, int]:
    found = mapping_of(anything)(value)
    return value_of(found, "rows", whole), int(value_of(found, "digest", digest), 16)


def _autocast(value: Any) -> str | None:
    return value_of(mapping_of(anything)(value), "autocast", text, default=None)


def _parse_update(body: Body, line: int) -> UpdateLine:
    found = UpdateLine(
        line=line,
        update=value_of(body, "update", positive),
        loss=value_of(body, "loss", optional_number),
        grad_norm=value_of(body, "grad_norm", size, default=None),
        update_norm=value_of(body, "update_norm", size, default=None),
        lr=value_of(body, "lr", list_of(number)),
        loss_scale=value_of(body, "loss_scale", size, default=None),
        skipped=value_of(body, "skipped", truth, default=False),
        samples=value_of(body, "samples", whole),
        tokens=value_of(body, "tokens", whole, default=None),
        sample_ids=value_of(body, "sample_ids", list_of(sample_id)),
        finite=value_of(body, "finite", truth),
        deltas=value_of(body, "deltas", _norms, default={}),
        moved=value_of(body, "moved", _norms, default=None),
        steps=value_of(body, "steps", whole, default=1),
        seconds=value_of(body, "seconds", size, default=None),
        ids_digest=value_of(body, "ids_digest", _ids_digest, default=None),
        gradients=value_of(body, "gradients", _norms, default=None),
        step_norm=value_of(body, "step_norm", size, default=None),
        moved_direction=value_of(body, "moved_direction", _directions, default=None),
        gradients_direction=value_of(body, "gradients_direction", _directions, default=None),
        inputs=value_of(body, "inputs", _inputs, default=None),
        autocast=value_of(body, "inputs", _autocast, default=None),
    )
    globals_ = {"loss": found.loss, "grad_norm": found.grad_norm, "update_norm": found.update_norm}
    wrong = [name for name, value in globals_.items() if value is not None and not math.isfinite(value)]
    if found.finite and wrong:
        raise BadField(f"finite is true, but {wrong[0]} is {body[wrong[0]]}")
    return found


def _logits(value: Any) -> dict[str, Any]:
    found = mapping_of(anything)(value)
    name = value_of(found, "file", text)
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise BadField(f"{name!r} is no file beside the trace")
    value_of(found, "shape", list_of(whole))
    value_of(found, "stored_elements", whole)
    return found


def _module(value: Any) -> tuple[str, float, int]:
    row = list_of(anything)(value)
    if len(row) != 3:
        raise BadField(f"a module has a name, a norm and a number of elements, not {len(row)} values")
    return text(row[0]), size(row[1]), whole(row[2])


def _detail(value: Any) -> tuple[float, str]:
    row = list_of(anything)(value)
    if len(row) != 2:
        raise BadField(f"a detail has a norm and a type, not {len(row)} values")
    return size(row[0]), text(row[1])


def _parse_eval(body: Body, line: int) -> EvalLine:
    found = EvalLine(
        update=value_of(body, "update", whole),
        num_examples=value_of(body, "num_examples", whole),
        losses=value_of(body, "losses", list_of(number)),
        logits=value_of(body, "logits", _logits, default=None),
        state_unchanged=value_of(body, "state_unchanged", truth),
        rng_unchanged=value_of(body, "rng_unchanged", truth),
        changed=value_of(body, "changed", list_of(text), default=()),
        modules=value_of(body, "modules", list_of(_module), default=()),
        details=value_of(body, "details", mapping_of(_detail), default={}),
    )
    if len(found.losses) != found.num_examples:
        raise BadField(f"{len(found.losses)} losses of {found.num_examples} examples")
    return found


def _parse_state(body: Body, line: int) -> StateLine:
    check_state(body)
    rest = {name: value for name, value in body.items() if name not in ("kind", "when", "update")}
    return StateLine(when=body["when"], update=body["update"], body=rest)


def _parse_digest(body: Body, line: int) -> dict[str, Any]:
    value_of(body, "update", whole)
    return dict(body)


def _parse_boundary(body: Body, line: int) -> BoundaryLine:
    return BoundaryLine(what=value_of(body, "what", text), update=value_of(body, "update", whole))


def _parse_end(body: Body, line: int) -> EndLine:
    return EndLine(reason=value_of(body, "reason", text), updates=value_of(body, "updates", whole))


_PARSERS: dict[str, Any] = {
    "update": _parse_update,
    "eval": _parse_eval,
    "state": _parse_state,
    "digest": _parse_digest,
    "boundary": _parse_boundary,
    "end": _parse_end,
}
