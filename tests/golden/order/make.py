"""Writes the ids that the frameworks' real loaders hand out. Run it where they are installed:

    python3.11 -m venv v && v/bin/pip install torch==2.13.0 && v/bin/pip install numpy transformers accelerate torchdata
    v/bin/python tests/golden/order/make.py --megatron MEGATRON/megatron/training/datasets/data_samplers.py \
        --megatron-scheduler MEGATRON/megatron/core/optimizer_param_scheduler.py

Every loader runs on real gloo processes, with workers and prefetch where it can. `loader.json` has one entry per case:
its arguments, the ids as `[epoch][rank][batch]`, and `after`, the batches that came from a loader resumed after each
number of batches of the first epoch by the framework's own means. Megatron's module needs an installed Megatron to be
imported, so its two sampler classes are taken out of the file and run as they are.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

HERE = Path(__file__).parent


class Numbers(Dataset[int]):
    """Samples that are their own ids."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(index)


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls `function(rank, world_size, *args)` on forked gloo ranks and returns the results by rank."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for rank in range(world_size):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(sending, folder, rank, world_size, function, args))
            process.start()
            pipes.append((receiving, process))
        results = [receiving.recv() for receiving, _ in pipes]
        for _, process in pipes:
            process.join()
    if failed := [text for ok, text in results if not ok]:
        raise RuntimeError(failed[0])
    return [value for _, value in results]


def _rank(sending: Any, folder: str, rank: int, world_size: int, function: Callable[..., Any], args: Any) -> None:
    import traceback

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        sending.send((True, function(rank, world_size, *args)))
        dist.barrier()
    except BaseException:
        sending.send((False, traceback.format_exc()))
    os._exit(0)


# --- Accelerate ----------------------------------------------------------------------------------------------------


def accelerate_cases() -> list[dict[str, Any]]:
    """Every way to cut a loader, at lengths that nothing divides."""
    cases: list[dict[str, Any]] = []
    for processes in (2, 3):
        for length in (23, 5):
            for more in (
                {},
                {"even_batches": False},
                {"drop_last": True},
                {"split_batches": True},
                {"split_batches": True, "drop_last": True},
                {"split_batches": True, "even_batches": False},
                {"dispatch_batches": True},
                {"dispatch_batches": True, "drop_last": True},
                {"dispatch_batches": True, "split_batches": True},
                {"shuffle": False, "num_workers": 2},
                {"num_workers": 2},
            ):
                batch = 2 * processes if more.get("split_batches") else 2
                if length < batch * processes and (more.get("drop_last") or more.get("dispatch_batches")):
                    continue
                cases.append({"processes": processes, "length": length, "batch": batch, "seed": 7, **more})
    return cases


def accelerate_ids(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[Any]:
    from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
    from accelerate.state import AcceleratorState, GradientState, PartialState

    found = []
    for case in cases:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        config = DataLoaderConfiguration(
            split_batches=case.get("split_batches", False),
            dispatch_batches=case.get("dispatch_batches", False),
            even_batches=case.get("even_batches", True),
            use_seedable_sampler=True,
            data_seed=case["seed"],
        )
        accelerator = Accelerator(dataloader_config=config, cpu=True)
        data = Numbers(case["length"])
        sampler = RandomSampler(data) if case.get("shuffle", True) else SequentialSampler(data)
        loader = accelerator.prepare(
            DataLoader(
                data,
                case["batch"],
                sampler=sampler,
                drop_last=case.get("drop_last", False),
                num_workers=case.get("num_workers", 0),
            )
        )
        epochs = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            epochs.append([batch.tolist() for batch in loader])
        after = []
        counts = len(epochs[0]) + (not case.get("dispatch_batches", False))  # dispatching nothing fails in 1.15.0
        for count in range(counts if case.get("even_batches", True) else 0):
            loader.set_epoch(0)
            after.append([batch.tolist() for batch in skip_first_batches(loader, count)])
        found.append((epochs, after))
    return found


# --- Hugging Face Trainer --------------------------------------------------------------------------------------------


def trainer_ids(rank: int, world_size: int, length: int, batch: int, folder: str) -> Any:
    from transformers import Trainer, TrainingArguments

    class Rows(Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return length

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.tensor([float(index)]), "ids": torch.tensor(int(index))}

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any, ids: Any) -> dict[str, Any]:
            return {"loss": self.layer(x).mul(1e-3).square().mean()}

    class Recording(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(inputs["ids"].tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    def run(resume: str | None) -> list[Any]:
        seen.clear()
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=folder if resume is None else folder + "-again",
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            seed=11,
            use_cpu=True,
            save_strategy="steps" if resume is None else "no",
            save_steps=1,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_num_workers=1,
            optim="sgd",
        )
        Recording(model=Model(), args=arguments, train_dataset=Rows()).train(resume_from_checkpoint=resume)
        return list(seen)

    seen: list[Any] = []
    whole = run(None)
    steps = len(list(Path(folder).glob("checkpoint-*")))
    after = {step: run(f"{folder}/checkpoint-{step}") for step in range(1, steps)}
    return whole, after


# --- torchdata -------------------------------------------------------------------------------------------------------


def torchdata_ids(rank: int, world_size: int, length: int, batch: int, workers: int, drop_last: bool) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def build() -> Any:
        data = Numbers(length)
        sampler = DistributedSampler(data, world_size, rank, seed=3)
        sampler.set_epoch(0)
        more = {"prefetch_factor": 3} if workers else {}
        return StatefulDataLoader(data, batch, sampler=sampler, num_workers=workers, drop_last=drop_last, **more)

    loader = build()
    epoch, states = [], []
    for ids in loader:
        epoch.append(ids.tolist())
        states.append(loader.state_dict())
    after = []
    for state in states:
        again = build()
        again.load_state_dict(state)
        after.append([ids.tolist() for ids in again])
    return [epoch], after, [json.loads(json.dumps(state, default=str)) for state in states]


# --- Megatron --------------------------------------------------------------------------------------------------------


def megatron_classes(file: Path) -> dict[str, Any]:
    """Returns the sampler classes of Megatron's own file, without importing the rest of Megatron."""
    tree = ast.parse(file.read_text())
    wanted = {"MegatronPretrainingSampler", "MegatronPretrainingRandomSampler", "RandomSeedDataset"}
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted]
    scope: dict[str, Any] = {"torch": torch, "np": np, "random": random, "Dataset": Dataset}
    exec(compile(tree, str(file), "exec"), scope)
    return scope


def megatron_cases(file: Path) -> list[dict[str, Any]]:
    scope, cases = megatron_classes(file), []
    shapes = [(50, 2, 3), (50, 2, 4), (97, 3, 4), (48, 2, 4), (60, 1, 5), (31, 4, 2)]
    for length, micro, ranks in shapes:
        for kind in ("sequential", "cyclic-sharded", "cyclic"):
            for drop_last in (True, False) if kind == "sequential" else (True,):
                run = lambda consumed, rank, *at: list(megatron_epoch(scope, *at, consumed, rank))  # noqa: E731
                at = (kind, length, micro, ranks, drop_last)
                step, active = micro * ranks, length - length % (micro * ranks)
                case = {"kind": kind, "length": length, "micro": micro, "dp": ranks, "drop_last": drop_last}
                epochs = range(1 if kind == "sequential" else 3)
                case["ids"] = [[run(epoch * active, rank, *at) for rank in range(ranks)] for epoch in epochs]
                counts = range(0, active, step)
                case["after"] = [[run(count, rank, *at) for rank in range(ranks)] for count in counts]
                cases.append(case)
    return cases


def megatron_epoch(
    scope: Any, kind: str, length: int, micro: int, ranks: int, drop_last: bool, consumed: int, rank: int
) -> Any:
    data = Numbers(length)
    if kind == "sequential":
        sampler = scope["MegatronPretrainingSampler"](length, consumed, micro, rank, ranks, drop_last)
    else:
        sharded = kind == "cyclic-sharded"
        sampler = scope["MegatronPretrainingRandomSampler"](data, length, consumed, micro, rank, ranks, sharded)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=list)
    return list(loader)


# --- Megatron's schedule ---------------------------------------------------------------------------------------------


def megatron_schedules(path: Path) -> list[dict[str, Any]]:
    """What Megatron's scheduler sets in 30 updates, its `num_steps` (samples) before each, and its state at the end."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "OptimizerParamScheduler"]
    scope: dict[str, Any] = {"math": __import__("math"), "Optional": Any, "log_single_rank": lambda *_: None}
    scope |= {"logger": None, "logging": __import__("logging")}
    exec(compile(tree, str(path), "exec"), scope)
    cases = []
    for style in ("constant", "linear", "cosine", "inverse-square-root", "WSD"):
        for warm_up, batch in ((0, 8), (40, 8), (36, 5)):
            optimizer = argparse.Namespace(
                param_groups=[{"lr": 0.0}, {"lr": 0.0, "max_lr": 0.004, "min_lr": 0.001}, {"lr": 0.0, "lr_mult": 1.0}]
            )
            scheduler = scope["OptimizerParamScheduler"](
                optimizer, 1e-4, 0.01, 1e-3, warm_up, 200, style, 0.0, 0.0, 200, "constant",
                wsd_decay_steps=60, lr_wsd_decay_style="linear",
            )  # fmt: skip
            rates, steps = [], []
            for _ in range(30):
                steps.append(scheduler.num_steps)
                rates.append([group["lr"] for group in optimizer.param_groups])
                scheduler.step(batch)
            groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in optimizer.param_groups]
            state = scheduler.state_dict()
            cases.append({"batch": batch, "groups": groups, "rates": rates, "steps": steps, "state": state})
    return cases


# --- The Trainer's schedules -----------------------------------------------------------------------------------------


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.25}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {"lr_end": 1e-5, "power": 1.7}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 9}),
    ("cosine_with_min_lr", {"min_lr": 1e-4}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 8}),
    ("warmup_stable_decay", {"num_decay_steps": 6, "num_stable_steps": 9, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 7, "warmup_type": "cosine", "decay_type": "linear"}),
    ("warmup_stable_decay", {"num_decay_steps": 7, "warmup_type": "1-sqrt"}),
]


def all_trainer_schedules() -> list[dict[str, Any]]:
    """Returns the cases of trainer_schedule.json: rates of two groups in 30 updates, and the state after 7."""
    from transformers import get_scheduler

    cases = []
    for kind, more in SCHEDULES:
        for warm_up in (0, 5):
            groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (2e-3, 5e-4)]
            optimizer = torch.optim.SGD(groups, lr=2e-3)
            scheduler = get_scheduler(kind, optimizer, warm_up, 25, scheduler_specific_kwargs=dict(more))
            rates, state = [], {}
            for update in range(30):
                if update == 7:
                    state = {name: value for name, value in scheduler.state_dict().items() if name != "lr_lambdas"}
                rates.append([group["lr"] for group in optimizer.param_groups])
                optimizer.step()
                scheduler.step()
            cases.append({"kind": kind, "more": more, "warm_up": warm_up, "total": 25, "rates": rates, "state": state})
    return cases


# --- Every file ------------------------------------------------------------------------------------------------------


def all_torchdata() -> list[dict[str, Any]]:
    """Returns the cases of torchdata.json."""
    cases = []
    for ranks, length, batch, workers, drop in ((2, 23, 2, 0, False), (3, 23, 2, 2, False), (2, 27, 4, 2, True)):
        found = on_ranks(ranks, torchdata_ids, length, batch, workers, drop)
        ids = [[rank[0][0] for rank in found]]
        case = {"processes": ranks, "length": length, "batch": batch, "seed": 3, "workers": workers}
        after = [[rank[1][count] for rank in found] for count in range(len(found[0][1]))]
        states = [[rank[2][count] for rank in found] for count in range(len(found[0][2]))]
        cases.append({**case, "drop_last": drop, "ids": ids, "after": after, "states": states})
    return cases


def all_accelerate() -> list[dict[str, Any]]:
    """Returns the cases of accelerate.json."""
    cases = []
    for processes in (2, 3):
        mine = [case for case in accelerate_cases() if case["processes"] == processes]
        found = on_ranks(processes, accelerate_ids, mine)
        for index, case in enumerate(mine):
            by_rank = [rank[index] for rank in found]
            ids = [[rank[0][epoch] for rank in by_rank] for epoch in range(2)]
            after = [[rank[1][count] for rank in by_rank] for count in range(len(by_rank[0][1]))]
            cases.append({**case, "ids": ids, "after": after})
    return cases


def all_trainer() -> list[dict[str, Any]]:
    """Returns the cases of trainer.json."""
    cases = []
    for ranks, length, batch in ((2, 23, 2), (3, 23, 1)):
        with tempfile.TemporaryDirectory() as folder:
            found = on_ranks(ranks, trainer_ids, length, batch, folder + "/run")
        case = {"processes": ranks, "length": length, "batch": batch, "accumulation": 2, "seed": 11}
        after = {str(step): [rank[1][step] for rank in found] for step in found[0][1]}
        cases.append({**case, "ids": [rank[0] for rank in found], "after": after})
    return cases


FILES = {
    "torchdata": all_torchdata,
    "accelerate": all_accelerate,
    "trainer": all_trainer,
    "trainer_schedule": all_trainer_schedules,
}


def write(file: Path, body: Any) -> None:
    """Writes one golden file, a case per line."""
    text = "[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in body) + "\n]\n"
    file.write_text(text)
    print(f"{file.name}: {len(body)} cases, {len(text)} bytes", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megatron", type=Path, help="Megatron's data_samplers.py")
    parser.add_argument("--megatron-scheduler", type=Path, help="Megatron's optimizer_param_scheduler.py")
    parser.add_argument("--only", default="accelerate,torchdata,trainer,trainer_schedule,megatron,schedule")
    parser.add_argument("--into", type=Path, default=HERE, help="folder of the files (default: beside this script)")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "megatron" in only and arguments.megatron:
        write(arguments.into / "megatron.json", megatron_cases(arguments.megatron))
    if "schedule" in only and arguments.megatron_scheduler:
        write(arguments.into / "megatron_schedule.json", megatron_schedules(arguments.megatron_scheduler))
    for name in [name for name in FILES if name in only]:
        write(arguments.into / f"{name}.json", FILES[name]())


if __name__ == "__main__":
    main()
