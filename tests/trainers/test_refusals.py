"""What the bridges refuse, and where they stay silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samerun.errors import UsageError
from samerun.trace import read_trace
from support.gloo import run_ranks
from support.pages import huggingface_names, names_for

pytestmark = pytest.mark.framework

HERE = {"microbatch": 3, "passes": 2, "processes": 2, "epoch_updates": 40}


@pytest.mark.parametrize(
    ("now", "update", "said"),
    [
        (HERE, 8, None),
        ({"microbatch": 2, "passes": 2, "processes": 3}, 8, None),
        ({"processes": 1}, 8, "48 samples would come again"),
        ({"processes": 4}, 8, "96 would never come"),
        ({"processes": 1}, 0, None),
        ({"epoch_updates": 39}, 8, None),
        ({"epoch_updates": 39}, 39, "another number of updates"),
    ],
)
def test_a_trainer_that_would_go_on_elsewhere(now: dict[str, int], update: int, said: str | None) -> None:
    pytest.importorskip("transformers")
    from samerun.integrations.huggingface import check_resumed_batch

    problems = check_resumed_batch(HERE, {**HERE, **now}, update)
    assert [problem.code for problem in problems] == (["SR-ORDER-SKIP"] if said else [])
    assert not problems or (said or "") in problems[0].message
    assert check_resumed_batch({}, {**HERE, **now}, update) == []  # nothing is known of the job that saved


def test_a_resumed_trainer_with_another_batch_is_stopped(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with names_for("huggingface") as names:
        from samerun.integrations.huggingface import SamerunCallback, WithSampleIds

        def train(micro: int, steps: int, resume: str | None, **callback: Any) -> int:
            settings = names["TrainingArguments"](
                output_dir=str(tmp_path), max_steps=steps, save_steps=2, per_device_train_batch_size=micro,
                use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False,
                lr_scheduler_type="constant",
            )  # fmt: skip
            trainer = names["Trainer"](
                model=names["model"], args=settings, train_dataset=WithSampleIds(names["dataset"]),
                callbacks=[SamerunCallback(**callback)],
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=resume)
            return trainer.state.global_step

        assert train(3, 2, None) == 2
        saved = str(tmp_path / "checkpoint-2")
        kept = json.loads(Path(saved, "trainer_state.json").read_text())["stateful_callbacks"]["SamerunCallback"]
        assert kept["attributes"] == {"microbatch": 3, "passes": 1, "processes": 1, "epoch_updates": 20}
        with pytest.raises(UsageError, match=r"SR-ORDER-SKIP.*4 would never come"):
            train(5, 4, saved)
        assert train(5, 4, saved, changed_batch=True) == 4
        assert train(3, 4, saved) == 4


def test_the_norm_is_that_before_clipping(tmp_path: Path) -> None:
    """What Trainer logs, whether or not it clips; Accelerate is left as it was."""
    accelerate = pytest.importorskip("accelerate")
    clip = accelerate.Accelerator.clip_grad_norm_

    def norms(limit: float) -> tuple[list[float | None], list[float]]:
        with names_for("huggingface") as names:
            from samerun.integrations.huggingface import SamerunCallback, WithSampleIds

            settings = names["TrainingArguments"](
                output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
                max_grad_norm=limit, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
                remove_unused_columns=False,
            )  # fmt: skip
            trainer = names["Trainer"](
                model=names["model"], args=settings, train_dataset=WithSampleIds(names["dataset"]),
                callbacks=[SamerunCallback(ledger=tmp_path / str(limit))],
            )  # fmt: skip
            trainer.train()
        recorded = [line.grad_norm for line in read_trace(tmp_path / str(limit)).lead.updates]
        return recorded, [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]

    for limit in (1e-3, 0.0):
        recorded, logged = norms(limit)
        assert len(logged) == 3
        assert min(logged) > 0.1
        assert recorded == pytest.approx(logged, rel=1e-6)
    assert accelerate.Accelerator.clip_grad_norm_ is clip


def test_a_batch_without_ids_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with names_for("huggingface") as names:
        from samerun.integrations.huggingface import SamerunCallback

        settings = names["TrainingArguments"](
            output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
        )
        callback = SamerunCallback(ledger=tmp_path / "ledger")
        trainer = names["Trainer"](
            model=names["model"], args=settings, train_dataset=names["dataset"], callbacks=[callback]
        )
        with pytest.raises(UsageError, match="WithSampleIds"):
            trainer.train()
        callback.recorder.close()


def test_a_lightning_trainer_with_other_passes_is_named() -> None:
    pytest.importorskip("lightning")
    with names_for("lightning") as names:
        from samerun.integrations.lightning import SamerunCallback, WithSampleIds
        from samerun.train import ElasticSampler

        sampler = ElasticSampler(60, global_batch=12, replicas=1, replica=0, max_microbatch=3)
        loader = names["DataLoader"](WithSampleIds(names["dataset"]), batch_sampler=sampler)
        trainer = names["Trainer"](
            accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            use_distributed_sampler=False, accumulate_grad_batches=2, callbacks=[SamerunCallback(sampler)],
        )  # fmt: skip
        with pytest.raises(UsageError, match="an update in 4 passes, and the Trainer steps after 2"):
            trainer.fit(names["module"], loader)


@pytest.mark.parametrize(
    ("samples", "dealt", "said"),
    [
        (29, {"last_batch": "keep"}, "the last update of an epoch has 5 samples"),
        (24, {"last_batch": "keep"}, None),
        (29, {"last_batch": "carry"}, None),
        (29, {"last_batch": "drop"}, None),
        (29, {"last_batch": "drop", "global_batch": 13}, "they hold from 2 to 3 samples"),
    ],
)
def test_passes_of_several_sizes_are_named(samples: int, dealt: dict[str, Any], said: str | None) -> None:
    """Lightning weighs them alike; epochs end twice within six updates."""
    pytest.importorskip("lightning")
    with names_for("lightning") as names:
        from samerun.integrations.lightning import SamerunCallback, WithSampleIds
        from samerun.train import ElasticSampler

        def fit(**callback: Any) -> list[int]:
            batch = {"global_batch": 12, "replicas": 1, "replica": 0, "max_microbatch": 3, **dealt}
            sampler = ElasticSampler(samples, **batch)
            loader = names["DataLoader"](WithSampleIds(names["dataset"]), batch_sampler=sampler)
            trainer = names["Trainer"](
                accelerator="cpu", max_steps=6, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                use_distributed_sampler=False, accumulate_grad_batches=sampler.dealing.passes,
                enable_model_summary=False, callbacks=[SamerunCallback(sampler, **callback)],
            )  # fmt: skip
            trainer.fit(names["module"], loader)
            return [trainer.global_step, sampler.committed.update]

        if said is None:
            assert fit() == [6, 6]
        else:
            with pytest.raises(UsageError, match=said):
                fit()
            assert fit(weighted=True) == [6, 6]


def _prepare(rank: int, world_size: int) -> list[list[str]]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from samerun.integrations.accelerate import check_prepared
    from support.hfjob import rendezvous

    rendezvous(world_size, 29547)
    AcceleratorState._reset_state(reset_partial_state=True)  # what tests before this one left in the parent
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    plain = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = accelerator.prepare(plain)
    return [[problem.code for problem in check_prepared(accelerator, one)] for one in (plain, prepared)]


@pytest.mark.multiprocess
def test_a_prepared_scheduler_is_refused() -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(2, _prepare) == [[[], ["SR-REC-USE"]]] * 2
    assert run_ranks(1, _prepare) == [[[], []]]


def test_without_a_launch_the_model_does_not_see_the_ids(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with huggingface_names() as names, pytest.MonkeyPatch.context() as patch:
        import warnings

        from samerun.integrations.huggingface import SamerunCallback, WithSampleIds

        warnings.simplefilter("ignore")
        patch.chdir(tmp_path)
        settings = names["TrainingArguments"](
            output_dir="out", max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False
        )
        callback = SamerunCallback()
        names["Trainer"](
            model=names["model"], args=settings, train_dataset=WithSampleIds(names["dataset"]), callbacks=[callback]
        ).train()
        assert not callback.recorder.active
        assert not list(names["model"]._forward_pre_hooks)


def test_an_engine_without_zero_is_refused() -> None:
    pytest.importorskip("deepspeed")
    with names_for("deepspeed") as names:
        from samerun.integrations.deepspeed import RecordedEngine

        def engine(stage: int) -> Any:
            model = torch.nn.Linear(4, 1)
            config = {**names["config"], "zero_optimization": {"stage": stage}}
            optimizer = torch.optim.AdamW(model.parameters())
            return names["deepspeed"].initialize(model=model, optimizer=optimizer, config=config)[0]

        with pytest.raises(UsageError, match="not that of ZeRO"):
            RecordedEngine(engine(0))
        assert RecordedEngine(engine(2)).scaler is None


def test_what_the_megatron_bridge_does_not_cover() -> None:
    pytest.importorskip("megatron.core")
    with names_for("megatron") as names:
        from samerun.integrations.megatron import RecordedModel, RecordedOptimizer, check_chunks, check_optimizer

        model, optimizer = names["model"], names["optimizer"]
        assert check_optimizer(optimizer) == []
        assert check_chunks([chunk.module for chunk in model]) == []
        logical = RecordedModel(model, vocab_size=names["args"].vocab_size)
        assert RecordedOptimizer(optimizer, logical).param_groups[0]["params"]
        one = optimizer.chained_optimizers[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one.config, "use_precision_aware_optimizer", True)
            with pytest.raises(UsageError, match=r"SR-REC-USE.*precision-aware"):
                RecordedOptimizer(optimizer, logical)
        with pytest.MonkeyPatch.context() as patch:  # experts that are spread, in fp16
            patch.setattr(one, "grad_scaler", object())
            assert check_optimizer(optimizer) == []
            patch.setattr(optimizer, "chained_optimizers", [one, one])
            with pytest.raises(UsageError, match=r"SR-REC-USE.*a loss scale with several optimizers"):
                RecordedOptimizer(optimizer, logical)
        del model[0].module.decoder
        with pytest.raises(UsageError, match=r"SR-REC-USE.*without `decoder`"):
            RecordedModel(model, vocab_size=names["args"].vocab_size)


def test_what_the_torchtitan_bridge_does_not_cover() -> None:
    pytest.importorskip("torchtitan")
    with names_for("torchtitan") as names:
        from samerun.integrations.torchtitan import RecordedTrainer, check_trainer

        config = names["config"]
        assert check_trainer(config) == []
        config.dataloader.global_batch = 24
        assert [problem.found for problem in check_trainer(config)] == [24]
        config.parallelism.context_parallel_degree = 2
        with pytest.raises(UsageError, match=r"SR-REC-USE.*context_parallel_degree"):
            RecordedTrainer(config)
