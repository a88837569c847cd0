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


def _after_loading_megatron(change: Callable[[Any, dict[str, Any]], None]) -> None:
    """Changes optimizer and weights after both are loaded: the optimizer's masters come last, and win."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import ChainedOptimizer

    load_model, load_optimizer = GPTModel.load_state_dict, ChainedOptimizer.load_state_dict
    weights: dict[str, Any] = {}

    def remember(self: Any, *rest: Any, **named: Any) -> Any:
        weights.update(self.named_parameters())
        return load_model(self, *rest, **named)

    def load(self: Any, state: Any) -> None:
        load_optimizer(self, state)
        with torch.no_grad():
            change(self.chained_optimizers[0].optimizer, weights)

    GPTModel.load_state_dict, ChainedOptimizer.load_state_dict = remember, load


def megatron_forget_optimizer() -> None:
    """The optimizer forgets what it was given."""

    def change(optimizer: Any, weights: Any) -> None:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            del group["step"]

    _after_loading_megatron(change)


def megatron_miscount_steps() -> None:
    """The optimizer goes on one step further than it was."""

    def change(optimizer: Any, weights: Any) -> None:
        for group in optimizer.param_groups:
            group["step"] += 1

    _after_loading_megatron(change)


def megatron_swap_halves() -> None:
    """The two halves of every gated layer, of which each tensor-parallel rank has a part, are joined the wrong way."""
    import torch

    def change(optimizer: Any, weights: Any) -> None:
        for name in (name for name in weights if name.endswith("linear_fc1.weight")):
            weights[name].copy_(torch.cat(weights[name].chunk(2)[::-1]))

    _after_loading_megatron(change)


def megatron_swap_experts() -> None:
    """Each rank has the experts that it should have, the first two of them in the wrong order."""

    def change(optimizer: Any, weights: Any) -> None:
        for name in [name for name in weights if ".local_experts.0." in name]:
            other = weights[name.replace(".local_experts.0.", ".local_experts.1.")]
            kept = other.clone()
            other.copy_(weights[name])
            weights[name].copy_(kept)

    _after_loading_megatron(change)


def megatron_positions_in_order() -> None:
    """A context-parallel rank takes the positions of one stretch for its two stretches, from both ends."""
    import megatron.core.models.common.embeddings.rotary_pos_embedding as rotary

    def in_order(pos_emb: Any, seq_dim: int, cp_group: Any) -> Any:
        return pos_emb.chunk(cp_group.size(), seq_dim)[cp_group.rank()]

    rotary.get_pos_emb_on_this_cp_rank = in_order


def megatron_swap_layers() -> None:
    """Layers that another stage had come in the wrong order."""

    def change(optimizer: Any, weights: Any) -> None:
        for name in [name for name in weights if name.startswith("decoder.layers.1.")]:
            other = weights[name.replace("layers.1.", "layers.2.")]
            kept = other.clone()
            other.copy_(weights[name])
            weights[name].copy_(kept)

    _after_loading_megatron(change)


def torchtitan_forget_optimizer() -> None:
    """torchtitan's optimizers forget what they were given. It is told its device before, as the example does."""
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    import on_cpu  # pyright: ignore[reportMissingImports] # noqa: F401
    from torchtitan.components.optimizer import OptimizersContainer

    original = OptimizersContainer.load_state_dict

    def load(self: Any, state: Any) -> None:
        original(self, state)
        for optimizer in self.optimizers:
            optimizer.state.clear()

    OptimizersContainer.load_state_dict = load


def torchtitan_swap_layers() -> None:
    """Layers that another stage had come in the wrong order."""
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    import on_cpu  # pyright: ignore[reportMissingImports] # noqa: F401
    from torchtitan.components.checkpointer.base import ModelWrapper

    original = ModelWrapper.load_state_dict

    def load(self: Any, state: dict[str, Any]) -> None:
        swapped = str.maketrans("01", "10")
        layers = {name: tensor.clone() for name, tensor in state.items() if name.startswith("layers.")}
        original(self, state | {name[:8].translate(swapped) + name[8:]: tensor for name, tensor in layers.items()})

    ModelWrapper.load_state_dict = load


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
    "megatron-swap-experts": megatron_swap_experts,
    "megatron-positions-in-order": megatron_positions_in_order,
    "megatron-swap-layers": megatron_swap_layers,
    "torchtitan-forget-optimizer": torchtitan_forget_optimizer,
    "torchtitan-swap-layers": torchtitan_swap_layers,
    "restart-data": restart_data,
}

if __name__ == "__main__":
    FAULTS[(Path(__file__).parent / "fault.txt").read_text().strip()]()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
