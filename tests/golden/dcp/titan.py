"""Writes small checkpoint directories with torchtitan's own Trainer, and what the live run held beside each.

    python tests/golden/dcp/titan.py OUT [CASE...]      # with torchtitan 0.3.0; packs each beside this file

Ranks are forked from one process. Model, parallelism, text loader, optimizer, schedule and checkpoints are
torchtitan's; `examples/torchtitan/on_cpu.py` stands in for a GPU. A case saves everything after update 3
(asynchronously in `titan_fsdp3`) and, as torchtitan does by default, the weights alone after update 5, the last; those
in bf16. `truth3` and `truth5` are taken from model, optimizer, schedule, loader and trainer in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[3]
sys.path[:0] = [str(TOP / "examples" / "torchtitan"), str(TOP / "tests")]

import numpy as np
import on_cpu  # noqa: F401  before torchtitan is imported
import torch
import torch.distributed as dist
import torchtitan.hf_datasets.text_datasets as texts
from datasets import Dataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import _build_llama3_layers, parallelize_llama
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from support.packed import pack

VOCAB, DIM, INNER, LAYERS, HEADS, GROUPS, LENGTH = 13, 8, 10, 3, 4, 2, 6
FULL, LAST = 3, 5
CASES: dict[str, dict[str, Any]] = {
    "titan_fsdp3": {"ranks": 3, "tp": 1, "save": "async", "ac": FullAC.Config(), "fused": True},
    "titan_tp2_fsdp2": {"ranks": 4, "tp": 2, "save": "disabled", "ac": SelectiveAC.Config(), "fused": False},
}


class Letters(BaseTokenizer):
    """A letter is a number."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [0, *(1 + ord(letter) % (VOCAB - 2) for letter in text), VOCAB - 1]

    def decode(self, tokens: list[int]) -> str:
        return str(tokens)

    def get_vocab_size(self) -> int:
        return VOCAB


def text() -> Dataset:
    draw = np.random.default_rng(3)
    return Dataset.from_dict(
        {"text": ["".join(map(chr, draw.integers(97, 120, draw.integers(3, 9)))) for _ in range(70)]}
    )


def make_config(case: dict[str, Any], out: Path) -> Trainer.Config:
    adam = {"lr": 3e-3, "betas": (0.9, 0.95)}
    groups = [
        ParamGroupConfig(pattern=r"norm", optimizer_name="AdamW", optimizer_kwargs={**adam, "weight_decay": 0.0}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={**adam, "weight_decay": 0.1}),
    ]
    layers = _build_llama3_layers(
        fuse_qkv=case["fused"],
        n_layers=LAYERS,
        dim=DIM,
        n_heads=HEADS,
        n_kv_heads=GROUPS,
        hidden_dim=INNER,
        rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=LENGTH, theta=10000, scaling="none"),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    weights = {"weight": partial(torch.nn.init.normal_, std=0.05)}
    model = Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=weights),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init={"weight": torch.nn.init.ones_}),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=weights),
        layers=layers,
    )
    replicas = case["ranks"] // case["tp"]
    return Trainer.Config(
        model_spec=ModelSpec(
            name="llama3",
            flavor="tiny",
            model=model,
            parallelize_fn=parallelize_llama,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        dump_folder=str(out),
        tokenizer=Letters.Config(),
        loss=CrossEntropyLoss.Config(),
        dataloader=texts.HuggingFaceTextDataLoader.Config(dataset="letters"),
        optimizer=OptimizersContainer.Config(param_groups=groups, implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=20),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=4 * replicas,
            seq_len=LENGTH,
            steps=LAST,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=case["tp"], enable_sequence_parallel=False, spmd_backend="partial_dtensor"
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=FULL, folder=".", async_mode=case["save"], export_dtype="bfloat16"
        ),
        activation_checkpoint=case["ac"],
        metrics=MetricsProcessor.Config(log_freq=50),
        comm=CommConfig(trace_buf_size=0),
        debug=DebugConfig(seed=3),
    )


def whole(value: Any) -> np.ndarray:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().numpy().copy()


class Watched(Trainer):
    """The Trainer, which notes what it holds when a checkpoint is due."""

    held: dict[int, tuple[dict[str, np.ndarray], dict[str, Any]]]

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        done = super().train_step(*args, **kwargs)
        if self.step in (FULL, LAST):
            self.__dict__.setdefault("held", {})[self.step] = self.note()
        return done

    def note(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        (model,), (optimizer,) = self.model_parts, self.optimizers.optimizers
        names = {id(p): n.replace("_checkpoint_wrapped_module.", "") for n, p in model.named_parameters()}
        held = {f"model.{name}": whole(value) for name, value in model.state_dict().items()}
        for parameter, slots in optimizer.state.items():
            held |= {f"optim.{names[id(parameter)]}.{slot}": whole(value) for slot, value in slots.items()}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.dataloader.state_dict())
        facts = {
            "groups": groups,
            "step": self.step,
            "ntokens_seen": self.ntokens_seen,
            "lr_scheduler": self.lr_schedulers.state_dict(),
            "dataloaders": [{k: v for k, v in state.items() if k != "world_size"} for state in every],
        }
        return held, facts


def train(case: dict[str, Any], out: Path, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case["ranks"]))
    texts.DATASETS["letters"] = texts.DatasetConfig(
        path="letters", loader=lambda path: text(), sample_processor=lambda sample: sample["text"]
    )
    trainer = Watched(make_config(case, out))
    try:
        trainer.train()
        if rank == 0:
            for step, (held, facts) in trainer.held.items():
                np.savez(out / f"truth{step}.npz", **held)
                (out / f"truth{step}.json").write_text(json.dumps(facts, indent=1, default=readable))
    finally:
        trainer.close()
    dist.destroy_process_group()


def readable(value: Any) -> Any:
    """Loaders keep their state as bytes of a pickle of their own."""
    if isinstance(value, bytes):
        import pickle

        return pickle.loads(value)
    return value.item() if hasattr(value, "item") else str(value)


def run(name: str, out: Path, port: int) -> None:
    case = CASES[name]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks: list[int] = []
    for rank in range(case["ranks"]):
        child = os.fork()
        if child == 0:
            try:
                train(case, out, rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        ranks.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    assert not any(codes), f"{name}: ranks ended with {codes}"
    for extra in out.iterdir():
        if extra.name not in (f"step-{FULL}", f"step-{LAST}") and not extra.name.startswith("truth"):
            shutil.rmtree(extra) if extra.is_dir() else extra.unlink()
    pack(out, Path(__file__).parent / f"{name}.tar.xz")


if __name__ == "__main__":
    for number, name in enumerate(sys.argv[2:] or CASES):
        run(name, Path(sys.argv[1]) / name, 29_711 + number)
        print(name, "written", flush=True)
