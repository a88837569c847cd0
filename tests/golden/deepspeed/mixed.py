"""Writes universal checkpoints that stock DeepSpeed makes, without a word, of saves that do not belong together.

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    torchrun --nproc-per-node 2 mixed.py save OUT one
    torchrun --nproc-per-node 2 mixed.py save OUT fused
    python mixed.py convert OUT PACKED

`save` trains and saves: `one` after three updates with two parameter groups and `later` after five, or `fused` after
three of another run, which has everything in one group. `convert` puts directories together as accidents do, converts
each with DeepSpeed's own `ds_to_universal`, and packs what that wrote:

| name | directory |
|---|---|
| `universal_z1_even` | `one` as it is |
| `universal_z1_steps` | `one`, with rank 1's optimizer file of `later` |
| `universal_z1_groups` | `fused`, overwritten by `one` until killed |

Nothing of the model spans both ranks, so no parameter is put together from two saves and the converter does not fail.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.packed import pack

TAGS = {"one": "global_step3", "later": "global_step5", "fused": "global_step3"}


class Even(nn.Module):
    """Two layers of one shape: at two ranks each group's boundary lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(functional.silu(self.first(inputs)))


def groups_of(model: nn.Module, fused: bool) -> list[dict[str, Any]]:
    if fused:
        ordered = [p for layer in model.children() for p in layer.parameters()]
        return [{"params": ordered, "lr": 1e-2, "weight_decay": 0.1}]
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 1e-2, "weight_decay": 0.1, "name": "decay"},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 5e-3, "weight_decay": 0.0, "name": "no_decay"},
    ]


def save(out: Path, name: str) -> None:
    """Trains a run. Every rank calls it, in a process of its own."""
    import deepspeed
    import deepspeed.ops
    import torch.distributed as dist
    from generate import held_values

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    model = Even()
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    optimizer = torch.optim.AdamW(groups_of(model, name == "fused"), betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for update in range(1, 6):
        inputs, wanted = torch.randn(2, 4, 6, generator=draw).bfloat16()
        engine.backward(functional.mse_loss(engine(inputs), wanted))
        engine.step()
        if update == 3:
            engine.save_checkpoint(str(out / name))
            held = held_values(engine, 1)
            if dist.get_rank() == 0:
                np.savez(out / f"{name}.npz", **held)
    if name == "one":
        engine.save_checkpoint(str(out / "later"))
    dist.destroy_process_group()


def convert(out: Path, packed: Path) -> None:
    """Puts directories together, converts and packs them."""

    def put(name: str, source: str) -> Path:
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(out / source / TAGS[source], folder / TAGS[source])
        return folder / TAGS[source]

    put("even", "one")
    last = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copyfile(out / "later" / TAGS["later"] / last, put("steps", "one") / last)
    model = "mp_rank_00_model_states.pt"
    shutil.copyfile(out / "one" / TAGS["one"] / model, put("groups", "fused") / model)
    for name in ("even", "steps", "groups"):
        target = out / f"universal_z1_{name}"
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        command += ["--input_folder", str(out / name / "global_step3"), "--output_folder", str(target / "uc")]
        subprocess.run(command, check=True)
        shutil.copyfile(out / ("fused.npz" if name == "groups" else "one.npz"), target / "truth.npz")
        pack(target, packed / f"{target.name}.tar.xz")


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(Path(sys.argv[2]), sys.argv[3])
    else:
        convert(Path(sys.argv[2]), Path(sys.argv[3]))
