"""Trains a small byte-level GPT on Python's own sources, on any number of ranks, and resumes on any other number.

torchrun --nproc-per-node 4 train.py --layout dp_shard=4 --updates 12 --save-dir checkpoints
torchrun --nproc-per-node 3 train.py --layout dp_shard=3 --updates 32 --resume checkpoints/step-12
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from data import IGNORE, Batch, load_text
from model import GPT, SIZES, initialize
from parallel import make_mesh, parallelize, parse_layout
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp_shard=1", help="such as dp_shard=4 or tp=2,dp_shard=2")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--precision", choices=["float32", "mixed", "bfloat16"], default="float32")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--global-batch", type=int, default=32, help="samples per update, over all ranks and passes")
    parser.add_argument("--max-microbatch", type=int, default=4, help="most samples that one rank runs at once")
    parser.add_argument("--updates", type=int, default=40, help="train up to this update")
    parser.add_argument("--schedule-updates", type=int, default=200, help="where the learning rate reaches its end")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-dir", type=Path)
    parser.add_argument("--save-at", type=int, nargs="*", help="updates to save after (default: the last one)")
    parser.add_argument("--resume", type=Path, help="a checkpoint directory")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def make_optimizer(model: GPT, args: argparse.Namespace) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 2 * args.lr},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def make_scheduler(optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> torch.optim.lr_scheduler.LambdaLR:
    def factor(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        done = min(1.0, (step - args.warmup) / (args.schedule_updates - args.warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def loss_sum(model: GPT, batch: Batch, device: str) -> torch.Tensor:
    """Returns the sum of the losses of the valid tokens: the division comes later, over the whole global batch."""
    logits = model(batch.inputs.to(device))
    targets = batch.targets.to(device).flatten()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


def main() -> None:
    args = parse_args()
    layout = parse_layout(args.layout)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = make_mesh(layout, args.device)
    replicas = layout["dp_replicate"] * layout["dp_shard"]
    replica = mesh["dp_replicate"].get_local_rank() * layout["dp_shard"] + mesh["dp_shard"].get_local_rank()

    config = dataclasses.replace(SIZES[args.size], dropout=args.dropout)
    text, fixed = load_text(config.block, args.size)
    model = GPT(config)
    initialize(model, text.log_frequencies(), args.seed)
    if args.precision == "bfloat16":
        model.to(torch.bfloat16)
    model.to(args.device)
    parallelize(model, mesh, args.precision)
    optimizer = make_optimizer(model, args)
    scheduler = make_scheduler(optimizer, args)
    torch.manual_seed(args.seed + 1000 * replica)
    progress = {"update": 0, "samples": 0, "tokens": 0, "epoch": 0}

    if args.resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {
            "model": model_state,
            "optim": optimizer_state,
            "scheduler": scheduler.state_dict(),
            "progress": progress,
        }
        dcp.load(state, checkpoint_id=args.resume)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        scheduler.load_state_dict(state["scheduler"])
        progress = state["progress"]

    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(args.seed)).tolist()
    while progress["update"] < args.updates:
        start = progress["samples"]
        ids = order[start : start + args.global_batch]
        passes = math.ceil(len(ids) / (replicas * args.max_microbatch))
        mine = ids[replica::replicas]
        batches = [text.collate([text[i] for i in mine[p::passes]]) for p in range(passes)]
        tokens = torch.tensor(float(sum(batch.valid_tokens for batch in batches)))
        dist.all_reduce(tokens)
        tokens /= layout["tp"]
        total = torch.zeros(())
        for batch in batches:
            loss = loss_sum(model, batch, args.device) / tokens
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        total /= layout["tp"]
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress["update"] += 1
        progress["samples"] += len(ids)
        progress["tokens"] += int(tokens)
        if dist.get_rank() == 0:
            print(f"update {progress['update']} loss {total:.6f} grad {grad_norm:.6f}", flush=True)

        if args.save_dir and progress["update"] in (args.save_at or [args.updates]):
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {
                "model": model_state,
                "optim": optimizer_state,
                "scheduler": scheduler.state_dict(),
                "progress": progress,
            }
            dcp.save(state, checkpoint_id=args.save_dir / f"step-{progress['update']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
