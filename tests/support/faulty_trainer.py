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
    "restart-data": restart_data,
}

if __name__ == "__main__":
    FAULTS[(Path(__file__).parent / "fault.txt").read_text().strip()]()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
