"""Trains a small network on Python's own sources with DeepSpeed's ZeRO 1, 2 or 3, on any number of ranks.

    torchrun --standalone --nproc-per-node 4 train.py --stage 3 --at-once 3 --passes 1 --steps 8 --save-dir saved
    samerun convert saved three --to zero --layout dp_shard=3
    torchrun --standalone --nproc-per-node 3 train.py --stage 3 --at-once 2 --passes 2 --steps 40 --resume three

DeepSpeed loads a ZeRO checkpoint only on the number of ranks that wrote it; samerun rewrites it in the same format for
another one. The lines that samerun adds are marked `# samerun`. On CPUs set DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import argparse
import logging
import sysconfig
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from samerun.integrations.deepspeed import RecordedEngine  # samerun
from samerun.train import ElasticSampler, Recorder  # samerun

CONTEXT, WIDTH = 10, 35


class Windows(Dataset[tuple[int, Tensor, Tensor]]):
    """Sample i is (i, `CONTEXT` bytes of source text, the byte that follows)."""

    def __init__(self) -> None:
        text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.text[index : index + CONTEXT], self.text[index + CONTEXT]


class Network(nn.Module):
    """Maps bytes `(batch, CONTEXT)` to logits `(batch, 256)`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.embedding = nn.Embedding(256, 9)
        self.layers = nn.Sequential(nn.Linear(9 * CONTEXT, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(text).flatten(1)))


def make_engine(args: argparse.Namespace) -> RecordedEngine:
    model = Network()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    config = {
        "train_micro_batch_size_per_gpu": args.at_once,
        "gradient_accumulation_steps": args.passes,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": args.bf16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return RecordedEngine(engine)  # samerun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=3)
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16, with float32 masters")
    parser.add_argument("--at-once", type=int, default=3, help="samples of one rank in one pass")
    parser.add_argument("--passes", type=int, default=1, help="passes per update")
    parser.add_argument("--steps", type=int, default=40, help="train up to this update")
    parser.add_argument("--save-dir", help="save there after the last update")
    parser.add_argument("--resume", help="a checkpoint, or a directory of them")
    args = parser.parse_args()

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes minutes and nothing here needs it
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    recorder = Recorder.from_env()  # samerun
    deepspeed.init_distributed("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = Windows()
    engine = make_engine(args)
    sampler = ElasticSampler(  # samerun
        len(data),
        global_batch=args.at_once * args.passes * world_size,
        replicas=world_size,
        replica=rank,
        max_microbatch=args.at_once,
        seed=6,
        last_batch="drop",
    )
    loader = DataLoader(data, batch_sampler=sampler)
    recorder.attach(  # samerun
        engine.module, engine.zero, engine.lr_scheduler, engine.scaler, sampler=sampler, layout={"dp_shard": world_size}
    )
    if args.resume:
        path = Path(args.resume)  # of one checkpoint, or of the directory whose `latest` names one
        folder, tag = (path, None) if (path / "latest").exists() else (path.parent, path.name)
        found, saved = engine.load_checkpoint(str(folder), tag=tag)
        if found is None:
            raise SystemExit(f"--resume: DeepSpeed finds no checkpoint at {path}")
        sampler.load_state_dict(saved["sampler"])  # samerun
    recorder.loaded(update=engine.completed_updates)  # samerun
    fixed = [torch.stack(column) for column in zip(*(data[i][1:] for i in range(0, 400, 100)), strict=True)]

    def evaluate() -> dict[str, Tensor]:
        logits = engine(fixed[0]).float()
        return {"losses": nn.functional.cross_entropy(logits, fixed[1], reduction="none"), "logits": logits}

    recorder.evaluate(evaluate)  # samerun

    for update in sampler.updates(loader, until=args.steps):  # samerun
        if recorder.finished:  # samerun
            break
        for microbatch in update:
            ids, text, following = microbatch.batch
            loss = nn.functional.cross_entropy(engine(text).float(), following)
            recorder.samples(ids.tolist(), loss=loss)  # samerun
            engine.backward(loss)
            engine.step()
        done = sampler.commit().update  # samerun
        if done % 5 == 0:
            if rank == 0:
                print(f"update {done}: loss {loss.item():.5f}", flush=True)
            recorder.boundary("log", done)  # samerun
        if args.save_dir and done == args.steps and recorder.may_save:  # samerun: may_save
            state: dict[str, Any] = {"sampler": sampler.state_dict()}  # samerun
            engine.save_checkpoint(args.save_dir, client_state=state)
    recorder.close()  # samerun
    dist.barrier()  # no rank leaves while another's last collective is still under way
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
