"""Megatron-core: model chunks and their optimizer under the names of a distributed checkpoint, at any TP, PP and DP.

    model = RecordedModel(chunks, vocab_size=args.vocab_size)
    optimizer = RecordedOptimizer(optimizer, model)
    recorder.attach(model, optimizer, opt_param_scheduler, optimizer.scaler, sampler=sampler, layout=parallel_layout())
    ...
        losses = forward_backward(forward_step_func=..., data_iterator=..., model=chunks, ...)
        recorder.samples(ids, loss=mean_loss if losses else None, tokens=tokens, weight=tokens)
        optimizer.step()

Each rank's pieces are digested where they are, at the places that the model's own `sharded_state_dict` gives them;
nothing is gathered. Derived from megatron-core 0.16.1 (`dist_checkpointing/mapping.py`,
`optimizer/distrib_optimizer.py`, `optimizer/optimizer.py`). Needs the package `megatron-core`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samerun.core.flat import Block, row_major_strides, unravel
from samerun.errors import Problem, UsageError
from samerun.integrations.hooks import StepHooks
from samerun.integrations.logical import LogicalParameter, Values
from samerun.train.agree import world
from samerun.train.boxpart import BoxPart

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "LogicalParameter",
    "RecordedModel",
    "RecordedOptimizer",
    "check_chunks",
    "check_optimizer",
    "parallel_layout",
]


def parallel_layout() -> dict[str, int]:
    """Returns Megatron's process groups as a layout for `Recorder.attach`."""
    from megatron.core import parallel_state as mpu

    return {
        "pp": mpu.get_pipeline_model_parallel_world_size(),
        "dp_shard": mpu.get_data_parallel_world_size(),
        "cp": mpu.get_context_parallel_world_size(),
        "tp": mpu.get_tensor_model_parallel_world_size(),
        "ep": mpu.get_expert_model_parallel_world_size(),
    }


class RecordedModel:
    """A rank's model chunks, with the parameters of the whole model under the names that a checkpoint has.

    Layers of all stages are one stacked tensor, as in the checkpoint, so are the experts of all ranks, and
    tensor-parallel parts are parts of one. Collective: every rank makes one, after the model is built.

    Args:
        chunks: the model chunks, wrapped or not.
        vocab_size: rows of the vocabulary that are tokens. Rows beyond are padding, of which every TP has another
            number, and which are left out.
        metadata: what the job gives `sharded_state_dict`, if anything.

    Raises:
        UsageError: for what `check_chunks` finds.
    """

    def __init__(
        self, chunks: nn.Module | Sequence[nn.Module], *, vocab_size: int, metadata: Mapping[str, Any] | None = None
    ) -> None:
        listed: list[Any] = list(chunks) if isinstance(chunks, list | tuple) else [chunks]
        self.chunks = [_bare(chunk) for chunk in listed]
        if problems := check_chunks(self.chunks):
            raise UsageError(problems)
        self._logical: dict[str, LogicalParameter] = {}
        self.owners: dict[int, list[LogicalParameter]] = {}
        for chunk in self.chunks:
            state = chunk.sharded_state_dict(metadata=dict(metadata or {}))
            for name, parameter in chunk.named_parameters():
                for sharded, index in _sharded_parts(state[name], parameter):
                    self._add(parameter, sharded, index, vocab_size)
        _agree_on_replicas(self._logical)

    def _add(self, parameter: nn.Parameter, sharded: Any, index: torch.Tensor, rows: int) -> None:
        shape, lead = tuple(sharded.global_shape), len(sharded.global_shape) - parameter.dim()
        source = unravel(int(index.reshape(-1)[0]), row_major_strides(tuple(parameter.shape)))
        target, sizes = tuple(sharded.global_offset), tuple(index.shape)
        if sharded.allow_shape_mismatch:  # a vocabulary, which is padded
            shape = (min(rows, shape[0]), *shape[1:])
            sizes = (max(0, min(sizes[0], shape[0] - target[0])), *sizes[1:])
        replica = sharded.replica_id if isinstance(sharded.replica_id, tuple) else (sharded.replica_id,)
        logical = self._logical.get(sharded.key)
        if logical is None:
            logical = self._logical[sharded.key] = LogicalParameter(sharded.key, shape, parameter, replica)
        logical.add(parameter, target[:lead], Block(source, target[lead:], sizes))
        self.owners.setdefault(id(parameter), []).append(logical)

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, LogicalParameter]]:
        """Yields every parameter of which this rank holds something, by the checkpoint's name."""
        yield from self._logical.items()

    def parameters(self) -> Iterator[LogicalParameter]:
        """Yields the same without names."""
        yield from self._logical.values()

    def named_modules(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        """Yields the chunks' modules, layers numbered as in the whole model."""
        for chunk in self.chunks:
            first = {
                f"decoder.layers.{place}": f"decoder.layers.{layer.layer_number - 1}"
                for place, layer in enumerate(chunk.decoder.layers)
            }
            for name, module in chunk.named_modules(remove_duplicate=remove_duplicate):
                head = ".".join(name.split(".")[:3])
                yield first.get(head, head) + name[len(head) :], module

    def modules(self) -> Iterator[nn.Module]:
        """Yields the chunks' modules."""
        for chunk in self.chunks:
            yield from chunk.modules()

    def register_forward_pre_hook(self, hook: Any, **named: Any) -> Any:
        """Calls `hook` before the first chunk's forward pass."""
        return self.chunks[0].register_forward_pre_hook(hook, **named)

    def eval(self) -> None:
        """Puts the chunks into evaluation mode."""
        for chunk in self.chunks:
            chunk.eval()


class LossScale:
    """Megatron's gradient scaler, as `torch.amp.GradScaler` is asked.

    Attributes:
        num_skipped: updates that it skipped: the first infinities do not change the scale.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler, self.num_skipped = scaler, 0

    def get_scale(self) -> float:
        """Returns what the loss is multiplied by."""
        return float(self._scaler.scale)

    def unscale(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a gradient as it is without the scale."""
        return gradient.float() * self._scaler.inv_scale

    def state_dict(self) -> dict[str, Any]:
        """Returns what Megatron saves of it."""
        return self._scaler.state_dict()


class RecordedOptimizer(StepHooks):
    """A Megatron optimizer with hooks around its step; parameters, groups and state are those of the whole model.

    Everything else is the optimizer's own. Every rank makes one, before it loads.

    Attributes:
        megatron: the optimizer, or a chain of them: experts that are spread over ranks have one of their own.
        scaler: its loss scale, where it has one; None otherwise.

    Raises:
        UsageError: for what `check_optimizer` finds.
    """

    def __init__(self, optimizer: Any, model: RecordedModel) -> None:
        super().__init__()
        self.megatron, self._model = optimizer, model
        if problems := check_optimizer(optimizer):
            raise UsageError(problems)
        self._chain = _chain(optimizer)
        self._sharded = any(hasattr(one, "model_param_gbuf_map") for one in self._chain)
        scaler = getattr(self._chain[0], "grad_scaler", None) if self._chain else None
        self.scaler = None if scaler is None else LossScale(scaler)
        self._norm: float | None = None
        self._members: dict[int, dict[LogicalParameter, None]] = {}
        for logical in model.parameters():
            logical.gradient = self._gradient

    def __getattr__(self, name: str) -> Any:
        return getattr(self.megatron, name)

    def step(self) -> Any:
        """Runs the optimizer's step and the recorder's hooks around it."""
        self.step_begins()
        made, norm, zeros = self.megatron.step()
        self._norm = float(norm) if norm else None
        if made:
            self.step_ended()
        elif self.scaler is not None:
            self.scaler.num_skipped += 1
        return made, norm, zeros

    def global_grad_norm(self) -> float | None:
        """Returns the L2 norm of the whole gradient before clipping, as Megatron computed it; None where it did not."""
        return self._norm

    @property
    def optimizer(self) -> Any:
        """The torch optimizer inside: the first one, of a chain."""
        return self._chain[0].optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with parameters of the whole model in them: those of which this rank steps something."""
        if not self._members:
            for stepped in self._stepped():
                owners = self._model.owners[id(stepped.parameter)]
                self._members.setdefault(stepped.group, {}).update(dict.fromkeys(owners))
        return [{**group, "params": list(self._members.get(number, ()))} for number, group in enumerate(self._groups())]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for one in self._chain for group in one.optimizer.param_groups]

    @property
    def state(self) -> dict[LogicalParameter, dict[str, Any]]:
        """Each parameter's slots, as far as they lie on this rank, and its step."""
        held = {id(stepped.parameter): stepped for stepped in self._stepped()}
        slots = {
            name: value.dtype
            for one in self._chain
            for state in one.optimizer.state.values()
            for name, value in state.items()
            if name != "step" and hasattr(value, "dtype")
        }
        trained = [logical for logical in self._model.parameters() if logical.requires_grad]
        return {logical: self._slots(logical, slots, held) for logical in trained}

    @property
    def masters(self) -> dict[LogicalParameter, BoxPart]:
        """Each parameter's fp32 master: where the model itself is in another type, or the optimizer saves it as one."""
        import torch

        mains = {id(stepped.parameter): (stepped.main, stepped.first) for stepped in self._stepped()}
        return {
            logical: self._part(logical, torch.float32, lambda p: mains.get(id(p)))
            for logical in self._model.parameters()
            if logical.requires_grad and (self._sharded or logical.dtype != torch.float32)
        }

    def _slots(
        self, logical: LogicalParameter, slots: Mapping[str, torch.dtype], held: Mapping[int, _Stepped]
    ) -> dict[str, Any]:
        def values(slot: str) -> Values:
            def find(parameter: Any) -> tuple[torch.Tensor, int] | None:
                if (stepped := held.get(id(parameter))) is None:
                    return None
                found = stepped.state
                return (found[slot], stepped.first) if slot in found else None

            return find

        found: dict[str, Any] = {slot: self._part(logical, dtype, values(slot)) for slot, dtype in slots.items()}
        mine = [held[id(parameter)] for parameter in logical.own if id(parameter) in held]
        for stepped in mine[:1]:
            step = stepped.state.get("step", self._groups()[stepped.group].get("step"))
            found |= {} if step is None else {"step": step}
        return found if slots else {}

    def _part(self, logical: LogicalParameter, dtype: torch.dtype, values: Values) -> BoxPart:
        lead = logical.shared_lead if self._sharded else logical.lead
        return BoxPart(logical.shape, dtype, lambda: logical.read(values), lead=lead)

    def _gradient(self, logical: LogicalParameter) -> BoxPart | None:
        """The gradients in Megatron's buffers: with the distributed optimizer, this rank's part of each is complete."""
        import torch

        def values(parameter: Any) -> tuple[torch.Tensor, int] | None:
            if not self._sharded:
                return unscaled(parameter.main_grad), 0
            one = next((one for one in self._chain if parameter in one.model_param_gbuf_map), None)
            if one is None:
                return None
            span = one._get_model_param_range_map(parameter)["param"]
            return unscaled(parameter.main_grad.reshape(-1)[span.start : span.end]), span.start

        def unscaled(gradient: torch.Tensor) -> torch.Tensor:
            return gradient if self.scaler is None else self.scaler.unscale(gradient)

        own = logical.own
        if not own or any(getattr(parameter, "main_grad", None) is None for parameter in own):
            return None
        counts = logical.primary if self._sharded else None
        dtype = torch.float32 if self.scaler is not None else own[0].main_grad.dtype
        return BoxPart(logical.shape, dtype, lambda: logical.read(values), counts=counts)

    def _stepped(self) -> Iterator[_Stepped]:
        """Yields all that this rank steps."""
        groups = 0
        for one in self._chain:
            for number, parameter, main, first in _stepped(one):
                yield _Stepped(groups + number, parameter, main, first, one.optimizer.state.get(main, {}))
            groups += len(one.optimizer.param_groups)


@dataclass(frozen=True, slots=True, eq=False)
class _Stepped:
    """What is stepped in a parameter's place, or in that of a run of its elements.

    Attributes:
        group: number of its group, over the whole chain.
        parameter: the rank's own parameter.
        main: what is stepped.
        first: the parameter's element that it begins with.
        state: its slots.
    """

    group: int
    parameter: Any
    main: torch.Tensor
    first: int
    state: Mapping[str, Any]


def _stepped(one: Any) -> Iterator[tuple[int, Any, torch.Tensor, int]]:
    """Yields (group, parameter, what is stepped in its place, its first element) of one optimizer of a chain."""
    if hasattr(one, "model_param_gbuf_map"):
        for models, mains in (
            (one.model_fp32_groups, one.shard_fp32_groups),
            (one.model_float16_groups, one.shard_fp32_from_float16_groups),
        ):
            for number, pairs in enumerate(zip(models, mains, strict=True)):
                for parameter, main in zip(*pairs, strict=True):
                    yield number, parameter, main, one._get_model_param_range_map(parameter)["param"].start
        return
    mains = {
        id(main): parameter
        for models, wide in zip(
            getattr(one, "float16_groups", ()), getattr(one, "fp32_from_float16_groups", ()), strict=True
        )
        for parameter, main in zip(models, wide, strict=True)
    }
    for number, group in enumerate(one.optimizer.param_groups):
        for main in group["params"]:
            yield number, mains.get(id(main), main), main, 0


def check_chunks(chunks: Sequence[Any]) -> list[Problem]:
    """Returns findings (SR-REC-USE) for models whose state the bridge does not show."""
    return [
        _unsupported("a model without `decoder`", "GPTModel", type(chunk).__name__)
        for chunk in chunks
        if not hasattr(chunk, "decoder")
    ]


def check_optimizer(optimizer: Any) -> list[Problem]:
    """Returns findings (SR-REC-USE) if an optimizer is not one whose parts on each rank can be shown."""
    chain = _chain(optimizer)
    problems = [problem for one in chain for problem in _check_one(one)]
    if len(chain) > 1 and getattr(chain[0], "grad_scaler", None) is not None:
        # Each scales down for infinities among its own gradients; the loss is scaled by the first one's.
        problems.append(_unsupported("a loss scale with several optimizers", None, type(chain[0].grad_scaler).__name__))
    return problems


def _check_one(one: Any) -> list[Problem]:
    known = any(hasattr(one, name) for name in ("model_param_gbuf_map", "fp32_from_float16_groups"))
    if not known and type(one).__name__ != "FP32Optimizer":
        return [_unsupported("this optimizer", "DistributedOptimizer or a plain one", type(one).__name__)]
    if getattr(one.config, "use_precision_aware_optimizer", False):
        return [_unsupported("the precision-aware optimizer", False, True)]
    return []


def _unsupported(what: str, expected: Any, found: Any) -> Problem:
    return Problem(
        "SR-REC-USE",
        f"the Megatron bridge does not cover {what}",
        expected=expected,
        found=found,
        hint="it covers GPT models, with experts too, and the plain and the distributed optimizer",
    )


def _chain(optimizer: Any) -> list[Any]:
    """Returns the optimizers that step something on this rank."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in chain if not getattr(one, "is_stub_optimizer", False)]


def _bare(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _sharded_parts(sharded: Any, parameter: nn.Parameter) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yields the tensors of the checkpoint that a parameter is part of, each with the elements that it takes.

    A gated layer is two parts, which a factory cuts out of the parameter: here, out of its elements' numbers.
    """
    import torch

    index = torch.arange(parameter.numel(), device="cpu").view(parameter.shape)
    if not hasattr(sharded, "build_fn"):
        yield sharded, index
        return
    built = sharded.build_fn(sharded.key, index, sharded.replica_id, sharded.flattened_range)
    for part in built.values() if isinstance(built, dict) else built:
        yield part, part.data


def _agree_on_replicas(logical: Mapping[str, LogicalParameter]) -> None:
    """Tells replicas apart: by the lowest rank that holds some of each. Collective over the model-parallel groups.

    Experts that are spread over ranks have groups of their own.
    """
    from megatron.core import parallel_state as mpu

    spread = {name for name, one in logical.items() if not all(getattr(p, "allreduce", True) for p in one.own)}
    _agree_within(
        {name: one for name, one in logical.items() if name not in spread},
        mpu.get_model_parallel_group(),
        mpu.get_data_parallel_group(with_context_parallel=True),
    )
    _agree_within(
        {name: logical[name] for name in spread},
        mpu.get_expert_tensor_model_pipeline_parallel_group(),
        mpu.get_expert_data_parallel_group(),
    )


def _agree_within(logical: Mapping[str, LogicalParameter], group: Any, data: Any) -> None:
    """Tells replicas apart within `group`, whose ranks hold one copy of all; `data` holds the copies of this rank's."""
    import torch.distributed as dist

    rank, _ = world()
    first = min(dist.get_process_group_ranks(data))
    told: list[Any] = [None] * dist.get_world_size(group)
    mine = {name: parameter.replica[:-1] for name, parameter in logical.items()}
    dist.all_gather_object(told, (rank, first, mine), group=group)
    told.sort(key=lambda item: item[0])
    for name, parameter in logical.items():
        holders = [(other, start, held[name]) for other, start, held in told if name in held]
        same = [(other, start) for other, start, replica in holders if replica == parameter.replica[:-1]]
        parameter.lead, parameter.shared_lead = min(other for other, _ in same), min(start for _, start in same)
        parameter.primary = holders[0][2] == parameter.replica[:-1]
