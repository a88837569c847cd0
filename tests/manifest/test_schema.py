"""The published JSON schema is the models', accepts what they accept, and answers what may stand where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from samerun.manifest.schema import accepted, describe, known_keys, manifest_schema, schema_text
from support.manifests import COMPLETE, manifest_data

PUBLISHED = Path(__file__).parents[2] / "docs" / "schema" / "manifest-1.json"


def test_the_published_schema_is_current() -> None:
    assert PUBLISHED.read_text(encoding="utf-8") == schema_text(), "run python scripts/make_docs.py"


def test_the_schema_is_valid_and_accepts_a_complete_manifest() -> None:
    jsonschema.Draft202012Validator.check_schema(manifest_schema())
    jsonschema.validate(COMPLETE, manifest_schema(), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch__invariant": "ASK: which?"},
        {"batch__option": "rugged"},
        {"declare__order": {"bounded": -1}},
        {"destination__world_size": 0},
        {"tolerances__loss": {"from": "user", "limit": 1}},
        {"extra": 1},
    ],
)
def test_the_schema_refuses_wrong_values_and_open_questions(changes: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest_data(**changes), manifest_schema(), cls=jsonschema.Draft202012Validator)


def test_what_may_stand_where() -> None:
    assert accepted(("batch", "invariant")) == "samples-per-update | valid-tokens-per-update | schedule-position"
    assert accepted(("declare", "order")) == "exact | expected-to-change | {bounded}"
    assert accepted(("tolerances", "loss", "from")) == "control | analysis | user"
    assert accepted(("destination", "device_memory")) == "text (may be empty) | null"
    assert accepted(("watch", 0)) == "text (may be empty)"
    assert accepted(("launch", "timeout_seconds")) == "a number above 0"
    assert accepted(("control", "vary_microbatch")) == "a whole number of at least 1 | null"
    assert accepted(("no", "such")) == ""
    assert known_keys(("control",)) == ("kind", "trace", "repeats", "vary_microbatch", "oracle", "rehearsal")
    assert "layout" in known_keys(("source",))


def test_every_field_is_described() -> None:
    def walk(path: tuple[str, ...]) -> None:
        for key in known_keys(path):
            assert describe((*path, key)), (*path, key)
            walk((*path, key))

    walk(())


def test_the_schema_is_plain_json() -> None:
    assert json.loads(schema_text()) == manifest_schema()
