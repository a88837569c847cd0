"""A language model in small that may be killed at any time and started again on any number of ranks.

    torchrun --standalone --nproc-per-node 2 train.py --dir run --updates 30
    torchrun --standalone --nproc-per-node 3 train.py --dir run --updates 60      # goes on from the last checkpoint
    samerun audit run/ledger/* --order keyed:samples=97,seed=5

Every start consumes what the uninterrupted run would have: the order is `KeyedOrder`, the position the sampler's.
Noise on the inputs, dropout masks and initial weights belong to samples and names, not to ranks. `move.py` kills it
five times.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from samerun import rng
from samerun.core.orders import KeyedOrder
from samerun.train import ContributionMean, ElasticSampler, Recorder
from samerun.train.contribution import accumulate
from samerun.train.rng import SampleKeys, keyed_normal_, use_keyed_dropout

SAMPLES, VOCABULARY, SEED = 97, 61, 5
IGNORED = -100


class Progressions(Dataset[Tensor]):
    """Arithmetic progressions modulo VOCABULARY, of 3 to 20 tokens."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        draw = rng.generator(SEED, sample=index, operation="progression")
        first, step, length = draw.integers(0, VOCABULARY), draw.integers(1, 9), draw.integers(3, 21)
        return torch.from_numpy((first + step * torch.arange(int(length)).numpy()) % VOCABULARY)


def collate(samples: list[Tensor]) -> Tensor:
    """Returns `(samples, time)` tokens, padded with IGNORED. An empty microbatch becomes one row without a token."""
    return pad_sequence(samples, batch_first=True, padding_value=IGNORED) if samples else torch.full((1, 2), IGNORED)


class Model(nn.Module):
    """Predicts the next token from the running mean of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.hidden = nn.Sequential(nn.Linear(48, 50), nn.GELU(), nn.Dropout(0.2), nn.Linear(50, 24), nn.Dropout(0.1))
        self.norm = nn.LayerNorm(24)
        self.out = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        here = self.embedding(tokens)
        count = torch.arange(1, tokens.shape[1] + 1).view(1, -1, 1)
        mean = here.cumsum(1) / count
        return self.out(self.norm(here + self.hidden(torch.cat([here, mean], dim=-1))))


def noisy(tokens: Tensor, ids: Sequence[int], epoch: int) -> Tensor:
    """Replaces a tenth of the input tokens. Which, and by what, belongs to the sample and the epoch."""
    tokens = tokens.clamp(min=0)
    for row, sample in enumerate(ids):
        draw = rng.generator(SEED, epoch=epoch, sample=sample, operation="noise")
        drawn = torch.from_numpy(draw.random((20, 2)))[: tokens.shape[1]]  # of every place that a sample can have
        other = (drawn[:, 1] * VOCABULARY).long()
        tokens[row] = torch.where(drawn[:, 0] < 0.1, other, tokens[row])
    return tokens


def build(max_lr_updates: int) -> tuple[Model, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = Model()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            keyed_normal_(parameter, SEED, name, std=0.1)
        elif not name.startswith("norm"):
            nn.init.zeros_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max_lr_updates)


def save(file: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint whole or not at all."""
    torch.save(state, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the loss of each update that was made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="checkpoint and ledgers")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--global-batch", type=int, default=13)
    parser.add_argument("--max-microbatch", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--horizon", type=int, default=100, help="updates of the learning-rate schedule")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--die-in", type=int, help="be killed within this update, as a lost node would")
    args = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size()

    bare, optimizer, scheduler = build(args.horizon)
    keys = SampleKeys(SEED)
    use_keyed_dropout(bare, keys)
    sampler = ElasticSampler(
        KeyedOrder(SAMPLES, SEED),
        global_batch=args.global_batch,
        replicas=replicas,
        replica=rank,
        max_microbatch=args.max_microbatch,
    )
    checkpoint = args.dir / "last.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        sampler.load_state_dict(state["sampler"])
    model = DistributedDataParallel(bare)
    loader: DataLoader[Any] = DataLoader(
        Progressions(),  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    mean = ContributionMean(replicas=replicas)
    starts = len(list((args.dir / "ledger").glob("*"))) if rank == 0 else 0
    number = torch.tensor(starts)
    dist.broadcast(number, 0)
    recorder = Recorder.from_env(args.dir / "ledger" / f"{int(number):03d}", norms="never")
    recorder.attach(model, optimizer, scheduler=scheduler, sampler=sampler, layout={"dp_replicate": replicas})
    recorder.loaded(update=sampler.committed.update)

    losses: list[float] = []
    for update in sampler.updates(loader, until=args.updates):
        microbatches = list(update)
        mean.start(sum(int((m.batch[:, 1:] >= 0).sum()) for m in microbatches), passes=update.passes)
        for microbatch in accumulate(model, microbatches):
            tokens, ids = microbatch.batch, microbatch.ids
            keys.set(ids, epoch=update.epoch, num_rows=len(tokens))
            logits = model(noisy(tokens, ids, update.epoch)[:, :-1])
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            mean.backward(loss, counts=not microbatch.is_empty)
        if update.number == args.die_in:
            os._exit(9)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(mean.loss())
        done = sampler.commit(tokens=mean.total)
        recorder.record(update=done.update, loss=losses[-1], grad_norm=grad_norm, sample_ids=update.sample_ids)
        if done.update % args.save_every == 0 and recorder.may_save:
            if rank == 0:
                state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict()}
                save(checkpoint, {**state, "scheduler": scheduler.state_dict(), "sampler": sampler.state_dict()})
            recorder.boundary("save", done.update)
            dist.barrier()
    recorder.close()
    return losses


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank leaves while another's last collective is still under way
    dist.destroy_process_group()
