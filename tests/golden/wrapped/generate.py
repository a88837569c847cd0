"""Writes small checkpoints of DeepSpeed inside Accelerate and inside transformers' Trainer, and their truth.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 generate.py accelerate|trainer TARGET

Needs torch, deepspeed, accelerate and transformers (see PROVENANCE.md); runs on a CPU with gloo. The truth is taken
from the live engine: full fp32 parameters and moments.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.utils.data import DataLoader, TensorDataset

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes minutes and is not needed

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1000,
}


class Net(torch.nn.Module):
    """Dimensions that two ranks do not divide, a buffer, and the loss that Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 7)
        self.body = torch.nn.Linear(7, 11)
        self.norm = torch.nn.LayerNorm(11)
        self.head = torch.nn.Linear(11, 3)
        self.register_buffer("scale", torch.full((5,), 0.5))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.body(self.embed(input_ids)).relu()) * self.scale[0]
        logits = self.head(hidden)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.tensor(i % 13), "labels": torch.tensor(i % 3)} for i in range(count)]


def write_truth(engine: Any, file: Path, rank: int) -> None:
    model = engine.module
    engine.optimizer._hp_optimizer_states_linked = False  # with two groups or more they are linked half
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    truth: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        truth[f"param:{name}"] = safe_get_full_fp32_param(parameter).detach().numpy()
        for slot in ("exp_avg", "exp_avg_sq"):
            truth[f"optim.{slot}:{name}"] = safe_get_full_optimizer_state(parameter, slot).numpy()
    for name, buffer in model.named_buffers():
        truth[f"buffer:{name}"] = buffer.numpy()
    if rank == 0:
        np.savez(file, **truth)


def accelerate(target: Path) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    PartialState(cpu=True)  # otherwise Accelerate leaves DeepSpeed out on a CPU
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    rows = samples(24)
    data = TensorDataset(torch.stack([r["input_ids"] for r in rows]), torch.stack([r["labels"] for r in rows]))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, DataLoader(data, 2), scheduler)
    for number, (ids, labels) in enumerate(loader):
        if number == 4:
            break
        accelerator.backward(model(ids, labels)["loss"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(target))
    write_truth(model, target / "truth.npz", accelerator.process_index)


def trainer(target: Path) -> None:
    from accelerate import PartialState
    from transformers import Trainer, TrainingArguments

    PartialState(cpu=True)
    work = target.parent / f"{target.name}-work"
    arguments = TrainingArguments(
        output_dir=os.path.relpath(work), max_steps=4, save_steps=4, per_device_train_batch_size=2, report_to=[],
        deepspeed=CONFIG, learning_rate=1e-2, lr_scheduler_type="linear", warmup_steps=2, logging_steps=2, seed=1,
        ddp_backend="gloo", disable_tqdm=True, optim="adamw_torch",
    )  # fmt: skip
    torch.manual_seed(0)
    run = Trainer(model=Net(), args=arguments, train_dataset=samples(24))
    run.train()
    rank = torch.distributed.get_rank()
    if rank == 0:
        shutil.copytree(work / "checkpoint-4", target)
    torch.distributed.barrier()
    write_truth(run.model_wrapped, target / "truth.npz", rank)
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(work)


if __name__ == "__main__":
    {"accelerate": accelerate, "trainer": trainer}[sys.argv[1]](Path(sys.argv[2]))
