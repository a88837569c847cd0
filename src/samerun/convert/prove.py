"""Proves a written destination equal to its source, by reading it back through its own reader."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from samerun.core.digest import state_digest
from samerun.core.dtype import DType
from samerun.core.state import LogicalState
from samerun.errors import FormatError, Problem, Severity
from samerun.execute.engine import Progress, ProgressCallback
from samerun.execute.ranks import divide
from samerun.formats.base import Checkpoint
from samerun.verify.state.compare import compare_settings, compare_tensor
from samerun.verify.state.digest import digest_cast, digest_tensor
from samerun.verify.state.match import is_counter, match_tensors

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ProvedTensor:
    """One tensor that source and destination agree in. `digest` is under the source's key and the written type.

    `saved` is its key in the destination; `cast_from` the source's type where that is another.
    """

    key: str
    saved: str
    digest: str
    dtype: str
    shape: tuple[int, ...]
    cast_from: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the entry of the proof."""
        body: dict[str, Any] = {"digest": self.digest, "dtype": self.dtype, "shape": list(self.shape)}
        if self.saved != self.key:
            body["destination_key"] = self.saved
        if self.cast_from is not None:
            body["cast_from"] = self.cast_from
        return body


def list_proved(tensors: Iterable[ProvedTensor]) -> dict[str, Any]:
    """Returns the proof's entries by the source's key. Further places of a tied tensor are its `copies`."""
    listed: dict[str, Any] = {}
    for tensor in tensors:
        if tensor.key in listed:
            listed[tensor.key].setdefault("copies", []).append(tensor.saved)
        else:
            listed[tensor.key] = tensor.to_json()
    return listed


@dataclass(slots=True)
class Evidence:
    """What reading back gave. It is a proof only if no problem is an error, and all of `total` pairs were compared."""

    tensors: list[ProvedTensor] = field(default_factory=list[ProvedTensor])
    problems: list[Problem] = field(default_factory=list[Problem])
    total: int = 0

    @property
    def state(self) -> str:
        """The digest of all tensors together."""
        return state_digest({tensor.key: tensor.digest for tensor in self.tensors})


@dataclass(frozen=True, slots=True)
class Claim:
    """What a destination is claimed to hold. `written` is the element type by key of the source, `dropped` says why
    something is not in it, by key or section."""

    state: LogicalState
    written: Mapping[str, DType]
    dropped: Mapping[str, str]


def prove_equal(
    source: Checkpoint,
    destination: Checkpoint,
    claim: Claim,
    *,
    threads: int = 2,
    progress: ProgressCallback | None = None,
    cancel: Event | None = None,
    share: tuple[int, int] = (0, 1),
) -> Evidence:
    """Compares the digest of every tensor of the source with that of the destination, and the rest of the state.

    `source` is the checkpoint as it was opened; where `claim` says that another type was written, the destination must
    hold the cast of it. With `share` (rank, of how many) only that part of the tensors is compared, contiguous and
    equal in bytes; what is not of single tensors is compared by rank 0.

    Raises:
        InterruptedError: if `cancel` was set.
    """
    evidence = Evidence([], list(_check_read_back(destination)))
    pairs = list(_pairs(source, destination, claim, evidence.problems))
    evidence.total = len(pairs)
    rank, ranks = share
    if ranks > 1:
        mine = divide([destination.state.tensors[saved].num_bytes for _, saved, _ in pairs], ranks)[rank]
        pairs = pairs[mine.start : mine.stop]
    if rank > 0:
        evidence.problems.clear()
    stop = cancel or Event()
    started, done = time.monotonic(), 0
    total = sum(destination.state.tensors[saved].num_bytes for _, saved, _ in pairs)

    def work(pair: tuple[str, str, DType]) -> ProvedTensor | list[Problem]:
        if stop.is_set():
            raise InterruptedError(4, "the conversion was interrupted")
        try:
            return _prove_tensor(source, destination, *pair)
        except FormatError as error:
            return list(error.problems)

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        try:
            for (_, saved, _), result in zip(pairs, pool.map(work, pairs), strict=True):
                if isinstance(result, ProvedTensor):
                    evidence.tensors.append(result)
                else:
                    evidence.problems += result
                done += destination.state.tensors[saved].num_bytes
                if progress is not None:
                    progress(Progress("proving", done, total, time.monotonic() - started))
        except BaseException:  # an interrupt from the keyboard: do not wait for what has not begun
            stop.set()
            raise
    if rank == 0:
        evidence.problems += _check_settings(claim, destination.state)
    return evidence


def _check_read_back(destination: Checkpoint) -> Iterator[Problem]:
    """What the destination's own reader finds wrong with it blocks; what it merely notes was so in the source too."""
    for problem in destination.state.problems:
        if problem.severity is Severity.ERROR and problem.code.startswith(
            ("SR-COV-", "SR-FILE-", "SR-META-", "SR-PKL-")
        ):
            yield problem


def _pairs(
    source: Checkpoint, destination: Checkpoint, claim: Claim, problems: list[Problem]
) -> Iterator[tuple[str, str, DType]]:
    """Yields (key in the source, key in the destination, written type), and reports tensors that one side lacks."""
    expected = {
        key: {"aliases": list(source.state.tensors[key].aliases)} for key in claim.written if key not in claim.dropped
    }
    match = match_tensors(destination.state, expected, counters=True)
    for key in match.unexpected:
        problems.append(_differs("SR-CONVERT-LOST", f"{key} was written and is not found when read back", key))
    if match.missing:
        shown = ", ".join(match.missing[:_SHOWN])
        more = f" and {len(match.missing) - _SHOWN} more" if len(match.missing) > _SHOWN else ""
        problems.append(
            Problem(
                "SR-CONVERT-DERIVED",
                f"the destination has {len(match.missing)} tensors that the source has not: {shown}{more}",
                severity=Severity.NOTE,
                where={"tensor": match.missing[0]},
                hint="its format needs them and derives them from others, which were proved",
            )
        )
    for pair in match.pairs:
        for saved in (pair.saved, *pair.copies):
            yield pair.key, saved, claim.written[pair.key]


def _prove_tensor(
    source: Checkpoint, destination: Checkpoint, key: str, saved: str, dtype: DType
) -> ProvedTensor | list[Problem]:
    mine, other = source.state.tensors[key], destination.state.tensors[saved]
    cast_from = mine.dtype.name if dtype != mine.dtype else None
    if (mine.shape, dtype) != (other.shape, other.dtype):
        return _prove_counter(source, destination, key, saved)
    digest = digest_tensor(source, key) if cast_from is None else digest_cast(source, key, key, dtype)
    found = digest_tensor(destination, saved, as_key=key)
    if digest != found:
        problem = _differs("SR-CONVERT-DIFFERS", f"{key} read back is not what the source holds", key)
        return [_with_values(problem, digest, found)]
    return ProvedTensor(key, saved, digest, dtype.name, mine.shape, cast_from)


def _prove_counter(source: Checkpoint, destination: Checkpoint, key: str, saved: str) -> ProvedTensor | list[Problem]:
    """Step counters are numbers: formats differ in the shape and type that they keep one in."""
    mine, other = source.state.tensors[key], destination.state.tensors[saved]
    one_number = is_counter(mine.key) and mine.num_elements == other.num_elements == 1
    if one_number and compare_tensor(source, key, destination, saved) is None:
        return ProvedTensor(key, saved, digest_tensor(source, key), mine.dtype.name, mine.shape)
    problem = _differs("SR-CONVERT-DIFFERS", f"{key} read back has another shape, type or count", key)
    return [_with_values(problem, f"{mine.dtype.name} {mine.shape}", f"{other.dtype.name} {other.shape}")]


def _with_values(problem: Problem, expected: Any, found: Any) -> Problem:
    return Problem(
        problem.code, problem.message, where=problem.where, hint=problem.hint, expected=expected, found=found
    )


def _differs(code: str, message: str, key: str) -> Problem:
    return Problem(
        code,
        message,
        where={"tensor": key},
        hint="the destination was removed. A disk that returns other bytes than were written, or a defect in samerun: "
        "run it again, and report it if it stays",
    )


def _check_settings(claim: Claim, found: LogicalState) -> Iterator[Problem]:
    """Groups, progress and scheduler: lost or changed without being named as dropped."""
    for name in ("groups", "scheduler"):
        if getattr(claim.state, name) and not getattr(found, name) and not _is_dropped(claim, name):
            yield _differs("SR-CONVERT-LOST", f"the {name} were written and are not found when read back", name)
    for item in compare_settings(claim.state, found):
        if not _is_dropped(claim, item.key):
            problem = _differs("SR-CONVERT-DIFFERS", f"{item.key} read back is not what the source holds", item.key)
            yield _with_values(problem, str(item.a), str(item.b))


def _is_dropped(claim: Claim, name: str) -> bool:
    section = name.partition(".")[0] if not name.startswith("param:") else "groups"
    return name in claim.dropped or section in claim.dropped
