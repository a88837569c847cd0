"""Traces: what a job really did, one JSON line per event, one file per rank.

A trace is a directory of `rank-NNNNN.jsonl`. The first line of each is a header; then come `state`, `eval`, `update`,
`boundary` and `end` lines in the order in which they happened (`docs/trace.md` describes every field). Reading needs
neither torch nor NumPy. A last line that a crash cut off is reported and ignored; everything before it counts.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from samerun.core.mesh import Layout
from samerun.errors import Problem, Severity, UsageError

SCHEMA = "samerun/trace/1"
KINDS = frozenset({"header", "state", "eval", "update", "digest", "boundary", "end"})
RANK_AGREEMENT = 1e-6
"""How far two ranks' copies of one reduced number may lie apart (relative): reductions may end in different orders."""

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def file_name(rank: int) -> str:
    """Returns the name of a rank's file.

    >>> file_name(3)
    'rank-00003.jsonl'
    """
    return f"rank-{rank:05d}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a rank said about itself before it did anything.

    `layout` is the mesh as the job has it; `declared_layout` is what the script claimed, when that differs. `batch`
    has `global_batch`, `max_microbatch`, `passes`, `replicas` and `microbatches` ([pass][replica] samples), or is None
    when the job does not say how it deals.
    """

    rank: int
    world_size: int
    stage: str | None
    coordinate: Mapping[str, int]
    layout: Mapping[str, int] | None
    declared_layout: Mapping[str, int] | None
    batch: Mapping[str, Any] | None
    versions: Mapping[str, str]
    environment: Mapping[str, Any]

    def mesh(self) -> Layout | None:
        """Returns the layout as a value, or None when the header has none that makes sense."""
        try:
            return Layout.from_dict(self.layout) if self.layout else None
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLine:
    """One completed (or skipped) update as one rank recorded it.

    `loss`, `grad_norm` (before clipping), `update_norm` and `lr` (per parameter group, as the step used it) are global
    and equal on every rank; `samples`, `tokens` and `sample_ids` are this rank's. `deltas` are the L2 norms of the
    change of a few named parameters; `moved` those of every parameter (rank 0, first update of a job). None: not
    measured.
    """

    update: int
    loss: float | None
    grad_norm: float | None
    update_norm: float | None
    lr: tuple[float, ...]
    loss_scale: float | None
    skipped: bool
    samples: int
    tokens: int | None
    sample_ids: tuple[int | str, ...]
    finite: bool
    deltas: Mapping[str, float]
    moved: Mapping[str, float] | None
    steps: int
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalLine:
    """A fixed-example evaluation, and whether it left the state bit-identical.

    `losses` has one value per example. `logits` names a `.npy` file beside the trace (rank 0 only). `changed` lists the
    keys, RNG streams and cursors that were different afterwards.
    """

    update: int
    num_examples: int
    losses: tuple[float, ...]
    logits: Mapping[str, Any] | None
    state_unchanged: bool
    rng_unchanged: bool
    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLine:
    """The logical state as the job had it in memory (`when`: "loaded" or "end"). `body` is what was captured."""

    when: str
    update: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryLine:
    """The job crossed a boundary after update `update`: "log", "eval", "save" or a name of its own."""

    what: str
    update: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLine:
    """The job ended on its own; without this line it was killed or crashed. `updates` were recorded."""

    reason: str
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """Everything one rank wrote, in order within each kind."""

    file: Path
    header: Header
    updates: tuple[UpdateLine, ...] = ()
    evals: tuple[EvalLine, ...] = ()
    digests: tuple[Mapping[str, Any], ...] = ()
    states: tuple[StateLine, ...] = ()
    boundaries: tuple[BoundaryLine, ...] = ()
    end: EndLine | None = None

    def update(self, index: int) -> UpdateLine | None:
        """Returns the line of the completed update `index`, or the last skipped one of that index, or None."""
        lines = [line for line in self.updates if line.update == index]
        return lines[-1] if lines else None

    def state(self, when: str) -> StateLine | None:
        """Returns the last captured state of that kind, or None."""
        lines = [line for line in self.states if line.when == when]
        return lines[-1] if lines else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole job's trace: ranks in order, and what was wrong with the files themselves."""

    path: Path
    ranks: tuple[RankTrace, ...]
    problems: tuple[Problem, ...] = ()

    @property
    def lead(self) -> RankTrace:
        """The lowest rank that was read: rank 0 of a whole trace. It carries the global values and the states."""
        return self.ranks[0]

    @property
    def layout(self) -> Layout | None:
        """The job's layout, or None when the header has none."""
        return self.lead.header.mesh()

    @property
    def update_indices(self) -> tuple[int, ...]:
        """Update indices in the order recorded by the lead rank, skipped ones included."""
        return tuple(line.update for line in self.lead.updates)

    def replica_of(self, rank: RankTrace) -> int:
        """Returns which batch replica a rank belongs to, from its own mesh coordinate."""
        layout, at = self.layout, rank.header.coordinate
        if layout is None or not at:
            return rank.header.rank
        return at.get("dp_replicate", 0) * layout.dp_shard + at.get("dp_shard", 0)

    def replicas(self) -> dict[int, RankTrace]:
        """Returns the one rank per batch replica whose sample ids count (lowest pp, cp and tp), by replica."""
        chosen: dict[int, RankTrace] = {}
        for rank in self.ranks:
            chosen.setdefault(self.replica_of(rank), rank)
        return dict(sorted(chosen.items()))

    def sample_ids(self, index: int) -> dict[int, tuple[int | str, ...]]:
        """Returns the ids that update `index` consumed, by batch replica, each in the order of consumption."""
        lines = {replica: rank.update(index) for replica, rank in self.replicas().items()}
        return {replica: line.sample_ids for replica, line in lines.items() if line is not None}

    def global_totals(self, index: int) -> tuple[int, int | None]:
        """Returns (samples, valid tokens) of update `index` over all batch replicas; tokens None if not recorded."""
        lines = [line for rank in self.replicas().values() if (line := rank.update(index)) is not None]
        tokens = [line.tokens for line in lines]
        known = [count for count in tokens if count is not None]
        return sum(line.samples for line in lines), sum(known) if len(known) == len(tokens) else None


class TraceWriter:
    """Appends a rank's lines to a new file, one write per line, so that a crash can cut only the last one.

    Raises:
        UsageError: SR-TRACE-EXISTS if the rank's file is already there; a trace is never overwritten or continued.
    """

    def __init__(self, directory: str | Path, rank: int) -> None:
        self.path = Path(directory) / file_name(rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = self.path.open("xb", buffering=0)
        except FileExistsError:
            raise UsageError(
                Problem(
                    "SR-TRACE-EXISTS",
                    f"{self.path.parent} already holds a trace",
                    where={"file": str(self.path), "rank": rank},
                    hint="a trace is never overwritten: name a new directory for each start of the job",
                )
            ) from None

    def write(self, kind: str, body: Mapping[str, Any]) -> None:
        """Writes one line. Numbers that JSON does not have become the strings "nan", "inf" and "-inf"."""
        if kind not in KINDS:
            raise ValueError(f"a trace line is one of {', '.join(sorted(KINDS))}, not {kind!r}")
        text = json.dumps({"kind": kind, **encode(body)}, ensure_ascii=False, separators=(", ", ": "))
        self._file.write(text.encode() + b"\n")

    def close(self) -> None:
        """Closes the file; writing afterwards is an error."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def encode(value: Any) -> Any:
    """Returns `value` with non-finite floats as strings, mappings with text keys, and sequences as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in cast("Sequence[Any]", value)]
    return value


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


def _parse_update(body: Mapping[str, Any]) -> UpdateLine:
    moved = body.get("moved")
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
        sample_ids=tuple(body["sample_ids"]),
        finite=bool(body["finite"]),
        deltas={name: _required(value) for name, value in (body.get("deltas") or {}).items()},
        moved=None if moved is None else {name: _required(value) for name, value in moved.items()},
        steps=int(body.get("steps", 1)),
        seconds=_number(body.get("seconds")),
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


def check_trace(trace: Trace) -> list[Problem]:
    """Returns everything that is wrong with a trace: its lines, its ranks, and whether its ranks tell one story."""
    return [
        *trace.problems,
        *_check_ranks(trace),
        *_check_ends(trace),
        *_check_indices(trace),
        *_check_agreement(trace),
        *_check_samples(trace),
        *_check_finite(trace),
    ]


def _check_ranks(trace: Trace) -> Iterator[Problem]:
    world_sizes = sorted({rank.header.world_size for rank in trace.ranks})
    if len(world_sizes) > 1:
        yield Problem(
            "SR-TRACE-RANKS",
            f"ranks report different world sizes: {', '.join(map(str, world_sizes))}",
            hint="the directory holds files of two jobs; keep one directory per start",
            expected=world_sizes[0],
            found=world_sizes[1:],
        )
        return
    have = [rank.header.rank for rank in trace.ranks]
    missing = sorted(set(range(world_sizes[0])) - set(have))
    if missing or len(have) != len(set(have)):
        yield Problem(
            "SR-TRACE-RANKS",
            f"the job had {world_sizes[0]} ranks; files for {', '.join(map(str, missing))} are missing or repeated",
            where={"file": str(trace.path)},
            hint="copy every rank's file into one directory (nodes may not share a file system)",
            expected=world_sizes[0],
            found=len(set(have)),
        )


def _check_ends(trace: Trace) -> Iterator[Problem]:
    open_ranks = [rank.header.rank for rank in trace.ranks if rank.end is None]
    if open_ranks:
        yield Problem(
            "SR-TRACE-OPEN",
            f"{len(open_ranks)} of {len(trace.ranks)} ranks have no end line: the job still runs, or was killed",
            severity=Severity.WARNING,
            where={"rank": open_ranks[0]},
            hint="what was recorded before counts; the log says why it ended",
        )


def _check_indices(trace: Trace) -> Iterator[Problem]:
    for rank in trace.ranks:
        done = [line.update for line in rank.updates if not line.skipped]
        for before, after in itertools.pairwise(done):
            if after != before + 1:
                yield Problem(
                    "SR-TRACE-INDEX",
                    f"update {before} is followed by update {after}",
                    where={"rank": rank.header.rank, "update": after},
                    hint="call `record` once after every completed update, counted by one",
                    expected=before + 1,
                    found=after,
                )


def _check_agreement(trace: Trace) -> Iterator[Problem]:
    lead = trace.lead
    for rank in trace.ranks[1:]:
        mine, theirs = [line.update for line in lead.updates], [line.update for line in rank.updates]
        if mine != theirs and rank.end is not None and lead.end is not None:
            yield Problem(
                "SR-TRACE-DISAGREE",
                f"rank {rank.header.rank} recorded {len(theirs)} updates, rank {lead.header.rank} {len(mine)}",
                where={"rank": rank.header.rank},
                hint="`record` is collective: every rank calls it after every update",
                expected=mine[-1] if mine else None,
                found=theirs[-1] if theirs else None,
            )
        for left, right in zip(lead.updates, rank.updates, strict=False):
            if name := _first_difference(left, right):
                yield Problem(
                    "SR-TRACE-DISAGREE",
                    f"ranks {lead.header.rank} and {rank.header.rank} give another {name} for update {left.update}",
                    where={"rank": rank.header.rank, "update": left.update},
                    hint="give `record` the global value (reduced over the batch replicas), not this rank's",
                    expected=getattr(left, name),
                    found=getattr(right, name),
                )
                break  # one per rank: the rest follows from it


def _first_difference(left: UpdateLine, right: UpdateLine) -> str | None:
    if left.update != right.update:
        return "update"
    if left.lr != right.lr:
        return "lr"
    if left.skipped != right.skipped:
        return "skipped"
    return next(
        (n for n in ("loss", "grad_norm", "update_norm") if not _agree(getattr(left, n), getattr(right, n))), None
    )


def _agree(one: float | None, other: float | None) -> bool:
    if one is None or other is None:  # not every pipeline stage knows every number
        return True
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=RANK_AGREEMENT)


def _check_samples(trace: Trace) -> Iterator[Problem]:
    replicas = trace.replicas()
    for rank in trace.ranks:
        leader = replicas[trace.replica_of(rank)]
        for line in rank.updates:
            other = leader.update(line.update)
            if other is not None and not line.skipped and other.sample_ids != line.sample_ids:
                yield Problem(
                    "SR-TRACE-SAMPLES",
                    f"ranks {leader.header.rank} and {rank.header.rank} share a batch but consumed different samples",
                    where={"rank": rank.header.rank, "update": line.update},
                    hint="TP, CP and PP ranks of one batch replica must read the same microbatches",
                    expected=list(other.sample_ids[:8]),
                    found=list(line.sample_ids[:8]),
                )
                break
    for index in dict.fromkeys(trace.update_indices):
        seen: dict[int | str, int] = {}
        for replica, ids in trace.sample_ids(index).items():
            for sample in ids:
                if seen.setdefault(sample, replica) != replica:
                    yield Problem(
                        "SR-TRACE-OVERLAP",
                        f"replicas {seen[sample]} and {replica} both consumed sample {sample} in update {index}",
                        severity=Severity.WARNING,
                        where={"update": index},
                        hint="padding at the end of an epoch does this; in the middle of one, replicas are misnumbered",
                    )
                    return


def _check_finite(trace: Trace) -> Iterator[Problem]:
    for rank in trace.ranks:
        for line in rank.updates:
            if not line.finite and not line.skipped:
                yield Problem(
                    "SR-TRACE-NONFINITE",
                    f"update {line.update} has a value that is not finite",
                    where={"rank": rank.header.rank, "update": line.update},
                    hint="loss, gradient norm and update norm of that line show which came first",
                    found={"loss": line.loss, "grad_norm": line.grad_norm, "update_norm": line.update_norm},
                )
                return
