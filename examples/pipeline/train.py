"""Trains a small network on Python's own sources in pipeline stages, and resumes on another number of stages.

    torchrun --standalone --nproc-per-node 2 train.py --batch 12 --at-once 3 --steps 8 --save-dir saved
    torchrun --standalone --nproc-per-node 1 train.py --batch 12 --at-once 3 --steps 40 --resume saved

`torch.distributed.pipelining` with DCP checkpoints. Layers keep the names that they have in the whole model, so that a
checkpoint does not tell where it was cut. The lines that samerun adds are marked `# samerun`.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, Dataset

from samerun.train import ElasticSampler, Recorder  # samerun

BLOCK, WIDTH, LAYERS = 18, 27, 5
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # nested, every stage but one would lose its groups


class Blocks(Dataset[tuple[int, Tensor]]):
    """Sample i is (i, `BLOCK` + 1 bytes of source text)."""

    def __init__(self) -> None:
        text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
        self.blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, BLOCK + 1, BLOCK)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.blocks[index]


class Layer(nn.Module):
    """Looks at a position and the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        before = nn.functional.pad(y, (0, 0, 1, 0))[:, :-1]
        return x + torch.tanh(self.mix(torch.cat([y, before], -1)))


class Stage(nn.Module):
    """The layers of one stage under the names that they have in the whole model."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(9)
        whole = {"embedding": nn.Embedding(256, WIDTH)} | {str(i): Layer() for i in range(LAYERS)}
        whole["out"] = nn.Linear(WIDTH, 256)
        names = list(whole)
        size = -(-len(names) // stages)
        self.layers = nn.ModuleDict({name: whole[name] for name in names[stage * size : (stage + 1) * size]})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.mT, targets)


def clip(model: nn.Module, limit: float) -> Tensor:
    """Clips the gradient by its norm over all stages, which it returns."""
    parameters = list(model.parameters())
    square = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(parameters, limit, square.sqrt())
    return square.sqrt()


@torch.no_grad()
def evaluate(model: nn.Module, blocks: Tensor, rank: int, last: int) -> dict[str, Tensor]:
    """Runs fixed examples through the stages; every rank returns what the last one found."""
    x = blocks[:, :-1] if rank == 0 else torch.empty(len(blocks), BLOCK, WIDTH)
    if rank:
        dist.recv(x, rank - 1)
    y = model(x)
    if rank < last:
        dist.send(y, rank + 1)
    logits = y if rank == last else torch.empty(len(blocks), BLOCK, 256)
    dist.broadcast(logits, last)
    losses = nn.functional.cross_entropy(logits.mT, blocks[:, 1:], reduction="none").mean(1)
    return {"losses": losses, "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=12, help="samples per update")
    parser.add_argument("--at-once", type=int, default=3, help="samples in one microbatch of the pipeline")
    parser.add_argument("--steps", type=int, default=40, help="train up to this update")
    parser.add_argument("--save-dir", help="save there after the last update")
    parser.add_argument("--resume", help="a checkpoint")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    recorder = Recorder.from_env()  # samerun
    data = Blocks()
    model = Stage(rank, stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.03)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    sampler = ElasticSampler(  # samerun: all stages work on the same samples
        len(data),
        global_batch=args.batch,
        replicas=1,
        replica=0,
        max_microbatch=args.at_once,
        seed=2,
        last_batch="drop",
    )
    loader = DataLoader(data, batch_sampler=sampler)
    stage = PipelineStage(model, rank, stages, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=sampler.dealing.passes, loss_fn=loss_of)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer, options=OPTIONS)
        return {
            "model": weights,
            "optim": moments,
            "scheduler": scheduler.state_dict(),
            "sampler": sampler.state_dict(),  # samerun
        }

    recorder.attach(model, optimizer, scheduler, sampler=sampler, layout={"pp": stages})  # samerun
    if args.resume:
        saved = state()
        dcp.load(saved, checkpoint_id=args.resume)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"], options=OPTIONS
        )
        scheduler.load_state_dict(saved["scheduler"])
        sampler.load_state_dict(saved["sampler"])  # samerun
    recorder.loaded(update=sampler.committed.update)  # samerun
    fixed = torch.stack([data[i][1] for i in range(4)])
    recorder.evaluate(lambda: evaluate(model, fixed, rank, stages - 1))  # samerun

    for update in sampler.updates(loader, until=args.steps):  # samerun
        if recorder.finished:  # samerun
            break
        ids, blocks = (torch.cat(column) for column in zip(*(microbatch.batch for microbatch in update), strict=True))
        losses: list[Tensor] = []
        schedule.step(
            *([blocks[:, :-1]] if rank == 0 else []),
            **({"target": blocks[:, 1:], "losses": losses} if rank == stages - 1 else {}),
        )
        loss = torch.stack(losses).mean() if losses else None
        recorder.samples(ids.tolist(), loss=loss)  # samerun: the last stage alone knows the loss
        recorder.grad_norm(clip(model, 1.0))  # samerun: the norm
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        done = sampler.commit().update  # samerun
        if done % 5 == 0:
            if loss is not None:
                print(f"update {done}: loss {loss.item():.5f}", flush=True)
            recorder.boundary("log", done)  # samerun
        if args.save_dir and done == args.steps and recorder.may_save:  # samerun: may_save
            dcp.save(state(), checkpoint_id=args.save_dir)
    recorder.close()  # samerun
    dist.barrier()  # no rank leaves while another's last collective is still under way
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
