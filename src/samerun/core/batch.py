"""The batch equation: every honest way to deal one global batch to a number of batch replicas.

`replicas x microbatch x passes = global batch` has a whole solution at the old degree and often none at the new one:
16 replicas x 2 x 8 passes are 256 samples, and 10 replicas x 2 would need 12.8 passes. What can be done about it is a
closed list, and none of it is chosen here:

* `uniform`: the replicas divide the batch and every microbatch has the same size.
* `ragged`: every replica makes the same number of passes (collectives must match) with microbatches of different
  sizes. The same samples count in the same update, so it is exact, provided that the loss is normalised by the whole
  update's contributions and not by each microbatch's own.
* `fewer-replicas`: uniform on fewer replicas; the rest stay idle.
* `changed-batch`: another global batch that *is* dealt uniformly. Another training run, which needs a policy for the
  learning rate and is labelled an intentional change.

Counts are samples per update unless said otherwise; replicas are *batch* replicas (`Layout.batch_replicas`), never
ranks: tensor-, context- and pipeline-parallel ranks of one replica share its samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from samerun.errors import Problem, Severity, UsageError, has_errors

Kind = Literal["uniform", "ragged", "fewer-replicas", "changed-batch"]
Unit = Literal["samples", "tokens"]
Policy = Literal["keep", "linear", "square-root"]

MAX_CELLS = 4_000_000
"""Most cells (passes x replicas) that one dealing may have; more is a slip of the keyboard, not a batch."""

WEIGHTED_NORMALISATION = "weighted-normalisation"
"""The loss must be a sum over contributions divided by the update's global total, not a mean of means."""
EMPTY_MICROBATCHES = "empty-microbatches"
"""Some replica has a pass without a sample, in which it must still run forward and backward, at zero weight."""
IDLE_REPLICAS = "idle-replicas"
"""The job must be launched on fewer replicas than are there."""
LEARNING_RATE_POLICY = "learning-rate-policy"
"""Somebody must say what happens to the learning rate; the run is labelled an intentional change."""
MEASURED_TOKENS = "measured-token-counts"
"""The valid tokens of each sample must be known before whole samples can be put into these token budgets."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """How one global batch is dealt: `microbatches[pass][replica]` samples.

    The global batch is a slice of the global order. Each pass takes the next contiguous part of it and deals that part
    like cards, one sample to each replica in turn that still has room. With equal microbatches this is exactly which
    ids `torch.utils.data.DistributedSampler` gives to each rank, pass by pass.

    >>> Dealing(((2, 2, 1), (1, 1, 1))).positions(0, 1)
    range(1, 5, 3)
    """

    microbatches: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        rows = self.microbatches
        if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
            raise ValueError(f"every pass needs one microbatch per replica, and there is at least one of each: {rows}")
        if bad := [cell for row in set(rows) for cell in row if not _is_count(cell)]:
            raise ValueError(f"microbatch sizes are whole numbers of at least 0, not {bad}")
        if not self.global_batch:
            raise ValueError("a dealing holds at least one sample")

    @property
    def passes(self) -> int:
        """Forward-backward passes per update, the same on every replica."""
        return len(self.microbatches)

    @property
    def replicas(self) -> int:
        """Batch replicas that the batch is dealt to."""
        return len(self.microbatches[0])

    @property
    def global_batch(self) -> int:
        """Samples per update over all replicas and passes."""
        return sum(map(sum, self.microbatches))

    @property
    def max_microbatch(self) -> int:
        """The largest microbatch that occurs, which is what activation memory must hold."""
        return max(map(max, self.microbatches))

    @property
    def is_uniform(self) -> bool:
        """Whether every replica has the same number of samples in every pass."""
        return min(map(min, self.microbatches)) == self.max_microbatch

    @property
    def num_empty(self) -> int:
        """Microbatches without a sample, over all passes and replicas."""
        return sum(row.count(0) for row in self.microbatches)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per update of each replica."""
        return tuple(map(sum, zip(*self.microbatches, strict=True)))

    def share(self, replica: int) -> int:
        """Returns the samples per update of `replica`."""
        return sum(row[replica] for row in self.microbatches)

    def positions(self, pass_index: int, replica: int) -> Sequence[int]:
        """Returns which positions of the global batch (0-based) `replica` takes in pass `pass_index`.

        A `range` whenever they are equally spaced, which those of `deal` always are; else a tuple.
        """
        return _positions(sum(map(sum, self.microbatches[:pass_index])), self.microbatches[pass_index], replica)

    def replica_positions(self, replica: int) -> tuple[Sequence[int], ...]:
        """Returns `positions` of every pass of `replica`, in one sweep."""
        start, found = 0, list[Sequence[int]]()
        for row in self.microbatches:
            found.append(_positions(start, row, replica))
            start += sum(row)
        return tuple(found)

    def to_json(self) -> list[list[int]]:
        """Returns `[pass][replica]` as lists."""
        return [list(row) for row in self.microbatches]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[int]]) -> Self:
        """Reads `to_json` back. Raises ValueError if it is no dealing."""
        return cls(tuple(map(tuple, rows)))


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _positions(start: int, row: Sequence[int], replica: int) -> Sequence[int]:
    count, replicas = row[replica], len(row)
    if all(size >= count for size in row[:replica]) and all(size >= count - 1 for size in row[replica + 1 :]):
        return range(start + replica, start + replica + replicas * (count - 1) + 1, replicas) if count else range(0)
    before = (sum(min(size, turn + (other < replica)) for other, size in enumerate(row)) for turn in range(count))
    return tuple(start + position for position in before)


def deal(global_batch: int, replicas: int, max_microbatch: int) -> Dealing:
    """Returns the most even dealing in the fewest passes that microbatches of at most `max_microbatch` allow.

    Shares differ by at most one sample (the first replicas have the larger ones), each share is spread over the passes
    as evenly as it goes, every replica makes the same number of passes. A microbatch is empty only where that cannot
    be avoided: fewer samples than replicas, or microbatches of one sample whose number the replicas do not divide.

    Dealing a returned `Dealing` again with its own `global_batch`, `replicas` and `max_microbatch` gives it back, so
    these three numbers are all that a job needs to be told.

    >>> deal(7, 3, 2).microbatches
    ((2, 1, 1), (1, 1, 1))

    Raises:
        UsageError: naming every argument that makes no sense (SR-BATCH-INVALID, SR-BATCH-HUGE).
    """
    if problems := [*_check_counts(global_batch, replicas, max_microbatch)]:
        raise UsageError(problems)
    share, larger = divmod(global_batch, replicas)
    passes = -(-(share + bool(larger)) // max_microbatch)

    def size(samples: int, pass_index: int) -> int:
        each, extra = divmod(samples, passes)
        return each + (pass_index < extra)

    return Dealing(
        tuple((size(share + 1, p),) * larger + (size(share, p),) * (replicas - larger) for p in range(passes))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBatch:
    """The batch equation of the run that is being moved: `replicas x micro x accum` samples per update."""

    replicas: int
    micro: int
    accum: int

    @property
    def global_batch(self) -> int:
        """The product."""
        return self.replicas * self.micro * self.accum

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `"replicas=16,micro=2,accum=8"`.

        Raises:
            UsageError: naming everything in the text that is missing, unknown, repeated or no count (SR-BATCH-FROM).
        """
        names, values, wrong = ("replicas", "micro", "accum"), dict[str, int](), list[str]()
        for part in text.replace(" ", "").split(","):
            name, _, number = part.partition("=")
            if name not in names:
                wrong.append(f"{part!r} is none of {', '.join(names)}")
            elif name in values:
                wrong.append(f"{name} is given twice")
            elif not (number.isascii() and number.isdigit() and int(number)):
                wrong.append(f"{name} must be a whole number of at least 1, not {number!r}")
                values[name] = 1
            else:
                values[name] = int(number)
        wrong += [f"{name} is missing" for name in names if name not in values]
        if wrong:
            hint = "it looks like replicas=16,micro=2,accum=8"
            raise UsageError([Problem("SR-BATCH-FROM", f"--from: {each}", hint=hint) for each in wrong])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class LearningRateChoice:
    """What each policy would multiply every learning rate by when the global batch changes. None is chosen here."""

    linear: float
    square_root: float
    keep: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns the factors by policy name; `policy` is null because it is the user's to choose."""
        return {"policy": None, "keep": self.keep, "linear": self.linear, "square-root": self.square_root}


def learning_rate_factor(policy: Policy, old_batch: int, new_batch: int) -> float:
    """Returns what `policy` multiplies the learning rate by when the global batch goes from `old_batch` to `new_batch`.

    `linear` keeps learning rate / batch (Goyal et al. 2017, arXiv:1706.02677), `square-root` keeps learning
    rate / sqrt(batch), usual for adaptive optimizers (Malladi et al. 2022, arXiv:2205.10287), `keep` changes nothing.
    """
    match policy:
        case "keep":
            return 1.0
        case "linear":
            return new_batch / old_batch
        case "square-root":
            return math.sqrt(new_batch / old_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOption:
    """One way to go on.

    `exact` says that every update contributes the very samples that it would have at the source, and nothing else.
    `max_microbatch` is the largest microbatch that occurs; `deal(global_batch, replicas, max_microbatch)` gives
    `dealing` back. `utilisation` is the part of the sample slots that hold a sample:
    `global_batch / (passes x (replicas + idle_replicas) x the largest microbatch allowed)`. `needs` names what must
    hold for the option to be what it claims. `reason` says why the option is listed.
    """

    kind: Kind
    dealing: Dealing
    exact: bool
    idle_replicas: int
    utilisation: float
    needs: tuple[str, ...] = ()
    learning_rate: LearningRateChoice | None = None
    reason: str = ""

    @property
    def global_batch(self) -> int:
        """Samples (or budgeted tokens) per update."""
        return self.dealing.global_batch

    @property
    def replicas(self) -> int:
        """Batch replicas that work."""
        return self.dealing.replicas

    @property
    def passes(self) -> int:
        """Forward-backward passes per update."""
        return self.dealing.passes

    @property
    def max_microbatch(self) -> int:
        """The largest microbatch that occurs."""
        return self.dealing.max_microbatch

    def to_json(self) -> dict[str, Any]:
        """Returns the option as `samerun batch --json` lists it."""
        return {
            "kind": self.kind,
            "replicas": self.replicas,
            "passes": self.passes,
            "global_batch": self.global_batch,
            "exact": self.exact,
            "max_microbatch": self.max_microbatch,
            "microbatches": self.dealing.to_json(),
            "idle_replicas": self.idle_replicas,
            "utilisation": self.utilisation,
            "needs": list(self.needs),
            "learning_rate": self.learning_rate.to_json() if self.learning_rate else None,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads `to_json` back."""
        rates = body["learning_rate"]
        return cls(
            kind=body["kind"],
            dealing=Dealing.from_json(body["microbatches"]),
            exact=body["exact"],
            idle_replicas=body["idle_replicas"],
            utilisation=body["utilisation"],
            needs=tuple(body["needs"]),
            learning_rate=LearningRateChoice(rates["linear"], rates["square-root"]) if rates else None,
            reason=body.get("reason", ""),
        )


def check_batch(
    global_batch: int,
    replicas: int,
    max_microbatch: int,
    *,
    source: SourceBatch | None = None,
    unit: str = "samples",
) -> list[Problem]:
    """Returns everything that is wrong with, or remarkable about, a batch question. Arguments as for `plan_batch`."""
    problems = [*_check_counts(global_batch, replicas, max_microbatch)]
    if unit not in get_args(Unit):
        problems.append(_invalid("unit", unit, "samples or tokens"))
    if source is not None:
        parts = (("source replicas", source.replicas), ("source micro", source.micro), ("source accum", source.accum))
        problems += [_invalid(name, value) for name, value in parts if not _is_count(value, 1)]
    if has_errors(problems):
        return problems
    if unit == "tokens":
        problems.append(_about_tokens())
    elif global_batch < replicas:
        problems.append(_about_small(global_batch, replicas))
    if source is not None and source.global_batch != global_batch:
        problems.append(_about_source(source, global_batch))
    return problems


def _check_counts(global_batch: int, replicas: int, max_microbatch: int) -> Iterator[Problem]:
    values = {"global batch": global_batch, "replicas": replicas, "max microbatch": max_microbatch}
    wrong = [_invalid(name, value) for name, value in values.items() if not _is_count(value, 1)]
    yield from wrong
    if not wrong and (cells := -(-global_batch // (replicas * max_microbatch)) * replicas) > MAX_CELLS:
        yield Problem(
            "SR-BATCH-HUGE",
            f"{global_batch} dealt to {replicas} replicas, at most {max_microbatch} at a time: {cells} microbatches",
            hint="raise the largest microbatch, or check the global batch: is it samples, not tokens?",
            expected=f"at most {MAX_CELLS}",
            found=cells,
        )


def _invalid(name: str, value: Any, expected: str = "a whole number of at least 1") -> Problem:
    return Problem("SR-BATCH-INVALID", f"{name} cannot be {value!r}", expected=expected, found=repr(value))


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
        for dealing, reason in _neighbours(question):
            yield question.option("changed-batch", dealing, reason)
    if (kept := _kept_accumulation(question)) is not None:
        yield question.option("changed-batch", *kept)


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
