"""Trains a small byte-level GPT on Python's own sources, on any number of ranks, and resumes on any other number.

    torchrun --standalone --nproc-per-node 4 train.py --layout dp_shard=4 --updates 12 --save-dir checkpoints
    torchrun --standalone --nproc-per-node 3 train.py --layout dp_shard=3 --updates 32 --resume checkpoints/step-12

An ordinary PyTorch script: FSDP2, HSDP or tensor parallel, AdamW, warm-up and cosine, clipping, accumulation, DCP. The
lines that samerun adds are marked `# samerun`. Started like this they change nothing: the recorder is inert.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from data import IGNORE, Batch, load_text
from model import GPT, SIZES, initialize
from parallel import make_mesh, parallelize, parse_layout
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from samerun.train import ContributionMean, ElasticSampler, Recorder, write_digests  # samerun


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp_shard=1", help="such as dp_shard=4 or tp=2,dp_shard=2")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--precision", choices=["float32", "mixed", "bfloat16", "float64"], default="float32")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--global-batch", type=int, default=32, help="samples per update, over all ranks and passes")
    parser.add_argument("--max-microbatch", type=int, default=4, help="most samples that one rank runs at once")
    parser.add_argument("--updates", type=int, default=40, help="train up to this update")
    parser.add_argument("--schedule-updates", type=int, default=200, help="where the learning rate reaches its end")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--ema", type=float, default=0.0, help="decay of an average of the model; 0 keeps none")
    parser.add_argument("--loss-scale", type=float, default=0.0, help="where a gradient scaler begins; 0 uses none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-dir", type=Path)
    parser.add_argument("--save-at", type=int, nargs="*", default=[], help="updates to save after, beside the last")
    parser.add_argument("--resume", type=Path, help="a checkpoint directory")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0, help="loader processes per rank")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trace-dir", type=Path, help="keep a ledger of this run there")
    return parser.parse_args()


def make_optimizer(model: GPT, lr: float) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 2 * lr},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def make_scheduler(optimizer: torch.optim.Optimizer, warmup: int, last: int) -> LambdaLR:
    """Warm-up, then a cosine down to a tenth at update `last`: a number of its own, not one derived from the ranks."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (last - warmup))))

    return LambdaLR(optimizer, factor)


def loss_sum(model: GPT, batch: Batch, device: str) -> torch.Tensor:
    """Returns the *sum* of the losses of the valid tokens; what to divide it by, only the whole global batch knows."""
    targets = batch.targets.to(device).flatten()
    return F.cross_entropy(model(batch.inputs.to(device)), targets, ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def follow(average: dict[str, torch.Tensor], model: GPT, decay: float) -> None:
    """Moves the average of the trained parameters a step towards them, each rank its own shards."""
    for name, parameter in model.named_parameters():
        if name in average:
            average[name].mul_(decay).add_(parameter, alpha=1 - decay)


@torch.no_grad()
def evaluate(model: GPT, batch: Batch, device: str) -> dict[str, torch.Tensor]:
    """Returns each example's mean loss and its logits. Every rank evaluates the same examples."""
    was_training = model.training
    model.eval()
    logits = model(batch.inputs.to(device))
    model.train(was_training)
    model.reshard()  # without a backward pass FSDP2 would leave the root's parameters gathered
    targets = batch.targets.to(device)
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none").view_as(targets)
    return {"losses": losses.sum(1) / (targets != IGNORE).sum(1), "logits": logits.view(*targets.shape, -1)}


@dataclasses.dataclass
class Run:
    """Everything that a checkpoint holds."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    sampler: ElasticSampler
    scaler: torch.amp.GradScaler
    average: dict[str, torch.Tensor]  # empty: none is kept
    progress: dict[str, int]
    settings: dict[str, Any]  # what the run would silently turn into another one without
    replica: int
    device: str

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optim": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),  # samerun: the committed position, the same for every number of ranks
            "progress": self.progress,
            "config": dataclasses.asdict(self.model.config),
            "settings": self.settings,
            **({"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {}),
            **({"ema": self.average} if self.average else {}),
            "rng": {str(self.replica): torch.cuda.get_rng_state() if self.device == "cuda" else torch.get_rng_state()},
        }

    def save(self, path: Path) -> None:
        dcp.save(self.state(), checkpoint_id=path)
        write_digests(path, self.model, self.optimizer, update=self.progress["update"])  # samerun: proves every copy

    def load(self, path: Path) -> None:
        state = self.state()
        expected = {"config": dict(state["config"]), "settings": dict(self.settings)}
        known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        has_rng = f"rng.{self.replica}" in known
        if not has_rng:  # this replica did not exist when the checkpoint was written: it keeps its own fresh seed
            del state["rng"]
        dcp.load(state, checkpoint_id=path)
        for name, value in expected.items():
            if value != state[name]:
                raise SystemExit(
                    f"--resume: the checkpoint was written with another {name}: {state[name]}, not {value}"
                )
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.sampler.load_state_dict(state["sampler"])  # samerun
        if "scaler" in state:  # the average was loaded in place
            self.scaler.load_state_dict(state["scaler"])
        if has_rng:
            set_rng = torch.cuda.set_rng_state if self.device == "cuda" else torch.set_rng_state
            set_rng(state["rng"][str(self.replica)])


def main() -> None:
    args = parse_args()
    recorder = Recorder.from_env(args.trace_dir)  # samerun
    layout = parse_layout(args.layout)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = make_mesh(layout, args.device)
    # Ranks of one tensor-parallel group work on the same samples: they are one batch replica.
    replicas = layout["dp_replicate"] * layout["dp_shard"]
    replica = mesh["dp_replicate"].get_local_rank() * layout["dp_shard"] + mesh["dp_shard"].get_local_rank()

    config = dataclasses.replace(SIZES[args.size], dropout=args.dropout)
    text, fixed_examples = load_text(config.block, args.size)
    model = GPT(config)
    initialize(model, text.log_frequencies(), args.seed)
    model.to(args.device, {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(args.precision))
    parallelize(model, mesh, args.precision)
    optimizer = make_optimizer(model, args.lr)
    scheduler = make_scheduler(optimizer, args.warmup, args.schedule_updates)
    sampler = ElasticSampler(  # samerun
        len(text),
        global_batch=args.global_batch,
        replicas=replicas,
        replica=replica,
        max_microbatch=args.max_microbatch,
        seed=args.seed,
    )
    loader = DataLoader(
        text,
        batch_sampler=sampler,
        collate_fn=text.collate,
        num_workers=args.workers,
        generator=torch.Generator(),  # else every new iterator, so every resume, draws from dropout's stream
    )
    scaler = torch.amp.GradScaler(
        args.device, init_scale=args.loss_scale or 1.0, growth_interval=5, enabled=args.loss_scale > 0
    )
    average = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad and args.ema}
    mean = ContributionMean(mesh["dp_replicate", "dp_shard"], replicas=replicas, reduction="sum")  # samerun

    torch.manual_seed(args.seed + 1 + replica)  # for dropout: replicas differ, ranks of one replica agree
    settings = {name: getattr(args, name) for name in ("schedule_updates", "warmup", "lr", "clip", "ema", "seed")}
    settings["text"] = text.fingerprint
    progress = {"update": 0, "samples": 0, "tokens": 0, "epoch": 0}
    run = Run(model, optimizer, scheduler, sampler, scaler, average, progress, settings, replica, args.device)
    recorder.attach(  # samerun
        model,
        optimizer,
        scheduler=scheduler,
        scaler=scaler if scaler.is_enabled() else None,
        average=average or None,
        sampler=sampler,
        layout=layout,
        objects={"progress": progress, "settings": settings},
    )
    if args.resume:
        run.load(args.resume)
    recorder.loaded(update=progress["update"])  # samerun
    recorder.evaluate(lambda: evaluate(model, fixed_examples, args.device))  # samerun

    model.train()
    for update in sampler.updates(loader, until=args.updates):
        if recorder.finished:  # samerun
            break
        batches = [microbatch.batch for microbatch in update]
        tokens = sum(batch.valid_tokens for batch in batches)
        mean.start(tokens, passes=update.passes)
        for batch in batches:
            scaler.scale(mean.scaled(loss_sum(model, batch, args.device))).backward()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        follow(average, model, args.ema)
        optimizer.zero_grad()
        loss = mean.loss()
        done = sampler.commit(tokens=mean.total)  # samerun: these samples are done; whatever was read ahead is not
        progress |= {"update": done.update, "samples": done.samples, "tokens": done.tokens, "epoch": done.epoch}
        recorder.record(  # samerun
            update=done.update,
            loss=loss,
            grad_norm=grad_norm,
            sample_ids=[sample for batch in batches for sample in batch.ids],
            tokens=tokens,
        )

        if done.update % args.log_every == 0 or done.update == args.updates:
            if dist.get_rank() == 0:
                rate = optimizer.param_groups[0]["lr"]
                print(
                    f"update {done.update}  loss {loss:.6f}  gradient {grad_norm:.6f}  next rate {rate:.3e}", flush=True
                )
            recorder.boundary("log", done.update)  # samerun
        if done.update % args.eval_every == 0:
            held_out = evaluate(model, fixed_examples, args.device)["losses"].mean()
            if dist.get_rank() == 0:
                print(f"update {done.update}  held-out loss {held_out:.6f}", flush=True)
            recorder.boundary("eval", done.update)  # samerun
        # A job that samerun launched looks at the run and must not write to it.
        if args.save_dir and recorder.may_save and done.update in (*args.save_at, args.updates):  # samerun: may_save
            run.save(args.save_dir / f"step-{done.update}")
            recorder.boundary("save", done.update)  # samerun

    recorder.close()  # samerun
    dist.barrier()  # no rank leaves while another's last collective is still under way
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
