"""DeepSpeed's own classes as its files name them (0.19.8), for writing. Nothing of DeepSpeed is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samerun.formats.torchfile.emit import Call, Instance, Named

# The version whose layout is written. Loaders refuse files without one, and stage 1 refuses those before 0.3.17.
WRITTEN_VERSION = "0.19.8"

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_KNOWN_SCALERS = ("LossScaler", "DynamicLossScaler")


def stage_number(stage: int) -> Call:
    """Returns a `ZeroStageEnum`."""
    return Call(Named("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def fragment(start: int, num_elements: int) -> Instance:
    """Returns a `fragment_address`: where in a rank's flat buffer a parameter's part lies, in elements."""
    return Instance(
        Named("deepspeed.utils.tensor_fragment", "fragment_address"), {"numel": num_elements, "start": start}
    )


def loss_scaler(saved: Any) -> Instance:
    """Returns the loss scaler that a source recorded; the one that scales by 1 if it recorded none."""
    if isinstance(saved, Mapping) and saved.get("class") in _KNOWN_SCALERS:
        attributes = {name: value for name, value in saved.items() if name != "class"}
        return Instance(Named(_SCALERS, str(saved["class"])), attributes)
    return Instance(Named(_SCALERS, "LossScaler"), {"cur_scale": 1.0, "dynamic": False})


def is_dynamic(saved: Any) -> bool:
    """Whether a recorded loss scaler changes its scale."""
    return isinstance(saved, Mapping) and saved.get("class") == "DynamicLossScaler"
