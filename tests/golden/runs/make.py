"""Makes the run directories that the report's tests read: real training jobs, really moved and judged.

    python tests/golden/runs/make.py WORKFOLDER

Trains the example (size `tiny`) on 4 ranks and moves it to 3: once as it should be, once with a sampler that starts the
epoch anew while the manifest does not insist on objects, so that only the ids of the samples tell. Takes a few minutes.
Paths of the machine are replaced by `/data/demo`, recorded logits are left out for their size; all else is as it was.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

HERE = Path(__file__).parent
TEXT = {".json", ".yaml", ".txt", ".jsonl"}


def samerun(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "samerun", *arguments], check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"samerun {arguments[0]} ended with {done.returncode}")


LOSE_POSITION = """\
import runpy
import sys
from pathlib import Path

from samerun.train.sampler import ElasticSampler

original = ElasticSampler.load_state_dict


def load_state_dict(self, state):
    original(self, {**state, "samples_in_epoch": 0})


ElasticSampler.load_state_dict = load_state_dict
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""What the second job really runs: the sampler keeps its counters and forgets where in the epoch it was."""


def make_promote(work: Path) -> None:
    """Trains, moves and judges; the demonstration does all of it."""
    samerun("demo", "--dir", str(work), "--size", "tiny")
    pack(next(work.glob("run-*")) / "moves/dp_shard=3/run", "promote", work)


def make_reject(work: Path) -> None:
    """Moves the same checkpoint again, with another declaration and a job that loses its place after the seal."""
    clean = next(work.glob("run-*")) / "moves/dp_shard=3"
    move = clean.parent / "position-lost"
    move.mkdir()
    manifest = (clean / "move.yaml").read_text(encoding="utf-8")
    changed = manifest.replace("  objects: exact", "  objects: expected-to-change")
    if changed == manifest:
        raise SystemExit("the draft no longer declares objects exact")
    (move / "move.yaml").write_text(changed, encoding="utf-8")
    (move / "lose_position.py").write_text(LOSE_POSITION, encoding="utf-8")
    launcher = (clean / "launch.sh").read_text(encoding="utf-8")
    (move / "launch.sh").write_text(launcher, encoding="utf-8")
    run = ("run", str(move / "move.yaml"), "--dir", str(move / "run"))
    samerun(*run, "--until", "control")
    broken = launcher.replace("../../../example/", "lose_position.py ../../../example/")
    (move / "launch.sh").write_text(broken, encoding="utf-8")
    samerun(*run)
    pack(move / "run", "reject", work)


def pack(run: Path, name: str, work: Path) -> None:
    """Packs a run directory as `name`.tar.xz beside this script."""
    raw = BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for path in sorted(run.rglob("*")):
            if not path.is_file() or path.name in ("lock", "report.html") or path.suffix == ".npy":
                continue
            content = path.read_bytes()
            if path.suffix in TEXT:
                content = content.replace(str(work).encode(), b"/data/demo").replace(sys.executable.encode(), b"python")
            entry = tarfile.TarInfo(f"{name}/{path.relative_to(run).as_posix()}")
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))
    (HERE / f"{name}.tar.xz").write_bytes(lzma.compress(raw.getvalue(), preset=9))


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    make_promote(folder)
    make_reject(folder)
