"""What a script under each trainer has defined before the lines that its page shows: real models, one process."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from support.trainer import trainer_names

WIDTH = 6


def _dictionaries() -> Any:
    """Returns samples as Trainer and Lightning take them."""
    import torch

    class Samples(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = torch.arange(index, index + WIDTH) % 13
            return {"input_ids": tokens, "labels": tokens}

    return Samples()


@contextmanager
def huggingface_names() -> Iterator[dict[str, Any]]:
    """A small Llama."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=8, intermediate_size=10, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=WIDTH,
    )  # fmt: skip
    yield {
        "Trainer": transformers.Trainer, "TrainingArguments": transformers.TrainingArguments,
        "model": transformers.LlamaForCausalLM(config), "dataset": _dictionaries(),
        "evaluate": lambda model: {"losses": []},
    }  # fmt: skip


@contextmanager
def lightning_names() -> Iterator[dict[str, Any]]:
    """A module that guesses a sample's last token."""
    lightning = pytest.importorskip("lightning.pytorch")
    import torch

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, 13)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.cross_entropy(self.layer(batch["input_ids"].float()), batch["labels"][:, -1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    yield {
        "Trainer": lightning.Trainer, "DataLoader": torch.utils.data.DataLoader, "module": Module(),
        "dataset": _dictionaries(), "evaluate": lambda module: {"losses": []}, "world_size": 1, "rank": 0,
    }  # fmt: skip


def _loop_names() -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    model: Any = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {
        "DataLoader": torch.utils.data.DataLoader, "dataset": [(i, torch.randn(4)) for i in range(96)],
        "model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "loss_of": lambda model, batch: model(batch).square().mean(), "evaluate": lambda model: {"losses": []},
        "resume": None, "total_updates": 2, "world_size": 1, "rank": 0,
    }  # fmt: skip


@contextmanager
def accelerate_names() -> Iterator[dict[str, Any]]:
    """An Accelerator on the CPU."""
    accelerate = pytest.importorskip("accelerate")
    yield {**_loop_names(), "accelerator": accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)}


@contextmanager
def deepspeed_names() -> Iterator[dict[str, Any]]:
    """DeepSpeed with its process group of one rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = pytest.importorskip("deepspeed")
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with patch.dict(os.environ, alone):  # no longer than here: other trainers would make a process group of it
        deepspeed.init_distributed("gloo")
        try:
            yield {**_loop_names(), "deepspeed": deepspeed, "config": config}
        finally:
            dist.destroy_process_group()
            deepspeed.comm.comm.cdb = deepspeed.utils.groups._WORLD_GROUP = None  # else the next one finds this group


@contextmanager
def _example(name: str) -> Iterator[dict[str, Any]]:
    """What `examples/NAME/train.py` defines, in the process group of one rank; torch is then as it was."""
    import torch
    import torch.distributed as dist

    folder = Path(__file__).parents[2] / "examples" / name
    stubbed = (torch.cuda, torch.cuda.random, torch._utils)
    before, path, modules = [dict(vars(module)) for module in stubbed], list(sys.path), set(sys.modules)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    sys.path.insert(0, str(folder))
    try:
        with patch.dict(os.environ, alone):
            yield runpy.run_path(str(folder / "train.py"), run_name=f"{name}_example")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for module, names in zip(stubbed, before, strict=True):
            vars(module).update(names)
        sys.path[:] = path
        for name in {"on_cpu", "data", "model", "parts"} - modules:
            sys.modules.pop(name, None)


@contextmanager
def megatron_names() -> Iterator[dict[str, Any]]:
    """The example's model, optimizer and schedule, one rank of each."""
    pytest.importorskip("megatron.core")
    import torch
    import torch.distributed as dist

    with _example("megatron") as train:
        try:
            args = train["parse_args"](["--train-iters", "2"])
            dist.init_process_group("gloo")
            train["mpu"].initialize_model_parallel(1, 1, create_gloo_process_groups=True)
            train["tensor_parallel"].model_parallel_cuda_manual_seed(1)
            model = train["make_model"](args)
            optimizer = train["make_optimizer"](args, model)
            text, fixed = train["load_text"](args.seq_length, "tiny")
            yield {
                "args": args, "mpu": train["mpu"], "model": model, "optimizer": optimizer,
                "opt_param_scheduler": train["make_scheduler"](args, optimizer),
                "dataset": text, "collate": text.collate, "DataLoader": torch.utils.data.DataLoader,
                "forward_backward": train["get_forward_backward_func"](),
                "forward_step": partial(train["forward_step"], args),
                "evaluate": lambda model: train["evaluate"](args, model, fixed), "save": lambda update: None,
            }  # fmt: skip
        finally:
            train["mpu"].destroy_model_parallel()
            train["on_cpu"].__exit__(None, None, None)


@contextmanager
def torchtitan_names() -> Iterator[dict[str, Any]]:
    """The example's configuration, on one rank."""
    pytest.importorskip("torchtitan")
    with _example("torchtitan") as train:
        yield {
            **{name: train[name] for name in ("LRSchedulersContainer", "CheckpointManager", "load_samples")},
            "config": train["make_config"](train["parse_args"](["--steps", "2"])), "resume": None,
            "losses_of": lambda model: [0.0],
        }  # fmt: skip


SETUPS: dict[str, Callable[[], AbstractContextManager[dict[str, Any]]]] = {
    "trainer": trainer_names,
    "huggingface": huggingface_names,
    "lightning": lightning_names,
    "accelerate": accelerate_names,
    "deepspeed": deepspeed_names,
    "megatron": megatron_names,
    "torchtitan": torchtitan_names,
}
"""By the word after `setup=` above a block. Trainers that are not installed skip theirs."""


def _leave_nothing() -> None:
    """Resets what is one for the whole process: tests that follow fork their ranks from it."""
    import torch.distributed as dist

    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert not dist.is_initialized(), "a process group is left"


@contextmanager
def names_for(setup: str | None) -> Iterator[dict[str, Any]]:
    """Yields what a block finds defined; a trainer's own warnings are its own."""
    with warnings.catch_warnings():
        if setup not in (None, "trainer"):
            warnings.simplefilter("ignore")
        if setup is None:
            yield {}
        else:
            with SETUPS[setup]() as names:
                yield names
            _leave_nothing()
