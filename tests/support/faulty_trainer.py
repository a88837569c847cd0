"""Runs a trainer's example with the fault in it that `fault.txt` names: `faulty_trainer.py train.py ARGUMENT...`

Copied into a test's workspace. Faults are put into the framework that the example calls, where a wrong version, a wrong
flag or an innocent edit would put them, never into what is recorded.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def torch_forget_optimizer() -> None:
    """The optimizer forgets what it was given."""
    import torch.distributed.checkpoint.state_dict as state_dict

    original = state_dict.set_state_dict

    def set_state_dict(model: Any, optimizer: Any, **named: Any) -> Any:
        result = original(model, optimizer, **named)
        optimizer.state.clear()
        return result

    state_dict.set_state_dict = set_state_dict


def hf_forget_optimizer() -> None:
    """Trainer resumes without its optimizer and scheduler."""
    from transformers import Trainer

    Trainer._load_optimizer_and_scheduler = lambda self, checkpoint: None


def hf_restart_data() -> None:
    """Trainer passes over nothing of the epoch that it resumes in."""
    import transformers.trainer as trainer

    trainer.skip_first_batches = lambda loader, num_batches: loader


def pl_forget_optimizer() -> None:
    """Lightning resumes with a fresh optimizer."""
    from lightning.pytorch.strategies import Strategy

    Strategy.load_optimizer_state_dict = lambda self, checkpoint: None


def accelerate_forget_optimizer() -> None:
    """Accelerate loads the sharded model without its optimizer."""
    import accelerate.accelerator as module

    module.load_fsdp_optimizer = lambda *arguments, **named: None


def deepspeed_forget_optimizer() -> None:
    """DeepSpeed loads the model only: what `load_optimizer_states=False` does."""
    import functools

    from deepspeed.runtime.engine import DeepSpeedEngine

    whole = DeepSpeedEngine.load_checkpoint
    DeepSpeedEngine.load_checkpoint = functools.partialmethod(whole, load_optimizer_states=False)


def megatron_forget_optimizer() -> None:
    """Megatron's optimizer keeps what it had."""
    from megatron.core.optimizer import ChainedOptimizer

    ChainedOptimizer.load_state_dict = lambda self, state: None


def megatron_miscount_steps() -> None:
    """The optimizer goes on one step further than it was."""
    from megatron.core.optimizer import ChainedOptimizer

    original = ChainedOptimizer.load_state_dict

    def load(self: Any, state: Any) -> None:
        original(self, state)
        for group in self.param_groups:
            group["step"] += 1

    ChainedOptimizer.load_state_dict = load


def _after_loading_megatron(change: Callable[[dict[str, Any]], None]) -> None:
    from megatron.core.models.gpt import GPTModel

    original = GPTModel.load_state_dict

    def load(self: Any, state: dict[str, Any], *rest: Any, **named: Any) -> Any:
        change(state)
        return original(self, state, *rest, **named)

    GPTModel.load_state_dict = load


def megatron_swap_halves() -> None:
    """The two halves of every gated layer, of which each tensor-parallel rank has a part, are joined the wrong way."""
    import torch

    def change(state: dict[str, Any]) -> None:
        for name in (name for name in state if name.endswith("linear_fc1.weight")):
            state[name] = torch.cat(state[name].chunk(2)[::-1])

    _after_loading_megatron(change)


def megatron_swap_layers() -> None:
    """Layers that another stage had come in the wrong order."""

    def change(state: dict[str, Any]) -> None:
        for name in [name for name in state if name.startswith("decoder.layers.1.")]:
            other = name.replace("layers.1.", "layers.2.")
            state[name], state[other] = state[other], state[name]

    _after_loading_megatron(change)


def torchtitan_forget_optimizer() -> None:
    """torchtitan's optimizers keep what they had. It is told its device before, as the example does."""
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    import on_cpu  # pyright: ignore[reportMissingImports] # noqa: F401
    from torchtitan.components.optimizer import OptimizersContainer

    OptimizersContainer.load_state_dict = lambda self, state: None


def restart_data() -> None:
    """The loader hands out the epoch from its first batch, whatever was committed."""
    from samerun.train.sampler import Committed, ElasticSampler

    ElasticSampler.__iter__ = lambda self: self._microbatches(Committed())


FAULTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "torch-forget-optimizer": torch_forget_optimizer,
    "hf-forget-optimizer": hf_forget_optimizer,
    "hf-restart-data": hf_restart_data,
    "pl-forget-optimizer": pl_forget_optimizer,
    "accelerate-forget-optimizer": accelerate_forget_optimizer,
    "deepspeed-forget-optimizer": deepspeed_forget_optimizer,
    "megatron-forget-optimizer": megatron_forget_optimizer,
    "megatron-miscount-steps": megatron_miscount_steps,
    "megatron-swap-halves": megatron_swap_halves,
    "megatron-swap-layers": megatron_swap_layers,
    "torchtitan-forget-optimizer": torchtitan_forget_optimizer,
    "restart-data": restart_data,
}

if __name__ == "__main__":
    FAULTS[(Path(__file__).parent / "fault.txt").read_text().strip()]()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
