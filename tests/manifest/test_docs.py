"""The specification's example is valid, and the specification leaves no field and no finding out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from samerun.catalog import load_catalog
from samerun.errors import PlanError
from samerun.manifest.models import PLACEHOLDERS
from samerun.manifest.read import parse_document, require_manifest
from samerun.manifest.schema import known_keys
from samerun.plan.migration import plan_migration
from support.states import adam_state

PAGE = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text(encoding="utf-8")


def example() -> str:
    match = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert match
    return match[1]


def test_the_worked_example_is_decided_and_can_be_planned() -> None:
    document = parse_document(example(), "docs/manifest.md")
    assert document.problems == ()
    plan = plan_migration(require_manifest(document), adam_state())
    assert plan.batch.dealing.shares == (11, 11, 10)
    assert plan.batch.passes == 6
    assert plan.source_batch.global_batch == 32


def test_the_example_gives_every_field_that_has_no_default() -> None:
    for section in known_keys(()):
        assert f"\n{section}:" in f"\n{example()}", section


def test_the_page_names_every_field_and_placeholder() -> None:
    def walk(path: tuple[str, ...]) -> None:
        for key in known_keys(path):
            assert re.search(rf"\b{key}\b", PAGE), (*path, key)
            walk((*path, key))

    walk(())
    assert [name for name in PLACEHOLDERS if f"{{{name}}}" not in PAGE] == []


def test_the_page_names_only_findings_that_exist() -> None:
    assert set(re.findall(r"SR-[A-Z]+(?:-[A-Z]+)+", PAGE)) <= set(load_catalog())


def test_the_example_fails_where_it_is_bent() -> None:
    bent = parse_document(example().replace("option: ragged", "option: uniform"))
    with pytest.raises(PlanError) as caught:
        plan_migration(require_manifest(bent), adam_state())
    assert [problem.code for problem in caught.value.problems] == ["SR-PLAN-BATCH-IMPOSSIBLE"]
