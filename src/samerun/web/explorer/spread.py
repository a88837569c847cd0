"""How the values of a tensor are spread: moments and histograms, read in blocks twice, never whole in memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.errors import FormatError, Problem
from samerun.formats.base import Checkpoint
from samerun.verify.state.digest import blocks, read_piece_blocks, unique_pieces

BINS = 64
WINDOW_ELEMENTS = 1 << 20
"""Values that are looked at at once: 8 MiB as float64."""

Array = npt.NDArray[Any]
Advance = Callable[[int, int], None]


@dataclass(slots=True)
class _Range:
    """What the first reading finds."""

    seen: int = 0
    nan: int = 0
    positive_infinite: int = 0
    negative_infinite: int = 0
    zeros: int = 0
    negative: int = 0
    low: float = math.inf
    high: float = -math.inf
    smallest: float = math.inf
    largest: float = 0.0
    total: float = 0.0
    problems: list[Problem] = field(default_factory=list[Problem])

    @property
    def finite(self) -> int:
        return self.seen - self.nan - self.positive_infinite - self.negative_infinite

    def look(self, window: Array) -> None:
        self.seen += window.size
        self.nan += int(np.count_nonzero(np.isnan(window)))
        self.positive_infinite += int(np.count_nonzero(window == math.inf))
        self.negative_infinite += int(np.count_nonzero(window == -math.inf))
        values = window[np.isfinite(window)]
        if not values.size:
            return
        self.negative += int(np.count_nonzero(values < 0))
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        with np.errstate(all="ignore"):
            self.total += float(values.sum())
        sizes = np.abs(values[values != 0])
        self.zeros += values.size - sizes.size
        if sizes.size:
            self.smallest = min(self.smallest, float(sizes.min()))
            self.largest = max(self.largest, float(sizes.max()))


class _Counts:
    """What the second reading finds: central sums, and two histograms."""

    def __init__(self, found: _Range) -> None:
        self.mean = found.total / found.finite if found.finite else 0.0
        self.sums = [0.0, 0.0, 0.0]
        self.squares = 0.0
        self.linear = np.zeros(BINS, np.int64)
        self.edges = _edges(found.low, found.high) if found.finite else None
        self.decades = np.zeros(BINS, np.int64)
        self.decade_edges = _edges(math.log10(found.smallest), math.log10(found.largest)) if found.largest else None

    def look(self, window: Array) -> None:
        values = window[np.isfinite(window)]
        with np.errstate(all="ignore"):
            gap = values - self.mean
            for place, power in enumerate((2, 3, 4)):
                self.sums[place] += float((gap**power).sum())
            self.squares += float((values**2).sum())
        if self.edges is not None:
            self.linear += np.histogram(values, self.edges)[0]
        if self.decade_edges is not None:
            sizes = np.log10(np.abs(values[values != 0]))
            self.decades += np.histogram(
                np.clip(sizes, self.decade_edges[0], self.decade_edges[-1]), self.decade_edges
            )[0]


def _edges(low: float, high: float) -> npt.NDArray[np.float64]:
    """Returns the edges of equal bins; of a single value, around it."""
    if low == high:
        margin = abs(low) * 0.5 or 0.5
        low, high = max(low - margin, -sys.float_info.max), min(high + margin, sys.float_info.max)
    if math.isfinite(high - low):
        return np.linspace(low, high, BINS + 1)
    return np.linspace(low / 2, high / 2, BINS + 1) * 2  # the difference itself is out of range


def measure_spread(checkpoint: Checkpoint, key: str, advance: Advance) -> dict[str, Any]:
    """Reads a tensor twice and returns its moments, histograms and what could not be read, as JSON.

    Every piece is read, replicas once; pieces that cannot be read are named, and what the others hold is counted.
    `advance` is told (bytes done, bytes in all) at every block; it may raise to end the reading.
    """
    found = _Range()
    total = 2 * sum(_piece_bytes(checkpoint, key))
    done = 0

    def told(window: Array) -> Array:
        nonlocal done
        done += window.nbytes
        advance(min(done, total), total)
        return _real(window)

    for window in _windows(checkpoint, key, found.problems):
        found.look(told(window))
    counts = _Counts(found)
    for window in _windows(checkpoint, key, []):
        counts.look(told(window))
    return {**_describe(checkpoint, key, found, counts), "problems": [item.to_json() for item in found.problems]}


def _piece_bytes(checkpoint: Checkpoint, key: str) -> Iterator[int]:
    entry = checkpoint.state.tensors[key]
    for piece in unique_pieces(entry):
        yield math.prod(entry.tiling.sizes[piece].tolist()) * entry.dtype.num_bytes


def _windows(checkpoint: Checkpoint, key: str, problems: list[Problem]) -> Iterator[Array]:
    """Yields the stored values in windows, as vectors. A piece that cannot be read is a finding."""
    for piece in unique_pieces(checkpoint.state.tensors[key]):
        try:
            for _, values in read_piece_blocks(checkpoint, key, piece):
                for _, block in blocks(values):
                    flat = block.reshape(-1)
                    for start in range(0, flat.size, WINDOW_ELEMENTS):
                        yield flat[start : start + WINDOW_ELEMENTS]
        except FormatError as error:
            problems += error.problems


def _real(window: Array) -> npt.NDArray[np.float64]:
    """Returns the values as float64; of complex ones the magnitudes."""
    with np.errstate(all="ignore"):
        return np.abs(window).astype(np.float64) if window.dtype.kind == "c" else window.astype(np.float64)


def _describe(checkpoint: Checkpoint, key: str, found: _Range, counts: _Counts) -> dict[str, Any]:
    number = found.finite
    variance = counts.sums[0] / number if number else None
    deviation = math.sqrt(variance) if variance is not None else None
    return {
        "elements": checkpoint.state.tensors[key].num_elements,
        "seen": found.seen,
        "finite": number,
        "nan": found.nan,
        "positive_infinite": found.positive_infinite,
        "negative_infinite": found.negative_infinite,
        "zeros": found.zeros,
        "negative": found.negative,
        "magnitudes": checkpoint.state.tensors[key].dtype.kind == "complex",
        "min": found.low if number else None,
        "max": found.high if number else None,
        "smallest": found.smallest if found.largest else None,
        "mean": counts.mean if number else None,
        "std": deviation,
        "rms": math.sqrt(counts.squares / number) if number else None,
        "norm": math.sqrt(counts.squares),
        "skewness": _standard(counts.sums[1], number, deviation, 3),
        "kurtosis": _standard(counts.sums[2], number, deviation, 4),
        "linear": _histogram(counts.linear, counts.edges),
        "decades": _histogram(counts.decades, counts.decade_edges),
    }


def _standard(total: float, number: int, deviation: float | None, power: int) -> float | None:
    """Returns a standardised central moment, None where nothing varies or the numbers leave float64's range."""
    scale = deviation**power if deviation and math.isfinite(deviation) and deviation < 1e60 else 0.0
    return total / number / scale if scale else None


def _histogram(counts: npt.NDArray[np.int64], edges: npt.NDArray[np.float64] | None) -> dict[str, Any] | None:
    return None if edges is None else {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}
