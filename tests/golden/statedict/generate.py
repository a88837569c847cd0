"""Writes the checkpoints of this directory again, with the real frameworks, on gloo ranks of this machine.

    PYTHONPATH=src:tests python tests/golden/statedict/generate.py [NAME...]

See PROVENANCE.md for versions. Each folder gets `truth.npz`: full tensors from the live run, by samerun's keys.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samerun.core.mesh import Layout
from support import rankfiles, toy
from support.gloo import run_ranks

HERE = Path(__file__).parent


def keep(folder: Path, truth: dict[str, Any]) -> None:
    np.savez_compressed(folder / "truth.npz", **truth)


def full_truth(model: torch.nn.Module, optimizer: Any, buffers: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the tensors of a model that this rank holds whole, and of its optimizer, by samerun's keys."""
    names = {id(parameter): name.removeprefix("module.") for name, parameter in model.named_parameters()}
    truth: dict[str, Any] = {f"param:{names[id(p)]}": p.detach().numpy().copy() for p in model.parameters()}
    truth |= {f"buffer:{name}": dict(model.named_buffers())[name].numpy().copy() for name in buffers}
    inner = getattr(optimizer, "optimizer", optimizer)
    for parameter, slots in inner.state.items():
        truth |= {f"optim.{slot}:{names[id(parameter)]}": value.numpy().copy() for slot, value in slots.items()}
    return truth


# ---- torch ----


def torch_files(folder: Path) -> None:
    """One job in one process, saved in both containers."""
    job = toy.build(Layout(), config=rankfiles.SMALL)
    toy.train(job, 2)
    state = {
        "model": {f"module.{name}": tensor for name, tensor in job.model.state_dict().items()},
        "optimizer": job.optimizer.state_dict(),
        "lr_scheduler": job.scheduler.state_dict(),
        "epoch": 0,
        "global_step": 2,
    }
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    keep(folder, toy.full_state(job))


def bare_ranks(folder: Path) -> None:
    keep(folder, run_ranks(3, rankfiles.write_fsdp2, Layout(dp_shard=3), folder, False)[0])


def fsdp1_orig(folder: Path) -> None:
    keep(folder, run_ranks(3, rankfiles.write_fsdp1, folder, True)[0])
    (folder / "full.pt").unlink()  # to keep this directory small: only the local kind is like no other
    shutil.rmtree(folder / "sharded")


def shards(folder: Path) -> None:
    keep(folder, run_ranks(3, rankfiles.write_safetensors, folder, dict)[0])


def shards_with_object(folder: Path) -> None:
    keep(folder, run_ranks(3, rankfiles.write_safetensors, folder, lambda: {"step": 5})[0])


# ---- Hugging Face Trainer ----


def rendezvous(world_size: int) -> None:
    """Sets what Accelerate wants to see although the process group is there."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", LOCAL_WORLD_SIZE=str(world_size))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 11, (toy.BLOCK,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11, hidden_size=10, intermediate_size=14, num_hidden_layers=2, num_attention_heads=1,
            num_key_value_heads=1, max_position_embeddings=8, tie_word_embeddings=True,
        )
    )  # fmt: skip


def trainer(folder: Path) -> None:
    def write(rank: int, world_size: int) -> Any:
        rendezvous(world_size)
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            output_dir="run", per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=4,
            save_steps=2, learning_rate=1e-3, weight_decay=0.1, warmup_steps=1, lr_scheduler_type="cosine",
            use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, seed=11, save_total_limit=4,
        )  # fmt: skip
        runner = Trainer(model=llama(), args=arguments, train_dataset=Tokens())
        runner.train()
        return full_truth(runner.model, runner.optimizer)

    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        truth = run_ranks(3, write, timeout=500)[0]
        shutil.copytree("run/checkpoint-4", folder / "checkpoint-4")
    keep(folder, truth)


def adapters(folder: Path) -> None:
    """Trainer with peft: adapters and a whole output layer are trained and saved, the base model is not."""

    def write(rank: int, world_size: int) -> Any:
        rendezvous(world_size)
        from peft import LoraConfig, get_peft_model
        from transformers import Trainer, TrainingArguments

        chosen = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
        arguments = TrainingArguments(
            output_dir="run", per_device_train_batch_size=1, max_steps=4, save_steps=4, learning_rate=1e-2,
            weight_decay=0.1, use_cpu=True, report_to=[], disable_tqdm=True, seed=11,
        )  # fmt: skip
        model = llama()
        model.config.tie_word_embeddings = False
        runner = Trainer(model=get_peft_model(model, chosen), args=arguments, train_dataset=Tokens())
        runner.train()
        truth = full_truth(runner.model, runner.optimizer)
        trained = {name for name, value in runner.model.named_parameters() if value.requires_grad}
        names = {key: key.removeprefix("param:").partition(":")[2] or key.removeprefix("param:") for key in truth}
        kept = {key: value for key, value in truth.items() if names[key] in trained}
        return {key.replace(".default", "").replace(".modules_to_save", ""): value for key, value in kept.items()}

    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        truth = run_ranks(2, write, timeout=500)[0]
        shutil.copytree("run/checkpoint-4", folder / "checkpoint-4", ignore=shutil.ignore_patterns("README.md"))
    keep(folder, truth)


# ---- Accelerate ----


def accelerate_ddp(folder: Path) -> None:
    def write(rank: int, world_size: int) -> Any:
        rendezvous(world_size)
        from accelerate import Accelerator

        runner = Accelerator(cpu=True)
        torch.manual_seed(0)
        model: Any = toy.Model(rankfiles.SMALL)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        model = runner.prepare_model(model.module, device_placement=False, evaluation_mode=True)
        optimizer, scheduler = runner.prepare(optimizer, scheduler)
        for number in range(2):
            tokens = torch.randint(0, 11, (2, toy.BLOCK), generator=torch.Generator().manual_seed(number))
            model(tokens).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        runner.save_state(str(folder), safe_serialization=True)
        return full_truth(model, optimizer, ("average", "seen"))

    keep(folder, run_ranks(3, write, timeout=500)[0])


def accelerate_local(folder: Path) -> None:
    """One file per rank of flat parameters, and the optimizer in DCP, as `LOCAL_STATE_DICT` makes Accelerate save."""
    from support import hfjob

    keep(folder, run_ranks(3, hfjob.save_fsdp, folder, timeout=500)[0])


# ---- Lightning ----


def lightning_module() -> Any:
    import lightning

    class Job(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = toy.Model(rankfiles.SMALL)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.net(batch["input_ids"]).square().mean()

        def configure_optimizers(self) -> Any:
            trained = [p for p in self.net.parameters() if p.requires_grad]
            groups = [
                {"params": [p for p in trained if p.ndim > 1]},
                {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=False)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]

    return Job()


def lightning_file(folder: Path) -> None:
    import lightning

    loader = torch.utils.data.DataLoader(Tokens(), batch_size=2)
    runner = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder),
    )  # fmt: skip
    module = lightning_module()
    runner.fit(module, loader)
    runner.save_checkpoint(folder / "step3.ckpt")
    keep(folder, full_truth(module, runner.optimizers[0], ("net.average", "net.seen")))


def lightning_sharded(folder: Path) -> None:
    """The directory that ModelParallelStrategy writes: DCP files and meta.pt."""

    def write(rank: int, world_size: int) -> Any:
        rendezvous(world_size)
        import lightning
        from lightning.pytorch.strategies import ModelParallelStrategy
        from torch.distributed.fsdp import fully_shard

        class Sharded(type(lightning_module())):
            def configure_model(self) -> None:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
                self.net.set_force_sum_reduction_for_comms(True)

        strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
        strategy.process_group_backend  # noqa: B018
        runner = lightning.Trainer(
            max_steps=2, accelerator="cpu", devices=world_size, strategy=strategy, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir="run", use_distributed_sampler=False, plugins=[Environment(rank, world_size)],
        )  # fmt: skip
        module = Sharded()
        runner.fit(module, torch.utils.data.DataLoader(Tokens(), batch_size=2))
        runner.save_checkpoint(str(folder / "step2.ckpt"))
        return {
            f"{'buffer' if name in ('net.average', 'net.seen') else 'param'}:{name}": whole(tensor)
            for name, tensor in module.state_dict().items()
            if name != "net.head.weight"
        }

    def whole(tensor: Any) -> Any:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().numpy().copy()

    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Environment(LightningEnvironment):
        def __init__(self, rank: int, world_size: int) -> None:
            super().__init__()
            self._rank, self._world = rank, world_size

        @property
        def creates_processes_externally(self) -> bool:
            return True

        def world_size(self) -> int:
            return self._world

        def global_rank(self) -> int:
            return self._rank

        def local_rank(self) -> int:
            return self._rank

        def set_world_size(self, size: int) -> None:
            pass

        def set_global_rank(self, rank: int) -> None:
            pass

    keep(folder, run_ranks(2, write, timeout=500)[0])


MAKERS: dict[str, Callable[[Path], None]] = {
    "torch": torch_files,
    "bare": bare_ranks,
    "fsdp1-orig": fsdp1_orig,
    "shards": shards,
    "shards-object": shards_with_object,
    "trainer": trainer,
    "adapters": adapters,
    "accelerate": accelerate_ddp,
    "accelerate-local": accelerate_local,
    "lightning": lightning_file,
    "lightning-sharded": lightning_sharded,
}


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names or MAKERS:
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        MAKERS[name](HERE / name)
        size = sum(path.stat().st_size for path in (HERE / name).rglob("*") if path.is_file())
        print(f"{name}: {size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
