"""From YAML to a `Manifest`: every error at once, each with its line; open questions kept apart from errors.

A value may be the text `ASK: <question>` in place of an answer. Such a document is well formed but not decided: it has
`questions` and no `manifest`. Anchors, aliases, merge keys and tags are not accepted: a manifest is sealed and read by
people, so it says what it says once.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from samerun.errors import Problem, UndecidedError, UsageError
from samerun.manifest.checks import check_sections
from samerun.manifest.models import Manifest
from samerun.manifest.schema import accepted, describe, known_keys
from samerun.manifest.section import Section

Keys = tuple[str | int, ...]

MAX_BYTES = 1 << 20
_QUESTION = re.compile(r"\s*ASK\b:?\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Question:
    """One open decision: where it stands, what is asked, and what may be answered."""

    key: str
    text: str
    line: int
    answers: str

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form that `samerun plan --json` lists."""
        return {"key": self.key, "line": self.line, "question": self.text, "answers": self.answers}


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A manifest file as read. `manifest` is set only when there are neither errors nor open questions.

    `sections` holds every top-level section that is valid by itself, so that what can be computed already can be shown
    while questions are open.
    """

    name: str
    text: str
    manifest: Manifest | None
    sections: Mapping[str, Section]
    questions: tuple[Question, ...]
    problems: tuple[Problem, ...]
    lines: Mapping[Keys, int]
    data: Mapping[str, Any]

    def value(self, key: str) -> Any:
        """Returns the plain value at a dotted key such as `batch.global_batch`; None where it is absent or open."""
        node: Any = self.data
        for step in key.split("."):
            node = cast(dict[str, Any], node).get(step) if isinstance(node, dict) else None
        return node


def read_document(path: Path) -> Document:
    """Reads a manifest file without judging it.

    Raises:
        UsageError: if the file does not exist, is no text, or is larger than a manifest can be.
    """
    where = {"file": str(path)}
    if not path.is_file():
        hint = "`samerun draft CHECKPOINT --to LAYOUT -o FILE` writes one from a checkpoint"
        raise UsageError(Problem("SR-MAN-FILE", "there is no such manifest file", where=where, hint=hint))
    raw = path.read_bytes()
    if len(raw) > MAX_BYTES:
        message = f"the file has {len(raw)} bytes; a manifest has at most {MAX_BYTES}"
        raise UsageError(Problem("SR-MAN-FILE", message, where=where))
    try:
        return parse_document(raw.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UsageError(Problem("SR-MAN-FILE", f"the file is not UTF-8 text: {error}", where=where)) from error


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest file that must be valid and completely decided.

    Raises:
        UsageError: with every error in the file.
        UndecidedError: with every open question, if there are no errors.
    """
    return require_manifest(read_document(path))


def require_manifest(document: Document) -> Manifest:
    """Returns the document's manifest.

    Raises:
        UsageError: with every error (and then every open question) of the document.
        UndecidedError: with every open question, if there are no errors.
    """
    if document.manifest is not None:
        return document.manifest
    asked = [question_problem(document, question) for question in document.questions]
    if document.problems:
        raise UsageError([*document.problems, *asked])
    raise UndecidedError(asked)


def question_problem(document: Document, question: Question) -> Problem:
    """Returns the finding that stands for an open question."""
    return Problem(
        "SR-PLAN-ASK",
        f"{question.key} is not decided: {question.text}",
        where={"file": document.name, "line": question.line, "key": question.key},
        hint=f"accepted here: {question.answers}" if question.answers else "replace the ASK by an answer",
    )


def place_problems(document: Document, problems: Iterable[Problem]) -> list[Problem]:
    """Returns the findings with file and line added to those that name a key of the manifest."""
    return [_placed(document, problem) for problem in problems]


def _placed(document: Document, problem: Problem) -> Problem:
    dotted = problem.where.get("key")
    if dotted is None or "file" in problem.where:
        return problem
    keys: Keys = tuple(str(dotted).split("."))
    while keys and keys not in document.lines:
        keys = keys[:-1]
    if not keys:
        return problem
    return replace(problem, where={"file": document.name, "line": document.lines[keys], **problem.where})


def parse_document(text: str, name: str = "manifest") -> Document:
    """Reads the text of a manifest; `name` stands for the file in messages. Never raises for bad content."""
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        return _unreadable(name, text, _syntax_problem(name, error))
    except (YAMLError, RecursionError, ValueError) as error:
        return _unreadable(name, text, Problem("SR-MAN-YAML", f"not readable as YAML: {error}", where={"file": name}))
    if not isinstance(root, MappingNode):
        message = "a manifest is a YAML mapping that begins with `samerun: 1`"
        found = "an empty file" if root is None else f"a {root.id}"
        return _unreadable(name, text, Problem("SR-MAN-YAML", message, where={"file": name, "line": 1}, found=found))
    reader = _Reader(name)
    data = reader.mapping(root, ())
    questions = tuple(_questions(reader))
    problems = [*reader.problems, *_violations(data, reader, questions)]
    sections = _sections(data, problems, questions)
    problems += check_sections(sections, lambda keys: _place(reader, keys))
    problems.sort(key=lambda problem: problem.where.get("line", 0))
    manifest = None if problems or questions else Manifest.from_data(data)
    return Document(name, text, manifest, sections, questions, tuple(problems), reader.lines, data)


def _unreadable(name: str, text: str, problem: Problem) -> Document:
    return Document(name, text, None, {}, (), (problem,), {}, {})


def _syntax_problem(name: str, error: MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    where: dict[str, Any] = {"file": name}
    if mark is not None:
        where |= {"line": mark.line + 1, "column": mark.column + 1}
    reason = str(error.problem or error.context or "not readable as YAML").strip()
    hint = "text that holds `: `, `{` or `#` needs quotes; indent with spaces; one document per file"
    return Problem("SR-MAN-YAML", f"this is not YAML: {reason}", where=where, hint=hint)


class _Reader:
    """Turns a composed YAML tree into plain data and remembers the line of every key path."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Keys, int] = {(): 1}
        self.asked: dict[Keys, str] = {}
        self.problems: list[Problem] = []
        self._seen: set[int] = set()

    def mapping(self, node: MappingNode, at: Keys) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in cast(list[tuple[Node, Node]], node.value):
            key = str(key_node.value) if isinstance(key_node, ScalarNode) else "?"
            path = (*at, key if _is_text(key) else "?")
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode) or key == "<<" or not _is_text(key):
                self._refuse(line, path, "a key is one plain word; merge keys are not accepted")
            elif path in self.lines:
                self._refuse(line, path, f"{key} is given twice, first on line {self.lines[path]}")
            else:
                self.lines[path] = line
                data[key] = self.node(value_node, path)
        return data

    def node(self, node: Node, at: Keys) -> Any:
        line = node.start_mark.line + 1
        if id(node) in self._seen:
            self._refuse(line, at, "anchors and aliases are not accepted: write the value out")
            return None
        self._seen.add(id(node))
        if isinstance(node, MappingNode):
            return self.mapping(node, at)
        if isinstance(node, SequenceNode):
            return [self._item(item, (*at, index)) for index, item in enumerate(cast(list[Node], node.value))]
        return self._scalar(cast(ScalarNode, node), at)

    def _item(self, node: Node, at: Keys) -> Any:
        self.lines[at] = node.start_mark.line + 1
        return self.node(node, at)

    def _scalar(self, node: ScalarNode, at: Keys) -> Any:
        text = str(node.value)
        if not _is_text(text):
            self._refuse(
                node.start_mark.line + 1, at, "the text has a NUL or half a character (a lone surrogate) in it"
            )
            return None
        match str(node.tag).rsplit(":", 1)[-1]:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return self._number(int, text, node, at)
            case "float":
                return self._number(float, text, node, at)
            case "str":
                if match := _QUESTION.match(text):
                    self.asked[at] = text[match.end() :].strip()
                return text
            case "timestamp" | "value":
                return text
            case tag:
                self._refuse(node.start_mark.line + 1, at, f"tags are not accepted: {tag}")
                return None

    def _number(self, kind: type[int] | type[float], text: str, node: ScalarNode, at: Keys) -> int | float | str | None:
        plain = text.replace("_", "")
        if kind is float:
            plain = re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", plain.lower())
        try:
            return int(plain, 0) if kind is int and plain.lower().startswith(("0x", "0o")) else kind(plain)
        except ValueError:
            self._refuse(node.start_mark.line + 1, at, f"{text[:40]} is not a number; quote it if it is text")
            return None

    def _refuse(self, line: int, at: Keys, message: str) -> None:
        where = {"file": self.name, "line": line, "key": _dotted(at)}
        self.problems.append(Problem("SR-MAN-YAML", message, where=where))


def _is_text(text: str) -> bool:
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text)


def _questions(reader: _Reader) -> Iterator[Question]:
    for keys, text in reader.asked.items():
        meaning = describe(keys)
        answers = accepted(keys) if "null" in meaning else accepted(keys).removesuffix(" | null")
        yield Question(_dotted(keys), text or meaning or "no question is written down", reader.lines[keys], answers)


def _violations(data: dict[str, Any], reader: _Reader, questions: tuple[Question, ...]) -> Iterator[Problem]:
    """Yields what the models refuse, except where a question stands in for the value."""
    open_keys = {question.key for question in questions}
    already = {problem.where.get("key") for problem in reader.problems}
    try:
        Manifest.model_validate_json(json.dumps(data))
    except ValidationError as error:
        for violation in error.errors(include_url=False):
            keys = _data_path(violation["loc"], data)
            value = violation["input"]
            if violation["type"].startswith("union_tag") and isinstance(value, dict) and "from" in value:
                keys, value = (*keys, "from"), cast(dict[str, Any], value)["from"]
            if _dotted(keys) not in open_keys | already:
                yield _as_problem(violation["type"], violation["msg"], value, keys, reader)


def _data_path(location: tuple[int | str, ...], data: Any) -> Keys:
    """Returns the document path of a validator's location, which also names the branches of unions."""
    keys: list[str | int] = []
    node: Any = data
    for index, step in enumerate(location):
        if isinstance(node, dict) and step in node:
            node = cast(dict[str | int, Any], node)[step]
        elif isinstance(node, list) and isinstance(step, int) and step < len(cast(list[Any], node)):
            node = cast(list[Any], node)[step]
        elif index < len(location) - 1 or not isinstance(node, dict):
            continue
        keys.append(step)
    return tuple(keys)


def _as_problem(kind: str, message: str, value: Any, keys: Keys, reader: _Reader) -> Problem:
    where = _place(reader, keys)
    dotted = _dotted(keys)
    if kind == "missing":
        hint = f"{describe(keys)} Accepted here: {accepted(keys)}".strip()
        return Problem("SR-MAN-MISSING", f"{dotted} is missing", where=where, hint=hint)
    if kind == "extra_forbidden":
        return Problem("SR-MAN-KEY", f"there is no key {dotted}", where=where, hint=_closest(keys))
    if dotted == "samerun" and isinstance(value, int):
        message = f"this samerun reads manifest version 1, not {value}"
        return Problem("SR-MAN-VERSION", message, where=where, expected=1, found=value)
    if kind.startswith("value_error"):
        return Problem("SR-MAN-VALUE", f"{dotted}: {message.removeprefix('Value error, ')}", where=where, found=value)
    hint = describe(keys)
    if "string" in kind and isinstance(value, int | float):
        hint = "YAML reads this as a number: put it in quotes"
    return Problem(
        "SR-MAN-VALUE",
        f"{dotted} cannot be {json.dumps(value, ensure_ascii=False)}{_guess(value, keys)}",
        where=where,
        hint=hint,
        expected=accepted(keys) or message,
        found=value,
    )


def _closest(keys: Keys) -> str:
    known = known_keys(keys[:-1])
    close = difflib.get_close_matches(str(keys[-1]), known, n=1, cutoff=0.5)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"{guess}known keys here: {', '.join(known)}" if known else guess


def _guess(value: Any, keys: Keys) -> str:
    words = [word for word in accepted(keys).split(" | ") if " " not in word]
    close = difflib.get_close_matches(str(value), words, n=1, cutoff=0.6) if isinstance(value, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def _place(reader: _Reader, keys: Keys) -> dict[str, Any]:
    """Returns file, line and dotted key; a key that is not there is placed at the nearest one above it."""
    known = keys
    while known not in reader.lines:
        known = known[:-1]
    return {"file": reader.name, "line": reader.lines[known], "key": _dotted(keys)}


def _dotted(keys: Keys) -> str:
    return ".".join(str(key) for key in keys)


def _sections(data: dict[str, Any], problems: list[Problem], questions: tuple[Question, ...]) -> dict[str, Section]:
    """Returns every top-level section in which nothing is wrong and nothing is open."""
    spoiled = {str(problem.where.get("key", "")).split(".")[0] for problem in problems}
    spoiled |= {question.key.split(".")[0] for question in questions}
    found: dict[str, Section] = {}
    for name, field in Manifest.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section) and name in data and name not in spoiled:
            found[name] = kind.model_validate_json(json.dumps(data[name]))
    return found
