"""Batch options as pictures: a grid of passes by replicas, each cell a microbatch with its slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from samerun.core.batch import BatchOption, Dealing
from samerun.errors import SamerunError
from samerun.report.model import ReportModel

MAX_COLUMNS, MAX_ROWS = 16, 8
"""Up to so many replicas and passes are drawn one by one; beyond them equal neighbours are drawn once, with a count."""

KINDS: Mapping[str, str] = {
    "uniform": "every microbatch has the same size",
    "ragged": "same samples, same update, microbatches of unequal size",
    "fewer-replicas": "even on fewer replicas; the others stay idle",
    "changed-batch": "another global batch: another run, labelled so",
}
NEEDS: Mapping[str, str] = {
    "weighted-normalisation": "the loss is a sum over contributions divided by the whole update's total",
    "empty-microbatches": "a pass without a sample still runs forward and backward, at weight zero",
    "idle-replicas": "the job is launched on fewer replicas than there are",
    "learning-rate-policy": "somebody decides what becomes of the learning rate",
    "measured-token-counts": "the valid tokens of each sample are known beforehand",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One microbatch: its samples, and its share of the largest one allowed, in percent."""

    samples: int
    percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A dealing, drawn. Labels name the replicas of each column and the passes of each row, from 0.

    `whole` is false where the dealing is too irregular to be drawn whole.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    idle: int
    whole: bool = True
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionView:
    """One option with its picture. `chosen` marks the manifest's."""

    kind: str
    meaning: str
    chosen: bool
    exact: bool
    equation: str
    utilisation: float
    needs: tuple[str, ...]
    rates: tuple[tuple[str, float], ...]
    grid: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """The source's dealing and every option for the destination."""

    invariant: str
    source: Grid
    source_equation: str
    options: tuple[OptionView, ...]


def view_batch(model: ReportModel) -> BatchView | None:
    """Returns the options, or None if neither plan nor manifest tell them."""
    if model.manifest is None:
        return None
    batch, plan = model.manifest.batch, model.plan
    try:
        options = plan.options if plan else _list_options(model)
        source = plan.source_batch if plan else _source_dealing(model)
    except SamerunError:  # the stage that plans says what is wrong with the numbers
        return None
    chosen = plan.batch if plan else next((option for option in options if option.kind == batch.option), None)
    every = options if chosen is None or chosen in options else (*options, chosen)
    allowed = max(batch.max_microbatch, max((option.max_microbatch for option in every), default=1))
    return BatchView(
        invariant=batch.invariant.replace("-", " "),
        source=draw_grid(source, max(source.max_microbatch, 1)),
        source_equation=_equation(source),
        options=tuple(_option(option, option == chosen, allowed) for option in every),
    )


def _list_options(model: ReportModel) -> tuple[BatchOption, ...]:
    from samerun.plan.batch import list_options

    if model.manifest is None:
        return ()
    return list_options(model.manifest.batch, model.manifest.destination.layout.to_layout(), model.manifest.source)


def _source_dealing(model: ReportModel) -> Dealing:
    from samerun.core.batch import deal

    manifest = model.manifest
    if manifest is None:
        raise ValueError("without a manifest there is no source batch")
    replicas = manifest.source.layout.to_layout().batch_replicas
    return deal(manifest.batch.global_batch, replicas, manifest.source.microbatch or manifest.batch.max_microbatch)


def _option(option: BatchOption, chosen: bool, allowed: int) -> OptionView:
    rates = option.learning_rate.to_json() if option.learning_rate else {}
    return OptionView(
        kind=option.kind,
        meaning=_sentence(option.reason or KINDS[option.kind]),
        chosen=chosen,
        exact=option.exact,
        equation=_equation(option.dealing),
        utilisation=option.utilisation,
        needs=tuple(NEEDS.get(need, need) for need in option.needs),
        rates=tuple((name.replace("-", " "), float(rate)) for name, rate in rates.items() if rate is not None),
        grid=draw_grid(option.dealing, allowed, idle=option.idle_replicas),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _equation(dealing: Dealing) -> str:
    if dealing.is_uniform:
        return (
            f"{dealing.replicas} replicas × {dealing.max_microbatch} × {dealing.passes} passes = {dealing.global_batch}"
        )
    shares = sorted(set(dealing.shares), reverse=True)
    each = "/".join(map(str, shares))
    return f"{dealing.replicas} replicas, {each} samples each in {dealing.passes} passes = {dealing.global_batch}"


def draw_grid(dealing: Dealing, allowed: int, *, idle: int = 0) -> Grid:
    """Returns the picture of a dealing whose microbatches may hold up to `allowed` samples."""
    columns = _runs(list(zip(*dealing.microbatches, strict=True)), MAX_COLUMNS)
    rows = _runs(dealing.microbatches, MAX_ROWS)
    whole = len(columns) <= MAX_COLUMNS and len(rows) <= MAX_ROWS
    columns, rows = columns[:MAX_COLUMNS], rows[:MAX_ROWS]
    cells = tuple(tuple(_cell(dealing.microbatches[row][column], allowed) for column, _ in columns) for row, _ in rows)
    share = "/".join(map(str, sorted(set(dealing.shares), reverse=True)))
    return Grid(
        columns=tuple(_label(first, count) for first, count in columns),
        rows=tuple(_label(first, count) for first, count in rows),
        cells=cells,
        idle=idle,
        whole=whole,
        summary=f"{dealing.global_batch} samples dealt to {dealing.replicas} replicas in {dealing.passes} passes, "
        f"{share} to each" + (f"; {idle} idle" if idle else ""),
    )


def _cell(samples: int, allowed: int) -> Cell:
    return Cell(samples, round(100 * samples / allowed, 1))


def _runs(items: Sequence[tuple[int, ...]], most: int) -> list[tuple[int, int]]:
    """Returns (first, count) of each stretch of equal neighbours; of each single item if there are few."""
    if len(items) <= most:
        return [(index, 1) for index in range(len(items))]
    runs: list[tuple[int, int]] = []
    first = 0
    for _, group in groupby(items):
        count = sum(1 for _ in group)
        runs.append((first, count))
        first += count
    return runs


def _label(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}–{first + count - 1}"
