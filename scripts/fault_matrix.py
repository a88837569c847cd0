"""Runs clean moves to every layout and every fault, and writes the tables in docs/faults.md.

python scripts/fault_matrix.py --dir /tmp/matrix            # all of it, about forty minutes on two cores
python scripts/fault_matrix.py --dir /tmp/matrix --only clean --precision float32 --sizes slim --seeds 6
python scripts/fault_matrix.py --dir /tmp/matrix --analyse  # judges the same traces by bounds from analysis
python scripts/fault_matrix.py --page                       # only writes the page, from docs/faults.json

Rows are kept in docs/faults.json, each with the commit that it was run at. A row of an earlier commit holds until it is
run again (--again). `tiny` is the model on which floors and bands were set; `slim` was used for nothing but this table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[1]
sys.path[:0] = [str(TOP), str(TOP / "src"), str(TOP / "tests")]

from scripts.analysed import reassess  # noqa: E402

from samerun.core.mesh import Layout  # noqa: E402
from samerun.demo.faults import FAULTS  # noqa: E402
from samerun.demo.workspace import DemoSettings, Workspace  # noqa: E402
from support.warm_ranks import warm_launches  # noqa: E402

LAYOUTS = ("dp_shard=3", "dp_shard=2", "dp_shard=1", "dp_replicate=2,dp_shard=2", "tp=2,dp_shard=2")
DATA, PAGE = TOP / "docs" / "faults.json", TOP / "docs" / "faults.md"
MODELS = {
    "tiny": "two layers of width 40, tied head",
    "slim": "five layers of width 24, head apart, other rotary base and epsilon, 24 tokens",
}


@dataclass(frozen=True)
class Case:
    """One move: to a layout, with a fault or clean."""

    size: str
    precision: str
    seed: int
    layout: str
    fault: str | None = None

    @property
    def name(self) -> str:
        return f"{self.size}/{self.precision}/{self.seed}/{self.layout}/{self.fault or 'clean'}"


def list_cases(args: argparse.Namespace) -> Iterator[Case]:
    for size in args.sizes:
        for precision in args.precision:
            for seed in args.seeds:
                if args.only != "faults":
                    yield from (Case(size, precision, seed, layout) for layout in args.layouts)
                if args.only != "clean":
                    for fault in FAULTS.values():
                        if precision in (fault.precisions or (precision,)) and fault.name in (args.faults or FAULTS):
                            yield Case(size, precision, seed, fault.layout or "dp_shard=3", fault.name)


def place_of(row: dict[str, Any], directory: Path) -> Path:
    """Returns the run directory of a row's demonstration."""
    settings = DemoSettings(
        directory=directory,
        destination=Layout.parse(row["layout"]),
        fault=FAULTS[row["fault"]] if row["fault"] else None,
        size=row["size"],
        precision=row["precision"],
        seed=row["seed"],
    )
    return Workspace(settings).rundir


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """Runs one demonstration; returns its row."""
    command = [sys.executable, "-m", "samerun", "demo", "--dir", str(directory), "--size", case.size, "--json"]
    command += ["--precision", case.precision, "--seed", str(case.seed), "--to", case.layout]
    command += ["--break", case.fault] if case.fault else []
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    try:
        verdict = json.loads(done.stdout)
    except ValueError:
        verdict = {"verdict": f"none (exit {done.returncode})"}
        print(done.stderr[-2000:], file=sys.stderr)
    divergence = verdict.get("first_divergence") or {}
    return {
        **asdict(case),
        "verdict": verdict.get("verdict"),
        "named": list(verdict.get("named") or ()),
        "codes": [reason["code"] for reason in verdict.get("reasons", ())],
        "stage": divergence.get("stage"),
        "first": divergence.get("code"),
        "kind": divergence.get("kind"),
        "where": {name: value for name, value in (divergence.get("where") or {}).items() if name != "file"},
        "used": _used(verdict),
        "seconds": round(time.monotonic() - started, 1),
    }


def _used(verdict: dict[str, Any]) -> dict[str, list[float]]:
    """Returns by metric the deviation that used most of its band, and the limit there."""
    rows = [row for row in verdict.get("criteria", ()) if row["name"].startswith("numerics.")]
    return {row["name"].partition(".")[2]: [row["value"], row["limit"]] for row in rows}


def share(row: dict[str, Any]) -> float | None:
    """Returns the largest part of any sealed band that was used (1 is the limit)."""
    return max((value / limit for value, limit in row["used"].values() if limit), default=row.get("share"))


def as_it_should_be(row: dict[str, Any]) -> bool:
    """Whether a clean move was promoted, or a fault rejected under its own name."""
    if row["fault"] is None:
        return row["verdict"] == "promote"
    return row["verdict"] == "reject" and bool(row["named"])


def points_right(row: dict[str, Any]) -> bool:
    """Whether the verdict points to the kind of failure that was injected."""
    return row["kind"] == FAULTS[row["fault"]].kind.value


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Returns docs/faults.md."""
    clean = [row for row in rows if row["fault"] is None]
    broken = [row for row in rows if row["fault"] is not None]
    lines = [
        "# Which faults are caught",
        "",
        "Made by `python scripts/fault_matrix.py` from docs/faults.json: real runs of the demonstration's training",
        "script on CPU, source on 4 FSDP2 ranks, every move judged by `samerun run`. Faults are put into the job,",
        "its launcher or its files after the tolerances were sealed, never into a trace. The seeds were used to set",
        "nothing; nor was the model `slim`. Each row says at which commit it was run.",
        "",
        *_rates(rows),
        "",
        *(f"`{size}`: {words}." for size, words in MODELS.items()),
        "An abstention says that the two controls differ so much by themselves that no candidate could be judged:",
        "here, in low precision, by the norm of a gradient that leaps in one update.",
        "",
        "## Clean moves",
        "",
        "`band used` is the largest part of any sealed band that the candidate used over 20 updates (1: all).",
        "",
        "| model | precision | seed | destination | verdict | band used | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in clean:
        used = share(row)
        cells = (row["size"], row["precision"], row["seed"], f"`{row['layout']}`", row["verdict"])
        lines.append(f"| {' | '.join(map(str, cells))} | {'' if used is None else f'{used:.2g}'} | {row['commit']} |")
    runs = sorted({(row["size"], row["precision"], row["seed"]) for row in broken})
    heads = [f"{size}, {precision}, seed {seed}" for size, precision, seed in runs]
    lines += [
        "",
        "## Faults",
        "",
        "Each cell: the finding that named the fault, and the stage of the first divergence. A dash: at this precision",
        "it changes nothing, or it was not run.",
        "",
        f"| fault | what happens | {' | '.join(heads)} |",
        "|---|---|" + "---|" * len(heads),
    ]
    by_case = {(row["fault"], row["size"], row["precision"], row["seed"]): row for row in broken}
    for fault in FAULTS.values():
        cells = [_cell(by_case.get((fault.name, *run))) for run in runs]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {fault.name} | {fault.story} | {' | '.join(cells)} |")
    commits = [
        f"- {head}: {', '.join(sorted({row['commit'] for row in broken if _run(row) == run}))}"
        for head, run in zip(heads, runs, strict=True)
    ]
    return "\n".join([*lines, "", "Commits:", "", *commits, "", *_confusion(broken), *_analysed(rows)]) + "\n"


def _analysed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the table of what bounds from analysis say of the same traces."""
    known = [row for row in rows if row.get("analysis")]
    if not known:
        return []
    lines = [
        "",
        "## The same traces under bounds from analysis",
        "",
        "Each run judged again with every tolerance `{from: analysis}` ([judging.md](judging.md#tolerances)).",
        "`caught`: of the runs in which a number left a band from the controls, those in which one leaves its bound.",
        "`too wide`: metrics whose bound exceeds its ceiling in the window, so that such a run would abstain.",
        "",
        "| model | precision | clean moves within | most of a bound used | caught | too wide |",
        "|---|---|---|---|---|---|",
    ]
    for size, precision in sorted({(row["size"], row["precision"]) for row in known}):
        mine = [row for row in known if (row["size"], row["precision"]) == (size, precision)]
        clean = [row["analysis"] for row in mine if row["fault"] is None]
        left = [row["analysis"] for row in mine if row["fault"] is not None and row["analysis"]["controls"]]
        cells = (
            f"{sum(not found['analysis'] for found in clean)} of {len(clean)}",
            f"{max((found['used'] for found in clean), default=0.0):.2g}",
            f"{sum(bool(found['analysis']) for found in left)} of {len(left)}",
            ", ".join(sorted({name for found in clean for name in found["wide"]})) or "none",
        )
        lines.append(f"| {size} | {precision} | {' | '.join(cells)} |")
    return lines


def _run(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["size"], row["precision"], row["seed"]


def _rates(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the table of detection and false rejects, by model and precision."""
    lines = [
        "| model | precision | clean moves promoted | abstained | rejected | faults rejected by name | right kind |",
        "|---|---|---|---|---|---|---|",
    ]
    groups = sorted({(row["size"], row["precision"]) for row in rows})
    for group in (*groups, None):
        mine = [row for row in rows if group is None or (row["size"], row["precision"]) == group]
        clean = [row for row in mine if row["fault"] is None]
        broken = [row for row in mine if row["fault"] is not None]
        told = sum(row["kind"] is not None for row in broken)
        name = "**all** |" if group is None else " | ".join(group)
        cells = (
            f"{sum(map(as_it_should_be, clean))} of {len(clean)}",
            sum(row["verdict"] == "abstain" for row in clean),
            sum(row["verdict"] == "reject" for row in clean),
            f"{sum(map(as_it_should_be, broken))} of {len(broken)}",
            f"{sum(map(points_right, broken))} of {told}" if told else "not recorded then" if broken else "none run",
        )
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return lines


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    named = [f"[{code}](findings.md#{code.lower()})" for code in row["named"][:1]]
    verdict = "" if row["verdict"] == "reject" else f"**{row['verdict']}** "
    return f"{verdict}{named[0] if named else '**not named**'} {row['stage'] or ''}".strip()


def _confusion(broken: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the table of what was injected against the kind that the first divergence points to."""
    broken = [row for row in broken if row["kind"]]  # rows from before verdicts told kinds have none
    pairs = Counter((FAULTS[row["fault"]].kind.value, row["kind"]) for row in broken)
    wrong = sorted({row["fault"] for row in broken if not points_right(row)})
    right = sum(count for pair, count in pairs.items() if pair[0] == pair[1])
    lines = [
        "## Confusion by kind",
        "",
        "A verdict says which kind of failure its first divergence points to (`first_divergence.kind`), from the",
        f"finding and from what the jobs recorded beside it. {right} of {sum(pairs.values())} runs point to the kind",
        "that was injected.",
        *([f"Not always: {', '.join(f'`{name}`' for name in wrong)}."] if wrong else []),
        "",
        "| injected | pointed to |",
        "|---|---|",
    ]
    for kind in sorted({pair[0] for pair in pairs}):
        found = [(count, other) for (own, other), count in pairs.items() if own == kind]
        lines.append(f"| {kind} | {', '.join(f'{other} ({count})' for count, other in sorted(found, reverse=True))} |")
    return lines


def _commit() -> str:
    """Returns the short hash of what is run, with `+` for a tree that was changed since."""
    short = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=TOP, capture_output=True, text=True, check=True)
    dirty = subprocess.run(["git", "status", "--porcelain", "src", "examples"], cwd=TOP, capture_output=True, text=True)
    return short.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def main() -> int:
    """Runs what is missing; returns 1 if any row is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--sizes", nargs="*", default=["tiny"])
    parser.add_argument("--precision", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[2, 3])
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--faults", nargs="*")
    parser.add_argument("--only", choices=["clean", "faults"])
    parser.add_argument("--again", action="store_true", help="run rows again that are there already")
    parser.add_argument("--analyse", action="store_true", help="run nothing, judge what is in DIR by analysis")
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page")
    args = parser.parse_args()
    rows: dict[str, Any] = json.loads(args.data.read_text()) if args.data.exists() else {}
    if args.dir is None and not args.page:
        parser.error("--dir is where the runs go")
    if args.analyse:
        for row in rows.values():
            place = place_of(row, args.dir / "work")
            if place.exists():
                row["analysis"] = reassess(place)
        args.data.write_text(json.dumps(rows, indent=1) + "\n")
    elif not args.page:
        args.dir.mkdir(parents=True, exist_ok=True)
        commit = _commit()
        with warm_launches():
            for case in list_cases(args):
                if case.name in rows and not args.again:
                    continue
                row = rows[case.name] = {**run_case(case, args.dir / "work"), "commit": commit}
                args.data.write_text(json.dumps(rows, indent=1) + "\n")
                told = row["named"] or row["codes"]
                print(f"{case.name}: {row['verdict']} {told} {row['kind']} {row['seconds']} s", flush=True)
    if args.data == DATA:
        PAGE.write_text(render(list(rows.values())), encoding="utf-8")
    wrong = [name for name, row in rows.items() if not as_it_should_be(row)]
    print(f"{len(rows)} rows, not as they should be: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
