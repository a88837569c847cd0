"""Kills `train.py` five times, each time on another number of ranks, and compares it with a run that was left alone.

    python move.py --dir /tmp/elastic

About two minutes on four cores. Prints the audit of all starts, and the largest difference of any update's loss.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MOVES = ((2, 11), (3, 22), (1, 31), (4, 42), (2, 51), (3, None))
"""(ranks, the update within which the start is killed)."""
LOSS_BOUND = 16 * 2.0**-23
"""Relative. A sum of n fp32 terms in another order moves by about sqrt(n) units of rounding (Higham, 2002, 4.2); here n
is up to 250 tokens. A lost or repeated sample, or another mask, moves a loss by 1e-3 and more."""


def start(directory: Path, ranks: int, updates: int, die_in: int | None) -> None:
    """Runs one start of the job; one that is to be killed ends with an error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(Path(__file__).with_name("train.py")), "--dir", str(directory), "--updates", str(updates)]
    done = subprocess.run(
        command if die_in is None else [*command, "--die-in", str(die_in)], capture_output=True, text=True, check=False
    )
    if (done.returncode == 0) != (die_in is None):
        sys.exit(done.stderr)
    print(f"{ranks} ranks: {'finished' if die_in is None else f'killed within update {die_in}'}")


def losses(directory: Path) -> dict[int, float]:
    """Returns each update's loss as the start that made it for good recorded it."""
    found: dict[int, float] = {}
    for ledger in sorted((directory / "ledger").iterdir()):
        lines = [json.loads(line) for line in (ledger / "rank-00000.jsonl").read_text().splitlines()]
        found |= {line["update"]: line["loss"] for line in lines if line["kind"] == "update"}
    return found


def main() -> int:
    """Returns the audit's exit code, or 1 for a loss that is not the uninterrupted run's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=60)
    args = parser.parse_args()
    start(args.dir / "alone", 2, args.updates, None)
    for ranks, die_in in MOVES:
        start(args.dir / "moved", ranks, args.updates, die_in)
    alone, moved = losses(args.dir / "alone"), losses(args.dir / "moved")
    worst = max(abs(alone[update] - moved[update]) / alone[update] for update in alone)
    print(f"{len(alone)} updates, largest relative difference of a loss: {worst:.1e} (bound {LOSS_BOUND:.1e})")
    if moved.keys() != alone.keys() or worst > LOSS_BOUND:
        return 1
    ledgers = sorted(map(str, (args.dir / "moved" / "ledger").iterdir()))
    return subprocess.run(
        [sys.executable, "-m", "samerun", "audit", *ledgers, "--order", "keyed:samples=97,seed=5"], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
