"""Hugging Face Trainer: one callback records the run, and stops a resume that would go on in other data.

    trainer = Trainer(
        model=model, args=TrainingArguments(..., remove_unused_columns=False),
        train_dataset=WithSampleIds(dataset), callbacks=[SamerunCallback(evaluate)],
    )

Derived from transformers 5.24.0 (`trainer.py`, `trainer_callback.py`). Needs the package `transformers`.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from samerun.core.mesh import Layout
from samerun.errors import Problem, UsageError
from samerun.integrations.tagged import SAMPLE_IDS, WithSampleIds
from samerun.train.lines import misuse
from samerun.train.recorder import Recorder, StageDone

__all__ = ["SamerunCallback", "WithSampleIds", "check_resumed_batch"]


class SamerunCallback(TrainerCallback, ExportableState):
    """Records what a Trainer does. Inert unless samerun launched the job or a ledger is kept.

    The ids come from the batch (`WithSampleIds`), the loss from the model's output, everything else from the step. The
    model never sees the ids. In a job that samerun launched nothing is saved, and the job ends after its last update.
    `trainer_state.json` keeps how the batch was dealt: a resume whose data would not go on where it stopped is refused.

    Leave `restore_callback_states_from_checkpoint` off: Trainer would make a new callback without `evaluate`.

    Args:
        evaluate: given the model, returns the losses and logits of a few fixed examples, as for `Recorder.evaluate`.
        layout: how the ranks are arranged; by default what the model shows, and data parallel without.
        ledger: keeps a record of the run itself there.
        changed_batch: permits a resume with another global batch.
    """

    def __init__(
        self,
        evaluate: Callable[[Any], Mapping[str, Any]] | None = None,
        *,
        layout: Layout | Mapping[str, int] | str | None = None,
        ledger: str | Path | None = None,
        changed_batch: bool = False,
    ) -> None:
        self.recorder = Recorder.from_env(ledger)
        self._evaluate, self._layout, self._changed_batch = evaluate, layout, changed_batch
        self._dealt: dict[str, int] = {}
        self._ids: Any = None
        self._hooks: list[Any] = []

    def state(self) -> dict[str, Any]:
        """Returns how the batch was dealt, for `trainer_state.json`."""
        return {"args": {}, "attributes": dict(self._dealt)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by Trainer when everything is built and loaded, random states apart."""
        model, optimizer = given["model"], given["optimizer"]
        self._dealt = dealt(args, len(given["train_dataloader"]))
        before: Any = (state.stateful_callbacks or {}).get(type(self).__name__, {})
        problems = check_resumed_batch(before.get("attributes", {}), self._dealt, state.global_step)
        if problems and not self._changed_batch:
            raise UsageError(problems)
        self._hooks = [
            model.register_forward_pre_hook(self._take_ids, with_kwargs=True),
            model.register_forward_hook(self._note_pass, with_kwargs=True),
        ]
        self.recorder.attach(
            model,
            getattr(optimizer, "optimizer", optimizer),
            given["lr_scheduler"],
            getattr(optimizer, "scaler", None),
            layout=self._layout,
            batch=_header_batch(self._dealt),
            config=_config(model),
        )
        self.recorder.loaded(update=state.global_step)
        if self.recorder.active:
            self._hooks.append(_Clipping(self.recorder))
        if self._evaluate is not None:
            evaluate = self._evaluate
            self.recorder.evaluate(lambda: evaluate(model))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by Trainer after each update, before it logs, evaluates and saves."""
        control.should_training_stop |= self.recorder.finished
        control.should_save &= self.recorder.may_save

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by Trainer when it logs, and once more after the last update."""
        if "train_runtime" not in (given.get("logs") or {}):
            self.recorder.boundary("log", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by Trainer after an evaluation."""
        self.recorder.boundary("eval", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by Trainer after a save."""
        self.recorder.boundary("save", state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by Trainer when its loop is left: a launched job goes no further, where it would tidy checkpoints."""
        control.should_save &= self.recorder.may_save
        if self.recorder.finished:
            self.recorder.close()
            raise StageDone(0)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by Trainer at the end of an ordinary run."""
        self.recorder.close()
        for hook in self._hooks:
            hook.remove()

    def _take_ids(self, module: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._ids = named.get(SAMPLE_IDS)
        return inputs, {name: value for name, value in named.items() if name != SAMPLE_IDS}

    def _note_pass(self, module: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
        import torch

        if not (self.recorder.active and module.training and torch.is_grad_enabled()):
            return
        if self._ids is None:
            raise misuse(
                "a batch came without sample ids",
                "wrap the training data in WithSampleIds, with remove_unused_columns=False",
            )
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if loss is None:
            raise misuse(
                "the model's output has no loss",
                "pass labels to the model; a loss made outside of it (label smoothing, compute_loss_func) is unseen",
            )
        tokens, items = _valid_tokens(module, named), named.get("num_items_in_batch")
        # With num_items_in_batch the model returns its sum over all tokens of the update; else the mean of the pass.
        share = 1.0 if items is None or not tokens else items / tokens
        weight = 1 if items is None or tokens is None else tokens
        self.recorder.samples(self._ids.tolist(), loss=loss.detach() * share, tokens=tokens, weight=weight)


class _Clipping:
    """Tells the norm of every gradient before Trainer clips it, until it is removed.

    Trainer clips before its first callback of a step, and tells callbacks the norm only where it logs. It takes it from
    `Accelerator.clip_grad_norm_`, which returns that before clipping, also where nothing is clipped. (With gradients on
    several device meshes it does not, and the norm is then measured in the step.) After an error in training nothing
    removes it, and it stays silent.
    """

    def __init__(self, recorder: Recorder) -> None:
        from accelerate.accelerator import Accelerator

        self._clip = clip = Accelerator.clip_grad_norm_

        def clip_and_tell(accelerator: Any, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
            norm = clip(accelerator, parameters, max_norm, norm_type)
            if norm is not None and norm_type == 2 and not recorder.closed:
                recorder.grad_norm(norm)
            return norm

        Accelerator.clip_grad_norm_ = clip_and_tell

    def remove(self) -> None:
        from accelerate.accelerator import Accelerator

        Accelerator.clip_grad_norm_ = self._clip


def dealt(args: Any, num_batches: int) -> dict[str, int]:
    """Returns how a Trainer deals: samples per process and pass, passes, processes, and updates in an epoch."""
    passes = args.gradient_accumulation_steps
    return {
        "microbatch": args.train_batch_size,
        "passes": passes,
        "processes": args.world_size,
        "epoch_updates": max(1, -(-num_batches // passes)),
    }


def check_resumed_batch(before: Mapping[str, int], now: Mapping[str, int], update: int) -> list[Problem]:
    """Returns a finding (SR-ORDER-SKIP) if a resumed Trainer would not go on with the next sample.

    Trainer counts updates: it passes over `update` times its own batch, epoch by epoch. That is where the run stopped
    only if the global batch, and the updates in an epoch, are what they were. Derived from transformers 5.24.0
    (`Trainer._init_training_state`).

    Args:
        before: what `dealt` gave in the job that saved, from `trainer_state.json`; empty where it was not kept.
        now: what it gives here.
        update: completed updates.
    """
    if not before or not update:
        return []
    old, new = (at["microbatch"] * at["passes"] * at["processes"] for at in (before, now))
    if old != new:
        seen, skipped = update * old, update * new
        what = f"{seen - skipped} samples would come again" if skipped < seen else f"{skipped - seen} would never come"
        return [
            Problem(
                "SR-ORDER-SKIP",
                f"Trainer skips {update} updates of {new} samples, where the run has made {update} of {old}: {what}",
                where={"key": "per_device_train_batch_size x gradient_accumulation_steps x processes"},
                expected=old,
                found=new,
                hint="keep the product, or say SamerunCallback(changed_batch=True)",
            )
        ]
    if before["epoch_updates"] != now["epoch_updates"] and update >= min(before["epoch_updates"], now["epoch_updates"]):
        return [
            Problem(
                "SR-ORDER-SKIP",
                "an epoch has another number of updates on these processes, so Trainer goes on elsewhere in the data",
                where={"key": "updates in an epoch"},
                expected=before["epoch_updates"],
                found=now["epoch_updates"],
                hint="its end is padded for the processes: set dataloader_drop_last, or move within the first epoch",
            )
        ]
    return []


def _header_batch(at: Mapping[str, int]) -> dict[str, Any]:
    micro, passes, processes = at["microbatch"], at["passes"], at["processes"]
    return {
        "global_batch": micro * passes * processes,
        "max_microbatch": micro,
        "passes": passes,
        "replicas": processes,
        "microbatches": [[micro] * processes] * passes,
    }


def _config(model: Any) -> dict[str, Any] | None:
    """Returns the model's settings as `save_pretrained` will write them: it adds the class."""
    config = getattr(model, "config", None)
    return None if config is None else {**config.to_dict(), "architectures": [type(model).__name__]}


def _valid_tokens(module: Any, named: Mapping[str, Any]) -> int | None:
    """Counts what Trainer counts: labels that are not -100, the first of each row left out where the loss shifts."""
    labels = named.get("labels")
    if labels is None:
        return None
    shifts = getattr(module, "loss_type", None) == "ForCausalLM"
    return int((labels[..., 1:] if shifts else labels).ne(-100).sum())
