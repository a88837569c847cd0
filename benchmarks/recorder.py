"""What the recorder costs a training step, in CPU time per rank, for a model of 10 million parameters.

    python benchmarks/recorder.py            # needs torch; one process, then two that meet over gloo

The optimizer's step is empty, so that what a loop with the recorder takes more than one without is the recorder's own:
`samples`, the step's hooks, the sum of the loss over ranks, and the line in the trace. Measured apart: an update of a
ledger as it comes (nothing per tensor), an update in which norms are measured (the window after a save, and every job
that samerun launched), and the state captured after loading.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samerun.train import Recorder

STEP_SECONDS = 0.1
UPDATES = {"never": 400, "every": 6}


class Still(torch.optim.SGD):
    """An optimizer whose step does nothing but call its hooks."""

    def step(self, closure: Any = None) -> None:
        pass


def make_model() -> nn.Module:
    """Returns 10.0 million parameters in 82 tensors."""
    layers = [layer for _ in range(40) for layer in (nn.Linear(494, 494), nn.Tanh())]
    return nn.Sequential(nn.Embedding(400, 494), *layers, nn.Linear(494, 60))


def loop(model: nn.Module, optimizer: Any, recorder: Recorder, updates: int) -> float:
    """Returns the CPU seconds of one update of an otherwise empty loop."""
    ids, loss = list(range(32)), torch.tensor(1.5)
    begin = time.process_time()
    for _ in range(updates):
        recorder.samples(ids, loss=loss, tokens=32_000)
        optimizer.step()
    return (time.process_time() - begin) / updates


def least(measure: Callable[[], float], repeats: int = 3) -> float:
    return min(measure() for _ in range(repeats))


def measure(rank: int, ranks: int, folder: str) -> None:
    """Measures on one rank and prints rank 0's rows."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model = make_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    bare = Still(model.parameters(), lr=0.1)
    without = least(lambda: loop(model, bare, Recorder(), UPDATES["never"]))
    rows: list[tuple[str, float]] = []
    for norms, what in (("never", "an update of a ledger"), ("every", "an update with norms measured")):
        optimizer = Still(model.parameters(), lr=0.1)
        recorder = Recorder(Path(folder) / f"{ranks}-{norms}", norms=norms)  # type: ignore[arg-type]
        recorder.attach(model, optimizer)
        begin = time.process_time()
        recorder.loaded(update=0)
        captured = time.process_time() - begin
        took = least(lambda: loop(model, optimizer, recorder, UPDATES[norms]))  # noqa: B023
        rows.append((what, took - without))
        recorder.close()
    rows.append(("state captured after loading, once", captured))
    if rank == 0:
        for what, took in rows:
            print(f"{ranks:5} {what:36} {took * 1e3:9.3f} {took / STEP_SECONDS:14.2%}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    """Prints one row per measurement."""
    count = sum(parameter.numel() for parameter in make_model().parameters())
    print(f"{count / 1e6:.2f} million parameters\n{'ranks':>5} {'what':36} {'CPU ms':>9} {'of 100 ms':>14}", flush=True)
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            if ranks == 1:
                measure(0, 1, folder)
            else:
                torch.multiprocessing.spawn(measure, (ranks, folder), nprocs=ranks)


if __name__ == "__main__":
    main()
