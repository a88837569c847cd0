"""Writes the checkpoints of this directory again, with libraries that the development environment has not.

    PYTHONPATH=src:tests python tests/golden/libraries/generate.py

See PROVENANCE.md for versions. `truth.npz` holds, by file and samerun's key, the tensors of the live objects.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).parent


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 2))


def train(model: Any, optimizer: torch.optim.Optimizer, after: Any = None) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        if after is not None:
            after()


def live(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns parameters, buffers and slots under samerun's keys."""
    found: dict[str, Any] = {f"buffer:{name}": value for name, value in model.named_buffers()}
    for name, param in model.named_parameters():
        found[f"param:{name}"] = param
        found |= {f"optim.{slot}:{name}": value for slot, value in optimizer.state.get(param, {}).items()}
    return found


def ema_pytorch() -> dict[str, Any]:
    """ema_pytorch's average with the trained model inside, and no other model in the file."""
    from ema_pytorch import EMA

    model = net()
    average = EMA(model, beta=0.9, update_after_step=0, update_every=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    train(model, optimizer, average.update)
    torch.save({"ema": average.state_dict(), "opt": optimizer.state_dict(), "step": 3}, HERE / "ema_pytorch.pt")
    held = {f"ema:{name}": value for name, value in average.ema_model.state_dict().items()}
    return live(model, optimizer) | held


def peft() -> dict[str, Any]:
    """Adapters on one layer and a whole layer trained beside its frozen original of the same shape."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(net(), LoraConfig(target_modules=["0"], modules_to_save=["2"], r=2))  # type: ignore[arg-type]
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, HERE / "peft.pt")
    return live(model, optimizer)


def main() -> None:
    warnings.simplefilter("ignore")
    truth = {"ema_pytorch.pt": ema_pytorch(), "peft.pt": peft()}
    flat = {f"{file}/{key}": value.detach().numpy() for file, held in truth.items() for key, value in held.items()}
    np.savez_compressed(HERE / "truth.npz", **flat)


if __name__ == "__main__":
    main()
