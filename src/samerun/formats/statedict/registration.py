"""The order in which a model registered its tensors, put together again where a file sorts names.

safetensors files list tensors by name. What PyTorch guarantees is used as it is: a module's own parameters come before
those of its submodules, and numbered submodules come in numeric order. For the rest there are conventions (`q_proj`
before `k_proj`, weight before bias, embeddings first, heads last), and there are shapes: an order is taken only if
the optimizer's positions can be dealt to it (see `order`). Modules built alike have the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from samerun.formats.statedict.order import Candidate, Matching, Position, count_matched, match_order

_MOST_PERMUTED = 6
_MAX_TRIALS = 4_000

# Names of siblings, in the order in which the classes that have all of them register them. The first row that a set of
# siblings contains completely decides; patterns match whole names.
_FAMILIES: tuple[tuple[str, ...], ...] = (
    ("k_proj", "v_proj", "q_proj", "out_proj"),  # OPT, BART, CLIP, Whisper, GPT-Neo, GPT-J
    ("q_proj", "k_proj", "v_proj", "o_proj"),  # Llama and its relatives
    ("gate_proj", "up_proj", "down_proj"),
    ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"),
    ("self_attn", "linear1", "linear2", "norm1", "norm2"),  # torch.nn.TransformerEncoderLayer
    ("self_attn", "multihead_attn", "linear1", "linear2", "norm1", "norm2", "norm3"),
    ("self_attn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"),  # BART, OPT, Whisper
    ("attention", "feed_forward", "attention_norm", "ffn_norm"),  # Llama as Meta and torchtitan write it
    ("attention", "intermediate", "output"),  # BERT
    ("query", "key", "value"),
    ("SelfAttention", "layer_norm"),  # T5
    ("q", "k", "v", "o"),
    ("wi_0", "wi_1", "wo"),
    ("word_embeddings", "position_embeddings", "token_type_embeddings"),
    ("dense", "LayerNorm"),
    ("layer_norm1", "mlp", "layer_norm2"),  # CLIP: self_attn, layer_norm1, mlp, layer_norm2
    ("ln_1", "attn", "ln_2", "mlp"),  # GPT-2
    ("c_attn", "c_proj"),
    ("c_fc", "c_proj"),
)

# Otherwise: the earliest pattern that a name matches gives its place, then a number at its end, then the alphabet.
_STAGES: tuple[str, ...] = (
    r"(?:shared|.*emb(?:ed.*)?|wte|.*token.*|patch.*|stem)",
    r"(?:wpe|pos.*|.*position.*)",
    r"(?:in_?proj.*|.*input.*)",
    r"(?:enc(?:oder)?.*)",
    r"(?:dec(?:oder)?.*)",
    r"(?:layers?|blocks?|h|stages?|body|backbone|model|transformer|\d+)",
    r"(?:n|ln|norm|layer_?norm|.*_ln|.*_norm|bn)_?0*1",
    r"(?:wqkv|qkv.*|w?q(?:uery)?(?:_.*)?)",
    r"(?:w?k(?:ey)?(?:_.*)?)",
    r"(?:w?v(?:alue)?(?:_.*)?)",
    r"(?:(?:self_?)?att(?:entio)?n.*|mixer)",
    r"(?:w?o(?:ut(?:put)?)?_?(?:proj|lin.*)?|c_proj|proj)",
    r"(?:n|ln|norm|layer_?norm|.*_ln|.*_norm|bn)_?0*2",
    r"(?:.*gate.*)",
    r"(?:ffn|mlp|feed_?forward|w\d|fc\d?|.*linear.*|.*up.*|dense.*)",
    r"(?:.*down.*)",
    r"(?:.*norm.*|ln.*|n\d*|.*_ln)",
    r"(?:.*head.*|.*classifier.*|score|out(?:put)?.*|proj_out)",
)
_LEAVES = ("weight", "weight_g", "weight_v", "in_proj_weight", "in_proj_bias", "bias")
_STAGE_PATTERNS = tuple(re.compile(stage, re.IGNORECASE) for stage in _STAGES)
_MIDDLE = _STAGES.index(next(stage for stage in _STAGES if "feed_?forward" in stage))


@dataclass(slots=True)
class _Node:
    """A module: its own tensors, its submodules, and a signature that modules built alike share."""

    own: dict[str, Candidate]
    inner: dict[str, _Node]
    signature: object = None


@dataclass(frozen=True, slots=True)
class Registered:
    """The matching, and the keys that only convention tells from others of the same shape."""

    matching: Matching
    assumed: frozenset[str]


def match_registration(candidates: Sequence[Candidate], groups: Sequence[Sequence[Position]]) -> Registered | None:
    """Finds an order of registration to which the groups' positions can be dealt. Returns None if none is found."""
    root = _tree(candidates)
    orders = {node.signature: _usual(list(node.inner)) for node in _modules(root)}
    matching = match_order(list(_walk(root, orders)), groups)
    if matching is None:
        orders = _search(root, orders, groups)
        matching = match_order(list(_walk(root, orders)), groups) if orders else None
    if matching is None:
        return None
    return Registered(matching, _assumed(candidates, matching, groups))


def _tree(candidates: Sequence[Candidate]) -> _Node:
    root = _Node({}, {})
    for candidate in candidates:
        node = root
        *modules, leaf = candidate.name.split(".")
        for module in modules:
            node = node.inner.setdefault(module, _Node({}, {}))
        node.own[leaf] = candidate
    _sign(root)
    return root


def _sign(node: _Node) -> object:
    own = tuple(sorted((leaf, candidate.shape) for leaf, candidate in node.own.items()))
    inner = tuple(
        sorted((name if not name.isdigit() else "", hash(_sign(child))) for name, child in node.inner.items())
    )
    node.signature = (own, inner)
    return node.signature


def _modules(node: _Node) -> Iterator[_Node]:
    yield node
    for child in node.inner.values():
        yield from _modules(child)


def _walk(node: _Node, orders: Mapping[object, tuple[str, ...]]) -> Iterator[Candidate]:
    """Yields the tensors as `named_parameters()` of a model registered in these orders does."""
    for leaf in sorted(node.own, key=_leaf_place):
        yield node.own[leaf]
    order = orders[node.signature]
    for name in order if set(order) == node.inner.keys() else _usual(list(node.inner)):
        yield from _walk(node.inner[name], orders)


def _leaf_place(leaf: str) -> tuple[int, str]:
    return (_LEAVES.index(leaf) if leaf in _LEAVES else -1, leaf)


def _usual(names: list[str]) -> tuple[str, ...]:
    """Returns siblings in the order in which modules with such names are usually registered."""
    if all(name.isdigit() for name in names):
        return tuple(sorted(names, key=int))
    ordered = sorted(names, key=_place)
    family = next((row for row in _FAMILIES if set(row) <= set(names)), None)
    if family is None:
        return tuple(ordered)
    ranks = iter(family)
    return tuple(next(ranks) if name in family else name for name in ordered)


def _place(name: str) -> tuple[int, int, str]:
    stage = next((i for i, pattern in enumerate(_STAGE_PATTERNS) if pattern.fullmatch(name)), _MIDDLE)
    number = re.search(r"(\d+)$", name)
    return stage, int(number.group(1)) if number else 0, name


def _search(
    root: _Node, orders: dict[object, tuple[str, ...]], groups: Sequence[Sequence[Position]]
) -> dict[object, tuple[str, ...]] | None:
    """Permutes siblings, one kind of module at a time, as long as that lets more tensors be dealt.

    The kinds that take part are those on the way to the first tensor that does not fit, and their parents' kinds.
    """
    trials = 0
    kinds = {node.signature for node in _modules(root) if 2 <= len(node.inner) <= _MOST_PERMUTED}
    total = len(list(_walk(root, orders)))
    best = _score(root, orders, groups)
    while best < total + 1:
        improved = None
        for kind in kinds:
            for order in permutations(orders[kind]):
                trials += 1
                if trials > _MAX_TRIALS:
                    return None
                score = _score(root, {**orders, kind: order}, groups)
                if score > best:
                    best, improved = score, (kind, order)
        if improved is None:
            return None
        orders = {**orders, improved[0]: improved[1]}
    return orders


def _score(root: _Node, orders: Mapping[object, tuple[str, ...]], groups: Sequence[Sequence[Position]]) -> int:
    """Returns how many tensors can be dealt in this order, plus one if all can and every place is filled."""
    candidates = list(_walk(root, orders))
    count = count_matched(candidates, groups)
    return count + (count == len(candidates) and match_order(candidates, groups) is not None)


def _assumed(
    candidates: Sequence[Candidate], matching: Matching, groups: Sequence[Sequence[Position]]
) -> frozenset[str]:
    """Returns the keys of parameters whose shape some differently named parameter has too.

    Parameters whose names differ in numbers only are told apart by these.
    """
    patterns: dict[tuple[int, ...], set[str]] = {}
    for candidate in candidates:
        patterns.setdefault(candidate.shape, set()).add(_pattern(candidate.name))
    shapes = {candidate.name: candidate.shape for candidate in candidates}
    stated = {place.key for group in groups for place in group if place.shape is not None}
    return frozenset(key for key, name in matching.names.items() if key in stated and len(patterns[shapes[name]]) > 1)


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
