"""Trains a small network to guess the next byte of Python's own sources with Lightning, on any number of processes.

    torchrun --standalone --nproc-per-node 2 train.py --batch 12 --at-once 3 --steps 8 --save-dir checkpoints
    torchrun --standalone --nproc-per-node 1 train.py --batch 12 --at-once 3 --steps 40 --resume checkpoints/last.ckpt

`--strategy ddp` replicates the model and saves one file, `--strategy fsdp2` shards it (ModelParallelStrategy) and saves
a directory. The lines that samerun adds are marked `# samerun`.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from samerun.integrations.lightning import SamerunCallback, WithSampleIds  # samerun
from samerun.train import ElasticSampler  # samerun

CONTEXT, WIDTH = 12, 33


class Bytes(Dataset[dict[str, Tensor]]):
    """Windows of source text: `CONTEXT` bytes and the one that follows."""

    def __init__(self) -> None:
        text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"context": self.text[index : index + CONTEXT], "following": self.text[index + CONTEXT]}


class Guesser(LightningModule):
    """Maps bytes `(batch, CONTEXT)` to logits `(batch, 256)`."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.sharded = sharded
        torch.manual_seed(5)
        self.embedding = nn.Embedding(256, 10)
        self.hidden = nn.Linear(10 * CONTEXT, WIDTH)
        self.out = nn.Linear(WIDTH, 256)

    def configure_model(self) -> None:
        if self.sharded:
            from torch.distributed.fsdp import FSDPModule, fully_shard

            mesh = self.device_mesh["data_parallel"]
            for module in (self.hidden, self.out, self):
                if not isinstance(module, FSDPModule):
                    fully_shard(module, mesh=mesh)
                    module.set_force_sum_reduction_for_comms(True)  # gloo can only add

    def forward(self, context: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.embedding(context).flatten(1))))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch["context"]), batch["following"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": [p for p in self.parameters() if p.ndim < 2]}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=12, help="samples per update, over all processes")
    parser.add_argument("--at-once", type=int, default=3, help="most samples of one process in one pass")
    parser.add_argument("--steps", type=int, default=40, help="train up to this update")
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--save-dir", default="checkpoints")
    parser.add_argument("--resume", help="a checkpoint")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = Bytes()
    sampler = ElasticSampler(  # samerun
        len(data),
        global_batch=args.batch,
        replicas=world_size,
        replica=rank,
        max_microbatch=args.at_once,
        seed=1,
        last_batch="drop",
    )
    loader = DataLoader(WithSampleIds(data), batch_sampler=sampler)  # samerun

    fixed = {name: torch.stack([data[i][name] for i in range(0, 400, 100)]) for name in ("context", "following")}

    def evaluate(module: LightningModule) -> dict[str, Tensor]:
        logits = module(fixed["context"])
        return {"losses": nn.functional.cross_entropy(logits, fixed["following"], reduction="none"), "logits": logits}

    sharded = args.strategy == "fsdp2"
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1) if sharded else "ddp",
        max_steps=args.steps,
        accumulate_grad_batches=sampler.dealing.passes,  # samerun
        use_distributed_sampler=False,  # samerun
        gradient_clip_val=None if sharded else 1.0,
        log_every_n_steps=5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            SamerunCallback(
                sampler, evaluate, layout={"dp_shard" if sharded else "dp_replicate": world_size}
            ),  # samerun
            ModelCheckpoint(args.save_dir, filename="last", every_n_train_steps=args.steps),
        ],
    )
    trainer.fit(Guesser(sharded), loader, ckpt_path=args.resume)


if __name__ == "__main__":
    main()
