"""`ElasticSampler` inside other libraries' training loops: real ones, on real gloo ranks, moved after every update.

What counts are the ids that a loader's dataset gave out and the loop trained on, not what the sampler says of itself.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from samerun.core.order import GlobalOrder
from samerun.core.orders import KeyedOrder
from samerun.errors import UsageError
from samerun.train.sampler import ElasticSampler
from support.gloo import import_frameworks, run_ranks
from support.warm_ranks import ZERO

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

SAMPLES, BATCH, MOST = 23, 11, 2
ROUTE = [(4, 1), (3, 2), (5, 3), (2, 5)]
"""(ranks, the update that ends the start): over two epochs' ends, nowhere dividing evenly."""
ORDER: GlobalOrder = KeyedOrder(SAMPLES, 6)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Samples that carry their own id."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return {"ids": torch.tensor(index), "x": x}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, **rest: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def sampler_of(rank: int, ranks: int, **more: Any) -> ElasticSampler:
    return ElasticSampler(ORDER, global_batch=BATCH, replicas=ranks, replica=rank, max_microbatch=MOST, **more)


def rendezvous(rank: int, ranks: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541", LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", GROUP_WORLD_SIZE="1", ACCELERATE_USE_CPU="true")


def updates_of(job: Callable[..., list[list[int]]], folder: Path, workers: int) -> list[list[int]]:
    """Runs the route, and returns what each update trained on, over all ranks."""
    found: list[list[int]] = []
    for ranks, until in ROUTE:
        by_rank = run_ranks(ranks, job, str(folder), until, workers, timeout=200, with_workers=True)
        assert {len(updates) for updates in by_rank} == {until - len(found)}
        found += [[sample for ids in update for sample in ids] for update in zip(*by_rank, strict=True)]
    return found


def expected(last_batch: str) -> list[list[int]]:
    ids = [sample for epoch in range(3) for sample in ORDER.ids(epoch, 0, SAMPLES).tolist()]
    if last_batch == "carry":
        return [ids[at : at + BATCH] for at in range(0, 5 * BATCH, BATCH)]
    epochs = [ids[at : at + SAMPLES] for at in range(0, 3 * SAMPLES, SAMPLES)]
    return [epoch[at : at + BATCH] for epoch in epochs for at in range(0, SAMPLES, BATCH)][:5]


def check(found: list[list[int]], last_batch: str) -> None:
    assert [Counter(ids) for ids in found] == [Counter(ids) for ids in expected(last_batch)]


def under_accelerate(rank: int, ranks: int, folder: str, until: int, workers: int) -> list[list[int]]:
    """Accelerate's own save and load carry the position; the loader is not given to `prepare`."""
    rendezvous(rank, ranks)
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == ranks
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = sampler_of(rank, ranks, empty="placeholder")
    accelerator.register_for_checkpointing(sampler)
    saved = sorted(Path(folder).glob("update-*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
    assert sampler.committed.update == len(saved)
    loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    found: list[list[int]] = []
    for update in sampler.updates(loader, until=until):
        ids: list[int] = []
        for microbatch in update:
            loss = model(**microbatch.batch)["loss"] * (0 if microbatch.is_empty else 1)
            accelerator.backward(loss)
            ids += [] if microbatch.is_empty else microbatch.batch["ids"].tolist()
        optimizer.step()
        optimizer.zero_grad()
        sampler.commit()
        found.append(ids)
        accelerator.save_state(f"{folder}/update-{update.number}")
    return found


def under_trainer(rank: int, ranks: int, folder: str, until: int, workers: int) -> list[list[int]]:
    """The Trainer counts updates; its loader has no end and no length, and is not prepared."""
    rendezvous(rank, ranks)
    from transformers import Trainer, TrainerCallback, TrainingArguments

    sampler = sampler_of(rank, ranks, last_batch="carry")
    assert sampler.dealing.num_empty == 0
    found: list[list[int]] = []
    seen: list[int] = []

    class Watched(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            more: dict[str, Any] = {"prefetch_factor": 2} if workers else {}
            return DataLoader(Rows(), batch_sampler=sampler.endless(), num_workers=workers, **more)

        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            seen.extend(inputs["ids"].tolist())
            return super().training_step(model, inputs, *rest, **named)

    class Position(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            assert sampler.commit().update == state.global_step
            found.append(seen.copy())
            seen.clear()

        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.is_world_process_zero:
                place = Path(args.output_dir, f"checkpoint-{state.global_step}", "sampler.json")
                place.write_text(json.dumps(sampler.state_dict()))

    saved = sorted(Path(folder).glob("checkpoint-*"))
    if saved:
        sampler.load_state_dict(json.loads((saved[-1] / "sampler.json").read_text()))
    arguments = TrainingArguments(
        output_dir=folder, max_steps=until, gradient_accumulation_steps=sampler.dealing.passes, save_steps=1,
        ignore_data_skip=True, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        remove_unused_columns=False, lr_scheduler_type="constant",
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Watched(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Position()])
    trainer.train(resume_from_checkpoint=str(saved[-1]) if saved else None)
    return found


def under_lightning(rank: int, ranks: int, folder: str, until: int, workers: int) -> list[list[int]]:
    """Lightning counts updates as well; the position is part of its checkpoint."""
    rendezvous(rank, ranks)
    import lightning

    sampler = sampler_of(rank, ranks, last_batch="carry")
    found: list[list[int]] = []
    seen: list[int] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, index: int) -> Any:
            seen.extend(batch["ids"].tolist())
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return DataLoader(Rows(), batch_sampler=sampler.endless(), num_workers=workers)

        def on_train_batch_end(self, *rest: Any) -> None:
            if self.trainer.global_step > sampler.committed.update:
                sampler.commit()
                found.append(seen.copy())
                seen.clear()
                self.trainer.save_checkpoint(f"{folder}/update-{self.trainer.global_step}.ckpt")

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["sampler"] = sampler.state_dict()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            sampler.load_state_dict(checkpoint["sampler"])

    torch.manual_seed(0)
    saved = sorted(Path(folder).glob("update-*.ckpt"))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp", max_steps=until, use_distributed_sampler=False,
        accumulate_grad_batches=sampler.dealing.passes, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    assert trainer.world_size == ranks
    trainer.fit(Module(), ckpt_path=str(saved[-1]) if saved else None)
    return found


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize(
    ("library", "job", "last_batch"),
    [
        ("accelerate", under_accelerate, "keep"),
        ("transformers", under_trainer, "carry"),
        ("lightning", under_lightning, "carry"),
    ],
)
def test_moved_after_every_update(library: str, job: Callable[..., Any], last_batch: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    import_frameworks("transformers.trainer", "accelerate", "lightning", *ZERO)
    check(updates_of(job, tmp_path, 1), last_batch)


def test_an_endless_sampler_makes_whole_updates_and_has_no_length() -> None:
    with pytest.raises(UsageError, match="SR-ORDER-INVALID"):
        sampler_of(0, 2).endless()
    loader = DataLoader(Rows(), batch_sampler=sampler_of(0, 2, last_batch="carry").endless())  # pyright: ignore
    with pytest.raises(TypeError):
        len(loader)
