"""Name maps by file or by the name of one that comes with samerun, with the numbers that they need.

`FILE`, `NAME`, `inverse:FILE`, each with settings after it: `megatron-to-llama,heads=32,groups=8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, cast

from samerun.core.config import find_setting
from samerun.core.mapparse import MapSyntaxError, parse_map, parse_settings
from samerun.core.namemap import NameMap
from samerun.core.state import LogicalState
from samerun.errors import Problem, UsageError

INVERSE = "inverse:"


def shipped_maps() -> list[str]:
    """Returns the names of the maps that come with samerun."""
    folder = resources.files("samerun.maps")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_name_map(text: str, state: LogicalState) -> NameMap:
    """Reads the map that a user names, for one checkpoint: its configuration gives the numbers that are not given.

    Raises:
        UsageError: if there is no such map (SR-MAP-FILE), it cannot be read (SR-MAP-SYNTAX), a number that it needs is
            neither given nor in the checkpoint's configuration (SR-MAP-SETTING), or it cannot be undone.
    """
    place, *assignments = text.split(",")
    name = place.removeprefix(INVERSE)
    document = _load(name)
    try:
        declared = parse_settings(document)
        numbers = _numbers(declared, _parse_assignments(assignments, name), state, name)
        names = parse_map(document, numbers)
    except MapSyntaxError as error:
        raise UsageError([_syntax(name, problem) for problem in error.problems]) from None
    try:
        return names.inverse() if place.startswith(INVERSE) else names
    except ValueError as error:
        raise UsageError([_syntax(name, problem) for problem in str(error).split("; ")]) from None


def _load(name: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    path = Path(name)
    try:
        if not path.exists() and name in shipped_maps():
            content = resources.files("samerun.maps").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        else:
            content = path.read_text(encoding="utf-8")
        return YAML(typ="safe", pure=True).load(content)
    except OSError as error:
        found = f"no such file, and no map of that name: {', '.join(shipped_maps())}"
        message = f"cannot read the name map: {found if not path.exists() else error.strerror}"
        raise UsageError(Problem("SR-MAP-FILE", message, where={"file": name})) from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise UsageError(_syntax(name, str(error))) from None


def _syntax(name: str, problem: str) -> Problem:
    return Problem("SR-MAP-SYNTAX", problem, where={"file": name}, hint="docs/maps.md describes the form of a map")


def _parse_assignments(assignments: list[str], name: str) -> dict[str, int]:
    given: dict[str, int] = {}
    for text in assignments:
        key, _, value = text.partition("=")
        if not value.isdecimal():
            message = f"{text!r} is no setting such as heads=32"
            raise UsageError(Problem("SR-MAP-SETTING", message, where={"file": name}))
        given[key.strip()] = int(value)
    return given


def _numbers(
    declared: Mapping[str, int | tuple[str, ...]], given: Mapping[str, int], state: LogicalState, name: str
) -> dict[str, int]:
    numbers: dict[str, int] = {}
    problems: list[Problem] = []
    for setting, value in declared.items():
        if setting in given:
            numbers[setting] = given[setting]
        elif isinstance(value, int):
            numbers[setting] = value
        elif isinstance(found := find_setting(state.objects, value), int) and not isinstance(found, bool):
            numbers[setting] = found
        else:
            problems.append(
                Problem(
                    "SR-MAP-SETTING",
                    f"the map needs {setting}, and the checkpoint's configuration has none of {', '.join(value)}",
                    where={"file": name},
                    hint=f"give it: --map {name},{setting}=NUMBER",
                )
            )
    for setting in given:
        if setting not in declared:
            known = ", ".join(cast("dict[str, Any]", declared)) or "none"
            message = f"the map has no setting {setting}; it has {known}"
            problems.append(Problem("SR-MAP-SETTING", message, where={"file": name}))
    if problems:
        raise UsageError(problems)
    return numbers
