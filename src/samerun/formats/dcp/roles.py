"""Which of a DCP checkpoint's tensors is a parameter, a buffer, an average of the model, or part of something else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from samerun.core.state import Role, normalize_fqn
from samerun.formats.dcpfile.index import StoredTensor
from samerun.formats.statedict.kinship import Distance, distance

_RNG = re.compile(r"(?:^|[._])(?:rng|random|seed)s?(?:_?(?:state|rank|gen))*[._\d]*", re.IGNORECASE)
_AVERAGE = re.compile(r"(?:^|[._])(?:ema|swa|averaged?|shadow)(?:$|[._])", re.IGNORECASE)
_MODEL = re.compile(r"(?:^|[._])(?:model|module|net|network|state_dict|params|weights)(?:$|[._])", re.IGNORECASE)
_OTHER = re.compile(
    r"^(?:lr_?)?(?:sched\w*|\w*scaler|data\w*|\w*loader|\w*sampler|train\w*|progress|counters?|meta\w*|metrics?|config)$",
    re.IGNORECASE,
)
_BUFFER_NAMES = frozenset({
    "running_mean", "running_var", "num_batches_tracked", "inv_freq", "freqs_cis", "freqs", "cos_cached", "sin_cached",
    "rope_cache", "position_ids", "attn_mask", "causal_mask", "mask", "tokens_per_expert", "expert_bias",
})  # fmt: skip
_PARAMETER_NAMES = frozenset({"weight", "bias", "lora_A", "lora_B", "scale"})


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor that belongs to a model (or an average of one): the item, its FQN there, and which model."""

    item: StoredTensor
    fqn: str
    container: str
    average: bool


def container_of(tensor: StoredTensor) -> tuple[str, str]:
    """Returns a tensor's container and its name inside: the saved path but its last part, and that part."""
    if len(tensor.path) > 1:
        return ".".join(str(part) for part in tensor.path[:-1]), str(tensor.path[-1])
    return "", tensor.name


@dataclass(frozen=True, slots=True)
class Models:
    """The model tensors of a checkpoint, everything else, and what each optimizer's FQNs must be prefixed with.

    `alike` are, by optimizer, the containers of which nothing tells which is its model; the first one was taken.
    """

    tensors: tuple[ModelTensor, ...]
    rest: tuple[StoredTensor, ...]
    prefixes: tuple[str, ...]
    alike: tuple[tuple[str, ...], ...] = ()


def find_models(
    tensors: Sequence[StoredTensor], optimizers: Mapping[str, frozenset[str]], *, structured: bool
) -> Models:
    """Splits tensors that are no optimizer's into those of models and those of anything else (RNG, loaders, ...).

    `optimizers` are, by name, the parameter names that each optimizer knows: the container that holds most of them is
    its model, and its names are used as they are; of several the one that is called like the optimizer. Names in any
    further model begin with its container's. With `structured` false there are no saved paths and containers are found
    from names alone.
    """
    known = frozenset[str]().union(*optimizers.values())
    inside: dict[str, list[tuple[str, StoredTensor]]] = {}
    for tensor in tensors:
        container, name = container_of(tensor) if structured else _split_unstructured(tensor.name, known)
        inside.setdefault(container, []).append((normalize_fqn(name), tensor))
    names = {container: {name for name, _ in items} for container, items in inside.items()}
    fitting = [_owners(root, fqns, names) for root, fqns in optimizers.items()]
    owners = [containers[0] if containers else None for containers in fitting]
    mains = dict.fromkeys(owner for owner in owners if owner is not None) or dict.fromkeys(_largest(inside))
    qualify = sum(len(names[main]) for main in mains) > len(set[str]().union(*(names[main] for main in mains)))
    prefix = {main: f"{main}." if qualify and main else "" for main in mains}
    found: list[ModelTensor] = []
    for container, items in inside.items():
        kind = _kind(container, names, mains)
        stem = prefix.get(container, f"{container}." if container and kind == "extra" else "")
        if kind:
            found.extend(ModelTensor(tensor, stem + name, container, kind == "average") for name, tensor in items)
    taken = {id(model.item) for model in found}
    rest = tuple(tensor for tensor in tensors if id(tensor) not in taken)
    prefixes = tuple(prefix.get(owner or "", "") for owner in owners)
    return Models(tuple(found), rest, prefixes, tuple(tuple(containers) for containers in fitting))


def _owners(root: str, fqns: frozenset[str], names: Mapping[str, set[str]]) -> list[str]:
    """Returns the containers that hold most of the parameters of the optimizer at `root`: one, if anything decides."""
    scored: dict[str, tuple[int, bool, Distance, bool]] = {}
    for container, held in names.items():
        if not _is_other(container) and fqns & held:
            averaged, called = bool(_AVERAGE.search(container)), bool(_MODEL.search(container))
            scored[container] = (-len(fqns & held), averaged, distance(root, container), not called)
    best = min(scored.values(), default=None)
    return [container for container, score in scored.items() if score == best]


def _largest(inside: Mapping[str, Sequence[tuple[str, StoredTensor]]]) -> list[str]:
    """Returns the container that is most likely the model when no optimizer says so: by its name, then by its size."""
    candidates = [container for container in inside if not _is_other(container)]
    return sorted(candidates, key=lambda name: (_weight(name), _elements(inside[name])))[-1:]


def _kind(container: str, names: Mapping[str, set[str]], mains: Mapping[str, None]) -> str:
    """Returns `main`, `average` (a copy of a main model), `extra` (a further model), or nothing for anything else."""
    if container in mains:
        return "main"
    if _is_other(container) or not container:
        return ""
    held = set[str]().union(*(names[main] for main in mains))
    if _AVERAGE.search(container):
        return "average" if names[container] & held else ""
    layered = any(name.rpartition(".")[2] in _PARAMETER_NAMES for name in names[container])
    return "extra" if layered else ""


def _split_unstructured(name: str, known: frozenset[str]) -> tuple[str, str]:
    """Splits a flat name where the rest becomes a parameter that the optimizer knows, else after `model.`."""
    at = -1
    while True:
        rest = name[at + 1 :]
        if normalize_fqn(rest) in known:
            return name[: max(at, 0)], rest
        at = name.find(".", at + 1)
        if at < 0:
            break
    first, _, rest = name.partition(".")
    return (first, rest) if rest and (_MODEL.search(first) or _OTHER.match(first)) else ("", name)


def _is_other(container: str) -> bool:
    """Whether a container is no model's. A model may lie in a section that is called otherwise: `train_state.model`."""
    parts = container.split(".")
    called = _MODEL.fullmatch(parts[-1])
    return bool(_RNG.search(container)) or (not called and any(_OTHER.match(part) for part in parts))


def _weight(container: str) -> int:
    return 2 if _MODEL.search(container) else 0 if _AVERAGE.search(container) else 1


def _elements(items: Iterable[tuple[str, StoredTensor]]) -> int:
    total = 0
    for _, tensor in items:
        count = 1
        for size in tensor.shape:
            count *= size
        total += count
    return total


def looks_random(name: str) -> bool:
    """Whether a section's name says that it holds random number generators."""
    return bool(_RNG.search(name))


def infer_role(
    tensor: ModelTensor, optimizer_fqns: frozenset[str], *, groups_known: bool, usual_pieces: int
) -> tuple[Role, bool]:
    """Returns a model tensor's role, and whether it had to be inferred.

    What an optimizer knows is a parameter. For the rest DCP records nothing, so the name and the type decide, then
    whether it was cut while others were (FSDP cuts parameters, frozen ones too, and leaves buffers whole), then whether
    there are groups that it is in none of.
    """
    if tensor.fqn in optimizer_fqns:
        return Role.PARAM, False
    last = tensor.fqn.rpartition(".")[2]
    if last in _BUFFER_NAMES or (tensor.item.dtype.kind != "float" and last not in _PARAMETER_NAMES):
        return Role.BUFFER, True
    if last in _PARAMETER_NAMES:
        return Role.PARAM, True
    if usual_pieces > 1 and tensor.item.shape:
        boxes = {offsets.tobytes() for offsets in tensor.item.tiling.offsets}  # replicas count once
        return (Role.PARAM if len(boxes) > 1 else Role.BUFFER), True
    return (Role.BUFFER if groups_known else Role.PARAM), True


def usual_pieces(tensors: Iterable[ModelTensor]) -> int:
    """Returns the most common number of pieces among tensors of at least one dimension."""
    counts = Counter(len(tensor.item.tiling) for tensor in tensors if tensor.item.shape)
    return counts.most_common(1)[0][0] if counts else 1
