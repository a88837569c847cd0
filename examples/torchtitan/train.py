"""Trains a small Llama with torchtitan's own Trainer on Python's own sources, and resumes on other ranks.

    torchrun --standalone --nproc-per-node 4 train.py --at-once 3 --steps 8 --dump saved
    torchrun --standalone --nproc-per-node 3 train.py --at-once 2 --steps 40 --resume saved/checkpoint/step-8

Trainer, model, FSDP and tensor parallelism, checkpoint directory and schedule are torchtitan's. The lines that samerun
adds are marked `# samerun`. Without a GPU `on_cpu.py` stands in for one.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

if not torch.cuda.is_available():
    import on_cpu  # noqa: F401

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import _build_llama3_layers, parallelize_llama
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from samerun.integrations.torchtitan import ElasticDataLoader, RecordedTrainer  # samerun

sys.path.insert(0, str(Path(__file__).parents[1] / "pytorch"))
from data import IGNORE, load_text
from model import NUM_TOKENS

DIM, HEADS, LAYERS, BLOCK = 24, 4, 2, 24


def load_samples(block: int) -> tuple[Any, Any]:
    """Returns the data set, and what makes ids, inputs and labels of some of its samples."""
    text, _ = load_text(block, "tiny")

    def collate(samples: Any) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        batch = text.collate(samples)
        return batch.ids, batch.inputs, batch.targets

    return text, collate


class Bytes(BaseTokenizer):
    """Bytes are their own numbers; the data set gives them out as such."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return NUM_TOKENS


def make_stages(*arguments: Any, **named: Any) -> Any:
    """Cuts the model into pipeline stages. torchtitan 0.3 gives schedules their microbatches one by one.

    The schedules of torch 2.13 want the whole batch, and cut it themselves.
    """
    schedule, *rest = pipeline_llm(*arguments, **named)
    step = schedule.step
    if "arg_mbs" not in inspect.signature(step).parameters:

        def step_whole(
            *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, return_outputs: bool
        ) -> Any:
            return step(
                *(torch.cat(column) for column in zip(*(arg_mbs or ()), strict=True)),
                target=torch.cat(target_mbs) if target_mbs else None,
                losses=losses,
                loss_kwargs=loss_kwargs if target_mbs else None,
                return_outputs=return_outputs,
                **{name: torch.cat([one[name] for one in kwarg_mbs]) for name in kwarg_mbs[0]},
            )

        schedule.step = step_whole
    return (schedule, *rest)


def make_model() -> ModelSpec:
    layers = _build_llama3_layers(
        fuse_qkv=False,  # a fused one goes by other names in the optimizer's state than in the model's
        n_layers=LAYERS,
        dim=DIM,
        n_heads=HEADS,
        n_kv_heads=2,
        hidden_dim=50,
        rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=BLOCK, theta=10000, scaling="none"),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # samples are not packed
    weights = {"weight": partial(torch.nn.init.normal_, std=0.05)}
    model = Llama3Model.Config(
        dim=DIM,
        vocab_size=NUM_TOKENS,
        tok_embeddings=Embedding.Config(num_embeddings=NUM_TOKENS, embedding_dim=DIM, param_init=weights),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init={"weight": torch.nn.init.ones_}),
        lm_head=Linear.Config(in_features=DIM, out_features=NUM_TOKENS, param_init=weights),
        layers=layers,
    )
    return ModelSpec(
        name="llama3",
        flavor="tiny",
        model=model,
        parallelize_fn=parallelize_llama,
        pipelining_fn=make_stages,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def make_config(args: argparse.Namespace) -> Trainer.Config:
    replicas = int(os.environ.get("WORLD_SIZE", "1")) // (args.pp * args.tp)
    adam = {"lr": 3e-3, "betas": (0.9, 0.95)}
    groups = [
        ParamGroupConfig(pattern=r"norm", optimizer_name="AdamW", optimizer_kwargs={**adam, "weight_decay": 0.0}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={**adam, "weight_decay": 0.1}),
    ]
    return Trainer.Config(
        model_spec=make_model(),
        dump_folder=args.dump,
        tokenizer=Bytes.Config(),
        loss=CrossEntropyLoss.Config(),
        dataloader=ElasticDataLoader.Config(load=load_samples, global_batch=args.batch, seed=7),  # samerun
        optimizer=OptimizersContainer.Config(param_groups=groups, implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5, total_steps=200),  # not the steps of this job
        training=TrainingConfig(
            local_batch_size=args.batch // replicas if args.pp > 1 else args.at_once,  # one run of the schedule
            global_batch_size=args.batch,
            seq_len=BLOCK,
            steps=args.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=args.tp,
            enable_sequence_parallel=False,
            spmd_backend="partial_dtensor",
            pipeline_parallel_degree=args.pp,
            pipeline_parallel_microbatch_size=args.at_once,
            pipeline_parallel_schedule="GPipe",
        ),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=1000,
            last_save_model_only=False,
            initial_load_path=args.resume,
            initial_load_model_only=False,
        ),
        metrics=MetricsProcessor.Config(log_freq=5),
        comm=CommConfig(trace_buf_size=0),
        debug=DebugConfig(seed=3),
    )


class MyTrainer(RecordedTrainer):  # samerun: Trainer
    """torchtitan's Trainer with fixed examples to look at."""

    def evaluate(self) -> dict[str, torch.Tensor]:  # samerun
        batch = load_text(BLOCK, "tiny")[1]
        logits = self.through_stages(batch.inputs.to(self.device))
        targets = batch.targets.to(self.device)
        losses = F.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="none")
        return {"losses": losses.sum(1) / (targets != IGNORE).sum(1), "logits": logits}

    def through_stages(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the last pipeline stage, on every rank."""
        mesh = self.parallel_dims.get_optional_mesh("pp")
        stage, stages = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
        group = mesh.get_group() if mesh else None
        samples, device = len(x), self.device
        if stage:
            x = torch.empty(samples, BLOCK, DIM, device=device)
            dist.recv(x, group=group, group_src=stage - 1)
        found = self.model_parts[0](x)
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        if stage < stages - 1:
            dist.send(found, group=group, group_dst=stage + 1)
            found = torch.empty(samples, BLOCK, NUM_TOKENS, device=device)
        if stages > 1:
            dist.broadcast(found, group=group, group_src=stages - 1)
        return found


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks of a tensor-parallel group")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--batch", type=int, default=12, help="samples per update")
    parser.add_argument("--at-once", type=int, default=3, help="samples of one rank in one pass")
    parser.add_argument("--steps", type=int, default=40, help="train up to this update")
    parser.add_argument("--dump", default="outputs", help="where checkpoints go")
    parser.add_argument("--resume", help="a checkpoint")
    return parser.parse_args(words)


def main() -> None:
    trainer = MyTrainer(make_config(parse_args()))
    torch.manual_seed(4 + trainer.dataloader.sampler.replica)  # torchtitan gives all replicas the same stream
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
