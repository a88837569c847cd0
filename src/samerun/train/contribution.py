"""The gradient of a global batch, whatever way it was dealt.

The loss of an update is a mean over its *contributions* (samples, or valid tokens): the sum of all losses over all
replicas and passes, divided by the number of all contributions. Averaging each microbatch, then passes, then replicas
is a mean of means: another loss as soon as microbatches are unequal, and yet another one after a move.

    mean = ContributionMean(group)                       # the data-parallel group; None: all ranks
    for update in sampler.updates(loader, until=total):
        microbatches = list(update)
        mean.start(sum(count_valid(m) for m in microbatches), passes=update.passes)
        for m in accumulate(model, microbatches):
            mean.backward(loss_sum(model, m), counts=not m.is_empty)
        optimizer.step()
        sampler.commit(tokens=mean.total)
        loss = mean.loss()

Why the total comes before the first backward, and not a division of the gradients after the last one: every gradient
that exists is then already the final one, so clipping, norms, reduction in low precision, loss scaling and hooks that
step inside the backward see what they expect; nothing needs to know where a framework keeps its gradients. The price is
one small all-reduce per update, and that the update's microbatches must have been loaded (not computed) to be counted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from samerun.errors import Problem, UsageError

Reduction = Literal["mean", "sum"]
Sync = Literal["last", "every"]
_T = TypeVar("_T")


class ContributionMean:
    """Turns sums of losses into the gradient of the mean over all of an update's contributions.

    Each backward works on `loss_sum * factor`, where the factor is 1 / total times whatever the framework will divide
    by. Gradients then add up to the same thing for every number of replicas, passes and samples per pass, up to the
    rounding of a differently ordered sum.

    Args:
        group: the ranks over which the framework reduces gradients, each of which contributes its own samples: the
            data-parallel process group, or a device mesh of data-parallel dimensions (`mesh["dp_replicate",
            "dp_shard"]` for HSDP). Ranks that share a batch (tensor parallel) must not be in it twice. None: every rank
            of the default group, or a single process where there is none. Ranks that hold different *parts* of the same
            samples (context parallel) belong into it when the framework reduces over them too.
        replicas: how many ranks the group should have; a safeguard against counting tensor-parallel ranks.
        reduction: what the framework does to gradients across the group. `mean` for DDP, FSDP2 and HSDP as they come,
            and also for FSDP2 under `set_force_sum_reduction_for_comms(True)` (gloo needs it), which sums and then
            divides. `sum` where nothing divides: FSDP2 with `set_gradient_divide_factor(1.0)`, a DDP hook that sums
            (which needs `accumulate`'s `last`, since DDP reduces an accumulated gradient again in every pass).

    Raises:
        UsageError: for another reduction, or a group of another size (SR-MEAN-GROUP).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        replicas: int | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        self._groups = _groups(group)
        self.replicas = 1
        for each in self._groups:
            self.replicas *= dist.get_world_size(each)
        if problems := _check_setup(replicas, self.replicas, reduction):
            raise UsageError(problems)
        self.reduction: Reduction = reduction
        self._device = _device(self._groups)
        self._total = 0
        self._passes = 0
        self._done = 0
        self._loss: torch.Tensor | None = None

    @classmethod
    def of_engine(cls, engine: Any, *, replicas: int | None = None) -> Self:
        """Returns the mean for a DeepSpeed engine, whose configuration says how gradients are reduced (0.19.8).

        `gradient_allreduce_op` may be `mean` or `sum`. `prescale_gradients` and `gradient_predivide_factor` move the
        division to before the reduction and change nothing in the end, but for one case that is refused.

            mean = ContributionMean.of_engine(engine)
            for update in sampler.updates(loader, until=total):
                microbatches = list(update)
                mean.start(sum(count_valid(m) for m in microbatches), passes=update.passes)
                for m in accumulate(engine, microbatches):
                    mean.backward(loss_sum(engine, m), counts=not m.is_empty, engine=engine)
                engine.step()

        Raises:
            UsageError: for sequence parallelism, for ZeRO-3 without reduce-scatter whose predivide factor is the number
                of ranks (DeepSpeed does not multiply it back), or as the class does (SR-MEAN-GROUP).
        """
        group = engine.seq_data_parallel_group
        if problems := _check_engine(engine, dist.get_world_size(group)):
            raise UsageError(problems)
        return cls(group, replicas=replicas, reduction="mean" if engine.gradient_average else "sum")

    @property
    def total(self) -> int:
        """Contributions of the current update over the whole group (0 before the first `start`)."""
        return self._total

    @property
    def factor(self) -> float:
        """What each loss sum is multiplied by: replicas / total when the framework averages, 1 / total when it sums."""
        if not self._total:
            raise UsageError(_out_of_order("start comes before backward"))
        return (self.replicas if self.reduction == "mean" else 1) / self._total

    def start(self, num_contributions: int, *, passes: int | None = None) -> int:
        """Begins an update. Collective: every rank of the group calls it, before the update's first backward.

        Args:
            num_contributions: samples or valid tokens of *this* rank over all passes of the update; may be 0.
            passes: this rank's number of passes, if it is to be checked that all ranks make the same number and that
                each of them was run.

        Returns:
            The total over the group.

        Raises:
            UsageError: on every rank alike, if any rank's count is negative or no whole number (SR-MEAN-COUNT), nobody
                contributes (SR-MEAN-ZERO), or the ranks' passes differ (SR-MEAN-PASSES).
        """
        usable = isinstance(num_contributions, int) and num_contributions >= 0
        each = passes or 0
        mine = [num_contributions if usable else 0, not usable, each, each * each]
        total, unusable, sum_passes, sum_squares = self._sum(torch.tensor(mine, dtype=torch.int64)).tolist()
        problems: list[Problem] = []
        if unusable:
            hint = "count whole samples or valid tokens, and pass a Python int (tensor.item())"
            found = repr(num_contributions) if not usable else f"another rank's, {unusable} in all"
            message = "a rank's number of contributions is no whole number of at least 0"
            problems.append(Problem("SR-MEAN-COUNT", message, found=found, hint=hint))
        elif not total:
            hint = "an update without a valid token has no mean; skip it on every rank"
            problems.append(Problem("SR-MEAN-ZERO", "nothing contributes to this update on any rank", hint=hint))
        if self.replicas * sum_squares != sum_passes**2:
            hint = "run an empty pass at zero weight where a rank has nothing left; else collectives wait for ever"
            found = f"{each} here, {sum_passes} over {self.replicas} ranks"
            message = "the ranks would make different numbers of passes"
            problems.append(
                Problem("SR-MEAN-PASSES", message, expected="the same on every rank", found=found, hint=hint)
            )
        if problems:
            raise UsageError(problems)
        self._total, self._passes, self._done, self._loss = total, each, 0, None
        return total

    def scaled(self, loss_sum: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        """Returns what to call backward on, and notes the loss: for loops that scale or compute backward themselves.

        Args:
            loss_sum: scalar, the *sum* (not mean) of this pass's losses over its contributions, with its graph.
            counts: False for an empty pass: the graph is kept so that backward runs, at zero weight.
        """
        if loss_sum.numel() != 1:
            raise UsageError(
                Problem(
                    "SR-MEAN-LOSS",
                    "backward takes one number, the sum of this pass's losses",
                    expected="a scalar tensor",
                    found=f"shape {tuple(loss_sum.shape)}",
                    hint='use reduction="sum" and no division by the number of tokens',
                )
            )
        factor = self.factor if counts else 0.0
        self._done += 1
        if counts:
            self._note(loss_sum.detach())
        return loss_sum * factor

    def backward(self, loss_sum: torch.Tensor, *, counts: bool = True, engine: Any = None) -> None:
        """Runs the backward of one pass; arguments as for `scaled`. Every rank makes the same number of passes.

        With a DeepSpeed `engine`, through it and without its own division by the accumulation steps.
        """
        scaled = self.scaled(loss_sum, counts=counts)
        if engine is None:
            scaled.backward()
        else:
            engine.backward(scaled, scale_wrt_gas=False)

    def loss(self) -> float:
        """Returns the update's mean loss over all contributions. Collective; after the update's last backward.

        Raises:
            UsageError: on every rank alike, if `start` was told a number of passes and some rank ran another
                (SR-MEAN-PASSES).
        """
        total = self._total
        if not total:
            raise UsageError(_out_of_order("start and backward come before loss"))
        loss = self._loss if self._loss is not None else torch.zeros(())
        wrong = float(bool(self._passes) and self._done != self._passes)
        mine = torch.stack([loss.to(self._device, torch.float64).reshape(()), torch.tensor(wrong).to(self._device)])
        loss_sum, num_wrong = self._sum(mine).tolist()
        if num_wrong:
            raise UsageError(
                Problem(
                    "SR-MEAN-PASSES",
                    f"{num_wrong:.0f} ranks ran another number of passes than they had announced",
                    expected=self._passes,
                    found=self._done,
                    hint="call backward once for every pass, empty ones included",
                )
            )
        return loss_sum / total

    def _note(self, loss: torch.Tensor) -> None:
        plain = loss.full_tensor() if isinstance(loss, DTensor) else loss
        plain = plain.reshape(()).to(torch.float32 if plain.device.type == "mps" else torch.float64)
        self._loss = plain if self._loss is None else self._loss + plain

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        values = values.to(self._device)
        for group in self._groups:
            dist.all_reduce(values, group=group)
        return values


def accumulate(model: torch.nn.Module, microbatches: Iterable[_T], *, sync: Sync | None = None) -> Iterator[_T]:
    """Yields an update's microbatches with the model's gradient synchronisation switched as each pass needs it.

    Run forward and backward inside the loop. A DDP model reduces in the last pass only (`last`, under `no_sync`). An
    FSDP2 or HSDP model reduces in every pass (`every`), which keeps its gradients sharded; `last` saves communication
    at the price of a whole unsharded gradient per rank. A DeepSpeed engine is told which pass is the update's last,
    whatever its configured accumulation steps are; call `engine.step()` once, after the loop. Any other model is left
    alone. The gradient is the same.

    Every rank needs the same number of microbatches. Synchronisation is on again afterwards, also after a break.
    """
    iterator = iter(microbatches)
    missing = object()
    current = next(iterator, missing)
    while current is not missing:
        following = next(iterator, missing)
        with _synchronised(model, is_last=following is missing, sync=sync):
            yield current  # pyright: ignore[reportReturnType]
        current = following


@contextmanager
def _synchronised(model: torch.nn.Module, *, is_last: bool, sync: Sync | None) -> Generator[None]:
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if isinstance(inner, DistributedDataParallel) and not is_last and sync != "every":
        with inner.no_sync():
            yield
    elif isinstance(inner, FSDPModule) and sync == "last":
        inner.set_requires_gradient_sync(is_last)
        try:
            yield
        finally:
            inner.set_requires_gradient_sync(True)
    elif (set_boundary := getattr(inner, "set_gradient_accumulation_boundary", None)) is not None:
        set_boundary(is_last)  # a DeepSpeed engine
        yield
    else:
        yield


def _groups(group: dist.ProcessGroup | DeviceMesh | None) -> list[dist.ProcessGroup]:
    if isinstance(group, DeviceMesh):
        return group.get_all_groups()
    if group is not None:
        return [group]
    if dist.is_available() and dist.is_initialized():
        world = dist.group.WORLD
        return [world] if world is not None else []
    return []


def _device(groups: list[dist.ProcessGroup]) -> torch.device:
    """Where the group can reduce a tensor: the CPU if any backend does that, else the backend's device."""
    if not groups:
        return torch.device("cpu")
    devices = [part.partition(":")[0] for part in str(dist.get_backend_config(groups[0])).split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


def _check_engine(engine: Any, ranks: int) -> list[Problem]:
    problems: list[Problem] = []
    if engine.sequence_parallel_size != 1:
        hint = "its ranks share samples and divide by fewer than they are; scale the loss by hand"
        message = "sequence parallelism is not taken into account"
        problems.append(Problem("SR-MEAN-GROUP", message, expected=1, found=engine.sequence_parallel_size, hint=hint))
    factor, scatters = engine.gradient_predivide_factor(), engine.zero_reduce_scatter()
    if engine.zero_optimization_stage() == 3 and not scatters and factor == ranks != 1:
        problems.append(
            Problem(
                "SR-MEAN-GROUP",
                "ZeRO-3 without reduce-scatter divides by a predivide factor of the number of ranks and does not "
                "multiply it back",
                expected=f"gradient_predivide_factor other than {ranks}",
                found=factor,
                hint="leave gradient_predivide_factor out, or turn reduce_scatter on",
            )
        )
    return problems


def _check_setup(expected: int | None, found: int, reduction: str) -> list[Problem]:
    problems: list[Problem] = []
    if reduction not in get_args(Reduction):
        known = ", ".join(get_args(Reduction))
        problems.append(Problem("SR-MEAN-GROUP", "the reduction is unknown", expected=known, found=reduction))
    if expected is not None and expected != found:
        problems.append(
            Problem(
                "SR-MEAN-GROUP",
                f"the group has {found} ranks, which would count as {found} batch replicas",
                expected=expected,
                found=found,
                hint="pass the data-parallel group; tensor-parallel ranks share a batch and must not be counted again",
            )
        )
    return problems


def _out_of_order(hint: str) -> Problem:
    return Problem("SR-MEAN-ORDER", "no update was started", hint=hint)
