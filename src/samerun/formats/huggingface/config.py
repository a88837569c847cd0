"""What `config.json` says about a model, compared with the tensors that are there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from samerun.errors import FormatError, Problem, Severity
from samerun.formats.statedict.saved import SavedModel
from samerun.formats.statedict.stored import Stored, place_of
from samerun.stores.local import MappedFiles

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "shared")
_HEADS = ("lm_head", "embed_out", "output")
_CAUSAL = re.compile(r"(?:ForCausalLM|LMHeadModel)$")
_LAYER = re.compile(r"^(?P<stack>(?:.*\.)?(?:layers?|h|blocks?))\.(?P<number>\d+)\.")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
_SAMPLED = 16_384


def tied_names(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> dict[str, str]:
    """Returns head -> embedding for a model whose configuration ties them and whose file has the embedding only.

    Such a file leaves the head out: `save_pretrained` writes a shared tensor once.
    """
    if config.get("tie_word_embeddings") is not True or not _is_causal(config):
        return {}
    embedding, head = _find(tensors, _EMBEDDINGS), _find(tensors, _HEADS)
    if embedding is None or head is not None:
        return {}
    return {"lm_head.weight": embedding}


def _is_causal(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and _CAUSAL.search(name) for name in names)


def _find(tensors: Mapping[str, Stored], modules: Sequence[str]) -> str | None:
    """Returns the one tensor that is the weight of a module with one of these names, None if there is not one."""
    found = [name for name in tensors if name.endswith(tuple(f"{module}.weight" for module in modules))]
    found = [name for name in found if name.split(".")[-2] in modules]
    return found[0] if len(found) == 1 else None


def check_config(config: Mapping[str, Any], models: Sequence[SavedModel], files: MappedFiles) -> list[Problem]:
    """Compares the number of layers and the tie of head and embedding with what is saved."""
    if not models or not config:
        return []
    tensors = models[0].tensors
    return [*_check_tie(config, tensors, files), *_check_layers(config, tensors)]


def _check_tie(config: Mapping[str, Any], tensors: Mapping[str, Stored], files: MappedFiles) -> list[Problem]:
    embedding, head = _find(tensors, _EMBEDDINGS), _find(tensors, _HEADS)
    if config.get("tie_word_embeddings") is not True or embedding is None or head is None:
        return []
    a, b = tensors[embedding], tensors[head]
    if place_of(a) == place_of(b) or a.shape != b.shape or _alike(a, b, files):
        return []
    return [
        Problem(
            "SR-TIE-DIFFERS",
            f"the configuration ties {head} to {embedding}, but both are saved with different values",
            where={"tensor": f"param:{head}"},
            hint="loading makes one of them win without a word; set tie_word_embeddings to what the run really trained",
        )
    ]


def _alike(a: Stored, b: Stored, files: MappedFiles) -> bool:
    """Whether the first, middle and last values of two tensors are equal."""
    try:
        left, right = a.view(0, files).reshape(-1), b.view(0, files).reshape(-1)
    except FormatError:
        return True
    starts = (0, len(left) // 2, max(0, len(left) - _SAMPLED))
    return all(left[i : i + _SAMPLED].tobytes() == right[i : i + _SAMPLED].tobytes() for i in starts)


def _check_layers(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> list[Problem]:
    stated = next((config[name] for name in _LAYER_COUNTS if type(config.get(name)) is int), None)
    stacks: dict[str, set[int]] = {}
    for name in tensors:
        match = _LAYER.match(name)
        if match and len(match["number"]) < 6:
            stacks.setdefault(match["stack"], set()).add(int(match["number"]))
    if stated is None or len(stacks) != 1:
        return []
    stack, numbers = next(iter(stacks.items()))
    if numbers == set(range(stated)):
        return []
    fewer = not numbers >= set(range(stated))
    return [
        Problem(
            "SR-HF-LAYERS",
            f"config.json states {stated} layers, the files hold {len(numbers)} of {stack}",
            severity=Severity.ERROR if fewer else Severity.WARNING,
            where={"tensor": f"param:{stack}.{min(numbers ^ set(range(stated)))}"},
            expected=stated,
            found=len(numbers),
            hint="from_pretrained ignores surplus tensors and initialises missing ones, with a warning at most",
        )
    ]
