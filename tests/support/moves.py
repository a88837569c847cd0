"""A trainer's example, trained by its own means, moved by `samerun run`, and then moved again with a fault in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samerun.demo.answers import fill_in
from samerun.runner.run import RunResult, run_migration
from samerun.runner.rundir import RunDirectory
from support.warm_ranks import WARM_PATH

ROOT = Path(__file__).parents[2]
TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node {world_size}"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{WARM_PATH}"}


@dataclass(frozen=True)
class Move:
    """A folder with what the example saved (`saved`), the manifest, the run directory, and the name of the fault."""

    folder: Path
    script: Path

    @property
    def manifest(self) -> Path:
        return self.folder / "move.yaml"

    @property
    def rundir(self) -> RunDirectory:
        return RunDirectory(self.folder / "move.run")

    def train(self, ranks: int, *arguments: object) -> None:
        """Runs the example on `ranks` processes in `folder`."""
        launcher = TORCHRUN.format(python=sys.executable, world_size=ranks).split()
        self._call(*launcher, str(self.script), *map(str, arguments))

    def samerun(self, *words: str) -> str:
        """Runs a verb in `folder` and returns its standard output."""
        return self._call(sys.executable, "-m", "samerun", *words)

    def _call(self, *command: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SAMERUN_")}
        done = subprocess.run(
            command, cwd=self.folder, env={**environment, **ENVIRONMENT}, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    def draft(self, checkpoint: str, source: str, to: str, arguments: str, **answers: Any) -> None:
        """Drafts a manifest for the checkpoint and fills in what is asked; `a__b` is the key `a.b`.

        An answer of `...` leaves what was drafted.
        """
        self.samerun("draft", checkpoint, "--from", source, "--to", to, "-o", "move.yaml")
        answered = common(self.script, arguments) | {key.replace("__", "."): answers[key] for key in answers}
        fill_in(self.manifest, {key: value for key, value in answered.items() if value is not ...})

    def run(self, *, fault: str = "none", stage: str | None = None) -> RunResult:
        """Runs the move, or again from `stage` with a fault in the example's libraries."""
        (self.folder / "fault.txt").write_text(fault)
        if stage is not None:
            self.rundir.drop_stages([stage])
        return run_migration(self.manifest)

    def copy(self, folder: Path) -> Move:
        """Returns the move in a folder of its own, to be broken; the checkpoint stays where it is."""
        shutil.copytree(self.folder, folder)
        return Move(folder, self.script)


def new_move(folder: Path, example: str) -> Move:
    """Returns a folder for moving the example of that name."""
    shutil.copy(ROOT / "tests" / "support" / "faulty_trainer.py", folder)
    return Move(folder, ROOT / "examples" / example / "train.py")


def common(script: Path, arguments: str) -> dict[str, Any]:
    """Returns what is answered alike for every example."""
    return {
        "run.model_commit": "example",
        "run.precision": "float32",
        "progress.tokens": None,
        "progress.epoch": 0,
        "batch.invariant": "samples-per-update",
        "batch.option": "uniform",
        "transition.label": "continuation",
        "control.kind": "original-layout",
        "control.vary_microbatch": 1,
        "window.updates": 6,
        "window.log_every": 5,
        "window.eval_every": None,
        "launch.command": f"{TORCHRUN} faulty_trainer.py {script} {arguments}",
        "launch.environment": ENVIRONMENT,
        "launch.timeout_seconds": 300,
    }


def codes(result: RunResult) -> set[str]:
    """Returns the codes of what decided."""
    return {problem.code for problem in result.verdict.reasons}


def wrongly(result: RunResult) -> Mapping[str, Any]:
    """Returns what to show when a verdict is not the expected one."""
    return {
        "stage": result.stopped_at,
        "reasons": [(problem.code, problem.message, problem.where) for problem in result.verdict.reasons],
    }
