"""Real jobs under Hugging Face Trainer and Accelerate, for ranks that `run_ranks` forked.

Six samples an update whatever the number of ranks (1, 2 or 3), dealt in one order, so that a job resumed on another
number of ranks takes the same next update up to the rounding of sums.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

SAMPLES, LENGTH, VOCAB = 6, 7, 31
SAVED, NEXT, HORIZON = 3, 4, 9


def rendezvous(world_size: int, port: int = 29531) -> None:
    """Sets what Accelerate wants to see although the process group is there."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(world_size))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Forty-one sequences, each told by its index."""

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama(seed: int = 0) -> Any:
    """Returns a small model with grouped heads and a tied output; no dimension divides by 2 and 3 both."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=20, intermediate_size=14, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=8, tie_word_embeddings=True,
        )
    )  # fmt: skip


def full_truth(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """Returns the tensors of a model that this rank holds whole, and of its optimizer, by samerun's keys."""
    names = {id(parameter): name.removeprefix("module.") for name, parameter in model.named_parameters()}
    truth = {f"param:{names[id(p)]}": p.detach().numpy().copy() for p in model.parameters()}
    for parameter, slots in getattr(optimizer, "optimizer", optimizer).state.items():
        truth |= {f"optim.{slot}:{names[id(parameter)]}": value.numpy().copy() for slot, value in slots.items()}
    return truth


def learning_rates(optimizer: Any) -> list[tuple[float, float]]:
    """Returns each group's rate and decay."""
    return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


def train(
    rank: int,
    world_size: int,
    folder: Path | None,
    source: Path | None,
    weight_decay: float = 0.1,
    build: Callable[[int], Any] = llama,
) -> dict[str, Any]:
    """Runs a stock Trainer to update 4 and saves after update 3, or resumes and takes the next update.

    Returns what the run held before update 4 (`saved`, `rates`, `rng`, `held` as in `llamajob`, the schedule's
    `position`) and after it (`next`).
    """
    rendezvous(world_size)
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from support import llamajob

    found: dict[str, Any] = {}
    saved = SAVED
    if source is not None:
        saved = int(json.loads((source / "trainer_state.json").read_text())["global_step"])

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == saved:
                found["saved"] = full_truth(given["model"], given["optimizer"])
                found["rates"] = learning_rates(given["optimizer"])
                found["rng"] = torch.get_rng_state().numpy().tobytes()
                found["held"] = llamajob.held_by(given["model"], given["optimizer"])
                found["position"] = given["lr_scheduler"].state_dict()["last_epoch"]

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == saved + 1:
                found["next"] = full_truth(given["model"], given["optimizer"])
                control.should_training_stop = True

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=str(folder or scratch), per_device_train_batch_size=1,
            gradient_accumulation_steps=SAMPLES // world_size, max_steps=saved - SAVED + HORIZON, save_steps=SAVED,
            learning_rate=1e-3, weight_decay=weight_decay, warmup_steps=2, lr_scheduler_type="cosine", use_cpu=True,
            report_to=[], disable_tqdm=True, logging_strategy="no", seed=11, max_grad_norm=0.5,
            save_strategy="steps" if source is None else "no",
        )  # fmt: skip
        model = build(0 if source is None else 5)
        runner = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[Watch()])
        runner.train(resume_from_checkpoint=None if source is None else str(source))
    return found


def shard(rank: int, world_size: int, checkpoint: Path, folder: Path, weight_decay: float) -> None:
    """Saves what a Trainer's checkpoint holds as an FSDP2 job does: DCP, everything by parameter name."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    from support.toy import quiet

    model = llama(7)
    model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)
    model.tie_weights()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    flat = [(name, parameter) for name, parameter in model.named_parameters()]
    groups = [
        {"params": [p for n, p in flat if "norm" not in n], "weight_decay": weight_decay},
        {"params": [p for n, p in flat if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    given = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    from torch.distributed.tensor import distribute_tensor

    for number, parameter in enumerate(p for group in groups for p in group["params"]):
        slots = given["state"][number]
        optimizer.state[parameter] = {
            name: value if name == "step" else distribute_tensor(value, parameter.device_mesh, parameter.placements)
            for name, value in slots.items()
        }
    for group, saved in zip(optimizer.param_groups, given["param_groups"], strict=True):
        group |= {name: value for name, value in saved.items() if name != "params"}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    scheduler = torch.load(checkpoint / "scheduler.pt", weights_only=True)
    with quiet():
        dcp.save(
            {
                "model": weights, "optimizer": moments, "scheduler": scheduler,
                "train": {"update": state["global_step"], "samples": state["global_step"] * SAMPLES},
            },
            checkpoint_id=folder,
        )  # fmt: skip


def accelerate(rank: int, world_size: int, folder: Path | None, source: Path | None) -> dict[str, Any]:
    """Runs a script under Accelerate to update 4 and saves after update 3, or loads and takes the next update."""
    rendezvous(world_size, 29532)
    from accelerate import Accelerator

    runner = Accelerator(cpu=True)
    model: Any = llama(0 if source is None else 5)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "mlp" in n], "lr": 2e-3},
        {"params": [p for n, p in named if "mlp" not in n], "weight_decay": 0.0},
    ]
    optimizer: Any = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, optimizer = runner.prepare(model, optimizer)
    runner.register_for_checkpointing(scheduler)
    data = Tokens()
    found: dict[str, Any] = {}
    if source is not None:
        with contextlib.redirect_stdout(None):
            runner.load_state(str(source))
        found["saved"], found["rates"] = full_truth(model, optimizer), learning_rates(optimizer)
        found["rng"] = torch.get_rng_state().numpy().tobytes()
    for update in range(SAVED if source is not None else 0, NEXT):
        indices = range(update * SAMPLES + rank, (update + 1) * SAMPLES, world_size)
        tokens = torch.stack([data[i]["input_ids"] for i in indices])
        runner.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if update + 1 == SAVED and folder is not None:
            torch.rand(rank + 1)  # so that ranks' streams differ
            runner.save_state(str(folder))
            found["saved"], found["rates"] = full_truth(model, optimizer), learning_rates(optimizer)
            found["rng"] = torch.get_rng_state().numpy().tobytes()
    found["next"] = full_truth(model, optimizer)
    return found


def save_fsdp(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    use_orig_params: bool = False,
    frozen: str = "",
    kind: str = "LOCAL_STATE_DICT",
    use_dcp: bool = True,
) -> dict[str, np.ndarray]:
    """Saves an FSDP1 job through Accelerate, which has to be told that FSDP is meant on a CPU. Returns the truth.

    By `save_state`; without `use_dcp` by the functions that it calls, which alone have that argument.
    """
    import warnings

    rendezvous(world_size, 29533)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, save_fsdp_model, save_fsdp_optimizer

    from support import rankfiles
    from support.toy import quiet

    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, on a CPU more so, and says it in many ways
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type=kind, use_orig_params=use_orig_params)
        runner = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, optimizer = rankfiles.build_fsdp1(use_orig_params, frozen=frozen)
        rankfiles.train_fsdp1(model, optimizer)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        runner._models.append(model)
        prepared = runner.prepare_optimizer(optimizer, device_placement=False)
        if use_dcp:
            runner.save_state(str(folder))
        else:
            save_fsdp_model(plugin, runner, model, str(folder), use_dcp=False)
            save_fsdp_optimizer(plugin, runner, prepared, model, str(folder), use_dcp=False)
        return rankfiles.truth_of(rankfiles.full_fsdp1(model, optimizer))
