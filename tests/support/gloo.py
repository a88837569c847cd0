"""Runs a function on every rank of a real gloo process group, forked from this (already warm) process."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0, with_workers: bool = False
) -> list[Any]:
    """Calls `function(rank, world_size, *args)` on `world_size` forked gloo ranks; returns results by rank.

    Torch is imported once here and inherited by fork, so a world starts in well under a second. The first failing
    rank's traceback is raised; every process is ended whatever happens. `with_workers` lets ranks have children of
    their own, such as a loader's workers.
    """
    import torch

    import_once()
    torch.set_num_threads(1)  # before any fork: children must not inherit a thread pool
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[tuple[Any, Connection]] = []
        for rank in range(world_size):
            receiving, sending = context.Pipe()
            process = context.Process(
                target=_run_rank,
                args=(sending, f"{folder}/store", rank, world_size, function, args),
                daemon=not with_workers,
            )
            process.start()
            sending.close()
            ranks.append((process, receiving))
        try:
            return [_receive(rank, receiving, timeout) for rank, (_, receiving) in enumerate(ranks)]
        finally:
            for _, receiving in ranks:
                with suppress(OSError):
                    receiving.send("received")
            for process, _ in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def import_once() -> None:
    """Imports, before any fork, what FSDP2 and DCP import at their first use: seconds per rank otherwise."""
    for module in ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "fsspec"):
        importlib.import_module(module)


def import_frameworks(*modules: str) -> None:
    """Imports, before any fork, what jobs of a framework would import in every rank. Its warnings are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            importlib.import_module(module)


def _receive(rank: int, receiving: Connection, timeout: float) -> Any:
    if not receiving.poll(timeout):
        raise TimeoutError(f"rank {rank} sent nothing within {timeout} s")
    try:
        ok, value = receiving.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died without a word") from None
    if not ok:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def _forget_accelerate() -> None:
    """Accelerate keeps one state per process; a test that used it here alone must not have settled it for the ranks."""
    if states := sys.modules.get("accelerate.state"):
        for kept in (states.AcceleratorState, states.PartialState, states.GradientState):
            kept._reset_state()


def _run_rank(
    sending: Connection, store: str, rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    _forget_accelerate()
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        sending.send((True, function(rank, world_size, *args)))
        sending.poll(60)  # tensors are fetched from this process while they are received
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sending.send((False, traceback.format_exc()))
        os._exit(1)
    finally:
        sending.close()
    os._exit(0)
