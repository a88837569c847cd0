"""`Recorder`: the few lines by which a training script writes down what it really did.

    recorder = Recorder.from_env()                         # does nothing unless samerun launched the job
    recorder.attach(model, optimizer, scheduler=scheduler, sampler=sampler, layout="dp_shard=4")
    recorder.loaded(update=progress["update"])             # after the checkpoint was loaded (or nothing was: 0)
    recorder.evaluate(lambda: {"losses": ..., "logits": ...})        # fixed examples
    while not recorder.finished and ...:
        ...
        optimizer.step()
        recorder.record(update=update, loss=loss, grad_norm=grad_norm, sample_ids=ids, tokens=tokens)
        if recorder.may_save and ...:
            save(...)
    recorder.close()

A loop that says of each pass what it worked on needs no `record`: the optimizer's own step makes the update.

    loss = loss_of(model, batch)
    recorder.samples(batch.ids, loss=loss)                 # every pass, before the step
    ...
    optimizer.step()                                       # recorded here

Every method is called by every rank, in the same order; all but `boundary` may communicate.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from samerun.core.mesh import Layout
from samerun.errors import Problem, UsageError
from samerun.trace import TraceWriter
from samerun.train.launch import Launch, read_launch
from samerun.train.lines import header_line, misuse, read_layout, update_line
from samerun.train.passes import Passes
from samerun.train.values import number

if TYPE_CHECKING:
    from torch import nn

    from samerun.train.inputs import InputWatch
    from samerun.train.norms import ParameterNorms
    from samerun.train.rank_rng import RankRandomness
    from samerun.train.steps import StepFacts, StepWatch

Norms = Literal["every", "after-save", "never"]

# Recorded models stay alive until the interpreter ends. When the last reference to a DDP model goes, torch 2.13 joins
# gloo's threads with the GIL held; a thread that is still finishing the last collective needs the GIL, and the job
# hangs at its very end.
_kept_alive: list[Any] = []


class StageDone(SystemExit):
    """Ends a job that samerun launched, with status 0, where its loop would go on after the stage's last update."""


class Recorder:
    """Records a job's updates, evaluations and state into a trace directory (`docs/trace.md`).

    `Recorder(dir=...)` always records, so that a run keeps its own ledger and can be a control later.
    `Recorder.from_env()` records when samerun launched the job, and is inert otherwise.

    Args:
        dir: the trace directory; must not hold a trace yet. None: inert.
        norms: how often a ledger measures how far parameters moved, which costs a copy of this rank's parameters and a
            pass over them: in `every` update, in the `window` updates after each `boundary("save", ...)` and after
            loading, which are those that a later move would be compared with (`after-save`), or `never`. A job that
            samerun launched always measures.
        window: how many updates `after-save` measures.
        keep_ids: False keeps each update's set digest of sample ids only, 32 characters whatever the batch; such a
            ledger can be audited against an order, and cannot be a control. A job that samerun launched keeps ids.
    """

    def __init__(
        self,
        dir: str | Path | None = None,
        *,
        norms: Norms = "after-save",
        window: int = 20,
        keep_ids: bool = True,
        _launch: Launch | None = None,
    ) -> None:
        if norms not in ("every", "after-save", "never"):
            raise UsageError(
                Problem(
                    "SR-REC-USE", f"there is no norms={norms!r}", hint="it is every, after-save or never", found=norms
                )
            )
        self._directory = Path(dir) if dir is not None else None
        self._launch = _launch
        self._norms: Norms = "every" if _launch is not None else norms
        self._window = window
        self._measure_left = window
        self._keep_ids = keep_ids or _launch is not None
        self._writer: TraceWriter | None = None
        self._watch: StepWatch | None = None
        self._inputs: InputWatch | None = None
        self._objects: dict[str, Any] = {}
        self._layout: Layout | None = None
        self._update: int | None = None
        self._rank_rng: RankRandomness | None = None
        self._num_updates = self._num_evals = 0
        self._passes = Passes()
        self._by_steps = False
        self._loaded = self._closed = self._end_captured = False
        if _launch is not None:
            from samerun.train.guard import SaveGuard

            self._guard = SaveGuard(_launch.stage)
            self._guard.install()

    @classmethod
    def from_env(
        cls,
        dir: str | Path | None = None,
        *,
        norms: Norms = "after-save",
        window: int = 20,
        keep_ids: bool = True,
    ) -> Self:
        """Returns a recorder for the stage that samerun launched this job for.

        Otherwise one that records into `dir` like `Recorder(dir)`, or, without `dir`, one that does nothing.
        """
        launch = read_launch(os.environ)
        if launch is not None:
            return cls(launch.trace_dir, _launch=launch)
        return cls(dir, norms=norms, window=window, keep_ids=keep_ids)

    @property
    def active(self) -> bool:
        """Whether anything is recorded."""
        return self._directory is not None

    @property
    def closed(self) -> bool:
        """Whether the trace has ended."""
        return self._closed

    @property
    def stage(self) -> str | None:
        """The stage that samerun launched this job for (load, eval, update, window, control), or None."""
        return self._launch.stage if self._launch else None

    @property
    def may_save(self) -> bool:
        """Whether this job may write checkpoints, advance trackers and log to the real run."""
        return self._launch is None

    @property
    def max_updates(self) -> int | None:
        """How many updates this job is to make, or None for as many as it likes."""
        return self._launch.max_updates if self._launch else None

    @property
    def finished(self) -> bool:
        """Whether the job has done what it was launched for and should leave its training loop. Never in a ledger."""
        return self._launch is not None and self._loaded and self._num_updates >= self._launch.max_updates

    def attach(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        sampler: Any = None,
        layout: Layout | Mapping[str, int] | str | None = None,
        batch: Mapping[str, Any] | None = None,
        config: Any = None,
        objects: Mapping[str, Any] | None = None,
        average: nn.Module | Mapping[str, Any] | None = None,
    ) -> None:
        """Says what is to be watched, and writes the trace's header. Call it once, when everything is built.

        Args:
            model: the model as it trains (wrapped, sharded), or this rank's pipeline stages.
            optimizer: one or several torch optimizers.
            scheduler: learning-rate scheduler, if any.
            scaler: gradient scaler, if any.
            sampler: `ElasticSampler`, or any sampler with a `state_dict`; None if sample ids are passed by hand.
            layout: what the script believes its layout to be. The header also says what the tensors show.
            batch: how the global batch is dealt, if the sampler is not an `ElasticSampler`: `global_batch`,
                `max_microbatch`, `passes`, `replicas`, `microbatches` (by pass, then replica).
            config: architecture settings; the model's own `config` by default.
            objects: whatever else is saved beside the tensors, by the name under which it is: to be compared after
                loading. Anything with a `state_dict`, or plain data.
            average: an average of the model (EMA, SWA), if one is kept: a module such as
                `torch.optim.swa_utils.AveragedModel`, or tensors by the averaged parameter's name.
        """
        if self._directory is None:
            return
        if self._writer is not None:
            raise misuse("attach was called twice", "attach once per job, after model and optimizer are built")
        from samerun.train.agree import world

        declared = read_layout(layout)
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._sampler, self._scaler, self._config, self._average = sampler, scaler, config, average
        self._objects = {"sampler": sampler, "scaler": scaler} | dict(objects or {})
        self._objects = {name: value for name, value in self._objects.items() if value is not None}
        place = self._rank, _ = world()
        self._writer = TraceWriter(self._directory, self._rank)
        self._began = time.monotonic()
        header = header_line(model, stage=self.stage, place=place, declared=declared, batch=batch, sampler=sampler)
        self._layout = Layout.from_dict(header["layout"])
        self._writer.write("header", header)
        self._watch = self._start_watch()
        atexit.register(self._close_at_exit)
        _kept_alive.append(model)

    def loaded(self, *, update: int, rank_rng: RankRandomness | None = None) -> None:
        """Says that the state is now that after `update` completed updates: call it after loading, or with 0.

        `rank_rng` is what `apply_rank_rng` did to this rank's generators, where ranks changed and a policy was applied.

        Writes every tensor's digest, groups, counters, schedule and objects as the job holds them ("state" line).
        """
        if self._directory is None:
            return
        self._require_attached("loaded")
        if self._num_updates:
            raise misuse("loaded was called after updates had been recorded", "load before the training loop")
        self._update, self._loaded, self._rank_rng = update, True, rank_rng
        self._capture("loaded")
        if self._watch is not None:  # loading may have replaced parameters and made an empty optimizer step
            self._watch.restart(self._norms_of_model())
        if self._measures():
            from samerun.train.inputs import InputWatch

            self._inputs = InputWatch(self._model, whole=self._layout is None or self._layout.pp == 1)

    def evaluate(self, function: Callable[[], Mapping[str, Any]]) -> None:
        """Evaluates fixed examples and proves that this changed nothing. Call it right after `loaded`.

        Args:
            function: returns {"losses": one number per example, "logits": array of one row per example}; `logits` may
                be left out. Every rank evaluates the same examples. It runs in evaluation mode without gradients.
        """
        if self._directory is None or (self._launch is not None and not self._launch.evaluates):
            return
        writer = self._require_attached("evaluate")
        from samerun.train.evaluation import evaluate_fixed

        body = evaluate_fixed(
            self._model,
            self._optimizer,
            {**self._objects, "scheduler": self._scheduler},
            function,
            folder=self._directory if self._rank == 0 else None,
            number=self._num_evals,
        )
        writer.write("eval", {"update": self._update or 0, **body})
        self._num_evals += 1

    def samples(
        self,
        ids: Sequence[int | str] | None = None,
        *,
        loss: Any = None,
        tokens: int | None = None,
        weight: float | None = None,
    ) -> None:
        """Says what a pass worked on, after its forward and before the step. The update is recorded by the step itself.

        For loops that do not call `record`. An update is one step of every attached optimizer; one that a gradient
        scaler skips is recorded as skipped when the next pass (or `close`) finds the loss scale lower. In a job that
        samerun launched, the pass after the last update that the stage wants ends the job (`StageDone`, status 0),
        unless the loop leaves by itself where `finished` is true.

        Args:
            ids: what *this* rank's loader gave out for the pass, in order. May be left out in every pass where `attach`
                was given an `ElasticSampler`, whose current update then tells.
            loss: the pass's mean loss on this rank; None on ranks that do not know it (a pipeline's first stages). The
                update's loss is the mean over ranks and passes.
            tokens: valid tokens of the pass on this rank.
            weight: what the pass weighs in that mean: its tokens, where the gradient is a mean over tokens; by default
                the number of ids, or 1 where they are left out.
        """
        if self._directory is None:
            return
        self._require_loaded("samples")
        if ids is None and not hasattr(self._sampler, "update_ids"):
            raise misuse("samples was given no ids", "pass them, or give attach the ElasticSampler that deals them")
        if self._num_updates and not self._by_steps:
            raise misuse("samples was called after record", "use one of them: record, or samples and the step's hook")
        self._by_steps = True
        self._note_skipped()
        if self.finished:
            self.close()
            raise StageDone(0)
        self._passes.note(ids, loss, tokens, weight)

    def grad_norm(self, norm: Any = None) -> None:
        """Says the L2 norm of the update's whole gradient before clipping, between the last backward and the step.

        For loops that call `samples` and clip. Without it, the norm of the gradient that the step used is measured.

        Args:
            norm: what the clipping function returned; None measures the gradients that the parameters have now, in the
                updates in which norms are measured.
        """
        if self._directory is None:
            return
        self._require_loaded("grad_norm").note_gradient(None if norm is None else number(norm))

    def record(
        self,
        *,
        update: int,
        loss: Any,
        grad_norm: Any = None,
        sample_ids: Sequence[int | str] | None = None,
        samples: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """Records one update, after the optimizer (and the scheduler) stepped, or after a loss scaler skipped it.

        Args:
            update: index of the update, 1-based: that of the first update after a resume at 12 is 13. A skipped one
                has the index that it would have completed.
            loss: the update's mean loss over the whole global batch, the same number on every rank.
            grad_norm: L2 norm of the whole gradient before clipping. If left out, that of the gradient which the step
                used, where norms are measured.
            sample_ids: what *this* rank consumed in this update, in order, as its loader gave it out.
            samples: how many those were; counted from `sample_ids` if left out.
            tokens: valid tokens among them.
        """
        if self._directory is None:
            return
        self._require_loaded("record")
        if self._by_steps:
            raise misuse("record was called after samples", "use one of them: record, or samples and the step's hook")
        if self._update is not None and update <= self._update:
            raise misuse(
                f"update {update} was recorded after update {self._update}",
                "record once per completed update; the first one after a resume at 12 is 13",
                update=update,
            )
        if sample_ids is None:
            raise misuse(
                "record was given no sample ids",
                "pass sample_ids=: the ids that this rank's loader gave out for this update ([] if none)",
                update=update,
            )
        self._write_update(update, loss, grad_norm, sample_ids, samples, tokens)

    def _write_update(
        self, update: int, loss: Any, grad_norm: Any, ids: Sequence[int | str], samples: int | None, tokens: int | None
    ) -> None:
        if self._watch is None or self._writer is None:
            return
        facts = self._watch.take()
        body = update_line(
            update,
            facts if self._rank == 0 else replace(facts, moved=None),
            loss=loss,
            grad_norm=grad_norm,
            sample_ids=ids,
            samples=samples,
            tokens=tokens,
            keep_ids=self._keep_ids,
            seconds=time.monotonic() - self._began,
            inputs=self._inputs.take() if self._inputs is not None else None,
        )
        self._writer.write("update", body)
        self._count(int(update), facts)

    def _step_ended(self) -> None:
        """Called by the watch, inside the step: every optimizer has stepped."""
        if self._by_steps and not self._closed and self._passes.count:
            self._write_noted()

    def _note_skipped(self) -> None:
        """Records an update that the scaler skipped: its passes are noted, and no step came."""
        if self._passes.count and self._watch is not None and self._watch.skipped:
            self._write_noted()

    def _write_noted(self) -> None:
        noted = self._passes.take()
        ids = noted.ids or (self._sampler.update_ids() if hasattr(self._sampler, "update_ids") else ())
        self._write_update((self._update or 0) + 1, noted.loss, None, ids, None, noted.tokens)

    def boundary(self, what: str, update: int) -> None:
        """Says that the job logged ("log"), evaluated ("eval"), saved ("save") or the like after `update`."""
        if self._directory is None:
            return
        self._require_attached("boundary").write("boundary", {"what": what, "update": int(update)})
        if what == "save":
            self._measure_left = self._window

    def close(self) -> None:
        """Ends the trace. Call it before the process group is destroyed; done at exit if forgotten."""
        if self._writer is None or self._closed:
            return
        self._note_skipped()
        self._capture_end()
        self._close("finished" if self.finished else "closed")

    def _start_watch(self) -> StepWatch:
        from samerun.train.named import as_list
        from samerun.train.steps import StepWatch

        norms = self._norms_of_model()
        return StepWatch(as_list(self._optimizer), self._scaler, norms, self._measures, self._step_ended)

    def _norms_of_model(self) -> ParameterNorms:
        from samerun.train.norms import ParameterNorms

        return ParameterNorms.of(self._model)

    def _measures(self) -> bool:
        return self._norms == "every" or (self._norms == "after-save" and self._measure_left > 0)

    def _capture(self, when: str) -> None:
        from samerun.train.capture import capture_state

        captured = capture_state(
            self._model,
            self._optimizer,
            scheduler=self._scheduler,
            objects=self._objects,
            config=self._config,
            layout=self._layout,
            rank_rng=self._rank_rng,
            average=self._average,
        )
        beside = self._measure_beside() if when == "end" else {}
        if self._rank == 0 and self._writer is not None:
            from samerun.train.settings import module_settings

            body = captured.to_json() | ({"modules": module_settings(self._model)} if when == "loaded" else beside)
            self._writer.write("state", {"when": when, "update": self._update or 0, **body})

    def _measure_beside(self) -> dict[str, Any]:
        from samerun.train.beside import measure_beside

        return {"beside": measure_beside(self._model, self._average)}

    def _count(self, update: int, facts: StepFacts) -> None:
        if facts.steps == 0:
            return
        self._update = update
        self._num_updates += 1
        self._measure_left -= 1
        if self.finished:
            self._capture_end()

    def _capture_end(self) -> None:
        """Captures the state once more where updates were made: replicas must still be equal."""
        if self._launch is not None and self._num_updates and not self._end_captured:
            self._end_captured = True
            self._capture("end")

    def _require_attached(self, method: str) -> TraceWriter:
        if self._writer is None or self._closed:
            what = "after close" if self._closed else "before attach"
            raise misuse(
                f"{method} was called {what}", "attach once, when model and optimizer are built; close at the end"
            )
        return self._writer

    def _require_loaded(self, method: str) -> StepWatch:
        self._require_attached(method)
        if self._watch is None or not self._loaded:
            raise misuse(f"{method} was called before loaded", "call recorder.loaded(update=...) once; 0 for a new run")
        return self._watch

    def _close_at_exit(self) -> None:
        if not self._closed and self._writer is not None:
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            self._close(f"error: {type(error).__name__}" if error is not None else "exit")

    def _close(self, reason: str) -> None:
        if self._writer is not None:
            self._writer.write("end", {"reason": reason, "updates": self._num_updates})
            self._writer.close()
        if self._watch is not None:
            self._watch.close()
        self._closed = True
        atexit.unregister(self._close_at_exit)
