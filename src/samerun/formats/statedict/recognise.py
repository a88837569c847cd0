"""What a part of a saved state is, told from its name and its content: optimizer, scheduler, RNG, loader, model, ..."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from samerun.core.plain import is_blank
from samerun.formats.statedict.records import unread_tensor
from samerun.formats.statedict.stored import Stored
from samerun.formats.torchfile.values import Inert

_RNG = re.compile(r"(?:^|[._])(?:rng|random|seed)s?(?:_?(?:state|rank|gen))*[._\d]*", re.IGNORECASE)
_AVERAGE = re.compile(r"(?:^|[._])(?:ema|swa|averaged?|shadow)(?:$|[._])", re.IGNORECASE)
_MODEL = re.compile(r"(?:^|[._])(?:model|module|net|network|state_dict|params|weights)(?:$|[._])", re.IGNORECASE)
_OTHER = re.compile(
    r"^(?:lr_?)?(?:sched\w*|\w*scaler|data\w*|\w*loader|\w*sampler|train\w*|progress|counters?|meta\w*|metrics?|config|"
    r"\w*args?|opt(?:im\w*)?|hyper\w*|loops?|callbacks?)$",
    re.IGNORECASE,
)
_SCHEDULER = re.compile(r"sched", re.IGNORECASE)
_DATA = re.compile(
    r"(?:^|_)(?:data|dataset|dataloader|loader|sampler|batch_?sampler|dl_state_dict)(?:$|_|\d)", re.IGNORECASE
)
_ABOUT_DATA = re.compile(
    r"_(?:meta\w*|info|names?|paths?|dirs?|conf\w*|cfg|\w*args|params|spec|version)$", re.IGNORECASE
)
_SCALER_KEYS = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval"})
_LOADER_KEYS = frozenset({"_snapshot", "_sampler_iter_yielded", "_num_yielded", "_steps_since_snapshot"})
_BUFFER_NAMES = frozenset({
    "running_mean", "running_var", "num_batches_tracked", "inv_freq", "freqs_cis", "freqs", "cos_cached", "sin_cached",
    "rope_cache", "position_ids", "attn_mask", "causal_mask", "mask", "tokens_per_expert", "expert_bias",
    "relative_position_index", "masked_bias", "token_type_ids",
})  # fmt: skip
_PARAMETER_NAMES = frozenset({"weight", "bias", "lora_A", "lora_B", "scale"})
EXTRA_STATE = "_extra_state"
_AVERAGE_AND_MODEL = ("ema_model.", "online_model.")
_LIST_OF_AVERAGES = "shadow_params"
_COUNT = "n_averaged"


def is_optimizer(node: Any) -> bool:
    """Whether a value is an optimizer's state dict: nested (`state`, `param_groups`) or flattened by names."""
    if not isinstance(node, dict):
        return False
    if isinstance(node.get("param_groups"), list) and isinstance(node.get("state"), dict):
        return True
    names = [key for key in node if isinstance(key, str)]
    flat = sum(name.startswith(("state.", "param_groups.")) for name in names)
    return flat > 0 and flat == len(node)


def is_scheduler(name: str, node: Any) -> bool:
    """Whether a value is a learning-rate scheduler's state dict. `name` is the last part of its name."""
    if not isinstance(node, dict) or not node:
        return False
    counted = "last_epoch" in node and any(key in node for key in ("base_lrs", "_step_count", "_last_lr"))
    return counted or bool(_SCHEDULER.search(name))


def is_scaler(name: str, node: Any) -> bool:
    """Whether a value is a gradient scaler's state dict."""
    return isinstance(node, dict) and (node.keys() >= _SCALER_KEYS or (bool(node) and "scaler" in name.lower()))


def is_loader(name: str, node: Any) -> bool:
    """Whether a value is the state of a data loader or sampler. What names or describes the data is none."""
    if isinstance(node, str) or is_blank(node):
        return False
    named = _DATA.search(name) and not _ABOUT_DATA.search(name)
    return bool(named) or (isinstance(node, dict) and bool(_LOADER_KEYS & node.keys()))


def is_module(node: Any) -> bool:
    """Whether a value is the record of a whole pickled `nn.Module`."""
    if not isinstance(node, Inert) or not isinstance(node.state, dict):
        return False
    return all(isinstance(node.state.get(key), dict) for key in ("_parameters", "_buffers", "_modules"))


def is_pickled_optimizer(node: Inert) -> bool:
    """Whether a record is that of a whole pickled optimizer: its state is there, by parameter and not by name."""
    return isinstance(node.state, dict) and node.state.keys() >= {"state", "param_groups"}


def is_state_dict(node: Any, *, nested: bool = False) -> bool:
    """Whether a value is a model's state dict: names to tensors, with at most a few other values among them.

    With `nested`, mappings of that kind may lie inside.
    """
    if not isinstance(node, dict) or not node or not all(isinstance(key, str) for key in node):
        return False
    unread = sum(unread_tensor(item) is not None for item in node.values())
    tensors = sum(isinstance(item, Stored) for item in node.values()) + unread
    inner = [item for item in node.values() if isinstance(item, Mapping) and item]
    if inner and not (nested and all(is_state_dict(item, nested=True) for item in inner)):
        return False
    others = sum(
        not isinstance(item, Stored | Mapping) and item is not None and not str(key).endswith(EXTRA_STATE)
        for key, item in node.items()
    )
    return tensors + len(inner) > unread and others - unread <= tensors + len(inner)


def is_average_list(node: Any) -> bool:
    """Whether a value is the state of an average that keeps its tensors in a list (diffusers' EMAModel, torch_ema)."""
    shadow = node.get(_LIST_OF_AVERAGES) if isinstance(node, dict) else None
    return isinstance(shadow, list) and bool(shadow) and all(isinstance(item, Stored) for item in shadow)


def split_average_list(node: Mapping[Any, Any]) -> tuple[list[Stored], dict[Any, Any]]:
    """Returns the tensors of a list of averages, and what was saved beside it."""
    return list(node[_LIST_OF_AVERAGES]), {key: item for key, item in node.items() if key != _LIST_OF_AVERAGES}


def is_averaged_model(node: Any) -> bool:
    """Whether a value is the state of `torch.optim.swa_utils.AveragedModel`: a module and a count of averages."""
    count = node.get(_COUNT) if isinstance(node, dict) else None
    if not isinstance(count, Stored) or count.num_elements != 1 or len(node) < 2:
        return False
    return all(key == _COUNT or str(key).startswith("module.") for key in node)


def split_average_and_model(node: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
    """Returns the average, the model and what else is in the state of ema_pytorch's `EMA`; None for anything else.

    It keeps the average under `ema_model.`, beside the counters `initted` and `step`, and with
    `include_online_model` (its default) the trained model once more under `online_model.` (ema_pytorch 0.8).
    """
    if not isinstance(node, dict) or not any(str(key).startswith(_AVERAGE_AND_MODEL[0]) for key in node):
        return None
    average, model = (
        {str(key).removeprefix(prefix): item for key, item in node.items() if str(key).startswith(prefix)}
        for prefix in _AVERAGE_AND_MODEL
    )
    beside = {str(key): item for key, item in node.items() if not str(key).startswith(_AVERAGE_AND_MODEL)}
    known = all(isinstance(item, Stored) and item.num_elements == 1 for item in beside.values())
    return (average, model, beside) if known else None


def looks_random(name: str) -> bool:
    """Whether a name says random number generators."""
    return bool(_RNG.search(name))


def looks_averaged(name: str) -> bool:
    """Whether a name says an average of the model (EMA, SWA)."""
    return bool(_AVERAGE.search(name))


def looks_like_model(name: str) -> bool:
    """Whether a name says model."""
    return bool(_MODEL.search(name))


def looks_other(name: str) -> bool:
    """Whether the last part of a name says that a section is no model, whatever it holds."""
    last = name.rpartition(".")[2]
    return looks_random(last) or bool(_OTHER.match(last))


def is_buffer_name(fqn: str) -> bool:
    """Whether a tensor has a name that only buffers have."""
    return fqn.rpartition(".")[2] in _BUFFER_NAMES


def is_parameter_name(fqn: str) -> bool:
    """Whether a tensor has a name that nearly always is a parameter's."""
    return fqn.rpartition(".")[2] in _PARAMETER_NAMES
