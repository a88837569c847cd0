"""Trains a small recurrent network on Python's own sources under Accelerate, and resumes on other numbers of processes.

    torchrun --standalone --nproc-per-node 2 train.py --batch 12 --at-once 3 --steps 8 --save checkpoint
    torchrun --standalone --nproc-per-node 3 train.py --batch 12 --at-once 2 --steps 40 --resume checkpoint

`--shard` shards the model (FSDP2). The checkpoints are those of `save_state`. The lines that samerun adds are marked
`# samerun`.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from samerun.integrations.accelerate import attach, begin_update  # samerun
from samerun.train import ElasticSampler, Recorder  # samerun

BLOCK, WIDTH = 20, 37


class Blocks(Dataset[tuple[int, Tensor]]):
    """Sample i is (i, `BLOCK` + 1 bytes of source text)."""

    def __init__(self) -> None:
        text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
        self.blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, BLOCK + 1, BLOCK)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.blocks[index]


class Network(nn.Module):
    """Maps bytes `(batch, BLOCK)` to logits `(batch, BLOCK, 256)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 22)
        self.recurrent = nn.GRU(22, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.recurrent(self.embedding(text))[0])


def losses(model: nn.Module, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean loss of each block, and the logits."""
    logits = model(blocks[:, :-1])
    return nn.functional.cross_entropy(logits.mT, blocks[:, 1:], reduction="none").mean(1), logits


def make_accelerator(shard: bool, passes: int) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT") if shard else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes, fsdp_plugin=plugin)
    if shard:  # on CPUs Accelerate would leave FSDP out, silently
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=12, help="samples per update, over all processes")
    parser.add_argument("--at-once", type=int, default=3, help="most samples of one process in one pass")
    parser.add_argument("--passes", type=int, default=2, help="passes per update")
    parser.add_argument("--steps", type=int, default=40, help="train up to this update")
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--save", help="save here after the last update")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    args = parser.parse_args()

    recorder = Recorder.from_env()  # samerun
    accelerator = make_accelerator(args.shard, args.passes)
    data = Blocks()
    torch.manual_seed(2)
    model: nn.Module = Network()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    sampler = ElasticSampler(  # samerun
        len(data),
        global_batch=args.batch,
        replicas=accelerator.num_processes,
        replica=accelerator.process_index,
        max_microbatch=args.at_once,
        seed=4,
        last_batch="drop",
    )
    loader = DataLoader(data, batch_sampler=sampler)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(scheduler, sampler)

    axis = "dp_shard" if args.shard else "dp_replicate"
    attach(  # samerun
        recorder, accelerator, model, optimizer, scheduler, sampler=sampler, layout={axis: accelerator.num_processes}
    )
    if args.resume:
        accelerator.load_state(args.resume)
        begin_update(accelerator)  # samerun
    recorder.loaded(update=sampler.committed.update)  # samerun
    fixed = torch.stack([data[i][1] for i in range(4)])
    recorder.evaluate(lambda: dict(zip(("losses", "logits"), losses(model, fixed), strict=True)))  # samerun

    for update in sampler.updates(loader, until=args.steps):  # samerun
        if recorder.finished:  # samerun
            break
        for microbatch in update:
            ids, blocks = microbatch.batch
            with accelerator.accumulate(model):
                loss = losses(model, blocks)[0].mean()
                recorder.samples(ids.tolist(), loss=loss)  # samerun
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    recorder.grad_norm(accelerator.clip_grad_norm_(model.parameters(), 1.0))  # samerun: the norm
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        done = sampler.commit().update  # samerun
        if done % 5 == 0:
            accelerator.print(f"update {done}: loss {loss.item():.5f}")
            recorder.boundary("log", done)  # samerun
        if args.save and done == args.steps and recorder.may_save:  # samerun: may_save
            accelerator.save_state(args.save)
    recorder.close()  # samerun
    accelerator.end_training()


if __name__ == "__main__":
    main()
