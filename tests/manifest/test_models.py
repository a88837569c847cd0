"""The models by themselves: content, defaults, hashes, placeholders."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from samerun.core.size import format_size, parse_size
from samerun.manifest.models import (
    PLACEHOLDERS,
    Manifest,
    canonical_json,
    fill_placeholders,
    find_placeholders,
)
from samerun.manifest.tolerances import METRICS
from support.manifests import COMPLETE, manifest, manifest_data


def test_content_goes_round_with_every_default_written_out() -> None:
    whole = manifest()
    assert Manifest.from_data(whole.to_data()) == whole
    assert whole.to_data()["source"]["layout"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "ep": 1}
    assert whole.to_data()["tolerances"]["loss"]["from"] == "control"


def test_the_hash_sees_content_and_nothing_else() -> None:
    reordered = {key: COMPLETE[key] for key in reversed(COMPLETE)}
    spelled_out = manifest_data(source__layout={"dp_shard": 4, "tp": 1}, watch=[])
    assert Manifest.from_data(reordered).sha256() == manifest().sha256() == Manifest.from_data(spelled_out).sha256()
    assert manifest(tolerances__loss={"from": "control", "factor": 10, "floor": 2e-6}).sha256() != manifest().sha256()


def test_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        manifest().batch.global_batch = 3  # type: ignore[misc]


def test_nothing_that_changes_the_run_has_a_default() -> None:
    decisions = {
        "run": {"precision", "optimizer", "format", "model_commit"},
        "source": {"layout", "world_size"},
        "destination": {"layout", "world_size"},
        "progress": {"update", "samples", "tokens", "epoch", "scheduler"},
        "batch": {"invariant", "global_batch", "max_microbatch"},
        "declare": set(COMPLETE["declare"]),
        "transition": {"label"},
        "control": {"kind"},
        "tolerances": set(METRICS) - {"parameter_gradient"},  # as parameter_delta
        "window": {"log_every", "eval_every"},
        "launch": {"command"},
    }
    for section, fields in decisions.items():
        for field in fields:
            with pytest.raises(ValidationError):
                Manifest.from_data(manifest_data(**{f"{section}__{field}": ...}))


def test_canonical_json_refuses_what_json_does_not_have() -> None:
    assert canonical_json({"b": [1.0, "é"], "a": None}) == '{"a":null,"b":[1.0,"é"]}'
    with pytest.raises(ValueError):
        canonical_json({"a": math.inf})


def test_placeholders_are_found_and_filled() -> None:
    command = "{python} -c 'print({{}})' --resume {checkpoint} --n {world_size}"
    assert find_placeholders(command) == ["python", "checkpoint", "world_size"]
    filled = fill_placeholders(command, {"python": "/bin/py", "checkpoint": "/c {x}", "world_size": 3})
    assert filled == "/bin/py -c 'print({})' --resume /c {x} --n 3"
    with pytest.raises(KeyError):
        fill_placeholders("{nothing}", {})


@given(st.lists(st.sampled_from(["text ", "{{", "}}", "{tp}", "{pp}"]), max_size=8).map("".join))
def test_filling_is_what_str_format_does(template: str) -> None:
    values = {"tp": 2, "pp": "{x}"}
    assert fill_placeholders(template, values) == template.format(**values)
    assert set(find_placeholders(template)) <= set(values)


def test_every_placeholder_is_known() -> None:
    assert {"checkpoint", "world_size", "layout", "tp", "passes"} < set(PLACEHOLDERS)


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * 2**30), ("1.5kb", 1500), ("7", 7), (" 2 mib ", 2**21)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 XiB", "0", "1e9", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@given(st.integers(1, 2**60))
def test_a_formatted_size_is_close(size: int) -> None:
    assert math.isclose(parse_size(format_size(size).replace(" ", "")), size, rel_tol=0.006)
