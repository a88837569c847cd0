"""Every honest option for a batch question, and what is wrong with the question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from samerun.core.batch.dealing import MAX_CELLS, Dealing, check_counts, deal, invalid, is_count
from samerun.core.batch.option import (
    EMPTY_MICROBATCHES,
    IDLE_REPLICAS,
    LEARNING_RATE_POLICY,
    MEASURED_TOKENS,
    WEIGHTED_NORMALISATION,
    BatchOption,
    Kind,
    LearningRateChoice,
    Unit,
    learning_rate_factor,
)
from samerun.core.batch.source import SourceBatch
from samerun.errors import Problem, Severity, UsageError, has_errors


def check_batch(
    global_batch: int,
    replicas: int,
    max_microbatch: int,
    *,
    source: SourceBatch | None = None,
    unit: str = "samples",
) -> list[Problem]:
    """Returns everything that is wrong with, or remarkable about, a batch question. Arguments as for `plan_batch`."""
    problems = [*check_counts(global_batch, replicas, max_microbatch)]
    if unit not in get_args(Unit):
        problems.append(invalid("unit", unit, "samples or tokens"))
    if source is not None:
        parts = (("source replicas", source.replicas), ("source micro", source.micro), ("source accum", source.accum))
        problems += [invalid(name, value) for name, value in parts if not is_count(value, 1)]
    if has_errors(problems):
        return problems
    if unit == "tokens":
        problems.append(_about_tokens())
    elif global_batch < replicas:
        problems.append(_about_small(global_batch, replicas))
    if source is not None and source.global_batch != global_batch:
        problems.append(_about_source(source, global_batch))
    return problems


def _about_tokens() -> Problem:
    return Problem(
        "SR-BATCH-TOKENS",
        "samples are whole: token budgets say how much fits, not which samples make up an update",
        severity=Severity.WARNING,
        hint="measure each sample's valid tokens; until then passes are a lower and utilisation an upper bound",
    )


def _about_small(global_batch: int, replicas: int) -> Problem:
    return Problem(
        "SR-BATCH-SMALL",
        f"{global_batch} samples cannot reach {replicas} replicas: {replicas - global_batch} have none in any update",
        severity=Severity.WARNING,
        hint="use fewer replicas, or check that tensor-, context- and pipeline-parallel ranks were not counted",
        expected=f"at least {replicas}",
        found=global_batch,
    )


def _about_source(source: SourceBatch, global_batch: int) -> Problem:
    return Problem(
        "SR-BATCH-SOURCE",
        f"the source's {source.replicas} x {source.micro} x {source.accum} is not the global batch asked for",
        severity=Severity.WARNING,
        hint="correct one of them; if the batch is to change on purpose, that is a decision of its own",
        expected=source.global_batch,
        found=global_batch,
    )


def plan_batch(
    global_batch: int,
    replicas: int,
    max_microbatch: int,
    *,
    source: SourceBatch | None = None,
    unit: Unit = "samples",
) -> tuple[BatchOption, ...]:
    """Returns every honest option, exact ones first, and chooses none.

    Args:
        global_batch: samples per update that must be kept (tokens, when `unit` says so).
        replicas: batch replicas at the destination.
        max_microbatch: most samples (tokens) that one replica can take in one pass.
        source: the equation at the source. With it, what keeping its accumulation passes would silently do is listed.
        unit: with `tokens` there is one option, even token budgets: that a token target divides by the replicas means
            nothing, because samples are whole, and no sample count is ever multiplied by a sequence length.

    Raises:
        UsageError: naming every argument that makes no sense.
    """
    problems = check_batch(global_batch, replicas, max_microbatch, source=source, unit=unit)
    if has_errors(problems):
        raise UsageError([problem for problem in problems if problem.severity is Severity.ERROR])
    question = _Question(global_batch, replicas, max_microbatch, source)
    if unit == "tokens":
        return _token_options(question)
    return tuple(_sample_options(question))


@dataclass(frozen=True, slots=True)
class _Question:
    global_batch: int
    replicas: int
    max_microbatch: int
    source: SourceBatch | None

    def option(self, kind: Kind, dealing: Dealing, reason: str, needs: Sequence[str] = ()) -> BatchOption:
        idle, batch = self.replicas - dealing.replicas, dealing.global_batch
        exact = batch == self.global_batch
        inherent = {
            WEIGHTED_NORMALISATION: not dealing.is_uniform,
            EMPTY_MICROBATCHES: dealing.num_empty > 0,
            IDLE_REPLICAS: idle > 0,
            LEARNING_RATE_POLICY: not exact,
        }
        factors = (learning_rate_factor("linear", self.global_batch, batch),)
        factors += (learning_rate_factor("square-root", self.global_batch, batch),)
        return BatchOption(
            kind=kind,
            dealing=dealing,
            exact=exact,
            idle_replicas=idle,
            utilisation=batch / (dealing.passes * self.replicas * self.max_microbatch),
            needs=(*(need for need, needed in inherent.items() if needed), *needs),
            learning_rate=None if exact else LearningRateChoice(*factors),
            reason=reason,
        )


def _sample_options(question: _Question) -> Iterator[BatchOption]:
    even = deal(question.global_batch, question.replicas, question.max_microbatch)
    uniform = _uniform(question.global_batch, question.replicas, question.max_microbatch)
    if uniform is not None:
        yield question.option("uniform", uniform, "the replicas divide the batch")
    if not even.is_uniform:
        yield question.option("ragged", even, "the same samples in the fewest passes, in unequal microbatches")
        fewer = _fewer(question)
        if fewer is not None and (uniform is None or fewer.passes < uniform.passes):
            yield question.option("fewer-replicas", fewer, "equal microbatches on as many replicas as divide the batch")
    changed = {} if even.is_uniform else dict(_neighbours(question))
    if (kept := _kept_accumulation(question)) is not None:
        dealing, reason = kept
        changed[dealing] = f"{changed[dealing]}, and {reason}" if dealing in changed else reason
    for dealing, reason in changed.items():
        yield question.option("changed-batch", dealing, reason)


def _uniform(global_batch: int, replicas: int, max_microbatch: int) -> Dealing | None:
    share, rest = divmod(global_batch, replicas)
    if rest or not share:
        return None
    micro = next(size for size in range(min(share, max_microbatch), 0, -1) if share % size == 0)
    return deal(global_batch, replicas, micro) if share // micro * replicas <= MAX_CELLS else None


def _fewer(question: _Question) -> Dealing | None:
    batch = question.global_batch
    found = [
        dealing
        for replicas in range(min(question.replicas - 1, batch), 0, -1)
        if batch % replicas == 0 and (dealing := _uniform(batch, replicas, question.max_microbatch)) is not None
    ]
    return min(found, key=lambda dealing: dealing.passes, default=None)  # the most replicas among equals


def _neighbours(question: _Question) -> Iterator[tuple[Dealing, str]]:
    batch = question.global_batch
    full = question.replicas * question.max_microbatch
    reasons: dict[int, str] = {}
    for step, what in ((full, "full microbatches"), (question.replicas, "equal microbatches")):
        below = batch // step * step
        reasons.setdefault(below, f"the nearest batch below with {what}")
        reasons.setdefault(below + step, f"the nearest batch above with {what}")
    for size in sorted(reasons, key=lambda size: (abs(size - batch), size)):
        if size != batch and (dealing := _uniform(size, question.replicas, question.max_microbatch)) is not None:
            yield dealing, reasons[size]


def _kept_accumulation(question: _Question) -> tuple[Dealing, str] | None:
    source = question.source
    if source is None or source.micro > question.max_microbatch or source.accum * question.replicas > MAX_CELLS:
        return None
    dealing = Dealing(((source.micro,) * question.replicas,) * source.accum)
    if dealing.global_batch == question.global_batch:
        return None
    return dealing, f"what keeping {source.accum} passes of {source.micro} silently makes of it"


def _token_options(question: _Question) -> tuple[BatchOption, ...]:
    dealing = deal(question.global_batch, question.replicas, question.max_microbatch)
    needs = (EMPTY_MICROBATCHES,) if dealing.num_empty else ()
    option = BatchOption(
        kind="ragged",
        dealing=dealing,
        exact=False,
        idle_replicas=0,
        utilisation=question.global_batch / (dealing.passes * question.replicas * question.max_microbatch),
        needs=(WEIGHTED_NORMALISATION, MEASURED_TOKENS, *needs),
        reason="even token budgets; whole samples must still be fitted into them",
    )
    return (option,)
