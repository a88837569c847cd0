"""What a recorded configuration says the run had, and the checkpoint does not hold: a gradient scaler, an average."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from samerun.core.plain import is_blank
from samerun.core.state import LogicalState, Role
from samerun.errors import Problem, Severity

# Settings by the last part of their name: arguments of scripts, Trainer's, timm's, Lightning's hyperparameters. `swa`
# is not among them: in a model's configuration it means attention in a sliding window.
_SCALED = re.compile(r"(?:^|[._])fp16$")
_PRECISION = re.compile(r"(?:^|[._])(?:mixed_)?precision$")
_HALF = frozenset({"fp16", "16", "16-mixed", "float16"})
_AVERAGED = re.compile(
    r"^(?:(?:use|with|enable|do|model)_)*ema(?:_(?:decay|rate|beta|momentum|power|enabled?|model|weights?))*$"
)
_SETTINGS_OF_AVERAGE = re.compile(r"(?:^|[._])(?:n_averaged|optimization_step|ema_step)$")
_SCALER = re.compile(r"scaler|(?:^|\.)growth_interval$|loss_scale", re.IGNORECASE)


def check_declared(state: LogicalState) -> list[Problem]:
    """Names what the checkpoint's own configuration says the run had and what is not here."""
    settings = list(_settings(state.objects))
    return [*_check_scaler(state, settings), *_check_average(state, settings)]


def _settings(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of plain settings."""
    for name, value in objects.items():
        if isinstance(value, bool | int | float | str):
            yield name, value


def _check_scaler(state: LogicalState, settings: list[tuple[str, Any]]) -> list[Problem]:
    needed = next((f"{name} = {value}" for name, value in settings if _needs_scaler(name, value)), None)
    there = any(_SCALER.search(name) and not is_blank(value) for name, value in state.objects.items())
    if needed is None or there or not any(entry.key.role is Role.OPTIM for entry in state.tensors.values()):
        return []
    return [
        Problem(
            "SR-SCALER-MISSING",
            f"the run trained in fp16 ({needed}) and no gradient scaler is saved",
            severity=Severity.WARNING,
            where={"key": needed.partition(" = ")[0]},
            hint="a new scaler starts at its initial scale (65536) and skips updates until it has found the run's; "
            "save scaler.state_dict()",
        )
    ]


def _needs_scaler(name: str, value: Any) -> bool:
    if _SCALED.search(name):
        return value is True
    return bool(_PRECISION.search(name)) and str(value).lower() in _HALF


def _check_average(state: LogicalState, settings: list[tuple[str, Any]]) -> list[Problem]:
    if any(entry.key.role is Role.EMA for entry in state.tensors.values()):
        return []
    declared = next((f"{name} = {value}" for name, value in settings if _declares_average(name, value)), None)
    if declared is None:
        return []
    return [
        Problem(
            "SR-EMA-MISSING",
            f"the run kept an average of its model ({declared}) and none is saved here",
            severity=Severity.WARNING,
            where={"key": declared.partition(" = ")[0]},
            hint="a resumed run would start it anew from the current model; look for it in another file, or save it",
        )
    ]


def _declares_average(name: str, value: Any) -> bool:
    last = name.rpartition(".")[2]
    if _SETTINGS_OF_AVERAGE.search(name):
        return isinstance(value, int | float) and value > 0
    positive = value is True or (isinstance(value, int | float) and value > 0)
    return bool(_AVERAGED.fullmatch(last)) and positive
