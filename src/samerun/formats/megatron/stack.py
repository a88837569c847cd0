"""Names of layers and experts as torch_dist has them, from those of one file per rank.

The same mapping that a job's own `sharded_state_dict` makes (megatron.core 0.16, `TransformerBlock`,
`TransformerLayer`, `SequentialMLP`): layers are stacked along a new first axis, experts along the next, and the norms
of Megatron's own layer specification go by the names of Transformer Engine's fused layers. Where layers are not all
alike, their numbers stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from samerun.core.mapsteps import Stack, Step
from samerun.core.namemap import NameMap, Pattern, Rule
from samerun.core.state import LogicalState
from samerun.formats.base import Checkpoint
from samerun.formats.mapped import MappedCheckpoint
from samerun.formats.mcore.order import fused_name

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.\d+\.(.+)")
_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12]\.(?:weight|bias))\d+")


def adapt(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint under the names of torch_dist: itself, unless it is one of a file per rank.

    Raises:
        UsageError: if its tensors cannot be stacked (shapes, types or groups differ, a layer is missing).
    """
    if checkpoint.state.format != "megatron-legacy":
        return checkpoint
    names = plan_stacks(checkpoint.state)
    return MappedCheckpoint(checkpoint, names) if names.rules else checkpoint


def plan_stacks(state: LogicalState) -> NameMap:
    """Returns the map from global numbered names to stacked ones."""
    args = state.objects.get("args")
    named: Mapping[Any, Any] = args if isinstance(args, Mapping) else {}
    layers: dict[str, set[int]] = {}
    for entry in state.tensors.values():
        if match := _LAYER.fullmatch(entry.key.fqn):
            layers.setdefault(match[2], set()).add(int(match[1]))
    own = named.get("transformer_impl") == "local" or any(name.startswith("input_layernorm.") for name in layers)
    stacked = _are_alike(layers.values(), named)
    rules: dict[str, Rule] = {}
    for name in layers:
        source, target, steps = _plan(name, own=own, stacked=stacked)
        if source != target:
            rules[source] = Rule((Pattern(source),), (Pattern(target),), steps)
    return NameMap.checked(list(rules.values()))


def _are_alike(found: Iterable[set[int]], args: Mapping[Any, Any]) -> bool:
    """Whether every layer has the same tensors; experts in some layers only are declared by their frequency."""
    frequency = args.get("moe_layer_freq", 1)
    declared = frequency if isinstance(frequency, int) else 2
    held = {frozenset(numbers) for numbers in found}
    return len(held) == 1 and declared <= 1


def _plan(name: str, *, own: bool, stacked: bool) -> tuple[str, str, tuple[Step, ...]]:
    """Returns the pattern of a tensor of a layer, what it becomes, and the steps between."""
    steps: list[Step] = []
    source = target = name
    expert = _EXPERT.fullmatch(name)
    grouped = _GROUPED.fullmatch(name)
    if expert:
        source, target = f"{expert[1]}.local_experts.{{e}}.{expert[2]}", f"{expert[1]}.experts.{expert[2]}"
    elif grouped:
        # a number at the end of a component is no variable of a pattern, so grouped experts keep their names
        return f"decoder.layers.{{i}}.{name}", f"decoder.layers.{{i}}.{name}", ()
    if "{e}" in source:
        steps.append(Stack("e"))
    if own:
        target = fused_name(target)
    if stacked:
        steps.append(Stack("i"))
    prefix = "decoder.layers." if stacked else "decoder.layers.{i}."
    return f"decoder.layers.{{i}}.{source}", f"{prefix}{target}", tuple(steps)
