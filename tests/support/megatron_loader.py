"""Megatron's own data loaders on real gloo ranks, run as a script: jobs as JSON on stdin, the ids it gave on stdout.

`build_pretraining_data_loader` and its samplers come from the `megatron.training` that PYTHONPATH leads to. The wheel
of megatron-core has it from 0.19 on; its code (if not its metadata) runs on Python 3.11, but for one name of `typing`.

A job is `{"kind", "length", "micro", "dp", "tp", "ep", "consumed": [...]}`. The answer to each is, for every number of
consumed samples, what each rank's loader then hands out until the epoch ends: `[consumed][rank][batch]`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
import typing
from typing import Any

JOB = {"dp": 1, "tp": 1, "ep": 1, "workers": 2}


def load() -> Any:
    """Imports Megatron's loader once, for all ranks to inherit."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if sys.version_info < (3, 12):
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    from megatron.training.datasets import data_samplers

    return data_samplers


class Numbers:
    """Samples that are their own ids."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(samplers: Any, job: dict[str, Any], consumed: int) -> Any:
    from megatron.core import mpu
    from megatron.training.global_vars import set_args
    from torch.utils.data import DataLoader

    data: Any = Numbers(job["length"])
    if job["kind"] != "sequential-keep":
        kind = "single" if job["kind"] == "sequential" else "cyclic"
        set_args(
            argparse.Namespace(
                dataloader_type=kind, micro_batch_size=job["micro"], num_workers=job["workers"],
                global_batch_size=2 * job["micro"] * job["dp"], data_sharding=job["kind"] == "cyclic-sharded",
                hybrid_context_parallel=False, exit_signal_handler=False, full_validation=False,
            )
        )  # fmt: skip
        return samplers.build_pretraining_data_loader(data, consumed)
    sampler = samplers.MegatronPretrainingSampler(  # the loader has no argument for keeping the last short step
        job["length"], consumed, job["micro"], mpu.get_data_parallel_rank(), job["dp"], drop_last=False
    )
    return DataLoader(data, batch_sampler=sampler, num_workers=job["workers"], collate_fn=list)


def on_rank(sending: Any, store: str, rank: int, world_size: int, samplers: Any, jobs: list[dict[str, Any]]) -> None:
    import torch.distributed as dist
    from megatron.core import mpu

    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        found: list[Any] = []
        for job in jobs:
            mpu.initialize_model_parallel(
                job["tp"], expert_model_parallel_size=job["ep"], create_gloo_process_groups=True
            )
            assert mpu.get_data_parallel_world_size() == job["dp"]
            found.append([[[*map(int, batch)] for batch in loader_of(samplers, job, at)] for at in job["consumed"]])
            mpu.destroy_model_parallel()
        sending.send(found)
        dist.barrier()
    except BaseException:
        sending.send(traceback.format_exc())
    os._exit(0)


def run(samplers: Any, world_size: int, jobs: list[dict[str, Any]]) -> list[list[Any]]:
    """Returns `[job][consumed][rank][batch]`."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for rank in range(world_size):
            receiving, sending = context.Pipe(duplex=False)
            given = (sending, f"{folder}/store", rank, world_size, samplers, jobs)
            context.Process(target=on_rank, args=given).start()
            sending.close()  # a rank that dies is then the end of its pipe
            ends.append(receiving)
        by_rank = [end.recv() for end in ends]
    if failed := [text for text in by_rank if isinstance(text, str)]:
        raise RuntimeError(failed[0])
    return [[list(rest) for rest in zip(*found, strict=True)] for found in zip(*by_rank, strict=True)]


def main() -> None:
    jobs = [{**JOB, **job} for job in json.load(sys.stdin)]
    samplers = load()
    answers: dict[int, Any] = {}
    for size in {job["dp"] * job["tp"] for job in jobs}:
        numbers = [number for number, job in enumerate(jobs) if job["dp"] * job["tp"] == size]
        answers |= zip(numbers, run(samplers, size, [jobs[number] for number in numbers]), strict=True)
    json.dump([answers[number] for number in range(len(jobs))], sys.stdout)


if __name__ == "__main__":
    main()
