"""Reading a trace: every rank's lines, and what is wrong with single lines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from samerun.errors import Problem, Severity, UsageError
from samerun.trace.model import BoundaryLine, EndLine, EvalLine, Header, RankTrace, StateLine, Trace, UpdateLine
from samerun.trace.write import KINDS, SCHEMA

_IDS_DIGEST = re.compile("[0-9a-f]{32}")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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
    for number, body in lines[1:]:
        kind = body["kind"]
        if kind not in _PARSERS:
            continue  # a later version's line: this reader does not know it and need not
        try:
            found[kind].append(_PARSERS[kind](body))
        except (KeyError, TypeError, ValueError) as error:
            problems.append(_bad_line(file, number, f"an {kind} line lacks or garbles a field ({error!r})"))
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
    raw = file.read_bytes().split(b"\n")
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
    for number, text in enumerate(raw, start=1):
        try:
            body = json.loads(text)
        except ValueError:
            problems.append(_bad_line(file, number, "not JSON"))
            continue
        if isinstance(body, dict) and isinstance(cast("dict[str, Any]", body).get("kind"), str):
            yield number, cast("dict[str, Any]", body)
        else:
            problems.append(_bad_line(file, number, 'no JSON object with a "kind"'))


def _bad_line(file: Path, number: int, what: str) -> Problem:
    return Problem(
        "SR-TRACE-LINE",
        f"line {number} of {file.name} cannot be read: {what}",
        where={"file": str(file), "line": number},
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
            rank=int(body["rank"]),
            world_size=int(body["world_size"]),
            stage=body.get("stage"),
            coordinate=body.get("coordinate") or {},
            layout=body.get("layout"),
            declared_layout=body.get("declared_layout"),
            batch=body.get("batch"),
            versions=body.get("versions") or {},
            environment=body.get("environment") or {},
        )
    except (KeyError, TypeError, ValueError) as error:
        problems.append(_bad_line(file, 1, f"the header lacks or garbles a field ({error!r})"))
        return None


def _number(value: Any) -> float | None:
    if value is None:
        return None
    return _NON_FINITE[value] if isinstance(value, str) else float(value)


def _required(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise ValueError("a number is missing")
    return number


def _ids(value: Any) -> tuple[int | str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, int | str) for item in cast("list[Any]", value)):
        raise ValueError("sample ids are whole numbers and texts")
    return tuple(cast("list[int | str]", value))


def _ids_digest(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and _IDS_DIGEST.fullmatch(value)):
        raise ValueError("a set digest has 32 hexadecimal digits")
    return value


def _norms(value: Any) -> dict[str, float] | None:
    return None if value is None else {name: _required(norm) for name, norm in value.items()}


def _inputs(value: Any) -> tuple[int, int] | None:
    return None if value is None else (int(value["rows"]), int(value["digest"], 16))


def _parse_update(body: Mapping[str, Any]) -> UpdateLine:
    return UpdateLine(
        update=int(body["update"]),
        loss=_number(body["loss"]),
        grad_norm=_number(body.get("grad_norm")),
        update_norm=_number(body.get("update_norm")),
        lr=tuple(_required(value) for value in body["lr"]),
        loss_scale=_number(body.get("loss_scale")),
        skipped=bool(body.get("skipped", False)),
        samples=int(body["samples"]),
        tokens=None if body.get("tokens") is None else int(body["tokens"]),
        sample_ids=_ids(body["sample_ids"]),
        finite=bool(body["finite"]),
        deltas={name: _required(value) for name, value in (body.get("deltas") or {}).items()},
        moved=_norms(body.get("moved")),
        steps=int(body.get("steps", 1)),
        seconds=_number(body.get("seconds")),
        ids_digest=_ids_digest(body.get("ids_digest")),
        gradients=_norms(body.get("gradients")),
        step_norm=_number(body.get("step_norm")),
        inputs=_inputs(body.get("inputs")),
        autocast=(body.get("inputs") or {}).get("autocast"),
    )


def _parse_eval(body: Mapping[str, Any]) -> EvalLine:
    return EvalLine(
        update=int(body["update"]),
        num_examples=int(body["num_examples"]),
        losses=tuple(_required(value) for value in body["losses"]),
        logits=body.get("logits"),
        state_unchanged=bool(body["state_unchanged"]),
        rng_unchanged=bool(body["rng_unchanged"]),
        changed=tuple(body.get("changed") or ()),
        modules=tuple((str(name), _required(norm), int(count)) for name, norm, count in body.get("modules") or ()),
        details={name: (_required(norm), str(dtype)) for name, (norm, dtype) in (body.get("details") or {}).items()},
    )


def _parse_state(body: Mapping[str, Any]) -> StateLine:
    rest = {name: value for name, value in body.items() if name not in ("kind", "when", "update")}
    return StateLine(when=str(body["when"]), update=int(body["update"]), body=rest)


def _parse_boundary(body: Mapping[str, Any]) -> BoundaryLine:
    return BoundaryLine(what=str(body["what"]), update=int(body["update"]))


def _parse_end(body: Mapping[str, Any]) -> EndLine:
    return EndLine(reason=str(body["reason"]), updates=int(body["updates"]))


_PARSERS: dict[str, Any] = {
    "update": _parse_update,
    "eval": _parse_eval,
    "state": _parse_state,
    "digest": dict,
    "boundary": _parse_boundary,
    "end": _parse_end,
}
