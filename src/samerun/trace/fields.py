"""The fields of a trace's lines: what may stand in each. Whatever else stands there is `BadField`, with its name.

A trace is evidence. A count that is a fraction, a negative one, a `NaN` that no writer writes, a name given twice: each
says that a line is not what a recorder wrote, and nothing on such a line counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

Body = Mapping[str, Any]

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ABSENT = object()
_DIGEST = re.compile("[0-9a-f]{16}")


class BadField(ValueError):
    """What is wrong with one line, in words."""


def parse_json(text: bytes) -> Any:
    """Reads one line. Raises BadField for what is no JSON (`NaN`, overflowing numbers too), or a name given twice."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_once)
    except BadField:
        raise
    except (ValueError, RecursionError) as error:
        raise BadField("not JSON" if isinstance(error, ValueError) else "nested too deeply") from None


def _refuse(name: str) -> float:
    raise BadField(f"{name} is no JSON number; a recorder writes it as text")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        names = [name for name, _ in pairs]
        raise BadField(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return body


def value_of(body: Body, name: str, read: Callable[[Any], Any], *, default: Any = _ABSENT) -> Any:
    """Returns `read(body[name])`; `default` where the field is absent or null, if one is given."""
    value = body.get(name, _ABSENT)
    if value is _ABSENT and default is _ABSENT:
        raise BadField(f"{name!r} is missing")
    if default is not _ABSENT and (value is _ABSENT or value is None):
        return default
    try:
        return read(value)
    except BadField as error:
        raise BadField(f"{name}: {error}") from None


def whole(value: Any) -> int:
    """A whole number of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadField(f"{_shown(value)} is no whole number of at least 0")
    return value


def positive(value: Any) -> int:
    """A whole number of at least 1."""
    if whole(value) < 1:
        raise BadField("0 is no whole number of at least 1")
    return value


def number(value: Any) -> float:
    """A number, or one of the texts that stand for those which JSON does not have."""
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadField(f"{_shown(value)} is no number")
    try:
        return float(value)
    except OverflowError:
        raise BadField(f"{_shown(value)} is no number") from None


def size(value: Any) -> float:
    """A number that is not below 0; it may be nan."""
    if (read := number(value)) < 0:
        raise BadField(f"{_shown(value)} is below 0")
    return read


def optional_number(value: Any) -> float | None:
    """A number, or null: not known."""
    return None if value is None else number(value)


def optional_size(value: Any) -> float | None:
    """A number that is not below 0, or null: not known."""
    return None if value is None else size(value)


def truth(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise BadField(f"{_shown(value)} is neither true nor false")
    return value


def text(value: Any) -> str:
    """Text."""
    if not isinstance(value, str):
        raise BadField(f"{_shown(value)} is no text")
    return value


def digest(value: Any) -> str:
    """A digest of 16 hexadecimal digits."""
    if not _DIGEST.fullmatch(text(value)):
        raise BadField(f"{_shown(value)} is no digest of 16 hexadecimal digits")
    return value


def sample_id(value: Any) -> int | str:
    """A sample's id: a whole number or a text."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadField(f"{_shown(value)} is no sample id, which is a whole number or a text")
    return value


def list_of(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns the reader of lists of what `read` reads."""

    def read_list(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise BadField(f"{_shown(value)} is no list")
        return tuple(map(read, cast("list[Any]", value)))

    return read_list


def mapping_of(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Returns the reader of objects whose every field `read` reads."""

    def read_mapping(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise BadField(f"{_shown(value)} is no object")
        return {name: value_of(value, name, read) for name in cast("dict[str, Any]", value)}

    return read_mapping


def anything(value: Any) -> Any:
    """Whatever stands there."""
    return value


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
