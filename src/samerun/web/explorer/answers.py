"""What the explorer answers: JSON from the same functions that the verbs call. No web framework in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samerun import __version__
from samerun.core.box import check_tiling
from samerun.errors import Problem, SamerunError, UsageError
from samerun.formats.base import require_key
from samerun.verify.evidence.stage import problem_from_json
from samerun.verify.inspection.structure import inspect_checkpoint
from samerun.verify.state.compare import compare_checkpoints
from samerun.web.explorer.findings import explain
from samerun.web.explorer.library import Library, Opened
from samerun.web.explorer.live import read_live
from samerun.web.explorer.picture import draw_tensor
from samerun.web.explorer.places import Places
from samerun.web.explorer.spread import measure_spread
from samerun.web.explorer.stream import Emit
from samerun.web.explorer.table import MAX_CHILDREN, SORTS, Choice, children, page_of, sizes, sort_rows, treemap

Query = Mapping[str, str]
"""The named values of an address."""

MAX_DIFFERENCES = 2_000
"""Differing tensors that are sent, those that deviate most; the verb lists all."""


class Answers:
    """Everything that can be asked about the places that were named."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.library = Library()

    def start(self, query: Query) -> dict[str, Any]:
        """Returns every checkpoint and run directory that was named or lies inside."""
        places = [{**asdict(place), "path": str(place.path)} for place in self.places.find()]
        for place in places:
            place["state"] = _run_state(Path(place["path"])) if place["kind"] == "run" else None
        return {"version": __version__, "named": self.places.named, "places": places}

    def _open(self, query: Query, name: str = "place", *, look_again: bool = True) -> Opened:
        return self.library.open(self.places.resolve(query.get(name, "")), look_again=look_again)

    def checkpoint(self, query: Query) -> dict[str, Any]:
        """Returns what inspecting `place` found, without its tensors."""
        opened = self._open(query)
        body = opened.report.to_json()
        for name in ("tensors", "problems"):
            del body[name]
        return body | {
            "findings": explain(opened.report.problems, opened.keys),
            "groups": [_group(group) for group in body["groups"][:100]],
            "parts": sizes(opened.table.rows, "part"),
            "dtypes": sizes(opened.table.rows, "dtype"),
            "broken": sum(1 for row in opened.table.rows if row.codes),
            "pieces": sum(row.pieces for row in opened.table.rows),
        }

    def tensors(self, query: Query) -> dict[str, Any]:
        """Returns a page of the tensors that `find`, `part`, `dtype`, `under`, `broken` choose, sorted by `sort`."""
        opened = self._open(query, look_again=False)
        by = query.get("sort", "")
        if by not in SORTS:
            raise UsageError(Problem("SR-USAGE-OPTION", f"tensors are not sorted by {by!r}", expected=sorted(SORTS)))
        rows = sort_rows(opened.table.choose(_choice(query)), by, descending="descending" in query)
        first, count = _number(query, "first", 0), _number(query, "count", 100)
        total = sum(row.num_bytes for row in rows)
        return {"first": first, "count": len(rows), "bytes": total, "rows": list(page_of(rows, first, count))}

    def tree(self, query: Query) -> dict[str, Any]:
        """Returns the nodes right below `under`, and their sizes as rectangles."""
        opened, choice = self._open(query, look_again=False), _choice(query)
        nodes = children(opened.table.choose(choice), choice.under)
        tiles = [
            {
                "prefix": node.prefix if node else None,
                "label": node.label if node else "all others",
                "bytes": size,
                "box": box,
            }
            for node, size, box in treemap(nodes)
        ]
        return {
            "nodes": [asdict(node) for node in nodes[:MAX_CHILDREN]],
            "left_out": max(0, len(nodes) - MAX_CHILDREN),
            "tiles": tiles,
        }

    def tensor(self, query: Query) -> dict[str, Any]:
        """Returns one tensor: what it is, who holds which part of it, and the findings that name it."""
        opened = self._open(query)
        entry = require_key(opened.report.state, query.get("key", ""))
        covered = check_tiling(entry.shape, entry.tiling)
        key = str(entry.key)
        drawn = draw_tensor(
            entry,
            lambda piece: opened.checkpoint.locate(key, piece),
            covered.missing_elements,
            covered.shared_elements,
        )
        named = [item for item in opened.report.problems if opened.keys.get(str(item.where.get("tensor"))) == key]
        return {
            "key": key,
            "role": entry.key.role.value,
            "slot": entry.key.slot,
            "name": entry.key.fqn,
            "dtype": entry.dtype.name,
            "elements": entry.num_elements,
            "bytes": entry.num_bytes,
            "original": entry.original,
            "aliases": list(entry.aliases),
            "siblings": [row.key for row in opened.table.rows if row.name == entry.key.fqn and row.key != key],
            "picture": asdict(drawn),
            "findings": explain(named),
        }

    def run(self, query: Query) -> dict[str, Any]:
        """Returns a run directory as it is now."""
        root = self.places.resolve(query.get("place", ""))
        if not isinstance(root, Path):
            raise UsageError(Problem("SR-RUN-DIRECTORY", "a run directory lies on this machine", where={"file": root}))
        return read_live(root)

    def values(self, query: Query, emit: Emit) -> None:
        """Reads a tensor and sends its moments and histograms."""
        opened = self._open(query)
        entry = require_key(opened.report.state, query.get("key", ""))
        found = measure_spread(opened.checkpoint, str(entry.key), _teller(emit))
        emit({"kind": "values", **found, "problems": None, "findings": _findings(found["problems"])})

    def diff(self, query: Query, emit: Emit) -> None:
        """Compares `place` with `other` and sends where they differ, what deviates most first."""
        one, two = self._open(query), self._open(query, "other")
        done, total = 0, sum(row.num_bytes for row in one.table.rows)

        def progress(key: str, size: int) -> None:
            nonlocal done
            done += size
            emit({"kind": "progress", "done": done, "total": total, "what": key})

        tolerances = {name: _tolerance(query, name) for name in ("rtol", "atol")}
        found = compare_checkpoints(one.checkpoint, two.checkpoint, **tolerances, progress=progress)
        body = found.to_json()
        worst = sorted(body["values"], key=lambda item: (-item["rel_l2"], -item["max_abs"], item["key"]))
        body["values"] = worst[:MAX_DIFFERENCES]
        emit({"kind": "diff", **body, "left_out": len(worst) - len(body["values"])})

    def deep(self, query: Query, emit: Emit) -> None:
        """Reads every byte of a checkpoint and sends what was found."""
        opened = self._open(query)
        done, total = 0, sum(row.num_bytes for row in opened.table.rows)

        def advance(size: int) -> None:
            nonlocal done
            done += size
            emit({"kind": "progress", "done": min(done, total), "total": total})

        report = inspect_checkpoint(opened.checkpoint, deep=True, advance=advance)
        emit(
            {
                "kind": "deep",
                "intact": report.intact,
                "complete": report.complete,
                "verdict": report.resumable.verdict,
                "findings": explain(report.problems, opened.keys),
            }
        )


def _findings(problems: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return explain(problem_from_json(item) for item in problems)


def _teller(emit: Emit) -> Callable[[int, int], None]:
    return lambda done, total: emit({"kind": "progress", "done": done, "total": total})


def _choice(query: Query) -> Choice:
    texts = {name: query.get(name, "") for name in ("find", "part", "dtype", "under")}
    return Choice(**texts, broken="broken" in query)


def _number(query: Query, name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(Problem("SR-USAGE-OPTION", f"{name} is a whole number, not {text!r}"))
    return int(text)


def _tolerance(query: Query, name: str) -> float:
    text = query.get(name) or "0"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(Problem("SR-USAGE-OPTION", f"{name} is a number not below zero, not {text!r}"))
    return value


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without the list of its names, which the table has."""
    return {"count": len(group["params"]), "hyperparameters": {k: str(v) for k, v in group["hyperparameters"].items()}}


def _run_state(root: Path) -> dict[str, Any] | None:
    try:
        found = read_live(root)
    except (SamerunError, OSError):
        return None
    return {name: found[name] for name in ("verdict", "busy")} | {
        "stage": next((stage["title"] for stage in found["stages"] if stage["status"] in ("running", "fail")), None)
    }
