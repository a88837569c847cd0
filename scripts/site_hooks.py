"""What the documentation site has beside the pages in docs/: the verbs' help, the lab, and files that pages link to.

mkdocs calls these functions (see mkdocs.yml). Nothing that they make is kept in the repository.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

TOP = Path(__file__).parents[1]
sys.path.insert(0, str(TOP / "src"))

import click  # noqa: E402
from mkdocs.structure.files import File  # noqa: E402

from samerun.cli import VERBS, root  # noqa: E402
from samerun.web.lab.page import render_lab  # noqa: E402

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
_DIRECTIVE = re.compile(r"^<!-- block:.*?-->\n", re.MULTILINE | re.DOTALL)
_outside: set[Path] = set()


def on_config(config: Any) -> Any:
    """Writes the navigation out: every page that a `*` stands for and that is not named elsewhere."""
    named = {name for name in _names(config.nav) if "*" not in name}
    config.nav = _expand(config.nav, Path(config.docs_dir), named)
    return config


def _names(nav: Any) -> list[str]:
    match nav:
        case str():
            return [nav]
        case dict():
            return [name for value in nav.values() for name in _names(value)]
        case _:
            return [name for item in nav for name in _names(item)]


def _expand(nav: list[Any], docs: Path, named: set[str]) -> list[Any]:
    pages: list[Any] = []
    for item in nav:
        if isinstance(item, str) and "*" in item:
            found = sorted(path.relative_to(docs).as_posix() for path in docs.glob(item))
            pages += [name for name in found if name not in named]
            named.update(found)
        elif isinstance(item, dict):
            [(title, value)] = item.items()
            pages.append({title: _expand(value, docs, named) if isinstance(value, list) else value})
        else:
            pages.append(item)
    return pages


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made from the code."""
    _outside.clear()
    files.append(File.generated(config, "verbs.md", content=verbs_page()))
    files.append(File.generated(config, "lab.html", content=render_lab()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Takes the directives of tests/docs out, and makes links to files outside of docs/ lead to a copy in the site."""
    here = Path(config.docs_dir) / page.file.src_path

    def lead(match: re.Match[str]) -> str:
        target = (here.parent / match[1]).resolve()
        if not target.is_file() or target.is_relative_to(Path(config.docs_dir).resolve()):
            return match[1]
        name = f"files/{target.relative_to(TOP).as_posix()}.txt"
        if target not in _outside:
            _outside.add(target)
            files.append(File.generated(config, name, content=target.read_text(encoding="utf-8")))
        return "../" * (len(PurePosixPath(page.file.src_path).parts) - 1) + name

    return _LINK.sub(lead, _DIRECTIVE.sub("", markdown))


def verbs_page() -> str:
    """Returns the help of every verb, as `samerun VERB --help` prints it."""
    lines = ["# Verbs", "", "As `samerun --help` and `samerun VERB --help` print them.", ""]
    lines += ["## samerun", "", "```text", _help(root, "samerun"), "```", ""]
    context = click.Context(root, info_name="samerun")
    for verb in VERBS:
        command = root.get_command(context, verb)
        if command is not None:
            lines += [f"## {verb}", "", "```text", _help(command, verb, context), "```", ""]
    return "\n".join(lines)


def _help(command: click.Command, name: str, parent: click.Context | None = None) -> str:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, max_content_width=80)
    context.terminal_width = 80
    return command.get_help(context)
