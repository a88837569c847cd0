"""The order in which a Megatron model registers its parameters: flat buffers and plain optimizers go by it.

It is the order of `named_parameters()`: a module's own parameters first, then its children as they were assigned in
`__init__` (megatron.core 0.16). Nothing in a checkpoint records it, so whoever uses it confirms the result by values.
"""

from __future__ import annotations

import re
from functools import lru_cache

_TOKENS = (
    "embedding", "word_embeddings", "position_embeddings", "tokentype_embeddings", "encoder", "decoder", "layers",
    "dt_bias", "A_log", "D", "in_proj", "conv1d",
    "input_layernorm", "self_attention", "core_attention", "linear_proj", "linear_q_proj", "linear_q_down_proj",
    "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_qkv", "q_layernorm", "kv_layernorm",
    "k_layernorm", "pre_cross_attn_layernorm", "cross_attention", "pre_mlp_layernorm", "mlp", "mixer", "norm",
    "out_proj", "router", "experts", "local_experts", "linear_fc1", "linear_fc2", "shared_experts",
    "final_layernorm", "final_norm", "mtp", "output_layer",
    "layer_norm_weight", "layer_norm_bias", "weight1", "weight2", "weight", "bias",
)  # fmt: skip
_RANKS = {token: rank for rank, token in enumerate(_TOKENS)}
_NUMBERED = re.compile(r"(weight|bias)(\d+)")
_LAST = len(_TOKENS)

# Where the local layer specification keeps what distributed checkpoints file under Transformer Engine's fused names.
_LOCAL_NAMES = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)


def registration_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Returns a sorting key by which names of a model come in the order of registration.

    >>> names = ["output_layer.weight", "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.router.weight"]
    >>> sorted(names, key=registration_key)[0]
    'decoder.layers.1.mlp.router.weight'
    """
    head, _, rest = name.partition(".layers.")
    number, dot, inner = rest.partition(".")
    if not number.isdigit() or not dot:
        return _components_key(name)
    return (*_components_key(f"{head}.layers"), (0, int(number), ""), *_components_key(inner))


@lru_cache(maxsize=4_096)
def _components_key(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple(_component_key(part) for part in name.split("."))


@lru_cache(maxsize=65_536)
def _component_key(part: str) -> tuple[int, int, str]:
    if part.isdigit():
        return (0, int(part), "")
    numbered = _NUMBERED.fullmatch(part)
    if numbered and part not in _RANKS:
        return (_RANKS[numbered.group(1)], int(numbered.group(2)), "")
    return (_RANKS.get(part, _LAST), 0, part if part not in _RANKS else "")


def local_name(name: str) -> str:
    """Returns the name under which the local layer specification registers a parameter.

    >>> local_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    'decoder.layers.0.pre_mlp_layernorm.weight'
    """
    for fused, own in _LOCAL_NAMES:
        name = name.replace(fused, own)
    return name


def fused_name(name: str) -> str:
    """Returns the name under which distributed checkpoints file a parameter of a layer of the local specification.

    >>> fused_name("pre_mlp_layernorm.weight")
    'mlp.linear_fc1.layer_norm_weight'
    """
    for fused, own in _LOCAL_NAMES:
        if name.startswith(own.lstrip(".")):
            return fused.lstrip(".") + name.removeprefix(own.lstrip("."))
    return name


def knows_order(name: str) -> bool:
    """Whether every part of a name has a known place in the order."""
    return all(part.isdigit() or part in _RANKS or _NUMBERED.fullmatch(part) for part in name.split("."))


def decays(name: str, ndim: int) -> bool:
    """Whether Megatron applies weight decay to a parameter: not to biases, nor to anything of one dimension."""
    return ndim != 1 and not name.endswith(".bias")
