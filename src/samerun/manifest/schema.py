"""The manifest's JSON schema, for editors and for our own messages: what may stand where.

`docs/schema/manifest-1.json` is this schema; a test keeps the two equal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from samerun.manifest.models import Manifest

Path = Sequence[str | int]


@cache
def manifest_schema() -> dict[str, Any]:
    """Returns the JSON schema (2020-12) of a manifest without open questions."""
    schema = Manifest.model_json_schema(by_alias=True)
    _drop_titles(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "samerun migration manifest, version 1",
        **schema,
    }


def schema_text() -> str:
    """Returns the schema as it is published: indented JSON, one trailing newline."""
    return json.dumps(manifest_schema(), indent=1, ensure_ascii=False) + "\n"


def known_keys(path: Path) -> tuple[str, ...]:
    """Returns the keys that the mapping at `path` may hold; empty where there is no mapping or any key goes."""
    return tuple(dict.fromkeys(key for node in _nodes(path) for key in node.get("properties", {})))


def accepted(path: Path) -> str:
    """Returns in words what may stand at `path`, such as `exact | expected-to-change | {bounded}`.

    A mapping is given by its keys, those that may be left out with a question mark. Empty for an unknown path.
    """
    return " | ".join(dict.fromkeys(_in_words(node) for node in _nodes(path)))


def describe(path: Path) -> str:
    """Returns the one-sentence description of the field at `path`, or nothing."""
    nodes = [*_nodes(path, whole=True), *_nodes(path)]
    return next((node["description"] for node in nodes if "description" in node), "")


def _drop_titles(node: Any) -> None:
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        for value in node.values():
            _drop_titles(value)
    elif isinstance(node, list):
        for value in node:
            _drop_titles(value)


def _nodes(path: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    """Returns every schema alternative that applies at `path`; `whole` leaves the last field's own node unexpanded."""
    schema = manifest_schema()
    nodes = [schema]
    for index, step in enumerate(path):
        below = [_below(node, step) for node in nodes]
        fields = [node for node in below if node is not None]
        last = index == len(path) - 1
        nodes = fields if whole and last else [option for node in fields for option in _alternatives(node, schema)]
    return nodes


def _below(node: dict[str, Any], step: str | int) -> dict[str, Any] | None:
    if isinstance(step, int):
        return node.get("items")
    return node.get("properties", {}).get(step)


def _alternatives(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in node:
        return _alternatives(schema["$defs"][node["$ref"].rsplit("/", 1)[1]], schema)
    for union in ("anyOf", "oneOf"):
        if union in node:
            return [found for option in node[union] for found in _alternatives(option, schema)]
    return [node]


def _in_words(node: dict[str, Any]) -> str:
    if "enum" in node:
        return " | ".join(str(value) for value in node["enum"])
    if "const" in node:
        return str(node["const"])
    match node.get("type"):
        case "integer":
            return f"a whole number{_range(node)}"
        case "number":
            return f"a number{_range(node)}"
        case "string":
            return "text" if node.get("minLength") else "text (may be empty)"
        case "boolean":
            return "true | false"
        case "null":
            return "null"
        case "array":
            return "a list of text"
        case "object":
            return _mapping_in_words(node)
        case _:
            return "anything"


def _mapping_in_words(node: dict[str, Any]) -> str:
    fields = node.get("properties", {})
    if not fields:
        return "a mapping"
    required = node.get("required", ())
    return "{" + ", ".join(key if key in required else f"{key}?" for key in fields) + "}"


def _range(node: dict[str, Any]) -> str:
    if "minimum" in node:
        return f" of at least {node['minimum']:g}"
    return f" above {node['exclusiveMinimum']:g}" if "exclusiveMinimum" in node else ""
