"""The pictures of docs/: drawn from what samerun computes, so that they cannot show another dealing than it makes."""

from __future__ import annotations

from collections.abc import Iterable

from samerun.core.batch import plan_batch

WIDTH = 760
_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1c2127; }
  .head { font-weight: 650; font-size: 14px; } .soft { fill: #565f6b; } .num { font-size: 11px; text-anchor: middle; }
  .mid { text-anchor: middle; } .end { text-anchor: end; }
  .paper { fill: #fcfbf8; } .slot { fill: none; stroke: #b9b6ad; } .empty { stroke-dasharray: 3 3; }
  .rule { stroke: #b9b6ad; } .ink { stroke: #1c2127; stroke-width: 1.5; } .dash { stroke-dasharray: 5 4; }
  .h0 { fill: #3b6fb6; } .h1 { fill: #d9822b; } .h2 { fill: #3f9b6c; } .h3 { fill: #b5578f; }
  .on { fill: #ffffff; } .done { fill: #aeb4bb; } .bad { fill: #b3261e; } .badline { stroke: #b3261e; fill: none; }
  .band { fill: #dcebe0; } .edge { stroke: #3d8b5f; fill: none; stroke-width: 1.5; }
  .control { stroke: #9aa3ad; stroke-width: 5; fill: none; }
  .candidate { stroke: #1f5fa8; stroke-width: 2; fill: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e7e9ec; } .soft { fill: #aab2bc; } .paper { fill: #14171b; } .slot, .rule { stroke: #4a525c; }
    .ink { stroke: #e7e9ec; } .on { fill: #14171b; } .done { fill: #87909b; } .bad { fill: #f2867d; }
    .h0 { fill: #6f9fe0; } .h1 { fill: #e79d52; } .h2 { fill: #62bb8b; } .h3 { fill: #d57fb2; }
    .badline { stroke: #f2867d; } .band { fill: #1d3327; } .edge { stroke: #5fb386; } .candidate { stroke: #7fb2f0; }
    .control { stroke: #75808c; }
  }
"""


def _svg(title: str, height: int, parts: Iterable[str]) -> str:
    body = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">\n'
        f"  <title>{title}</title>\n  <style>{_STYLE}  </style>\n"
        f'  <rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{kind}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"/>'


def dealing_picture() -> str:
    """Returns the same 32 samples dealt to 4 replicas and to 3, two at most in a pass."""
    ragged = next(option for option in plan_batch(32, 3, 2) if option.kind == "ragged")
    shares = ", ".join(str(sum(column)) for column in zip(*ragged.dealing.microbatches, strict=True))
    parts = [
        *_dealt(60, "4 replicas: 4 passes of 2", [[2] * 4] * 4),
        *_dealt(440, f"3 replicas: {ragged.passes} passes, shares {shares}", ragged.dealing.microbatches),
    ]
    return _svg("One global batch of 32 samples, dealt to 4 replicas and to 3", 280, parts)


def _dealt(left: float, title: str, passes: Iterable[Iterable[int]]) -> Iterable[str]:
    yield _text(left, 28, title, "head")
    first = 0
    for row, shares in enumerate(passes):
        y = 64 + row * 34
        columns = list(shares)
        yield _text(left - 10, y + 18, str(row + 1), "soft end")
        given = [0] * len(columns)
        for _ in range(max(columns)):
            for column, share in enumerate(columns):
                if given[column] < share:
                    x = left + column * 66 + given[column] * 29
                    yield _box(x, y, 26, 26, f"h{column}")
                    yield _text(x + 13, y + 17, str(first), "num on")
                    given[column] += 1
                    first += 1
        for column, share in enumerate(columns):
            if share < 2:
                yield _box(left + column * 66 + share * 29, y, 26, 26, "slot empty")
            if row == 0:
                yield _text(left + column * 66, 54, f"replica {column}", "soft")


def layouts_picture() -> str:
    """Returns one tensor of 10 x 8 values under three layouts."""
    kinds = (
        ("dp_shard=4", [(3 * r, min(3 * r + 3, 10), 0, 8) for r in range(4)]),
        ("dp_shard=3", [(4 * r, min(4 * r + 4, 10), 0, 8) for r in range(3)]),
        ("tp=2, dp_shard=2", [(5 * d, 5 * d + 5, 4 * t, 4 * t + 4) for d in range(2) for t in range(2)]),
    )
    parts: list[str] = []
    for number, (title, boxes) in enumerate(kinds):
        left = 40 + number * 245
        parts.append(_text(left, 28, title, "head"))
        for rank, (top, bottom, start, stop) in enumerate(boxes):
            x, y = left + start * 22 + 1, 44 + top * 20 + 1
            parts.append(_box(x, y, (stop - start) * 22 - 2, (bottom - top) * 20 - 2, f"h{rank}"))
            parts.append(_text(x + (stop - start) * 11, y + (bottom - top) * 10 + 4, f"rank {rank}", "num on"))
    parts += []
    return _svg("One tensor of 10 by 8 values under three layouts", 260, parts)


def progress_picture() -> str:
    """Returns the sample order across a move: committed, prefetched, and what can go wrong."""
    step, left = 26, 150
    rows = (
        ("source, 4 ranks", 50, 0, 16, "done"),
        ("exact", 122, 12, 24, "h2"),
        ("cursor lost", 164, 0, 12, "bad"),
        ("prefetch counted", 206, 16, 24, "h1"),
    )
    parts = [_text(left, 28, "positions in the global order", "soft")]
    for title, y, start, stop, kind in rows:
        parts.append(_text(left - 14, y + 18, title, "end" if kind == "done" else "end soft"))
        for place in range(start, min(stop, 23)):
            unsure = kind == "done" and place >= 12
            parts.append(_box(left + place * step, y, step - 4, 26, "slot empty" if unsure else kind))
            parts.append(_text(left + place * step + 11, y + 17, str(place), "num" if unsure else "num on"))
    seam = left + 12 * step - 2
    parts += [
        _line(seam, 38, seam, 240, "ink dash"),
        _text(left, 98, "committed: in a completed update", "soft"),
        _text(seam + 8, 98, "read ahead, not committed: issued again", "soft"),
        _text(seam + 8, 182, "0 to 11 are seen twice", "soft"),
        _text(left, 224, "12 to 15 are never seen", "soft"),
    ]
    return _svg("The sample order across a move, and two ways to lose the place in it", 250, parts)


def band_picture() -> str:
    """Returns a metric of two controls, the band that they seal, and two candidates."""
    left, right, base = 60, 700, 200
    drift = (0, 2, 3, 3, 6, 7, 7, 9, 12, 12, 13)
    xs = [left + i * (right - left) / 10 for i in range(11)]
    limit = [base - 14 - 6.5 * value for value in drift]
    inside = [base - 2.6 * value - (4 if i % 3 else 0) for i, value in enumerate(drift)]
    outside = [base - 3 * value - max(0, i - 4) ** 2 * 5.4 for i, value in enumerate(drift)]
    control = [base - value for value in drift]

    def path(values: list[float]) -> str:
        return "M" + "L".join(f"{x:g} {max(y, 24):g}" for x, y in zip(xs, values, strict=True))

    parts = [
        f'<path class="band" d="{path(limit)}L{right} {base}L{left} {base}Z"/>',
        f'<path class="edge" d="{path(limit)}"/>',
        f'<path class="control" d="{path(control)}"/>',
        f'<path class="candidate" d="{path(inside)}"/>',
        f'<path class="badline" stroke-width="2" d="{path(outside[:10] + outside[9:10])}"/>',
        _line(left, base, right, base, "rule"),
        _text(left, 226, "first update after the move", "soft"),
        _text(right, 226, "update 20", "soft end"),
        _text(left, 34, "deviation from the first control", "soft"),
        _text(left, 118, "sealed limit: factor × what the controls differ by", "soft"),
        _text(600, 46, "rejected", "bad end"),
    ]
    return _svg("A sealed band around two controls, a candidate inside and one that leaves it", 240, parts)


PICTURES = {
    "dealing.svg": dealing_picture,
    "layouts.svg": layouts_picture,
    "progress.svg": progress_picture,
    "band.svg": band_picture,
}
