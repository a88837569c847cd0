"""An optimizer's settings by parameter name, and the model's own configuration, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samerun.core.plain import plain
from samerun.core.state import normalize_fqn
from samerun.train.named import as_list, parameter_names

if TYPE_CHECKING:
    from torch import nn

# How weight decay enters the update: added to the gradient, or applied to the weight beside it.
_DECAY = {
    "Adam": "coupled",
    "SGD": "coupled",
    "Adagrad": "coupled",
    "Adadelta": "coupled",
    "Adamax": "coupled",
    "RMSprop": "coupled",
    "ASGD": "coupled",
    "NAdam": "coupled",
    "RAdam": "coupled",
    "AdamW": "decoupled",
    "Adafactor": "decoupled",
    "Muon": "decoupled",
    "Lion": "decoupled",
    "FusedLAMB": "decoupled",
}
_NOT_SETTINGS = ("params", "param_names")


def parameter_groups(model: nn.Module | Sequence[nn.Module], optimizer: Any) -> list[dict[str, Any]]:
    """Returns each group as {"params": names, "hyperparameters": {...}}, in the optimizer's order.

    A group that holds parameters which the model does not have also gets their number as "unknown_params".
    """
    if optimizer is None:
        return []
    names = parameter_names(model)
    groups: list[dict[str, Any]] = []
    for part in as_list(optimizer):
        for group in part.param_groups:
            known = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            body: dict[str, Any] = {
                "params": known,
                "hyperparameters": {name: _number(value) for name, value in group.items() if name not in _NOT_SETTINGS},
            }
            if len(known) != len(group["params"]):
                body["unknown_params"] = len(group["params"]) - len(known)
            groups.append(body)
    return groups


def _number(value: Any) -> Any:
    """Returns a hyperparameter as plain data; one held in a tensor (a learning rate, often) as its number."""
    if hasattr(value, "item") and hasattr(value, "numel") and value.numel() == 1:
        return plain(value.item())
    return plain(value)


def learning_rates(optimizer: Any) -> list[float]:
    """Returns the learning rate of every group, in the optimizer's order."""
    return [_number(group["lr"]) for part in as_list(optimizer) for group in part.param_groups if "lr" in group]


def optimizer_semantics(optimizer: Any) -> list[dict[str, Any]]:
    """Returns, per optimizer, its class and what its update means beyond the numbers in its groups.

    `decay` is "coupled" (added to the gradient), "decoupled" (applied to the weight) or None where the class is not
    known; per-group settings override the class.
    """
    return [_semantics(part) for part in as_list(optimizer)]


def _semantics(optimizer: Any) -> dict[str, Any]:
    kind = _innermost(optimizer)
    name = type(kind).__name__
    flags = {bool(group["decoupled_weight_decay"]) for group in kind.param_groups if "decoupled_weight_decay" in group}
    decay = _DECAY.get(name)
    if flags:
        decay = "mixed" if len(flags) > 1 else "decoupled" if flags == {True} else "coupled"
    return {"class": name, "module": type(kind).__module__, "decay": decay}


def _innermost(optimizer: Any) -> Any:
    """Looks through wrappers that keep the real optimizer in an attribute of that name."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer


def read_config(model: nn.Module | Sequence[nn.Module]) -> Any:
    """Returns the architecture settings that the model exposes as `config` (or `args`), or None."""
    for part in as_list(model):
        for module in part.modules():
            for attribute in ("config", "model_args", "args"):
                found = getattr(module, attribute, None)
                if found is not None and not callable(found):
                    return config_values(found)
            if not _is_wrapper(module):
                break
    return None


def _is_wrapper(module: Any) -> bool:
    return type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")


def config_values(config: Any) -> Any:
    """Returns a configuration object's values: a mapping's, a dataclass's, `to_dict()`'s, or its public attributes."""
    if isinstance(config, Mapping | str | int | float | list | tuple):
        return config
    if hasattr(config, "to_dict") and callable(config.to_dict):
        return config.to_dict()
    if hasattr(config, "__dataclass_fields__"):
        return config
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def module_settings(model: nn.Module | Sequence[nn.Module]) -> dict[str, dict[str, bool | int | float | str]]:
    """Returns the plain settings that each module keeps as attributes (`eps`, `p`, `num_heads`), by module, if any.

    They are the module's own and may depend on the layout: a tensor-parallel module may count its local heads.
    """
    found: dict[str, dict[str, bool | int | float | str]] = {}
    for part in as_list(model):
        for name, module in part.named_modules():
            settings = {
                key: value
                for key, value in vars(module).items()
                if not key.startswith("_") and key != "training" and isinstance(value, bool | int | float | str)
            }
            if settings:
                found[normalize_fqn(name)] = settings
    return found
