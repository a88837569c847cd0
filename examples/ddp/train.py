"""Trains a convolutional classifier with DDP: from which module of Python's standard library are these 96 bytes?

    torchrun --standalone --nproc-per-node 2 train.py --steps 10 --out checkpoints
    torchrun --standalone --nproc-per-node 3 train.py --steps 30 --from checkpoints/10

Its lines for samerun are those of the larger example, in a script that shares nothing else with it: another model,
optimizer, scheduler, parallelism, checkpoint arrangement, and flags of its own.
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from samerun.train import ContributionMean, ElasticSampler, Recorder  # samerun
from samerun.train.contribution import accumulate  # samerun

MODULES, WINDOW, STRIDE = 12, 96, 64


class Classifier(nn.Module):
    """Maps bytes `(batch, WINDOW)` to logits `(batch, MODULES)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 22)
        self.layers = nn.Sequential(
            nn.Conv1d(22, 50, 5, stride=2),
            nn.GroupNorm(5, 50),
            nn.GELU(),
            nn.Conv1d(50, 70, 5, stride=2),
            nn.GroupNorm(7, 70),
            nn.GELU(),
        )
        self.out = nn.Linear(70, MODULES)

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(text).transpose(1, 2)).mean(-1))


def load_windows() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Returns training windows as (index, bytes, module), and a few (bytes, module) that are never trained on."""
    library = Path(sysconfig.get_paths()["stdlib"])
    largest = sorted(library.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))[:MODULES]
    windows = [
        torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).unfold(0, WINDOW, STRIDE) for path in largest
    ]
    text = torch.cat(windows).long()
    module = torch.cat([torch.full((len(rows),), number) for number, rows in enumerate(windows)])
    is_held_out = torch.arange(len(text)) % 500 == 0
    train = ~is_held_out
    return TensorDataset(torch.arange(int(train.sum())), text[train], module[train]), (
        text[is_held_out][:10],
        module[is_held_out][:10],
    )


class App:
    """All state of the run, as one object that DCP saves and loads."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, sampler: ElasticSampler) -> None:
        self.model, self.optimizer, self.scheduler, self.sampler = model, optimizer, scheduler, sampler

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),  # samerun
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.sampler.load_state_dict(state["sampler"])  # samerun


def main() -> nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=40, help="samples per step, over all ranks")
    parser.add_argument("--at-once", type=int, default=8, help="most samples in one forward pass")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--horizon", type=int, default=400, help="steps of the cosine schedule")
    parser.add_argument("--out", type=Path, help="save here after the last step")
    parser.add_argument("--from", dest="source", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--ledger", type=Path, help="keep a record of this run there")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    recorder = Recorder.from_env(args.ledger)  # samerun

    windows, (fixed_text, fixed_module) = load_windows()
    torch.manual_seed(7)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.horizon)
    # In place of torch.utils.data.DistributedSampler(windows, seed=7): the same order, dealt to any number of ranks.
    sampler = ElasticSampler(  # samerun
        len(windows),
        global_batch=args.batch,
        replicas=world_size,
        replica=rank,
        max_microbatch=args.at_once,
        seed=7,
        empty="placeholder",
    )
    loader = DataLoader(windows, batch_sampler=sampler)
    mean = ContributionMean()  # samerun
    loss_sum = nn.CrossEntropyLoss(reduction="sum")

    recorder.attach(  # samerun
        model, optimizer, scheduler=scheduler, sampler=sampler, layout={"dp_replicate": world_size}
    )
    if args.source:
        dcp.load({"app": App(model, optimizer, scheduler, sampler)}, checkpoint_id=args.source)
    recorder.loaded(update=sampler.committed.update)  # samerun

    def evaluate() -> dict[str, Tensor]:
        logits = model.module(fixed_text)
        return {"losses": nn.functional.cross_entropy(logits, fixed_module, reduction="none"), "logits": logits}

    recorder.evaluate(evaluate)  # samerun

    for update in sampler.updates(loader, until=args.steps):
        if recorder.finished:  # samerun
            break
        mean.start(len(update.sample_ids), passes=update.passes)
        consumed: list[int] = []
        for microbatch in accumulate(model, update):  # samerun: one all-reduce per update, whatever the passes
            index, text, module = microbatch.batch
            mean.backward(loss_sum(model(text), module), counts=not microbatch.is_empty)
            consumed += [] if microbatch.is_empty else index.tolist()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        loss = mean.loss()
        step = sampler.commit().update  # samerun
        recorder.record(update=step, loss=loss, grad_norm=grad_norm, sample_ids=consumed)  # samerun
        if step % 5 == 0:
            if rank == 0:
                print(f"step {step}: loss {loss:.5f}, gradient {float(grad_norm):.5f}", flush=True)
            recorder.boundary("log", step)  # samerun
        if step % 10 == 0:
            with torch.no_grad():
                held_out = evaluate()["losses"].mean()
            if rank == 0:
                print(f"step {step}: held-out loss {held_out:.5f}", flush=True)
            recorder.boundary("eval", step)  # samerun
        if args.out and step == args.steps and recorder.may_save:  # samerun: may_save
            dcp.save({"app": App(model, optimizer, scheduler, sampler)}, checkpoint_id=args.out / str(step))

    recorder.close()  # samerun
    dist.barrier()  # no rank leaves while another's last collective is still under way
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    # Kept until Python ends: dropping a DDP model while gloo's threads finish their last collective can hang.
    trained = main()
