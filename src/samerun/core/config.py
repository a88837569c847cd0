"""The configuration that a run saved with its checkpoint, under whatever name it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

CONFIG_OBJECTS = ("config", "args", "hparams", "hyper_parameters", "train_config", "model_config", "model_args")


def settings_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's configuration, whether it was saved as one mapping or flattened to dotted names."""
    found: dict[str, Any] = {}
    for name, value in objects.items():
        head, _, rest = name.partition(".")
        if head not in CONFIG_OBJECTS:
            continue
        if isinstance(value, Mapping):
            found |= {str(key): item for key, item in cast("Mapping[Any, Any]", value).items()}
        elif rest:
            found[rest.rpartition(".")[2]] = value
    return found


def find_setting(objects: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Returns what a checkpoint's configuration says under the first of `names` that it has, or None."""
    settings = settings_of(objects)
    return next((settings[name] for name in names if settings.get(name) is not None), None)
