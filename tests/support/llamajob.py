"""One Llama run under every framework that saves it: same model, groups and data; what differs is who trains and saves.

Every `save_...` runs on ranks that `run_ranks` forked, takes three updates, saves as its framework does, and returns
what the live run held: tensors by samerun's keys, and the settings of each group. `resume_...` load with the framework.
No dimension that ranks divide is a multiple of 3; heads are grouped, and of another width than hidden / heads.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from support import hfjob

Held = dict[str, Any]
"""`tensors` by samerun's key, `groups` (the names and settings of each)."""

LAYERS, HIDDEN, INNER, VOCAB, HEADS, GROUPS, HEAD = 2, 20, 26, 37, 4, 2, 6
UPDATES, SAMPLES, RANKS = 3, 6, 3
SETTINGS = ("lr", "betas", "eps", "weight_decay")


def build(seed: int = 0, **changed: Any) -> Any:
    """Returns the model, its head not tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD, "max_position_embeddings": 16,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changed}))


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns two groups: what decays, and norms. So do Trainer and Megatron deal a Llama's parameters."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if "norm" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
    ]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW over the groups."""
    return torch.optim.AdamW(groups_of(model), lr=2e-3, betas=(0.9, 0.95), eps=1e-9)


def schedule_of(optimizer: Any) -> Any:
    """Returns a schedule that moves the rate at every update."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 2))


def batch_of(update: int, rank: int, ranks: int) -> torch.Tensor:
    """Returns this rank's part of the six sequences of an update."""
    tokens = torch.randint(0, VOCAB, (SAMPLES, 9), generator=torch.Generator().manual_seed(update))
    return tokens[rank::ranks]


def train(model: Any, optimizer: Any, scheduler: Any, rank: int, ranks: int, *, reduce: bool) -> None:
    """Takes three updates; with `reduce` gradients are averaged here, where no wrapper does it."""
    for update in range(UPDATES):
        tokens = batch_of(update, rank, ranks)
        model(input_ids=tokens, labels=tokens).loss.backward()
        for parameter in model.parameters() if reduce else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def held_by(model: Any, optimizer: Any) -> Held:
    """Returns what a model and an optimizer hold, gathered where they are distributed. Every rank calls it."""
    from support.skeleton import full

    inner = getattr(optimizer, "optimizer", optimizer)
    names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
    tensors = {f"param:{names[id(p)]}": full(p).copy() for p in model.parameters()}
    for parameter, slots in inner.state.items():
        tensors |= {f"optim.{slot}:{names[id(parameter)]}": full(value).copy() for slot, value in slots.items()}
    groups = [settings_of(group, [names[id(p)] for p in group["params"]]) for group in inner.param_groups]
    return {"tensors": tensors, "groups": groups}


def settings_of(group: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Returns what defines the next update of a group, and the names of its members."""
    return {"names": names, **{name: group[name] for name in SETTINGS}}


def state_of(model: Any, optimizer: Any, scheduler: Any, **names: str) -> dict[str, Any]:
    """Returns what a script puts into torch.save."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "progress": {"update": UPDATES, "samples": UPDATES * SAMPLES},
    }


# --- torch alone ------------------------------------------------------------------------------------------------------


def save_torch(rank: int, ranks: int, folder: Path) -> Held:
    """DDP, and rank 0 saves one file, `run.pt`, with the wrapper's prefix before every name."""
    model = torch.nn.parallel.DistributedDataParallel(build())
    optimizer = optimizer_of(model)
    scheduler = schedule_of(optimizer)
    train(model, optimizer, scheduler, rank, ranks, reduce=False)
    if rank == 0:
        torch.save(state_of(model, optimizer, scheduler), folder / "run.pt")
    return held_by(model, optimizer)


def save_fsdp2(rank: int, ranks: int, folder: Path, kind: str) -> Held:
    """FSDP2; every rank saves its DTensors in a file of its own (`ranklocal`), or all of them by `dcp`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    from support.toy import quiet

    model = build()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optimizer_of(model)
    scheduler = schedule_of(optimizer)
    train(model, optimizer, scheduler, rank, ranks, reduce=False)
    saved = state_of(model, optimizer, scheduler)
    (folder / kind).mkdir(exist_ok=True)
    if kind == "ranklocal":
        torch.save(saved, folder / kind / f"rank_{rank}.pt")
    else:
        weights, moments = get_state_dict(model, optimizer)
        with quiet():
            dcp.save({**saved, "model": weights, "optimizer": moments}, checkpoint_id=folder / kind)
    return held_by(model, optimizer)


def save_fsdp1(rank: int, ranks: int, folder: Path) -> Held:
    """FSDP1 with its flat parameters; every rank saves its sharded state dicts in a file of its own."""
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    from support.rankfiles import full_fsdp1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so in many ways
        model = build()
        how: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = FSDP(layer, **how)
        wrapped = FSDP(model, **how)
        optimizer = optimizer_of(wrapped)
        scheduler = schedule_of(optimizer)
        train(wrapped, optimizer, scheduler, rank, ranks, reduce=False)
        (folder / "fsdp1").mkdir(exist_ok=True)
        with FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
            saved = state_of(wrapped, optimizer, scheduler)
            saved["optimizer"] = FSDP.optim_state_dict(wrapped, optimizer)
            torch.save({**saved, "rank": rank, "world_size": ranks}, folder / "fsdp1" / f"model_rank{rank}.pt")
        held = full_fsdp1(wrapped, optimizer)  # offloaded to the CPU, torch 2.13 gives all moments one buffer
        full, moments = held["model"], held["optimizer"]
    tensors = {f"param:{name}": value.numpy().copy() for name, value in full.items()}
    for name, slots in moments["state"].items():
        tensors |= {f"optim.{slot}:{name}": value.numpy().copy() for slot, value in slots.items()}
    clean = [[*group["params"]] for group in moments["param_groups"]]
    groups = [settings_of(g, names) for g, names in zip(optimizer.param_groups, clean, strict=True)]
    return {"tensors": tensors, "groups": groups}


# --- trainers ---------------------------------------------------------------------------------------------------------


def save_lightning(rank: int, ranks: int, folder: Path) -> Held:
    """Lightning's Trainer under DDP; the model is an attribute of the module, so `net.` stands before every name."""
    hfjob.rendezvous(ranks, 29534)
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"},
            }

        def train_dataloader(self) -> Any:
            batches = [batch_of(update, rank, ranks) for update in range(UPDATES)]
            return torch.utils.data.DataLoader(batches, batch_size=None)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp", max_steps=UPDATES, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(folder),
    )  # fmt: skip
    trainer.fit(module)
    trainer.save_checkpoint(str(folder / "step3.ckpt"))
    return held_by(module.net, trainer.optimizers[0])


def save_trainer(rank: int, ranks: int, folder: Path) -> Held:
    """The stock Trainer under DDP, which makes its groups itself."""
    return hfjob.train(rank, ranks, folder / "trainer", None, 0.1, build)["held"]


def accelerate(
    rank: int, ranks: int, folder: Path | None, source: Path | None, make: Callable[[int], Any] = build
) -> Held:
    """A script under Accelerate, its scheduler prepared: trains and saves, or loads."""
    hfjob.rendezvous(ranks, 29535)
    from accelerate import Accelerator

    random.seed(rank)
    runner = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model: Any = make(0 if source is None else 5)
    optimizer: Any = optimizer_of(model)
    scheduler: Any = schedule_of(optimizer)
    model, optimizer, scheduler = runner.prepare(model, optimizer, scheduler)
    if source is not None:
        for group in optimizer.param_groups:
            group |= {"lr": 77.0, "weight_decay": 0.5}
        with contextlib.redirect_stdout(None):
            runner.load_state(str(source))
        return {**held_by(model, optimizer), "position": scheduler.state_dict()["last_epoch"]}
    train(model, optimizer, scheduler, rank, ranks, reduce=False)
    runner.save_state(str(folder))
    return held_by(model, optimizer)


def resume_accelerate(rank: int, ranks: int, source: Path, make: Callable[[int], Any] = build) -> Held:
    """What a script under Accelerate holds after `load_state`, and its schedule's position."""
    return accelerate(rank, ranks, None, source, make)


def resume_trainer(rank: int, ranks: int, source: Path, make: Callable[[int], Any] = build) -> Held:
    """What a stock Trainer holds when it has resumed, and its schedule's position."""
    found = hfjob.train(rank, ranks, None, source, 0.1, make)
    return {**found["held"], "position": found["position"]}


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def engine_of(stage: int, ranks: int, *, universal: bool = False, bf16: bool = False, **shape: Any) -> Any:
    """Starts DeepSpeed over the model; rates and weights are none that a checkpoint holds where one is loaded."""
    import deepspeed

    from support import dsjob

    dsjob._quiet()
    job = dsjob.Job(stage, bf16=bf16, batch=SAMPLES)
    config = job.config(ranks, universal)
    config.pop("gradient_clipping")
    rates = {"warmup_min_lr": [0.0, 0.0], "warmup_max_lr": [2e-3, 2e-3], "warmup_num_steps": 8}
    config["scheduler"]["params"] |= rates
    model = build(0 if not shape.get("seed") else shape["seed"], **shape.get("changed", {}))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    return engine, job


def save_zero(rank: int, ranks: int, folder: Path, stage: int) -> Held:
    """DeepSpeed's engine, native."""
    engine, job = engine_of(stage, ranks)
    for update in range(UPDATES):
        tokens = batch_of(update, rank, ranks)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(folder / f"zero{stage}"))
    return held_by_engine(engine, job)


def held_by_engine(engine: Any, job: Any) -> Held:
    """Returns what an engine holds, from its own interfaces; of 16-bit runs the masters, too."""
    from support import dsjob

    found = dsjob.full_state(engine, job)
    kinds = {"module": "param", "exp_avg": "optim.exp_avg", "exp_avg_sq": "optim.exp_avg_sq"}
    kinds |= {"fp32": "master"} if job.bf16 else {}
    tensors: dict[str, np.ndarray] = {}
    for name, value in found.items():
        kind, _, fqn = name.partition("/")
        if kind in kinds:
            tensors[f"{kinds[kind]}:{fqn}"] = value
    inner = engine.optimizer.optimizer
    steps = {float(state["step"]) for state in inner.state.values()}
    (step,) = steps
    tensors |= {f"optim.step:{key.partition(':')[2]}": np.float32(step) for key in tensors if key[:5] == "param"}
    names = [group["names"] for group in named_groups(engine.module)]
    groups = [settings_of(group, members) for group, members in zip(inner.param_groups, names, strict=True)]
    return {"tensors": tensors, "groups": groups}


def named_groups(model: Any) -> list[dict[str, Any]]:
    """Returns the names of the members of each group."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [{"names": [names[id(p)] for p in group["params"]]} for group in groups_of(model)]


def resume_engine(
    rank: int, ranks: int, folder: Path, stage: int, universal: bool, bf16: bool, changed: dict[str, Any]
) -> Held:
    """Loads into an engine whose model and rates are others, with the documented lines where it is universal."""
    from support import dsjob

    engine, job = engine_of(stage, ranks, universal=universal, bf16=bf16, seed=5, changed=changed)
    for group in engine.optimizer.optimizer.param_groups:
        group |= {"lr": 77.0, "weight_decay": 0.5}
    path, client = engine.load_checkpoint(str(folder), load_lr_scheduler_states=False)
    assert path is not None
    if universal and stage == 3:
        exec(dsjob.RESTORE_STAGE3, {"engine": engine, "path": path, "client": client})
    return held_by_engine(engine, job)


def to_universal(source: Path, target: Path) -> None:
    """Converts a native save with DeepSpeed's own tool."""
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(source), output_folder=str(target), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


# --- what is compared -------------------------------------------------------------------------------------------------


def differences(found: Held, truth: Held) -> list[str]:
    """Returns what is not bit for bit the truth's: tensors, members of groups in order, settings."""
    mine, theirs = found["tensors"], truth["tensors"]
    wrong = sorted(mine.keys() ^ theirs.keys())
    for key in mine.keys() & theirs.keys():
        a, b = np.asarray(mine[key]), np.asarray(theirs[key])
        if a.shape != b.shape or a.astype(b.dtype).tobytes() != b.tobytes():
            wrong.append(key)
    for number, (a, b) in enumerate(zip(found["groups"], truth["groups"], strict=True)):
        wrong += [f"{name} of group {number}" for name in ("names", *SETTINGS) if _plain(a[name]) != _plain(b[name])]
    return sorted(wrong)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


SAVES: dict[str, tuple[Callable[..., Held], tuple[Any, ...], str]] = {
    "torch": (save_torch, (), "run.pt"),
    "ranklocal": (save_fsdp2, ("ranklocal",), "ranklocal"),
    "dcp": (save_fsdp2, ("dcp",), "dcp"),
    "fsdp1": (save_fsdp1, (), "fsdp1"),
    "lightning": (save_lightning, (), "step3.ckpt"),
    "huggingface": (save_trainer, (), "trainer/checkpoint-3"),
    "accelerate": (lambda rank, ranks, folder: accelerate(rank, ranks, folder / "accelerate", None), (), "accelerate"),
    "zero": (save_zero, (2,), "zero2"),
}
"""By format: who saves it, with what, and where it then lies in the folder."""


def save(kind: str, folder: Path) -> tuple[Path, Held]:
    """Runs the job of a format on three ranks; returns where its checkpoint lies, and what the run held."""
    from support.gloo import run_ranks

    folder.mkdir(exist_ok=True)
    if kind == "universal":
        source, truth = save("zero", folder)
        to_universal(source / f"global_step{UPDATES}", folder / "universal" / f"global_step{UPDATES}_universal")
        (folder / "universal" / "latest_universal").write_text(f"global_step{UPDATES}_universal")
        return folder / "universal", truth
    function, rest, place = SAVES[kind]
    return folder / place, run_ranks(RANKS, function, folder, *rest, timeout=900)[0]
