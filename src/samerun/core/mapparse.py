"""A name map as it is written down, read into rules. `docs/maps.md` defines the form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from samerun.core.mapsteps import (
    Concat,
    FuseQKV,
    Resize,
    RotaryHalves,
    RotaryPairs,
    Split,
    SplitQKV,
    Stack,
    Step,
    Transpose,
    Unstack,
)
from samerun.core.namemap import NameMap, Pattern, Rule
from samerun.core.state import Role

VERSION_KEY = "samerun-map"


class MapSyntaxError(ValueError):
    """A name map that cannot be read; `problems` holds every reason, each with its place."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


def parse_map(document: Any, numbers: Mapping[str, int]) -> NameMap:
    """Returns the map that a document (plain data, as YAML or JSON gives it) describes.

    Args:
        document: a mapping of names to names, or one with `samerun-map: 1` and `rules`.
        numbers: what the settings that steps may name stand for, such as `heads`.

    Raises:
        MapSyntaxError: with everything that is wrong with it.
    """
    if not isinstance(document, Mapping):
        raise MapSyntaxError(["a name map is a mapping of names to names, or has `samerun-map: 1` and `rules`"])
    body = cast("Mapping[Any, Any]", document)
    if VERSION_KEY not in body:
        return _parse_names(body)
    problems: list[str] = []
    if body[VERSION_KEY] != 1:
        problems.append(f"{VERSION_KEY} is {body[VERSION_KEY]!r}, and this samerun reads 1")
    if unknown := set(map(str, body)) - {VERSION_KEY, "name", "settings", "rules"}:
        problems.append(f"unknown: {', '.join(sorted(unknown))}")
    listed = body.get("rules")
    if not isinstance(listed, list) or not listed:
        problems.append("rules is a list with at least one rule")
        listed = []
    rules: list[Rule] = []
    for number, item in enumerate(cast("list[Any]", listed), start=1):
        try:
            rule = _parse_rule(item, numbers)
            problems += [f"rule {number}: {text}" for text in rule.check()]
            rules.append(rule)
        except MapSyntaxError as error:
            problems += [f"rule {number}: {text}" for text in error.problems]
    if problems:
        raise MapSyntaxError(problems)
    return NameMap(tuple(rules))


def parse_settings(document: Any) -> dict[str, int | tuple[str, ...]]:
    """Returns the settings that a document declares: a number, or the names under which a configuration may have it.

    Raises:
        MapSyntaxError: with everything that is wrong with them.
    """
    body = cast("Mapping[Any, Any]", document) if isinstance(document, Mapping) else {}
    settings = body.get("settings") if VERSION_KEY in body else None
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise MapSyntaxError(["settings is a mapping of names to numbers, or to lists of names in a configuration"])
    found: dict[str, int | tuple[str, ...]] = {}
    problems: list[str] = []
    for name, value in cast("Mapping[Any, Any]", settings).items():
        names = [value] if isinstance(value, str) else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            found[str(name)] = value
        elif isinstance(names, list) and names and all(isinstance(item, str) for item in cast("list[Any]", names)):
            found[str(name)] = tuple(cast("list[str]", names))
        else:
            problems.append(f"settings.{name}: {value!r} is neither a number from 1 nor names in a configuration")
    if problems:
        raise MapSyntaxError(problems)
    return found


def _parse_names(body: Mapping[Any, Any]) -> NameMap:
    pairs = list(body.items())
    if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise MapSyntaxError(["a name map is a mapping of names to names, or has `samerun-map: 1` and `rules`"])
    rules = [Rule((Pattern(old),), (Pattern(new),)) for old, new in pairs]
    if problems := [text for rule in rules for text in rule.check()]:
        raise MapSyntaxError(problems)
    return NameMap(tuple(rules))


def _parse_rule(item: Any, numbers: Mapping[str, int]) -> Rule:
    if not isinstance(item, Mapping):
        raise MapSyntaxError([f"{item!r} is no rule: {{from: ..., to: ...}} or {{drop: ...}}"])
    body = cast("Mapping[Any, Any]", item)
    optional = body.get("optional", False)
    if not isinstance(optional, bool):
        raise MapSyntaxError([f"optional is true or false, not {optional!r}"])
    if "drop" in body and set(body) <= {"drop", "optional"}:
        return Rule(_patterns(body["drop"], "drop"), (), optional=optional)
    if not {"from", "to"} <= set(body) <= {"from", "to", "do", "optional", "roles"}:
        raise MapSyntaxError(["a rule has from and to, and may have do, optional and roles; or it has drop"])
    sources, targets = _patterns(body["from"], "from"), _patterns(body["to"], "to")
    steps = body.get("do", [])
    listed: list[Any] = cast("list[Any]", steps) if isinstance(steps, list) else [steps]
    problems: list[str] = []
    parsed: list[Step] = []
    for step in listed:
        try:
            parsed.append(_parse_step(step, numbers))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise MapSyntaxError(problems)
    return Rule(sources, targets, tuple(parsed), optional, _parse_roles(body.get("roles", [])))


def _parse_roles(value: Any) -> frozenset[Role]:
    listed: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    if unknown := [role for role in listed if role not in set(Role)]:
        raise MapSyntaxError([f"roles are {', '.join(Role)}, not {unknown[0]!r}"])
    return frozenset(Role(role) for role in listed)


def _patterns(value: Any, field: str) -> tuple[Pattern, ...]:
    names: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise MapSyntaxError([f"{field} is a name or a list of names"])
    return tuple(Pattern(name) for name in names)


def _parse_step(step: Any, numbers: Mapping[str, int]) -> Step:
    if isinstance(step, str):
        step = {step: {}}
    if not isinstance(step, Mapping) or len(cast("Mapping[Any, Any]", step)) != 1:
        raise ValueError(f"{step!r} is no step: one of {', '.join(STEPS)}, with its settings")
    ((kind, settings),) = cast("Mapping[Any, Any]", step).items()
    if kind not in STEPS:
        raise ValueError(f"unknown step {kind!r}: one of {', '.join(STEPS)}")
    if kind == "transpose" and isinstance(settings, list):
        settings = {"order": settings}
    if kind in ("stack", "unstack") and isinstance(settings, str):
        settings = {"over": settings}
    if not isinstance(settings, Mapping):
        raise ValueError(f"{kind}: settings are a mapping, not {settings!r}")
    given = {str(name): value for name, value in cast("Mapping[Any, Any]", settings).items()}
    make, allowed, needed = STEPS[kind]
    if wrong := (set(given) - allowed) | (needed - set(given)):
        raise ValueError(f"{kind}: settings are {', '.join(sorted(allowed))}; check {', '.join(sorted(wrong))}")
    return make(_Settings(kind, given, numbers))


class _Settings:
    """The settings of one step: numbers, or names of numbers."""

    def __init__(self, kind: str, given: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
        self._kind, self._given, self._numbers = kind, given, numbers

    def number(self, name: str, default: int | None = None) -> int:
        value = self._given.get(name, default)
        return self._resolve(name, value)

    def optional(self, name: str) -> int | None:
        return None if self._given.get(name) is None else self._resolve(name, self._given[name])

    def several(self, name: str) -> tuple[int, ...] | None:
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise ValueError(f"{self._kind}: {name} is a list of numbers, not {value!r}")
        return tuple(self._resolve(name, item) for item in cast("list[Any]", value))

    def each(self, name: str) -> tuple[int, ...]:
        """A number for one tensor, or a list with one for each."""
        return self.several(name) or () if isinstance(self._given[name], list) else (self.number(name),)

    def text(self, name: str) -> str:
        return str(self._given[name]).strip("{}")

    def _resolve(self, name: str, value: Any) -> int:
        if isinstance(value, str):
            if value not in self._numbers:
                raise ValueError(f"{self._kind}: {name} is {value}, and no setting of that name has a number")
            return self._numbers[value]
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{self._kind}: {name} is a number, not {value!r}")
        return value


def _split(given: _Settings) -> Step:
    return Split(given.number("axis", 0), given.optional("parts"), given.several("sizes"))


def _concat(given: _Settings) -> Step:
    return Concat(given.number("axis", 0), given.optional("parts"), given.several("sizes"))


def _resize(given: _Settings) -> Step:
    return Resize(given.number("axis", 0), given.number("before"), given.number("after"))


STEPS: Mapping[str, tuple[Callable[[_Settings], Step], frozenset[str], frozenset[str]]] = {
    "split": (_split, frozenset({"axis", "parts", "sizes"}), frozenset()),
    "concat": (_concat, frozenset({"axis", "parts", "sizes"}), frozenset()),
    "transpose": (lambda given: Transpose(given.several("order") or (1, 0)), frozenset({"order"}), frozenset()),
    "split-qkv": (
        lambda given: SplitQKV(given.number("heads"), given.number("groups")),
        frozenset({"heads", "groups"}),
        frozenset({"heads", "groups"}),
    ),
    "fuse-qkv": (
        lambda given: FuseQKV(given.number("heads"), given.number("groups")),
        frozenset({"heads", "groups"}),
        frozenset({"heads", "groups"}),
    ),
    "rotary-halves": (
        lambda given: RotaryHalves(given.each("heads")),
        frozenset({"heads"}),
        frozenset({"heads"}),
    ),
    "rotary-pairs": (lambda given: RotaryPairs(given.each("heads")), frozenset({"heads"}), frozenset({"heads"})),
    "stack": (
        lambda given: Stack(given.text("over"), given.number("start", 0)),
        frozenset({"over", "start"}),
        frozenset({"over"}),
    ),
    "unstack": (
        lambda given: Unstack(given.text("over"), given.number("start", 0)),
        frozenset({"over", "start"}),
        frozenset({"over"}),
    ),
    "resize": (_resize, frozenset({"axis", "before", "after"}), frozenset({"before", "after"})),
}
