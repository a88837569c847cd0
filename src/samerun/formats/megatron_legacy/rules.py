"""How tensor parallelism cuts Megatron's tensors, by their names, and how local names become global ones.

Column-parallel layers are cut along their outputs, row-parallel ones along their inputs, a gated first layer in each of
its halves; all else is held by every rank (megatron.core 0.13 to 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from samerun.core.flat import Block

_COLUMN = re.compile(
    r"(?:^|\.)(?:linear_qkv|linear_fc1|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|word_embeddings|output_layer)"
    r"\.(?:weight|bias)\d*$"
)
_ROW = re.compile(r"(?:^|\.)(?:linear_proj|linear_fc2)\.weight\d*$")
_EVERYWHERE = re.compile(
    r"(?:norm\w*\.(?:weight|bias)|\.layer_norm_(?:weight|bias)|\.(?:linear_proj|linear_fc2)\.bias\d*"
    r"|position_embeddings\.weight|\.router\.\w+|\.shared_experts\.gate_weight|tokentype_embeddings\.weight)$"
)
_LAYER = re.compile(r"^((?:module\.)*decoder\.layers\.)(\d+)\.")
_EXPERT = re.compile(r"(\.experts\.local_experts\.)(\d+)\.")
_GROUPED = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
_OF_EXPERTS = re.compile(r"\.experts\.")
_WRAPPERS = ("module.",)


@dataclass(frozen=True, slots=True)
class Cut:
    """Along which axis ranks' parts lie side by side, None where every rank holds all; in how many parts of its own."""

    axis: int | None
    parts: int = 1


def cut_of(name: str, *, gated: bool) -> Cut | None:
    """Returns how a tensor is cut, None if its name is not known.

    >>> cut_of("decoder.layers.0.mlp.linear_fc1.weight", gated=True)
    Cut(axis=0, parts=2)
    """
    if _EVERYWHERE.search(name):
        return Cut(None)
    if _COLUMN.search(name):
        return Cut(0, 2 if gated and ".linear_fc1." in name else 1)
    return Cut(1) if _ROW.search(name) else None


def join(shape: Sequence[int], cut: Cut, rank: int, degree: int) -> tuple[tuple[int, ...], tuple[Block, ...]] | None:
    """Returns the whole tensor's shape and the blocks of it that a rank holds; None if parts do not come out even."""
    if cut.axis is None or degree == 1:
        return tuple(shape), (Block.whole(shape),)
    if cut.axis >= len(shape) or shape[cut.axis] % cut.parts:
        return None
    axis, part = cut.axis, shape[cut.axis] // cut.parts
    blocks: list[Block] = []
    for number in range(cut.parts):
        source = tuple(number * part if i == axis else 0 for i in range(len(shape)))
        target = tuple((number * degree + rank) * part if i == axis else 0 for i in range(len(shape)))
        sizes = tuple(part if i == axis else size for i, size in enumerate(shape))
        blocks.append(Block(source, target, sizes))
    return tuple(size * degree if i == axis else size for i, size in enumerate(shape)), tuple(blocks)


def is_expert(name: str) -> bool:
    """Whether a tensor holds weights of experts (not of shared ones)."""
    return _OF_EXPERTS.search(name) is not None


def layer_of(name: str) -> int | None:
    """Returns the stage-local layer number in a name, None if it has none."""
    match = _LAYER.search(name)
    return int(match[2]) if match else None


def expert_of(name: str) -> int | None:
    """Returns the rank-local expert number in a name, None if it has none."""
    match = _EXPERT.search(name) or _GROUPED.search(name)
    return int(match[2]) if match else None


def global_name(name: str, first_layer: int, first_expert: int) -> str:
    """Returns a name with layer and expert numbers that hold in the whole run.

    >>> global_name("decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight", 2, 4)
    'decoder.layers.3.mlp.experts.local_experts.4.linear_fc1.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    name = _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + first_layer}.", name)
    name = _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first_expert}.", name)
    return _GROUPED.sub(lambda match: f"{match[1]}{int(match[2]) + first_expert}", name)
