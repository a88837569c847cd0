"""Plain data made ready for pickles that Megatron's loaders read: enumerations and element types by their names again.

Only classes that megatron.core itself declares safe to load (`safe_globals`, 0.16) are named; what a checkpoint names
otherwise is never written down as something to be called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from samerun.core.dtype import DTYPES
from samerun.formats.statedict.carry import Unwritable, writable
from samerun.formats.torchfile.nodes import Call, Named
from samerun.formats.torchfile.values import Inert

_SAFE = {
    name: Named(*name.rsplit(".", 1))
    for name in (
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.enums.ModelType",
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        "signal.Signals",
    )
}
_DTYPE = re.compile(r"torch\.(\w+)")


def revive(value: Any) -> Any:
    """Returns a value as `emit_pickle` takes it.

    Raises:
        Unwritable: for a record of any other class, or an array that is no tensor.
    """
    if isinstance(value, Inert):
        named = _SAFE.get(value.name)
        plain = value.state is None and not value.items and len(value.args) == 1
        if named is None or not plain or not isinstance(value.args[0], int | str):
            raise Unwritable(f"a record of {value.name} cannot be written as plain data")
        return Call(named, value.args)
    if isinstance(value, Mapping) and not value.get("bit_generator"):
        return {key: revive(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, Inert | Mapping | list) for item in value):
        ready = writable_or_none(value)
        return [revive(item) for item in value] if ready is None else ready
    return writable(value, numpy=True)


def writable_or_none(value: Any) -> Any:
    """Returns a value that has no record of a class in it as it is written, None for any other."""
    try:
        return writable(value, numpy=True)
    except Unwritable:
        return None


def revive_arguments(args: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns saved arguments, element types among them named again, and those that cannot be written, with why."""
    kept: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in args.items():
        match = _DTYPE.fullmatch(value) if isinstance(value, str) else None
        if match and match[1] in DTYPES:
            kept[str(name)] = Named("torch", match[1])
            continue
        try:
            kept[str(name)] = revive(value)
        except Unwritable as error:
            left_out[f"args.{name}"] = str(error)
    return kept, left_out
