"""Runs clean moves to every layout and every fault, and writes the table in docs/faults.md.

python scripts/fault_matrix.py --dir /tmp/matrix            # all of it, about forty minutes on two cores
python scripts/fault_matrix.py --dir /tmp/matrix --only clean --precision float32 --seeds 0

Rows that are already in DIR/matrix.json are kept, so an interrupted matrix goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[1]
sys.path[:0] = [str(TOP / "src"), str(TOP / "tests")]

from samerun.demo.faults import FAULTS  # noqa: E402
from samerun.verify.kinds import kind_of  # noqa: E402
from support.warm_ranks import warm_launches  # noqa: E402

LAYOUTS = ("dp_shard=3", "dp_shard=2", "dp_shard=1", "dp_replicate=2,dp_shard=2", "tp=2,dp_shard=2")


@dataclass(frozen=True)
class Case:
    """One move: to a layout, with a fault or clean."""

    precision: str
    seed: int
    layout: str
    fault: str | None = None

    @property
    def name(self) -> str:
        return f"{self.precision}/{self.seed}/{self.layout}/{self.fault or 'clean'}"


def list_cases(args: argparse.Namespace) -> Iterator[Case]:
    for precision in args.precision:
        for seed in args.seeds:
            if args.only != "faults":
                yield from (Case(precision, seed, layout) for layout in LAYOUTS)
            if args.only != "clean":
                fitting = (fault for fault in FAULTS.values() if precision in (fault.precisions or (precision,)))
                for fault in fitting:
                    yield Case(precision, seed, fault.layout or "dp_shard=3", fault.name)


def run_case(case: Case, directory: Path, size: str) -> dict[str, Any]:
    """Runs one demonstration; returns its row."""
    command = [sys.executable, "-m", "samerun", "demo", "--dir", str(directory), "--size", size, "--json"]
    command += ["--precision", case.precision, "--seed", str(case.seed), "--to", case.layout]
    command += ["--break", case.fault] if case.fault else []
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    try:
        verdict = json.loads(done.stdout)
    except ValueError:
        verdict = {"verdict": f"none (exit {done.returncode})", "stderr": done.stderr[-2000:]}
    divergence = verdict.get("first_divergence") or {}
    return {
        **asdict(case),
        "verdict": verdict.get("verdict"),
        "named": list(verdict.get("named") or ()),
        "codes": [reason["code"] for reason in verdict.get("reasons", ())],
        "stage": divergence.get("stage"),
        "first": divergence.get("code"),
        "where": {name: value for name, value in (divergence.get("where") or {}).items() if name != "file"},
        "used": _most_of_a_band(verdict),
        "seconds": round(time.monotonic() - started, 1),
        "stderr": verdict.get("stderr", ""),
    }


def _most_of_a_band(verdict: dict[str, Any]) -> float | None:
    """Returns the largest part of any sealed band that was used (1 is the limit)."""
    numerics = [row for row in verdict.get("criteria", ()) if row["name"] == "numerics"]
    return numerics[0]["value"] if numerics and isinstance(numerics[0]["value"], int | float) else None


def render(rows: list[dict[str, Any]]) -> str:
    """Returns docs/faults.md."""
    clean = [row for row in rows if row["fault"] is None]
    broken = [row for row in rows if row["fault"] is not None]
    promoted = sum(row["verdict"] == "promote" for row in clean)
    caught = sum(row["verdict"] == "reject" and bool(row["named"]) for row in broken)
    lines = [
        "# Which faults are caught",
        "",
        "Made by `python scripts/fault_matrix.py`: real runs of the demonstration's training script on CPU, source on",
        "4 FSDP2 ranks, every move judged by `samerun run`. Faults are put into the job, its launcher or its files",
        "after the tolerances were sealed, never into a trace.",
        "",
        f"**Clean moves promoted: {promoted} of {len(clean)}. Faults rejected under their own name: {caught} of "
        f"{len(broken)}.**",
        "",
        "## Clean moves",
        "",
        "`band used` is the largest part of any sealed band that the candidate used over 20 updates (1: all).",
        "",
        "| precision | seed | destination | verdict | band used |",
        "|---|---|---|---|---|",
    ]
    for row in clean:
        used = "" if row["used"] is None else f"{row['used']:.2g}"
        lines.append(f"| {row['precision']} | {row['seed']} | `{row['layout']}` | {row['verdict']} | {used} |")
    runs = sorted({(row["precision"], row["seed"]) for row in broken})
    heads = [f"{precision}, seed {seed}" for precision, seed in runs]
    lines += [
        "",
        "## Faults",
        "",
        "Each cell: the finding that named the fault, and the stage of the first divergence. A dash: at this precision",
        "it changes nothing.",
        "",
        f"| fault | what happens | {' | '.join(heads)} |",
        "|---|---|" + "---|" * len(heads),
    ]
    by_case = {(row["fault"], row["precision"], row["seed"]): row for row in broken}
    for fault in FAULTS.values():
        cells = [_cell(by_case.get((fault.name, *run))) for run in runs]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {fault.name} | {fault.story} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_confusion(broken)]) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    named = [f"[{code}](findings.md#{code.lower()})" for code in row["named"][:1]]
    verdict = "" if row["verdict"] == "reject" else f"**{row['verdict']}** "
    return f"{verdict}{named[0] if named else '**not named**'} {row['stage'] or ''}".strip()


def _confusion(broken: list[dict[str, Any]]) -> list[str]:
    """Returns the table of what was injected against the kind that the first divergence points to."""
    pairs = Counter((FAULTS[row["fault"]].kind.value, kind_of(row["first"] or "") or "nothing") for row in broken)
    injected = sorted({pair[0] for pair in pairs})
    right = sum(count for pair, count in pairs.items() if pair[0] == pair[1])
    lines = [
        "## Confusion by kind",
        "",
        "A verdict says which kind of failure its first divergence points to (`first_divergence.kind`). Several kinds",
        "show in the same quantity: a weight that matched no name and a weight joined in the wrong order are both a",
        f"weight with other values. {right} of {sum(pairs.values())} runs point to the kind that was injected.",
        "",
        "| injected | pointed to |",
        "|---|---|",
    ]
    for kind in injected:
        found = [(count, other) for (own, other), count in pairs.items() if own == kind]
        lines.append(f"| {kind} | {', '.join(f'{other} ({count})' for count, other in sorted(found, reverse=True))} |")
    return lines


def main() -> int:
    """Runs what is missing; returns 1 if any row is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--precision", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--only", choices=["clean", "faults"])
    parser.add_argument("--write", action="store_true", help="write docs/faults.md from what is there")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    record = args.dir / "matrix.json"
    rows: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    with warm_launches():
        for case in list_cases(args):
            if case.name in rows:
                continue
            rows[case.name] = row = run_case(case, args.dir / "work", args.size)
            record.write_text(json.dumps(rows, indent=1))
            print(f"{case.name}: {row['verdict']} {row['named'] or row['codes']} {row['seconds']} s", flush=True)
    if args.write:
        (TOP / "docs" / "faults.md").write_text(render(list(rows.values())), encoding="utf-8")
    wrong = [
        name
        for name, row in rows.items()
        if (row["verdict"] != "promote" if row["fault"] is None else row["verdict"] != "reject" or not row["named"])
    ]
    print(f"{len(rows)} rows, not as they should be: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
