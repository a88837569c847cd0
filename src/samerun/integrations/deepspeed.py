"""DeepSpeed: an engine whose steps the recorder sees, with ZeRO 1, 2 and 3.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    engine = RecordedEngine(engine)
    recorder.attach(engine.module, engine.zero, engine.lr_scheduler, engine.scaler, sampler=sampler, layout=layout)
    ...
        loss = engine(batch)
        recorder.samples(ids, loss=loss)
        engine.backward(loss)
        engine.step()

Each rank's parts of the optimizer state are digested where they are; nothing is gathered. Derived from deepspeed 0.19.8
(`runtime/engine.py`, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samerun.errors import Problem, UsageError
from samerun.integrations.hooks import StepHooks
from samerun.train.agree import world
from samerun.train.flatpart import FlatPart

if TYPE_CHECKING:
    import torch

__all__ = ["RecordedEngine", "ZeroOptimizer", "check_zero"]


class RecordedEngine:
    """A DeepSpeed engine with hooks around its step; everything else is the engine's own.

    Attributes:
        engine: the engine.
        zero: its optimizer as the recorder wants one.
        scaler: its loss scale, for fp16; None otherwise.

    Raises:
        UsageError: for what `check_zero` finds.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.zero = ZeroOptimizer(engine)
        self.scaler = _Scale(engine) if engine.fp16_enabled() else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the engine's forward."""
        return self.engine(*arguments, **named)

    @property
    def completed_updates(self) -> int:
        """Updates that the optimizer made: the engine's `global_steps` also count those that a loss scaler skipped."""
        return int(self.engine.global_steps - self.engine.skipped_steps)

    def step(self, *arguments: Any, **named: Any) -> Any:
        """Runs the engine's step, and the recorder's hooks around one that makes an update."""
        updates = self.engine.is_gradient_accumulation_boundary()
        if updates:
            self.zero.step_begins()
        result = self.engine.step(*arguments, **named)
        if updates and self.engine.was_step_applied():
            self.zero.step_ended()
        return result


class ZeroOptimizer(StepHooks):
    """A ZeRO optimizer with parameters, groups and state by parameter, as `torch.optim.Optimizer` has them.

    ZeRO's own optimizer steps flat buffers of many parameters. `state` gives each parameter's part of them on this
    rank.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine, self._zero = engine, engine.optimizer
        self.optimizer: Any = getattr(self._zero, "optimizer", None)
        self.keeps_gradients = True  # and takes them off the parameters
        if problems := check_zero(self._zero):
            raise UsageError(problems)

    def global_grad_norm(self) -> float | None:
        """Returns the L2 norm of the whole gradient before clipping; None where DeepSpeed does not compute it."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with the model's own parameters in them."""
        groups = [{**group, "params": list[Any]()} for group in self._zero.param_groups]
        for number, members, _ in self._buffers():
            groups[number]["params"] += [member.parameter for member in members]
        return groups

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Each parameter's slots: `FlatPart`s, and whatever the flat buffer's state has beside tensors of its size."""
        return {
            member.parameter: {
                name: member.part(value) if _alike(value, flat) else value
                for name, value in self.optimizer.state.get(flat, {}).items()
            }
            for _, members, flat in self._buffers()
            for member in members
        }

    @property
    def masters(self) -> dict[Any, FlatPart]:
        """Each parameter's fp32 master, where the model itself is trained in another type."""
        return {
            member.parameter: member.part(flat)
            for _, members, flat in self._buffers()
            for member in members
            if member.parameter.dtype != flat.dtype
        }

    def _buffers(self) -> Iterator[tuple[int, list[_Member], torch.Tensor]]:
        """Yields (group, members, this rank's flat buffer)."""
        zero = self._zero
        if hasattr(zero, "fp32_partitioned_groups_flat"):
            for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
                yield zero.sub_group_to_group_id[number], list(_stage3(zero.fp16_groups[number])), flat
            return
        for number, flat in enumerate(zero.single_partition_of_fp32_groups):
            yield number, list(_stage12(zero, number, flat.numel())), flat


def check_zero(zero: Any) -> list[Problem]:
    """Returns findings (SR-REC-USE) if an engine's optimizer is not one whose parts on each rank can be shown."""
    import torch.distributed as dist

    if not any(hasattr(zero, kind) for kind in ("round_robin_bit16_offsets", "fp32_partitioned_groups_flat")):
        return [
            Problem(
                "SR-REC-USE",
                "the engine's optimizer is not that of ZeRO 1, 2 or 3",
                expected="DeepSpeedZeroOptimizer or DeepSpeedZeroOptimizer_Stage3",
                found=type(zero).__name__,
                hint="without ZeRO attach the recorder to engine.module and engine.optimizer itself",
            )
        ]
    problems: list[Problem] = []
    if getattr(zero, "swap_optimizer", False):
        message = "the optimizer state lies on NVMe, where it cannot be digested in place"
        problems.append(Problem("SR-REC-USE", message, hint="offload it to the CPU for a judged job"))
    groups = getattr(zero, "real_dp_process_group", None) or [zero.dp_process_group]
    sizes = sorted({dist.get_world_size(group=group) for group in groups})
    if sizes != [dist.get_world_size()]:
        problems.append(
            Problem(
                "SR-REC-USE",
                "ZeRO cuts over some of the ranks only, as with tensor, pipeline or expert parallelism",
                expected=f"{dist.get_world_size()} ranks",
                found=", ".join(map(str, sizes)),
                hint="the bridge covers plain data parallelism",
            )
        )
    return problems


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """A parameter in a rank's flat buffer: its elements from `start` on lie at `place`, `count` of them."""

    parameter: Any
    shape: tuple[int, ...]
    start: int
    place: int
    count: int

    def part(self, buffer: torch.Tensor) -> FlatPart:
        return FlatPart(self.shape, buffer.detach()[self.place : self.place + self.count], self.start)


def _stage12(zero: Any, number: int, size: int) -> Iterator[_Member]:
    """A group's parameters follow one another in a buffer of which each rank has `size` elements."""
    import torch.distributed as dist

    first = dist.get_rank(group=zero.real_dp_process_group[number]) * size
    parameters, offsets = zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number]
    for parameter, offset in zip(parameters, offsets, strict=True):
        start = min(max(0, first - offset), parameter.numel())
        stop = max(start, min(parameter.numel(), first + size - offset))
        place = offset + start - first if stop > start else 0
        yield _Member(parameter, tuple(parameter.shape), start, place, stop - start)


def _stage3(parameters: list[Any]) -> Iterator[_Member]:
    """Each parameter is padded and cut among all ranks; a rank's pieces follow one another."""
    rank, _ = world()
    place = 0
    for parameter in parameters:
        size, shape = int(parameter.partition_numel()), tuple(parameter.ds_shape)
        start = min(rank * size, math.prod(shape))
        yield _Member(parameter, shape, start, place, min(size, math.prod(shape) - start))
        place += size


def _alike(value: Any, flat: torch.Tensor) -> bool:
    return hasattr(value, "numel") and value.numel() == flat.numel() and value.dim() == flat.dim()


class _Scale:
    """The loss scale of a ZeRO optimizer, as a gradient scaler tells it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def get_scale(self) -> float:
        return float(self._engine.optimizer.loss_scale)

    @property
    def num_skipped(self) -> int:
        return int(self._engine.skipped_steps)
