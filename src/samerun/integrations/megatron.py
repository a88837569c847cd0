"""Megatron-core: model chunks and their optimizer under the names of a distributed checkpoint, at any TP, PP and DP.

    model = RecordedModel(chunks, vocab_size=args.vocab_size)
    optimizer = RecordedOptimizer(optimizer, model)
    recorder.attach(model, optimizer, opt_param_scheduler, sampler=sampler, layout=parallel_layout())
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
        "tp": mpu.get_tensor_model_parallel_world_size(),
    }


class RecordedModel:
    """A rank's model chunks, with the parameters of the whole model under the names that a checkpoint has.

    Layers of all stages are one stacked tensor, as in the checkpoint, and tensor-parallel parts are parts of one.
    Collective: every rank makes one, after the model is built.

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


class RecordedOptimizer(StepHooks):
    """A Megatron optimizer with hooks around its step; parameters, groups and state are those of the whole model.

    Everything else is the optimizer's own. Every rank makes one, before it loads.

    Attributes:
        megatron: the optimizer.
        optimizer: the torch optimizer inside.

    Raises:
        UsageError: for what `check_optimizer` finds.
    """

    def __init__(self, optimizer: Any, model: RecordedModel) -> None:
        super().__init__()
        self.megatron, self._model = optimizer, model
        if problems := check_optimizer(optimizer):
            raise UsageError(problems)
        self._one = _single(optimizer)
        self.optimizer: Any = self._one.optimizer
        self._sharded = hasattr(self._one, "model_param_gbuf_map")
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
        return made, norm, zeros

    def global_grad_norm(self) -> float | None:
        """Returns the L2 norm of the whole gradient before clipping, as Megatron computed it; None where it did not."""
        return self._norm

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with parameters of the whole model in them: those of which this rank steps something."""
        if not self._members:
            for number, parameter, _, _ in self._stepped():
                self._members.setdefault(number, {}).update(dict.fromkeys(self._model.owners[id(parameter)]))
        return [
            {**group, "params": list(self._members.get(number, ()))}
            for number, group in enumerate(self.optimizer.param_groups)
        ]

    @property
    def state(self) -> dict[LogicalParameter, dict[str, Any]]:
        """Each parameter's slots, as far as they lie on this rank, and its step."""
        held = {id(parameter): (number, main, first) for number, parameter, main, first in self._stepped()}
        slots = {
            name: value.dtype
            for state in self.optimizer.state.values()
            for name, value in state.items()
            if name != "step" and hasattr(value, "dtype")
        }
        trained = [logical for logical in self._model.parameters() if logical.requires_grad]
        return {logical: self._slots(logical, slots, held) for logical in trained}

    @property
    def masters(self) -> dict[LogicalParameter, BoxPart]:
        """Each parameter's fp32 master: where the model itself is in another type, or the optimizer saves it as one."""
        import torch

        mains = {id(parameter): (main, first) for _, parameter, main, first in self._stepped()}
        return {
            logical: self._part(logical, torch.float32, lambda p: mains.get(id(p)))
            for logical in self._model.parameters()
            if logical.requires_grad and (self._sharded or logical.dtype != torch.float32)
        }

    def _slots(
        self, logical: LogicalParameter, slots: Mapping[str, torch.dtype], held: Mapping[int, Any]
    ) -> dict[str, Any]:
        def values(slot: str) -> Values:
            def find(parameter: Any) -> tuple[torch.Tensor, int] | None:
                if id(parameter) not in held:
                    return None
                _, main, first = held[id(parameter)]
                found = self.optimizer.state.get(main, {})
                return (found[slot], first) if slot in found else None

            return find

        found: dict[str, Any] = {slot: self._part(logical, dtype, values(slot)) for slot, dtype in slots.items()}
        mine = [held[id(parameter)] for parameter in logical.own if id(parameter) in held]
        for number, main, _ in mine[:1]:
            step = self.optimizer.state.get(main, {}).get("step", self.optimizer.param_groups[number].get("step"))
            found |= {} if step is None else {"step": step}
        return found if slots else {}

    def _part(self, logical: LogicalParameter, dtype: torch.dtype, values: Values) -> BoxPart:
        lead = logical.shared_lead if self._sharded else logical.lead
        return BoxPart(logical.shape, dtype, lambda: logical.read(values), lead=lead)

    def _gradient(self, logical: LogicalParameter) -> BoxPart | None:
        """The gradients in Megatron's buffers: with the distributed optimizer, this rank's part of each is complete."""

        def values(parameter: Any) -> tuple[torch.Tensor, int] | None:
            if not self._sharded:
                return parameter.main_grad, 0
            if parameter not in self._one.model_param_gbuf_map:
                return None
            span = self._one._get_model_param_range_map(parameter)["param"]
            return parameter.main_grad.reshape(-1)[span.start : span.end], span.start

        own = logical.own
        if not own or any(getattr(parameter, "main_grad", None) is None for parameter in own):
            return None
        counts = logical.primary if self._sharded else None
        return BoxPart(logical.shape, own[0].main_grad.dtype, lambda: logical.read(values), counts=counts)

    def _stepped(self) -> Iterator[tuple[int, Any, torch.Tensor, int]]:
        """Yields (group, parameter, what is stepped in its place, its first element) for all that this rank steps."""
        one = self._one
        if self._sharded:
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
        for number, group in enumerate(self.optimizer.param_groups):
            for main in group["params"]:
                yield number, mains.get(id(main), main), main, 0


def check_chunks(chunks: Sequence[Any]) -> list[Problem]:
    """Returns findings (SR-REC-USE) for models whose state the bridge does not show."""
    from megatron.core import parallel_state as mpu

    problems: list[Problem] = []
    degrees = {
        "context": mpu.get_context_parallel_world_size(),
        "expert": mpu.get_expert_model_parallel_world_size(),
    }
    for kind, size in degrees.items():
        if size > 1:
            problems.append(_unsupported(f"{kind} parallelism", 1, size))
    for chunk in chunks:
        if getattr(chunk.config, "num_moe_experts", None):
            problems.append(_unsupported("a mixture of experts", 0, chunk.config.num_moe_experts))
        if not hasattr(chunk, "decoder"):
            problems.append(_unsupported("a model without `decoder`", "GPTModel", type(chunk).__name__))
    return problems


def check_optimizer(optimizer: Any) -> list[Problem]:
    """Returns findings (SR-REC-USE) if an optimizer is not one whose parts on each rank can be shown."""
    one = _single(optimizer)
    if one is None:
        return [_unsupported("a chain of several optimizers", 1, len(optimizer.chained_optimizers))]
    known = any(hasattr(one, name) for name in ("model_param_gbuf_map", "fp32_from_float16_groups"))
    if not known and type(one).__name__ != "FP32Optimizer":
        return [_unsupported("this optimizer", "DistributedOptimizer or a plain one", type(one).__name__)]
    if getattr(one.config, "use_precision_aware_optimizer", False):
        return [_unsupported("the precision-aware optimizer", False, True)]
    if one.get_loss_scale().item() != 1:
        return [_unsupported("a loss scale", 1, one.get_loss_scale().item())]
    return []


def _unsupported(what: str, expected: Any, found: Any) -> Problem:
    return Problem(
        "SR-REC-USE",
        f"the Megatron bridge does not cover {what}",
        expected=expected,
        found=found,
        hint="it covers dense models with tensor, pipeline and data parallelism in fp32 and bf16",
    )


def _single(optimizer: Any) -> Any:
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return chain[0] if len(chain) == 1 else None


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
    """Tells replicas apart: by the lowest rank that holds some of each. Collective over the model-parallel group."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    rank, _ = world()
    data: Any = mpu.get_data_parallel_group(with_context_parallel=True)
    group: Any = mpu.get_model_parallel_group()
    first = min(dist.get_process_group_ranks(data))
    told: list[Any] = [None] * dist.get_world_size(group)
    mine = {name: (parameter.replica[:-1], parameter.requires_grad) for name, parameter in logical.items()}
    dist.all_gather_object(told, (rank, first, mine), group=group)
    told.sort(key=lambda item: item[0])
    for name, parameter in logical.items():
        holders = [(other, start, held[name][0]) for other, start, held in told if name in held]
        same = [(other, start) for other, start, replica in holders if replica == parameter.replica[:-1]]
        parameter.lead, parameter.shared_lead = min(other for other, _ in same), min(start for _, start in same)
        parameter.primary = holders[0][2] == parameter.replica[:-1]
