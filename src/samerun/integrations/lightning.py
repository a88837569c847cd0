"""Lightning: one callback records the run and carries the position in the data in Lightning's own checkpoint.

    sampler = ElasticSampler(len(dataset), global_batch=12, replicas=world_size, replica=rank, max_microbatch=3)
    trainer = Trainer(
        callbacks=[SamerunCallback(sampler, evaluate)], use_distributed_sampler=False,
        accumulate_grad_batches=sampler.dealing.passes, ...
    )
    trainer.fit(module, DataLoader(WithSampleIds(dataset), batch_sampler=sampler), ckpt_path=...)

Derived from lightning 2.6.6 (`loops/fit_loop.py`, `loops/training_epoch_loop.py`, `callbacks/callback.py`). Works with
automatic optimization. Needs the package `lightning`, or `pytorch_lightning`.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samerun.core.mesh import Layout
from samerun.integrations.tagged import SAMPLE_IDS, WithSampleIds
from samerun.train.lines import misuse
from samerun.train.recorder import Recorder

if TYPE_CHECKING or find_spec("lightning") is not None:
    from lightning.pytorch.callbacks import Callback, Checkpoint
else:
    from pytorch_lightning.callbacks import Callback, Checkpoint

if TYPE_CHECKING:
    from samerun.train.sampler import ElasticSampler

__all__ = ["SamerunCallback", "WithSampleIds"]


class SamerunCallback(Callback):
    """Records what a Lightning Trainer does, and commits the sampler's position after each update.

    Lightning restarts an unfinished epoch of a plain loader from its first sample. With the sampler's position in the
    callback's own state, which Lightning saves and restores, it goes on with the next one, on any number of processes
    and passes per update. In a job that samerun launched nothing is saved or logged, and fitting ends after its last
    update.

    Args:
        sampler: the batch sampler of the training loader. Its updates all make `accumulate_grad_batches` passes over
            microbatches of one size, which Lightning weighs alike: `last_batch="drop"` or `"carry"`, and a batch that
            is dealt evenly.
        evaluate: given the module, returns losses and logits of a few fixed examples, as for `Recorder.evaluate`.
        ids: reads the sample ids out of a batch; by default its `sample_ids` (`WithSampleIds`).
        layout: how the ranks are arranged; by default what the model shows.
        ledger: keeps a record of the run itself there.
        weighted: the module's loss itself weighs each pass by its samples, so that they may be of several sizes.
    """

    def __init__(
        self,
        sampler: ElasticSampler,
        evaluate: Callable[[Any], Mapping[str, Any]] | None = None,
        *,
        ids: Callable[[Any], Any] | None = None,
        layout: Layout | Mapping[str, int] | str | None = None,
        ledger: str | Path | None = None,
        weighted: bool = False,
    ) -> None:
        self.recorder = Recorder.from_env(ledger)
        self.sampler = sampler
        self._evaluate, self._layout, self._weighted = evaluate, layout, weighted
        self._read_ids: Callable[[Any], Any] = ids or itemgetter(SAMPLE_IDS)
        self._ids: list[int | str] = []

    def state_dict(self) -> dict[str, Any]:
        """Returns the committed position, for Lightning's checkpoint."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a saved position."""
        self.sampler.load_state_dict(state_dict)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by Lightning first of all: a launched job keeps neither checkpoints nor logs."""
        if not self.recorder.may_save:
            trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, Checkpoint)]
            trainer.loggers = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning when everything is built and restored."""
        expected, found = self.sampler.dealing.passes, trainer.accumulate_grad_batches
        if expected != found:
            raise misuse(
                f"the sampler deals an update in {expected} passes, and the Trainer steps after {found}",
                "Trainer(accumulate_grad_batches=sampler.dealing.passes)",
            )
        if not self._weighted and (uneven := _uneven(self.sampler)):
            raise misuse(
                f"Lightning gives every pass of every process the same weight, and {uneven}",
                "last_batch='drop' or 'carry' and a batch that divides evenly; or a loss that weighs each pass by its "
                "samples itself, and SamerunCallback(weighted=True)",
            )
        _begin_update(trainer.fit_loop.epoch_loop)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.recorder.attach(
            trainer.model,
            trainer.optimizers,
            schedulers[0] if len(schedulers) == 1 else schedulers or None,
            getattr(trainer.precision_plugin, "scaler", None),
            sampler=self.sampler,
            layout=self._layout,
        )
        self.recorder.loaded(update=trainer.global_step)
        if self._evaluate is not None:
            evaluate = self._evaluate
            self.recorder.evaluate(lambda: evaluate(pl_module))
        trainer.should_stop |= self.recorder.finished

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> int | None:
        """Called by Lightning before each pass. Returns -1, which ends the epoch, if the job wants no update."""
        if self.recorder.finished:
            return -1
        ids = self._read_ids(batch)
        self._ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        return None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Called by Lightning with the pass's loss, already divided by the number of passes."""
        self.recorder.samples(self._ids, loss=loss.detach() * trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Called by Lightning after the last backward of an update, before it clips."""
        self.recorder.grad_norm()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called by Lightning after each pass, and after the step where there is one; before it logs."""
        if trainer.global_step > self.sampler.committed.update:
            self.sampler.commit()
            if trainer.global_step % trainer.log_every_n_steps == 0:
                self.recorder.boundary("log", trainer.global_step)
        trainer.should_stop |= self.recorder.finished

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning after an evaluation."""
        if not trainer.sanity_checking:
            self.recorder.boundary("eval", trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning when fitting ends."""
        self.recorder.close()


def _uneven(sampler: ElasticSampler) -> str | None:
    """Says how passes differ in their samples, or returns None if all have as many."""
    sizes = [size for row in sampler.dealing.microbatches for size in row]
    if min(sizes) != max(sizes):
        return f"they hold from {min(sizes)} to {max(sizes)} samples"
    if sampler.last_batch == "keep" and (rest := sampler.order.num_samples(0) % sampler.global_batch):
        return f"the last update of an epoch has {rest} samples"
    return None


def _begin_update(epoch_loop: Any) -> None:
    """Lets the next pass be the first of an update, and the loader's length count from it.

    Lightning goes on counting passes from the checkpoint. With another number of passes per update the next step would
    come in the middle of one; and it would take the rest of the epoch, which is what the loader gives, for the whole.
    """
    epoch_loop.batch_progress.reset_on_run()
    if epoch_loop.restarted_on_train_batch_end:  # it counts the pass within which it was saved only now
        epoch_loop.batch_progress.current.completed = -1
