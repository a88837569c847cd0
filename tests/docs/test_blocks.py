"""Every command and every code block of the documentation is executed, on real checkpoints and real run directories."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from samerun.core.mapparse import parse_map
from samerun.manifest.read import parse_document
from support.blocks import KINDS, Block, read_blocks
from support.manifests import COMPLETE, to_yaml
from support.pages import names_for
from support.runs import unpack_run

TOP = Path(__file__).parents[2]
CHECKPOINT = TOP / "tests" / "golden" / "docs" / "step-400"
ZERO = TOP / "tests" / "golden" / "deepspeed" / "z1_bf16opt" / "global_step3"
PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
MOST_SKIPPED = 17
"""How many blocks may say that they cannot be executed here. Raise it only with a reason that holds for any machine."""


def of_kind(kind: str) -> list[Any]:
    return [
        pytest.param(block, id=str(block), marks=[pytest.mark.framework] if needs_framework(block) else [])
        for block in BLOCKS
        if block.kind == kind and "skip" not in block.directive
    ]


def needs_framework(block: Block) -> bool:
    """Says whether a block needs a package that the development environment has not."""
    return "needs" in block.directive or block.directive.get("setup", "trainer") != "trainer"


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages take for granted: a checkpoint, one of DeepSpeed, and the run directory of a finished move."""
    top = tmp_path_factory.mktemp("material")
    shutil.copytree(CHECKPOINT, top / "ckpt" / "step-400")
    shutil.copytree(ZERO, top / "ds" / ZERO.name)
    unpack_run("promote", top)
    for name in ("move", "run"):
        shutil.copytree(top / "promote", top / name)
    shutil.rmtree(top / "promote")
    return top


@pytest.fixture(scope="session")
def page_folders(material: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """One folder for each page, in which its blocks follow one another."""
    folders: dict[Path, Path] = {}
    for number, page in enumerate(dict.fromkeys(block.file for block in BLOCKS)):
        folders[page] = tmp_path_factory.mktemp("pages") / str(number)
        shutil.copytree(material, folders[page])
    return folders


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The shell's: `samerun` is what is being tested, whatever else is installed."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "samerun"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m samerun "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(TOP / "src"), "COLUMNS": "100"}


@pytest.mark.parametrize("block", of_kind("sh"))
def test_commands_run(block: Block, page_folders: dict[Path, Path], environment: dict[str, str]) -> None:
    if "needs" in block.directive:
        pytest.importorskip(block.directive["needs"])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=page_folders[block.file], env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == int(block.directive.get("exit", "0")), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "SR-INTERNAL" not in done.stderr


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    block: Block = request.node.callspec.params["block"]
    with names_for(block.directive.get("setup")) as known:
        yield {"__name__": "__main__", **known}


@pytest.mark.parametrize("block", of_kind("python"))
def test_python_runs(
    block: Block, names: dict[str, Any], page_folders: dict[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if name.startswith("SAMERUN_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(page_folders[block.file])
    code = compile("\n" * (block.line - 1) + block.text, str(block.file), "exec")
    exec(code, names)


@pytest.mark.parametrize("block", of_kind("yaml"))
def test_manifests_and_name_maps_are_valid(block: Block) -> None:
    document = YAML(typ="safe", pure=True).load(block.text)
    if "samerun" in document:
        assert parse_document(block.text, str(block)).problems == ()
    elif set(document) <= set(COMPLETE):  # sections of one
        whole = {**COMPLETE, **{name: {**COMPLETE[name], **section} for name, section in document.items()}}
        assert parse_document(to_yaml(whole), str(block)).problems == ()
    else:
        parse_map(document, dict.fromkeys(document.get("settings", ()), 2))


def test_every_block_says_what_it_is() -> None:
    """`sh`, `python` and `yaml` are tried; `text` is what nobody types."""
    assert [str(block) for block in BLOCKS if block.kind not in KINDS] == []


def test_few_blocks_are_not_executed_and_each_says_why() -> None:
    skipped = [block for block in BLOCKS if "skip" in block.directive]
    assert len(skipped) <= MOST_SKIPPED, [str(block) for block in skipped]
    for block in skipped:
        assert len(block.directive["skip"].split()) >= 5, str(block)


def test_blocks_of_mere_text_hold_no_commands() -> None:
    for block in BLOCKS:
        if block.kind == "text":
            assert not any(line.lstrip("$ ").startswith(("samerun ", "python ")) for line in block.text.splitlines()), (
                block
            )


class TestTheHarnessItself:
    def blocks(self, tmp_path: Path, text: str) -> list[Block]:
        page = tmp_path / "page.md"
        page.write_text(text)
        return read_blocks(page)

    def test_directives_belong_to_the_block_below(self, tmp_path: Path) -> None:
        text = "<!-- block: exit=1 -->\n```sh\nfalse\n```\n\n```python\n1\n```\n\n"
        text += '<!-- block: skip="no such GPU" -->\n```sh\nx\n```\n'
        first, second, third = self.blocks(tmp_path, text)
        assert (first.kind, first.line, first.text, first.directive) == ("sh", 3, "false\n", {"exit": "1"})
        assert (second.kind, second.directive) == ("python", {})
        assert third.directive == {"skip": "no such GPU"}

    def test_a_block_in_a_list_is_found_too(self, tmp_path: Path) -> None:
        [block] = self.blocks(tmp_path, "1. do\n\n   ```sh\n   true\n   ```\n")
        assert (block.kind, block.text) == ("sh", "   true\n")

    def test_a_block_without_a_kind_and_a_directive_nobody_knows_are_noticed(self, tmp_path: Path) -> None:
        assert [block.kind for block in self.blocks(tmp_path, "```\nx\n```\n\n```bash\nx\n```\n")] == ["", "bash"]
        with pytest.raises(ValueError, match=r"page\.md:3"):
            self.blocks(tmp_path, "<!-- block: maybe -->\n```sh\nx\n```\n")
