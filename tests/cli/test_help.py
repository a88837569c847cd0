"""Help as a manual page at 80 columns, and what the shell completes."""

from __future__ import annotations

import doctest
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from samerun.catalog import load_catalog
from samerun.cli import EXIT_CODES, VERBS, root
from samerun.cli import help as verb_help
from samerun.cli.help import PAGES, Verb, split_examples

TOP = Path(__file__).parents[2]


def help_of(*words: str) -> str:
    return CliRunner().invoke(root, [*words, "--help"], terminal_width=80, max_content_width=80).output


def command(verb: str) -> click.Command:
    found = root.get_command(click.Context(root), verb)
    assert found is not None
    return found


def test_the_first_page_tells_what_there_is() -> None:
    text = help_of()
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 50
    for verb, (_, line) in VERBS.items():
        assert f"  {verb}" in text
        assert line in text
    for code, meaning in EXIT_CODES.items():
        assert f"{code}  {meaning}" in text


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_manual_page(verb: str) -> None:
    text = help_of(verb)
    assert max(map(len, text.splitlines())) <= 80
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:3] == ["Options", "Examples", "Exit codes"]
    assert verb in verb_help.EXIT_CODES
    description = split_examples(command(verb).help or "")[0]
    assert len(description.split()) >= 15


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained(verb: str) -> None:
    for parameter in command(verb).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_is_understood(verb: str) -> None:
    """Each is parsed as if it had been typed; whether it runs is for tests/docs."""
    lines = split_examples(command(verb).help or "")[1]
    examples = [shlex.split(line) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]
    assert examples
    for program, name, *words in examples:
        assert (program, name) == ("samerun", verb)
        found = command(verb)
        assert isinstance(found, Verb)
        found.make_context(verb, words, parent=click.Context(root))


def test_pages_to_read_on_exist() -> None:
    for verb, page in PAGES.items():
        assert verb in VERBS
        assert (TOP / page).is_file()


def test_examples_in_docstrings_run() -> None:
    assert doctest.testmod(verb_help).failed == 0


def complete(*words: str) -> list[str]:
    """What bash is told to complete after these words; the last one is what was typed of it."""
    environment = {**os.environ, "_SAMERUN_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(("samerun", *words))}
    environment["COMP_CWORD"] = str(len(words))
    call = [sys.executable, "-c", "from samerun.cli import main; main()"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("in",), ["plain,inspect"]),
        (("inspect", "--de"), ["plain,--deep"]),
        (("inspect", "ckpt/"), ["file,ckpt/"]),
        (("batch", "--unit", "s"), ["plain,samples"]),
        (("explain", "sr-io-f"), ["plain,SR-IO-FAILED"]),
        (("explain", "SR-NOTHING"), []),
    ],
)
def test_the_shell_completes(words: tuple[str, ...], found: list[str]) -> None:
    assert complete(*words) == found


def test_all_verbs_and_all_codes_are_offered() -> None:
    assert complete("") == [f"plain,{verb}" for verb in VERBS]
    assert complete("explain", "SR-") == [f"plain,{code}" for code in load_catalog()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    environment = {**os.environ, "_SAMERUN_COMPLETE": f"{shell}_source"}
    call = [sys.executable, "-c", "from samerun.cli import main; main()"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "_SAMERUN_COMPLETE" in done.stdout
