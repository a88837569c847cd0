"""Writes a small DCP directory compressed with zstd, and its truth. Needs torch and zstandard."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

HERE = Path(__file__).parent


def main() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Linear(11, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()]
    state = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": names}]
    target = HERE / (sys.argv[1] if len(sys.argv) > 1 else "zstd")
    writer = dcp.FileSystemWriter(target, _extensions=[ZStandard()])
    full = {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}, "update": 3}
    dcp.save(full, storage_writer=writer, no_dist=True)
    truth = {f"param:{name}": value.detach().numpy() for name, value in model.named_parameters()}
    truth |= {f"optim.{slot}:{name}": value.numpy() for name in names for slot, value in state[name].items()}
    np.savez(target / "truth.npz", **truth)


if __name__ == "__main__":
    main()
