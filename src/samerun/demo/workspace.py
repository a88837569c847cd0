"""Where a demonstration lives on disk: one trained run, and one folder per move that is made of it.

DIR/example/                     the training script and its modules, copied so that they can be read and changed
DIR/run-SIZE/checkpoints/        what the run saved
DIR/run-SIZE/trace/              its own record
DIR/run-SIZE/moves/NAME/         move.yaml, launch.sh, run/ (the run directory), report.html
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from samerun.core.mesh import Layout
from samerun.demo.faults import Fault
from samerun.errors import Problem, UsageError

LAUNCHER = """\
#!/usr/bin/env bash
# How this run is started: launch.sh PYTHON WORLD_SIZE LAYOUT GLOBAL_BATCH MAX_MICROBATCH CHECKPOINT
set -euo pipefail
python=$1
world_size=$2 layout=$3
global_batch=$4 max_microbatch=$5 checkpoint=$6
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$world_size" \\
  ../../../example/train.py --resume "$checkpoint" --layout "$layout" \\
  --global-batch "$global_batch" --max-microbatch "$max_microbatch" {arguments}
"""


SOURCE = Layout(dp_shard=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What is trained and where it is moved. Counts are in updates and samples."""

    directory: Path
    destination: Layout
    fault: Fault | None = None
    size: str = "small"
    precision: str = "float32"
    seed: int = 0
    source: Layout = SOURCE
    save_at_update: int = 12
    window_updates: int = 20
    global_batch: int = 32
    max_microbatch: int = 2

    @property
    def training_arguments(self) -> tuple[str, ...]:
        """Arguments of the training script that stay the same on every layout."""
        return (
            *("--size", self.size, "--precision", self.precision, "--seed", str(self.seed)),
            *("--schedule-updates", "60", "--warmup", "8", "--log-every", "10", "--eval-every", "20"),
            *("--ema", "0.95", "--loss-scale", "256"),
        )

    @property
    def name(self) -> str:
        """The move's name, which is also its folder."""
        plain = str(self.destination)
        return f"{plain}.break-{self.fault.name}" if self.fault else plain


@dataclass(frozen=True, slots=True)
class Workspace:
    """The paths of one demonstration."""

    settings: DemoSettings

    @property
    def example(self) -> Path:
        """The copied example."""
        return self.settings.directory / "example"

    @property
    def run(self) -> Path:
        """The trained run."""
        settings = self.settings
        return settings.directory / f"run-{settings.size}-{settings.precision}-{settings.seed}"

    @property
    def source_checkpoint(self) -> Path:
        """The checkpoint that the run saved."""
        return self.run / "checkpoints" / f"step-{self.settings.save_at_update}"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of this move: the run's own, or a copy of it when the fault changes files."""
        fault = self.settings.fault
        damaged = fault is not None and fault.changes_files
        return self.move / "checkpoints" / self.source_checkpoint.name if damaged else self.source_checkpoint

    @property
    def move(self) -> Path:
        """Everything about this move."""
        return self.run / "moves" / self.settings.name

    @property
    def manifest(self) -> Path:
        """The migration manifest."""
        return self.move / "move.yaml"

    @property
    def launcher(self) -> Path:
        """The script that starts the job; the manifest's launch command calls it."""
        return self.move / "launch.sh"

    @property
    def rundir(self) -> Path:
        """The run directory of this move."""
        return self.move / "run"

    def check_directory(self) -> None:
        """Makes the demonstration's directory. Raises UsageError if it is something else already."""
        directory = self.settings.directory
        marker = directory / ".samerun-demo"
        if directory.exists() and any(directory.iterdir()) and not marker.exists():
            raise UsageError(
                Problem(
                    "SR-DEMO-DIR",
                    f"{directory} exists and was not made by `samerun demo`",
                    where={"file": str(directory)},
                    hint="name another directory with --dir; this one is left alone",
                )
            )
        directory.mkdir(parents=True, exist_ok=True)
        marker.touch()

    def copy_example(self) -> None:
        """Copies the example beside the runs, unless it is there: a copy that was edited stays as it is."""
        if not self.example.exists():
            shutil.copytree(find_example(), self.example, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))

    def prepare(self) -> None:
        """Makes this move's folder, launcher and, for damage to files, its own checkpoint. An earlier one is redone."""
        if self.move.exists():
            shutil.rmtree(self.move)
        self.move.mkdir(parents=True)
        arguments = " ".join(self.settings.training_arguments)
        self.launcher.write_text(LAUNCHER.format(arguments=arguments), encoding="utf-8")
        if self.checkpoint != self.source_checkpoint:
            shutil.copytree(self.source_checkpoint, self.checkpoint)


def find_example() -> Path:
    """Returns the folder of the example: beside the installed package, or in the checkout it runs from."""
    installed = Path(str(resources.files("samerun") / "demo" / "example"))
    checkout = Path(__file__).parents[3] / "examples" / "pytorch"
    for folder in (installed, checkout):
        if (folder / "train.py").is_file():
            return folder
    raise UsageError(
        Problem("SR-DEMO-EXAMPLE", "the example training script was not installed", hint="reinstall samerun")
    )
