"""The page as text: one file with its style, script and data inside, that fetches nothing.

Names of tensors, log lines and whatever else comes from a run are untrusted. They reach the page in two ways only: as
text through the templates, which escape everything, and as JSON in a data block in which no `<`, `>` or `&` is left;
the script that reads it makes text nodes. The page's own policy forbids any other script, and every connection.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from samerun import __version__
from samerun.core.size import format_size
from samerun.report.charts import Chart, Panel, number_text
from samerun.report.layout import HUES
from samerun.report.model import ReportModel
from samerun.report.page import Page, plan_page
from samerun.report.provenance import plain_text
from samerun.report.samples import SamplesView, Strip
from samerun.report.state import Agreement, ParameterRow, StateView
from samerun.report.style import read_static, script_hash, shared_style

MAX_ROWS, MAX_NAME_CHARACTERS = 12_000, 700_000
"""Parameters that the table lists; of more, or of very long names, those whose state or change stands out most."""
MAX_CHART_VALUES = 120_000
"""Numbers over all charts that can be hovered over; charts that would exceed it are drawn without."""

_AGREEMENTS: tuple[Agreement, ...] = ("equal", "differs", "missing", "unexpected", "unseen")


def render_html(model: ReportModel, *, base: str = "", written: datetime | None = None) -> str:
    """Returns the report.

    Args:
        model: what was read from a run directory.
        base: path from the report's folder to the run directory, for links to evidence, such as `../run/`.
        written: when the report is made; now by default.
    """
    page = plan_page(model)
    script = read_static("samerun.report", "report.js")
    html = (
        _environment(model, base)
        .get_template("report.html")
        .render(
            page=page,
            model=model,
            version=__version__,
            written=(written or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
            style=Markup(shared_style() + read_static("samerun.report", "report.css")),
            script=Markup(script),
            script_hash=script_hash(script),
            data=embed(page_data(page)),
            num_listed=len(_listed(page.state.rows)) if page.state else 0,
        )
    )
    return html.encode("utf-8", "replace").decode("utf-8")  # a name may hold half of a surrogate pair


def _environment(model: ReportModel, base: str) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("samerun.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "number": format_number,
        "percent": format_percent,
        "bytes": format_size,
        "thousands": format_thousands,
        "shape": format_shape,
        "plain": plain_text,
        "prose": prose,
        "stage_name": stage_name,
        "hue": hue,
    }
    functions: dict[str, Callable[..., Any]] = {
        "link": partial(evidence_link, model, base),
        "cells_above": cells_above,
        "cells_below": cells_below,
        "cells_extra": cells_extra,
    }
    environment.filters.update(filters)
    environment.globals.update(functions)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return environment


def evidence_link(model: ReportModel, base: str, path: str) -> str | None:
    """Returns the relative address of a piece of evidence, or None where nothing of that name is in the run directory.

    Only paths that were seen there become links: a path named in a file could be anything, also an address.
    """
    known = path in model.files or f"{path}/" in model.files
    return quote(base) + quote(path) if known else None


def format_number(value: Any) -> str:
    """Returns a number for people, with at most 3 significant digits; text and whole numbers as they are.

    >>> format_number(0.000123456789), format_number(20), format_number(None)
    ('0.000123', '20', '')
    """
    if value is None:
        return ""
    return number_text(value) if isinstance(value, float) else str(value)


def format_percent(share: float) -> str:
    """Returns a share as a percentage."""
    return f"{number_text(100 * share, 2)} %" if math.isfinite(share) else "left"


def format_thousands(count: int) -> str:
    """Returns a count with its thousands set apart."""
    return f"{count:,}"


def hue(number: int) -> int:
    """Returns the page's colour for a rank, a replica or a part."""
    return number % HUES


def prose(text: str) -> Markup:
    """Returns text of the catalogue with what stands in backticks as code.

    >>> str(prose("set `a < b`"))
    'set <code>a &lt; b</code>'
    """
    parts = [
        Markup("<code>{}</code>").format(part) if odd % 2 else escape(part) for odd, part in enumerate(text.split("`"))
    ]
    return Markup("").join(parts)


def stage_name(path: str) -> str:
    """Returns a path of evidence in short: the stage's name where it is a stage's result."""
    return path.removeprefix("stages/").removesuffix("/result.json")


def format_shape(shape: tuple[int, ...]) -> str:
    """Returns a shape as people write it; a scalar has none."""
    return " × ".join(map(str, shape)) or "scalar"


def cells_above(strip: Strip, replica: int) -> str:
    """Returns the path of the samples that the control's `replica` consumed, in the upper row of a strip."""
    places = [place for place, item in enumerate(strip.placed) if item.source == replica]
    return _cell_path(places, len(strip.placed), 0)


def cells_below(strip: Strip) -> Iterator[tuple[str, int | None, str]]:
    """Yields (kind, the candidate's replica, path) of the lower row: `same`, `later` (another update), `nobody`."""
    groups: dict[tuple[str, int | None], list[int]] = {}
    for place, item in enumerate(strip.placed):
        kind = "nobody" if item.update is None else "same" if item.update == strip.update else "later"
        groups.setdefault((kind, item.destination), []).append(place)
    for (kind, replica), places in groups.items():
        yield kind, replica, _cell_path(places, len(strip.placed), 1)


def cells_extra(strip: Strip) -> Iterator[tuple[int, str]]:
    """Yields (replica, path) of the row of samples that the candidate consumed instead."""
    groups: dict[int, list[int]] = {}
    for place, extra in enumerate(strip.extras[: len(strip.placed)]):
        groups.setdefault(extra.replica, []).append(place)
    for replica, places in groups.items():
        yield replica, _cell_path(places, len(strip.placed), 0)


def _cell_path(places: list[int], count: int, row: int) -> str:
    """Returns the path of cells at `places` in row 0 or 1, on a canvas of `count` x 2."""
    gap = 0.08 if count <= 200 else 0.0
    width = 1 - 2 * gap
    return "".join(f"M{place + gap:g} {row + 0.06:g}h{width:g}v.88h-{width:g}z" for place in places)


def embed(data: Any) -> Markup:
    """Returns JSON that can stand in a script element: nothing in it can end the element or begin another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for unsafe in "<>&\u2028\u2029":
        text = text.replace(unsafe, f"\\u{ord(unsafe):04x}")
    return Markup(text)


def page_data(page: Page) -> dict[str, Any]:
    """Returns what the script needs: numbers to hover over, ids of samples, rows of the tensor table."""
    tensors = _tensor_data(page.state) if page.state else None
    known = {name: index for index, name in enumerate(tensors["name"])} if tensors else {}
    return {
        "charts": dict(_charts_data([drawn.chart for drawn in page.charts], known)),
        "strips": _strips_data(page.samples) if page.samples else [],
        "tensors": tensors,
    }


def _charts_data(charts: Sequence[Chart], tensors: Mapping[str, int]) -> Iterator[tuple[str, dict[str, Any]]]:
    left = MAX_CHART_VALUES
    for chart in charts:
        panels = [_panel_data(panel) for panel in chart.panels]
        count = sum(len(series.get("values", ())) for panel in panels for series in panel["series"])
        if count <= left:
            left -= count
            yield (
                chart.key,
                {
                    "names": _names(chart, tensors),
                    "x": chart.x_title,
                    "synced": chart.synced,
                    "panels": panels,
                },
            )


def _panel_data(panel: Panel) -> dict[str, Any]:
    """Returns the series; one that has the very values of an earlier one (`as`) does not repeat them."""
    first: dict[tuple[float | None, ...], int] = {}
    rows: list[dict[str, Any]] = []
    for series in panel.all_series:
        row: dict[str, Any] = {"label": series.label, "style": series.style}
        same = first.setdefault(series.values, len(rows))
        if same < len(rows):
            row["as"] = same
        else:
            row["values"] = [_json_number(value, 9 if panel.scale == "linear" else 3) for value in series.values]
        rows.append(row)
    return {"scale": panel.scale, "series": rows}


def _names(chart: Chart, tensors: Mapping[str, int]) -> dict[str, Any]:
    """Returns the positions' names: from where they count, which rows of the tensor table they are, or one by one."""
    names = chart.names
    if chart.numeric and names == tuple(str(int(names[0]) + i) for i in range(len(names))):
        return {"from": int(names[0]), "count": len(names)}
    if all(name in tensors for name in names):
        return {"tensors": [tensors[name] for name in names]}
    return {"each": list(names)}


def _json_number(value: float | None, digits: int) -> float | int | str | None:
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() and abs(number) < 1e9 else number


def _strips_data(view: SamplesView) -> list[dict[str, Any]]:
    return [_strip_data(strip) for strip in view.strips]


def _strip_data(strip: Strip) -> dict[str, Any]:
    return {
        "update": strip.update,
        "ids": [item.sample for item in strip.placed],
        "source": [item.source for item in strip.placed],
        "destination": [item.destination for item in strip.placed],
        "updates": [item.update for item in strip.placed],
    }


def _tensor_data(state: StateView) -> dict[str, Any]:
    """Returns the table by columns: names are long and many, everything else is a number or an index."""
    rows = _listed(state.rows)
    dtypes = sorted({row.dtype for row in rows})
    slots = sorted({slot for row in rows for slot in row.slots})
    return {
        "compared": state.compared,
        "total": len(state.rows),
        "dtypes": dtypes,
        "slots": slots,
        "agreements": list(_AGREEMENTS),
        "name": [row.name for row in rows],
        "shape": [list(row.shape) for row in rows],
        "dtype": [dtypes.index(row.dtype) for row in rows],
        "trains": [row.trains for row in rows],
        "agreement": [_AGREEMENTS.index(row.agreement) for row in rows],
        "slot": [[_slot(row.slots, slot) for slot in slots] for row in rows],
        "moved": [_json_number(row.moved, 4) for row in rows],
        "deviation": [_json_number(row.deviation, 3) for row in rows],
        "limit": [_json_number(row.limit, 3) for row in rows],
    }


def _listed(rows: tuple[ParameterRow, ...]) -> tuple[ParameterRow, ...]:
    """Returns the rows that there is room for: all of them, or those that stand out most."""
    if len(rows) <= MAX_ROWS and sum(len(row.name) for row in rows) <= MAX_NAME_CHARACTERS:
        return rows
    standing_out = sorted(rows, key=lambda row: (row.agreement == "equal", -(row.deviation or 0.0)))[:MAX_ROWS]
    room = itertools.accumulate(len(row.name) for row in standing_out)
    return tuple(row for row, used in zip(standing_out, room, strict=True) if used <= MAX_NAME_CHARACTERS)


def _slot(slots: Mapping[str, Agreement], name: str) -> int | None:
    return _AGREEMENTS.index(slots[name]) if name in slots else None
