"""What stands in a "state" line: the shapes that the load check relies on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from samerun.trace.fields import (
    BadField,
    Body,
    anything,
    digest,
    list_of,
    mapping_of,
    number,
    optional_number,
    positive,
    text,
    truth,
    value_of,
    whole,
)

_Reader = Callable[[Any], Any]


def check_state(body: Body) -> None:
    """Raises BadField unless the line has every field that a recorder writes, each of its kind."""
    if value_of(body, "when", text) not in ("loaded", "end"):
        raise BadField(f"when: {body['when']!r} is neither 'loaded' nor 'end'")
    _check(body, _FIELDS, _OPTIONAL)


def _or_null(read: _Reader) -> _Reader:
    return lambda value: None if value is None else read(value)


def _record(required: Mapping[str, _Reader], optional: Mapping[str, _Reader] | None = None) -> _Reader:
    def read(value: Any) -> Any:
        _check(mapping_of(anything)(value), required, optional or {})
        return value

    return read


def _check(body: Body, required: Mapping[str, _Reader], optional: Mapping[str, _Reader]) -> None:
    for name, read in required.items():
        value_of(body, name, read)
    for name, read in optional.items():
        value_of(body, name, read, default=None)


_TENSOR = _record(
    {"shape": list_of(whole), "dtype": text, "digest": digest, "replicas": positive}
    | {"nonfinite": whole, "nonzero": whole},
    {"odd": list_of(_record({"rank": whole, "digest": digest})), "missing_elements": whole, "trainable": truth}
    | {"aliases": list_of(text), "cuts": list_of(list_of(anything)), "lead": whole},
)
_RANK_RNG = _record(
    {"policy": text, "update": whole, "kept": list_of(text), "seeded": list_of(text)}
    | {"stream": whole, "seed": whole},
    {"tracker": mapping_of(whole)},
)

_FIELDS: dict[str, _Reader] = {
    "update": whole,
    "world_size": positive,
    "layout": _or_null(mapping_of(positive)),
    "state": digest,
    "tensors": mapping_of(_TENSOR),
    "counters": mapping_of(_record({"value": anything})),
    "groups": list_of(_record({"params": list_of(text), "hyperparameters": mapping_of(anything)})),
    "optimizers": list_of(_record({"class": text})),
    "learning_rates": list_of(number),
    "scheduler": anything,
    "objects": mapping_of(anything),
    "config": anything,
    "rng": mapping_of(digest),
    "broken_ties": list_of(list_of(text)),
    "disagreements": list_of(_record({"what": text, "rank": whole, "expected": anything, "found": anything})),
}
_OPTIONAL: dict[str, _Reader] = {
    "rank_rng": mapping_of(_or_null(_RANK_RNG)),
    "generators": mapping_of(mapping_of(digest)),
    "beside": _record({"average_lag": optional_number, "buffers": mapping_of(number)}),
}
