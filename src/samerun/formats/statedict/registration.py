"""The order in which a model registered its tensors, put together again where a file sorts names.

safetensors files list tensors by name. What PyTorch guarantees is used as it is: a module's own parameters come before
those of its submodules, and numbered submodules come in numeric order. For the rest there are conventions (`q_proj`
before `k_proj`, weight before bias, embeddings first, heads last), and there are shapes: of the orders to which the
optimizer's positions can be dealt (see `order`), the one nearest to convention is taken. Modules built alike have the
same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from samerun.formats.statedict.order import Candidate, Dealer, Layer, Matching, Position, match_order

_MAX_TRIALS = 30_000
_MAX_WALKS = 10

# Names of siblings in the order in which classes that have all of them register them (transformers 5, torch.nn,
# torchtitan, fairseq's descendants). Of the rows that a set of siblings contains completely, the longest decides.
_FAMILIES: tuple[tuple[str, ...], ...] = (
    # attention
    ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("k_proj", "v_proj", "q_proj", "out_proj"),
    ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"),
    ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"),
    ("query", "key", "value"),
    ("query", "key", "value", "query_global", "key_global", "value_global"),
    ("ln", "self", "output"),
    ("query", "key", "value", "dense", "LayerNorm"),
    ("query_key_value", "dense"),
    ("self", "output"),
    ("c_attn", "c_proj"),
    ("q", "k", "v", "o"),
    ("Wqkv", "Wo"),
    # feed-forward and experts
    ("gate_proj", "up_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("c_fc", "c_proj"),
    ("wi_0", "wi_1", "wo"),
    ("Wi", "Wo"),
    ("intermediate_dense", "output_dense"),
    ("gate", "experts", "shared_expert", "shared_expert_gate"),
    ("experts", "gate", "shared_experts"),
    ("gate", "experts"),
    ("gate_up_proj", "down_proj"),
    ("in_proj", "x_proj", "dt_proj", "out_proj"),
    # blocks
    ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
     "post_feedforward_layernorm"),
    ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"),
    ("self_attn", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"),
    ("self_attn", "block_sparse_moe", "input_layernorm", "post_attention_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "attention", "mlp"),
    ("input_layernorm", "self_attention", "post_attention_layernorm", "mlp"),
    ("self_attention", "mlp", "input_layernorm"),
    ("attention", "feed_forward", "attention_norm", "ffn_norm"),
    ("self_attn", "self_attn_layer_norm", "encoder_attn", "encoder_attn_layer_norm", "fc1", "fc2", "final_layer_norm"),
    ("self_attn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"),
    ("self_attn", "layer_norm1", "mlp", "layer_norm2"),
    ("self_attn", "linear1", "linear2", "norm1", "norm2"),
    ("self_attn", "multihead_attn", "linear1", "linear2", "norm1", "norm2", "norm3"),
    ("ln_1", "attn", "ln_2", "mlp"),
    ("attention", "intermediate", "output"),
    ("attention", "ln", "intermediate", "output"),
    ("attention", "intermediate", "output", "layernorm_before", "layernorm_after"),
    ("full_layer_layer_norm", "attention", "ffn", "ffn_output"),
    ("attention", "intermediate", "output", "bottleneck", "ffn"),
    ("attention", "layernorm_before", "layernorm_after", "mlp"),
    ("attention", "layer_norm", "feed_forward", "final_layer_norm"),
    ("attention", "sa_layer_norm", "ffn", "output_layer_norm"),
    ("attn_norm", "attn", "mlp_norm", "mlp"),
    ("attn", "mlp_norm", "mlp"),
    ("SelfAttention", "layer_norm"),
    ("DenseReluDense", "layer_norm"),
    ("norm", "mixer"),
    ("dense", "LayerNorm"),
    # embeddings and whole models
    ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"),
    ("word_embeddings", "position_embeddings", "LayerNorm"),
    ("embed_tokens", "embed_positions", "final_layer_norm", "layers"),
    ("embed_tokens", "embed_positions"),
    ("embed_positions", "layers", "layernorm_embedding"),
    ("pos_conv_embed", "layer_norm", "layers"),
    ("layer_norm", "projection"),
    ("embeddings", "pre_layrnorm", "encoder", "post_layernorm"),
    ("word_embeddings", "position_embeddings", "token_type_embeddings", "embedding_transformation", "LayerNorm"),
    ("LayerNorm", "dense", "decoder"),
    ("dense", "LayerNorm", "bottleneck"),
    ("input", "attention"),
    ("vocab_transform", "vocab_layer_norm", "vocab_projector"),
)  # fmt: skip
_BY_LENGTH = sorted(_FAMILIES, key=len, reverse=True)

# The same names in another order, told by the module that holds them: Albert and Electra normalise before the head's
# projection, and the decoder that would tell it is tied and left out of the file.
_FAMILIES_IN: dict[str, tuple[str, ...]] = {
    "predictions": ("LayerNorm", "dense"),
    "generator_predictions": ("LayerNorm", "dense"),
}

# Otherwise: the earliest pattern that a name matches gives its place, then a number at its end, then the alphabet.
_STAGES: tuple[str, ...] = (
    r"(?:shared|embed(?:ding)?s?|emb|wte|.*tok(?:en)?(?:s|_.*)?|.*word_emb.*|patch.*|stem)",
    r"(?:wpe|pos.*|.*position.*|.*emb(?:ed.*)?)",
    r"(?:in_?proj.*|.*input.*|pre_.*|.*_before)",
    r"(?:enc(?:oder)?.*)",
    r"(?:dec(?:oder)?.*)",
    r"(?:layers?|blocks?|h|stages?|body|backbone|model|transformer|\d+)",
    r"(?:n|ln|norm|layer_?norm|.*_ln|.*_norm|bn)_?0*1",
    r"(?:wqkv|qkv.*|w?q(?:uery)?(?:_.*)?)",
    r"(?:w?k(?:ey)?(?:_.*)?)",
    r"(?:w?v(?:alue)?(?:_.*)?)",
    r"(?:(?:self_?)?att(?:entio)?n(?:_\d+)?|mixer|self)",
    r"(?:w?o(?:ut(?:put)?)?_?(?:proj|lin.*)?|c_proj|proj)",
    r"(?:n|ln|norm|layer_?norm|.*_ln|.*_norm|bn)_?0*2",
    r"(?:.*gate.*)",
    r"(?:ffn|mlp|feed_?forward|w\d|fc\d?|.*linear.*|.*up.*|dense.*)",
    r"(?:.*down.*)",
    r"(?:.*norm.*|ln.*|n\d*|.*_ln)",
    r"(?:.*head.*|.*classifier.*|score|cls|pooler|out(?:put)?.*|proj_out|predictions)",
)
_LEAVES = ("weight", "weight_g", "weight_v", "in_proj_weight", "gate_up_proj", "down_proj", "in_proj_bias", "bias")
# torch.nn's recurrent modules and cells: layer by layer, each direction by itself (torch 2.13, nn/modules/rnn.py).
_RECURRENT_KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
_RECURRENT = re.compile(rf"({'|'.join(_RECURRENT_KINDS)})(?:_l(\d+)(_reverse)?)?")
_STAGE_PATTERNS = tuple(re.compile(stage, re.IGNORECASE) for stage in _STAGES)
_MIDDLE = _STAGES.index(next(stage for stage in _STAGES if "feed_?forward" in stage))

Orders = Mapping[object, tuple[str, ...]]


@dataclass(slots=True)
class _Node:
    """A module: its own tensors, its submodules, its name, and a signature that modules built alike share."""

    own: dict[str, Candidate]
    inner: dict[str, _Node]
    name: str = ""
    signature: object = None


@dataclass(frozen=True, slots=True)
class Registered:
    """The matching, and the keys that only convention tells from others of the same shape."""

    matching: Matching
    assumed: frozenset[str]


def match_registration(candidates: Sequence[Candidate], groups: Sequence[Sequence[Position]]) -> Registered | None:
    """Finds an order of registration to which the groups' positions can be dealt. Returns None if none is found."""
    root = _tree(candidates)
    order = _Search(Dealer.of(len(candidates), groups)).run(root)
    matching = match_order(order, groups) if order is not None else None
    if matching is None:
        return None
    return Registered(matching, _assumed(candidates, matching, groups))


def usual_order(names: Iterable[str]) -> list[str]:
    """Returns names in the order in which a model usually registers them, where nothing else tells it.

    >>> usual_order(["norm.weight", "layers.0.k_proj.weight", "layers.0.q_proj.weight", "embed_tokens.weight"])
    ['embed_tokens.weight', 'layers.0.q_proj.weight', 'layers.0.k_proj.weight', 'norm.weight']
    """
    return [candidate.name for candidate in _walk(_tree([Candidate(name, ()) for name in names]))]


def _walk(node: _Node) -> Iterator[Candidate]:
    yield from (node.own[leaf] for leaf in _usual_leaves(node))
    for name in _usual(list(node.inner), node.name):
        yield from _walk(node.inner[name])


def _tree(candidates: Sequence[Candidate]) -> _Node:
    root = _Node({}, {})
    for candidate in candidates:
        node = root
        *modules, leaf = candidate.name.split(".")
        for module in modules:
            node = node.inner.setdefault(module, _Node({}, {}, module))
        node.own[leaf] = candidate
    _sign(root)
    return root


def _sign(node: _Node) -> object:
    own = tuple(sorted((leaf, candidate.shape) for leaf, candidate in node.own.items()))
    inner = sorted((name if not name.isdigit() else "", hash(_sign(child))) for name, child in node.inner.items())
    node.signature = (own, tuple(inner))
    return node.signature


# What is still to be walked: tensors and modules, as a linked list so that branches of the search share it.
_Rest = tuple["Candidate | _Node | _Choice", "_Rest"] | None


@dataclass(frozen=True, slots=True)
class _Choice:
    """A module whose submodules (or own tensors) are partly walked: which come next is open.

    `chosen` are those walked, `left` the others in usual order.
    """

    node: _Node
    kind: object
    chosen: tuple[str, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """Where the search stands: what is still to be walked, what was, and the orders settled by kind of module."""

    rest: _Rest
    layer: Layer
    walked: tuple[Candidate, ...]
    orders: Orders


class _Search:
    """Walks the modules in usual order as long as tensors can be dealt, and goes back to the last choice otherwise.

    The first module of a kind makes the choices; later ones follow them. So the first order that fits differs from the
    usual one as late as possible. Gives up after a bounded number of tensors.
    """

    def __init__(self, dealer: Dealer) -> None:
        self.dealer = dealer
        self.trials = 0
        self.most_trials = _MAX_TRIALS

    def run(self, root: _Node) -> list[Candidate] | None:
        """Returns the tensors in an order that fits, None if none was found."""
        if self.dealer.spare < 0:
            return None
        self.most_trials += _MAX_WALKS * sum(len(group) for group in self.dealer.groups)
        open_choices: list[Iterator[_State]] = []
        state: _State | None = _State((root, None), self.dealer.start(), (), {})
        while state is not None:
            reached = self.walk(state)
            if reached is not None and reached.rest is None:
                return list(reached.walked)
            if reached is not None:
                open_choices.append(_alternatives(reached))
            state = None
            while open_choices and state is None and self.trials <= self.most_trials:
                state = next(open_choices[-1], None)
                if state is None:
                    open_choices.pop()
        return None

    def walk(self, state: _State) -> _State | None:
        """Walks on to the end (nothing rests) or to the next choice (it is the first of the rest); None if stuck."""
        rest, layer, walked, orders = state.rest, state.layer, list(state.walked), state.orders
        while rest is not None:
            item, after = rest
            if isinstance(item, Candidate):
                self.trials += 1
                layer = self.dealer.deal(layer, len(walked), item)
                if not layer:
                    return None
                walked.append(item)
                rest = after
            elif isinstance(item, _Node):
                rest = _enter(item, after, orders)
            elif len(item.left) < 2:
                orders = {**orders, item.kind: (*item.chosen, *item.left)}
                rest = _push(item.node, item.left, after)
            else:
                break
        if rest is None and not self.dealer.done(layer):
            return None
        return _State(rest, layer, tuple(walked), orders)


def _alternatives(state: _State) -> Iterator[_State]:
    """Yields what follows from each way to decide the choice that comes first."""
    if state.rest is None or not isinstance(state.rest[0], _Choice):
        return
    choice, rest = state.rest[0], state.rest[1]
    for name in choice.left:
        left = tuple(other for other in choice.left if other != name)
        after: _Rest = (_Choice(choice.node, choice.kind, (*choice.chosen, name), left), rest)
        yield _State(_push(choice.node, (name,), after), state.layer, state.walked, state.orders)


def _enter(node: _Node, rest: _Rest, orders: Orders) -> _Rest:
    """Puts a module's own tensors, then its submodules, before the rest."""
    for own in (False, True):  # what is put there last is walked first
        names = _usual_leaves(node) if own else _usual(list(node.inner), node.name)
        kind = (node.signature, own)
        settled = orders.get(kind)
        if all(name.isdigit() for name in names):
            rest = _push(node, names, rest)
        elif settled is not None and set(settled) == set(names):
            rest = _push(node, settled, rest)
        else:
            rest = (_Choice(node, kind, (), names), rest)
    return rest


def _push(node: _Node, names: Sequence[str], rest: _Rest) -> _Rest:
    for name in reversed(names):
        rest = (node.own[name] if name in node.own else node.inner[name], rest)
    return rest


def _usual_leaves(node: _Node) -> tuple[str, ...]:
    return tuple(sorted(node.own, key=_leaf_place))


def _leaf_place(leaf: str) -> tuple[int, int, int, int, str]:
    if recurrent := _RECURRENT.fullmatch(leaf):
        kind, layer, backwards = recurrent.groups()
        return (-1, int(layer or 0), bool(backwards), _RECURRENT_KINDS.index(kind), leaf)
    return (_LEAVES.index(leaf) if leaf in _LEAVES else -1, 0, 0, 0, leaf)


def _usual(names: list[str], parent: str) -> tuple[str, ...]:
    """Returns siblings in the order in which modules with such names, in a module called so, are usually registered."""
    if all(name.isdigit() for name in names):
        return tuple(sorted(names, key=int))
    ordered = sorted(names, key=_place)
    rows = (_FAMILIES_IN[parent], *_BY_LENGTH) if parent in _FAMILIES_IN else _BY_LENGTH
    family = next((row for row in rows if set(row) <= set(names)), None)
    if family is None:
        return tuple(ordered)
    ranks = iter(family)
    return tuple(next(ranks) if name in family else name for name in ordered)


def _place(name: str) -> tuple[int, int, str]:
    stage = next((i for i, pattern in enumerate(_STAGE_PATTERNS) if pattern.fullmatch(name)), _MIDDLE)
    number = re.search(r"(\d+)$", name)
    return stage, int(number.group(1)) if number else 0, name


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
