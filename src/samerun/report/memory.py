"""Memory on the destination as bars: every rank against its device, and the host while the state gets there. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from samerun.core.size import format_size
from samerun.plan.memory import MemoryEstimate

MAX_MEMORY_RANKS = 32


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One part of a bar, in percent of the picture's width."""

    name: str
    percent: float
    text: str


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """One rank, or the host in one way of loading."""

    label: str
    parts: tuple[MemoryPart, ...]
    total: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """Bars on one scale; `device_percent` is where the device ends."""

    ranks: tuple[MemoryBar, ...]
    host: tuple[MemoryBar, ...]
    names: tuple[str, ...]
    device: str | None
    device_percent: float | None
    fits: bool | None
    left_out: int
    optimizer_known: bool


_PARTS = ("parameters", "gradients", "optimizer", "masters", "ema", "buffers", "gather")


def view_memory(estimate: MemoryEstimate) -> MemoryView:
    """Returns the bars of an estimate."""
    device = estimate.device_memory_bytes
    shown = estimate.per_rank[:MAX_MEMORY_RANKS]
    host = (("one process consolidates", estimate.host.consolidate_bytes), ("direct load", estimate.host.direct_bytes))
    widest = max([device or 0, 1, *(item.total_bytes for item in shown)]) * 1.02
    tallest = max(1, *(size for _, size in host)) * 1.02
    used = [part for part in _PARTS if any(getattr(item, f"{part}_bytes") for item in shown)]
    return MemoryView(
        ranks=tuple(
            MemoryBar(
                f"rank {item.rank}",
                tuple(_part(part, getattr(item, f"{part}_bytes"), widest) for part in used),
                format_size(item.total_bytes),
            )
            for item in shown
        ),
        host=tuple(MemoryBar(name, (_part("host", size, tallest),), format_size(size)) for name, size in host),
        names=tuple(used),
        device=format_size(device) if device else None,
        device_percent=round(100 * device / widest, 2) if device else None,
        fits=estimate.fits,
        left_out=len(estimate.per_rank) - len(shown),
        optimizer_known=estimate.optimizer_known,
    )


def _part(name: str, size_bytes: int, scale: float) -> MemoryPart:
    return MemoryPart(name, round(100 * size_bytes / scale, 3), format_size(size_bytes))
