"""torchtitan: its own Trainer, recorded, and a loader that goes on with the next sample on any number of ranks.

    class MyTrainer(RecordedTrainer):
        def evaluate(self): ...

    MyTrainer(Trainer.Config(dataloader=ElasticDataLoader.Config(load=load, global_batch=12), ...)).train()

Derived from torchtitan 0.3.0 (`trainer.py`, `components/dataloader.py`, `components/checkpointer/dcp.py`). Needs the
package `torchtitan`.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportIncompatibleVariableOverride=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer

from samerun.errors import Problem, UsageError
from samerun.integrations.tagged import SAMPLE_IDS
from samerun.train.recorder import Recorder
from samerun.train.sampler import ElasticSampler

__all__ = ["ElasticDataLoader", "RecordedTrainer", "check_trainer"]


class ElasticDataLoader(BaseDataLoader):
    """A loader whose state is the committed position in one global order: no number of ranks is in it.

    torchtitan's own loaders save one state per data-parallel rank and refuse another number of them.

    Attributes:
        sampler: the sampler, whose committed position is saved.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        load: Callable[[int], tuple[Any, Callable[[list[Any]], tuple[Any, Any, Any]]]]
        """Given the sequence length, returns a data set of samples by number, and a function that makes (sample ids,
        inputs, labels) of some of them; labels are -100 where nothing is predicted."""

        global_batch: int
        """Samples per update, over all ranks and passes: that of the training configuration."""

        seed: int = 0
        """Seed of the order."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        dataset, collate = config.load(seq_len)
        self.sampler = ElasticSampler(
            len(dataset),
            global_batch=config.global_batch,
            replicas=dp_world_size,
            replica=dp_rank,
            max_microbatch=local_batch_size,
            seed=config.seed,
            last_batch="drop",
        )
        self._loader = DataLoader(dataset, batch_sampler=self.sampler, collate_fn=collate)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yields what torchtitan's loaders yield, sample ids beside the input."""
        for update in self.sampler.updates(self._loader):
            for microbatch in update:
                ids, inputs, labels = microbatch.batch
                yield {"input": inputs, SAMPLE_IDS: ids}, labels

    def state_dict(self) -> dict[str, Any]:
        """Returns the committed position."""
        return {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a saved position."""
        if state_dict:
            self.sampler.load_state_dict(state_dict["sampler"])


class RecordedTrainer(Trainer):
    """torchtitan's Trainer, which records what it does and commits the loader's position after each update.

    In a job that samerun launched nothing is saved, and training ends after the last update that the stage wants.

    Attributes:
        recorder: inert unless samerun launched the job or the subclass names a `ledger`.
    """

    dataloader: ElasticDataLoader
    ledger: str | None = None
    """A directory that keeps a record of the run itself."""

    def __init__(self, config: Any) -> None:
        if problems := check_trainer(config):
            raise UsageError(problems)
        self.recorder = Recorder.from_env(self.ledger)
        if not self.recorder.may_save:
            config.checkpoint.load_only = True
        super().__init__(config)
        self._passes = 0
        dims = self.parallel_dims
        self.recorder.attach(
            self.model_parts,
            list(self.optimizers),
            self.lr_schedulers,
            sampler=self.dataloader.sampler,
            layout={"pp": dims.pp, "dp_replicate": dims.dp_replicate, "dp_shard": dims.dp_shard, "tp": dims.tp},
            config=self.model_config.to_dict(),
        )

    def evaluate(self) -> Mapping[str, Any] | None:
        """Returns losses and logits of a few fixed examples, as for `Recorder.evaluate`; None if there are none."""
        return None

    def should_continue_training(self) -> bool:
        """Called by torchtitan before each update: before the first one, everything is loaded."""
        if not self._loaded:
            self._loaded = True
            self.recorder.loaded(update=self.step)
            if type(self).evaluate is not RecordedTrainer.evaluate:
                self.recorder.evaluate(lambda: self.evaluate() or {})
        return super().should_continue_training() and not self.recorder.finished

    _loaded = False

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
        """Called by torchtitan for each pass, whose loss is a sum over all tokens of the update.

        With pipeline stages a pass is one run of the schedule, whose microbatches come as lists, and the last stage
        alone knows the loss.
        """
        inputs = input_dict if isinstance(input_dict, list) else [input_dict]
        ids = [sample for one in inputs for sample in one.pop(SAMPLE_IDS)]
        loss = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        targets = labels if isinstance(labels, list) else [labels]
        tokens = sum(int((one != IGNORE_INDEX).sum()) for one in targets)
        known = not self.parallel_dims.pp_enabled or self.pp_has_last_stage
        mean = loss.detach() * global_valid_tokens / max(1, tokens) if known else None
        self.recorder.samples(ids, loss=mean, tokens=tokens, weight=tokens)
        self._passes += 1
        if self._passes % self.gradient_accumulation_steps == 0:
            self.recorder.grad_norm()  # before torchtitan clips
        return loss

    def train_step(self, data_iterator: Any) -> None:
        """Called by torchtitan for each update."""
        super().train_step(data_iterator)
        self.dataloader.sampler.commit()
        if self.metrics_processor.should_log(self.step):
            self.recorder.boundary("log", self.step)

    def close(self) -> None:
        """Called by torchtitan at the end."""
        self.recorder.close()
        super().close()


def check_trainer(config: Any) -> list[Problem]:
    """Returns findings (SR-REC-USE) for configurations that the bridge does not cover."""
    problems: list[Problem] = []
    for name in ("context_parallel_degree", "expert_parallel_degree"):
        degree = getattr(config.parallelism, name, 1)
        if degree != 1:
            problems.append(_unsupported(f"parallelism.{name}", 1, degree))
    if not isinstance(config.dataloader, ElasticDataLoader.Config):
        problems.append(
            _unsupported("a loader of another class", "ElasticDataLoader", type(config.dataloader).__qualname__)
        )
    elif config.training.global_batch_size != config.dataloader.global_batch:
        problems.append(
            _unsupported(
                "a loader with another global batch", config.training.global_batch_size, config.dataloader.global_batch
            )
        )
    return problems


def _unsupported(what: str, expected: Any, found: Any) -> Problem:
    return Problem(
        "SR-REC-USE",
        f"the torchtitan bridge does not cover {what}",
        expected=expected,
        found=found,
        hint="it covers FSDP, HSDP, tensor and pipeline parallelism with ElasticDataLoader",
    )
