"""Name maps: how the tensors of one state become those of another, as rules that can be followed both ways.

A rule has patterns of names on both sides and the steps between. It holds for a parameter and for everything that
belongs to it: its master, its optimizer slots, its average. `docs/maps.md` describes how rules are written down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from samerun.core.dtype import DType
from samerun.core.links import Link, Shape, compose, whole
from samerun.core.mapsteps import Stack, Step, Unstack
from samerun.core.state import LogicalState, Role, TensorEntry, TensorKey
from samerun.errors import Problem

_TOKEN = re.compile(r"(\{\w+\}|\*)")
_REST = "*"

Binding = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name in which `{word}` stands for one component between dots and one `*` for any text.

    >>> Pattern("h.{i}.*").match("h.3.attn.w")
    (('*', 'attn.w'), ('i', '3'))
    >>> Pattern("layers.{i}.*").fill((("*", "attn.w"), ("i", "3")))
    'layers.3.attn.w'
    """

    text: str

    def match(self, name: str) -> Binding | None:
        """Returns what each variable stands for if `name` fits, sorted by variable; None if it does not fit."""
        expression, variables = _compiled(self.text)
        found = expression.fullmatch(name)
        return None if found is None else tuple((name, found[group]) for name, group in variables)

    def fill(self, binding: Binding) -> str:
        """Returns the name with the variables replaced by what they stand for."""
        values = dict(binding)
        return _TOKEN.sub(lambda token: values[token[0].strip("{}")], self.text)

    def variables(self) -> set[str]:
        """Returns the variables in the pattern (`*` is one)."""
        return {token.strip("{}") for token in _TOKEN.findall(self.text)}


@cache
def _compiled(text: str) -> tuple[re.Pattern[str], Binding]:
    """Returns a pattern's regular expression, and the group of each variable, sorted by variable."""
    parts: list[str] = []
    seen: dict[str, str] = {}
    for token in _TOKEN.split(text):
        if not _TOKEN.fullmatch(token):
            parts.append(re.escape(token))
            continue
        variable = token.strip("{}")
        if variable in seen:
            parts.append(f"(?P={seen[variable]})")
            continue
        seen[variable] = f"v{len(seen)}"
        parts.append(f"(?P<{seen[variable]}>{'.*' if variable == _REST else '[^.]+'})")
    return re.compile("".join(parts)), tuple(sorted(seen.items()))


@dataclass(frozen=True, slots=True)
class Rule:
    """Names in A, names in B, and the steps from one to the other. No `targets`: the tensor is left out.

    Without steps, source `i` becomes target `i`. Patterns that contain a `:` are whole keys (`param:a`, `buffer:a`).
    A rule that is not `optional` must fit some tensor. With `roles`, it fits tensors of these roles only: a framework
    may fuse what its optimizer sees and save the model apart.
    """

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    steps: tuple[Step, ...] = ()
    optional: bool = False
    roles: frozenset[Role] = frozenset()

    def check(self) -> list[str]:
        """Returns what is wrong with the rule itself, before any state is looked at."""
        wrong: list[str] = []
        texts = [pattern.text for pattern in (*self.sources, *self.targets)]
        if any(text.count(_REST) > 1 for text in texts):
            wrong.append("a name has at most one *")
        if self.targets and len({":" in text for text in texts}) > 1:
            wrong.append("keys (with a role, `param:a`) on both sides, or names on both sides")
        if self.targets and not self.steps and len(self.sources) != len(self.targets):
            wrong.append(f"{len(self.sources)} names become {len(self.targets)}, and no step says how")
        known = set[str]().union(*(pattern.variables() for pattern in self.sources))
        bound = known | {step.over for step in self.steps if isinstance(step, Unstack)}
        gone = {step.over for step in self.steps if isinstance(step, Stack)}
        needed = set[str]().union(*(pattern.variables() for pattern in self.targets))
        if unknown := needed - bound:
            wrong.append(f"nothing gives {', '.join(sorted(unknown))} a value")
        if lost := (known - needed - gone) if self.targets else set[str]():
            wrong.append(f"{', '.join(sorted(lost))} gets lost, so that several tensors would get one name")
        if len({frozenset(pattern.variables()) for pattern in self.sources}) > 1:
            wrong.append("the names that belong together have different variables")
        return [f"{', '.join(texts[: len(self.sources)])}: {text}" for text in wrong]

    def inverse(self) -> Rule:
        """Returns the rule that undoes this one.

        Raises:
            ValueError: if it cannot be undone: it leaves something out, or a step does not say enough.
        """
        names = ", ".join(pattern.text for pattern in self.sources)
        if not self.targets:
            raise ValueError(f"{names}: what was left out cannot be brought back")
        try:
            steps = tuple(step.inverse() for step in reversed(self.steps))
            return Rule(self.targets, self.sources, steps, self.optional, self.roles)
        except ValueError as error:
            raise ValueError(f"{names}: {error}") from None


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of B as elements of tensors of A. `links` go from `sources` (by number) to this tensor (number 0)."""

    key: TensorKey
    shape: Shape
    dtype: DType
    sources: tuple[str, ...]
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class MapResult:
    """What a map makes of a state: its tensors in order, names by old name, keys left out, findings."""

    tensors: tuple[MappedTensor, ...]
    names: Mapping[str, tuple[str, ...]]
    dropped: tuple[str, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class NameMap:
    """Rules that are tried in order for each tensor: the first that fits decides, and none leaves it as it is.

    >>> NameMap.of({"model.*": "*"}).rename("model.w")
    ('w',)
    """

    rules: tuple[Rule, ...] = field(default_factory=tuple[Rule, ...])

    @classmethod
    def of(cls, names: Mapping[str, str]) -> NameMap:
        """Returns the map that only renames.

        Raises:
            ValueError: naming every rule that cannot be one.
        """
        return cls.checked([Rule((Pattern(old),), (Pattern(new),)) for old, new in names.items()])

    @classmethod
    def checked(cls, rules: Sequence[Rule]) -> NameMap:
        """Returns the map with these rules.

        Raises:
            ValueError: naming every rule that cannot be one.
        """
        if wrong := [text for rule in rules for text in rule.check()]:
            raise ValueError("; ".join(wrong))
        return cls(tuple(rules))

    def inverse(self) -> NameMap:
        """Returns the map from B to A.

        Raises:
            ValueError: naming every rule that cannot be undone.
        """
        rules: list[Rule] = []
        wrong: list[str] = []
        for rule in self.rules:
            try:
                rules.append(rule.inverse())
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong))
        return NameMap.checked(rules)

    def find(self, key: TensorKey) -> tuple[Rule, int, Binding] | None:
        """Returns the rule for a tensor, which of the rule's sources it is, and what the variables stand for."""
        for rule in self.rules:
            for position, pattern in enumerate(rule.sources if not rule.roles or key.role in rule.roles else ()):
                binding = pattern.match(str(key) if ":" in pattern.text else key.fqn)
                if binding is not None:
                    return rule, position, binding
        return None

    def rename(self, fqn: str) -> tuple[str, ...]:
        """Returns the names that a parameter name becomes, as far as the name alone tells (not through stacks)."""
        found = self.find(TensorKey(Role.PARAM, fqn))
        if found is None:
            return (fqn,)
        rule, position, binding = found
        if any(isinstance(step, Stack | Unstack) for step in rule.steps):
            return ()
        targets = rule.targets if rule.steps else rule.targets[position : position + 1]
        return tuple(_fqn(target.fill(binding)) for target in targets)

    def unused(self, keys: Iterable[str]) -> list[str]:
        """Returns the left sides that no key fits: a rule that does nothing is usually a misspelt one."""
        parsed = [TensorKey.parse(key) for key in keys]
        subjects = {text for key in parsed for text in (str(key), key.fqn)}
        return [
            pattern.text
            for rule in self.rules
            if not rule.optional
            for pattern in rule.sources
            if not any(pattern.match(subject) is not None for subject in subjects)
        ]

    def apply(self, state: LogicalState) -> MapResult:
        """Returns what becomes of a state's tensors."""
        return _Application(self, state).run()


def _fqn(text: str) -> str:
    return text.partition(":")[2] if ":" in text else text


@dataclass(slots=True)
class _Item:
    """A tensor on its way through the steps of a rule."""

    binding: Binding
    position: int
    shape: Shape


class _Application:
    def __init__(self, names: NameMap, state: LogicalState) -> None:
        self._names, self._state = names, state
        self._made: dict[str, MappedTensor] = {}
        self._by_name: dict[str, dict[str, None]] = {}
        self._optimized: dict[str, dict[str, None]] = {}
        self._widest: dict[str, TensorEntry] = {}
        for entry in state.tensors.values():
            if entry.key.role is Role.OPTIM and entry.num_elements > self._size(entry.key.fqn):
                self._widest[entry.key.fqn] = entry
        self._dropped: list[str] = []
        self._problems: list[Problem] = []

    def _size(self, fqn: str) -> int:
        return self._widest[fqn].num_elements if fqn in self._widest else 0

    def run(self) -> MapResult:
        taken: dict[tuple[int, str], list[tuple[TensorEntry, int, Binding]]] = {}
        order: list[tuple[int, str] | str] = []
        numbers = {id(rule): number for number, rule in enumerate(self._names.rules)}
        for text, entry in self._state.tensors.items():
            found = self._names.find(entry.key)
            if found is None:
                order.append(text)
                continue
            rule, position, binding = found
            part = text.partition(":")[0]
            place = (numbers[id(rule)], part)
            if place not in taken:
                order.append(place)
            taken.setdefault(place, []).append((entry, position, binding))
        for place in order:
            if isinstance(place, str):
                entry = self._state.tensors[place]
                self._keep(MappedTensor(entry.key, entry.shape, entry.dtype, (place,), (whole(entry.shape),)))
            else:
                self._follow(self._names.rules[place[0]], taken[place])
        names = {old: tuple(new) for old, new in {**self._by_name, **self._optimized}.items()}
        return MapResult(tuple(self._made.values()), names, tuple(self._dropped), tuple(self._problems))

    def _keep(self, tensor: MappedTensor) -> None:
        text = str(tensor.key)
        if text in self._made:
            both = (*self._made[text].sources, *tensor.sources)
            self._refuse(f"{', '.join(both)} would all become {text}", text)
            return
        self._made[text] = tensor
        for source in tensor.sources:
            self._by_name.setdefault(_fqn(source), {})[tensor.key.fqn] = None
            if tensor.key.role in (Role.OPTIM, Role.MASTER):  # groups go by the optimizer's names
                self._optimized.setdefault(_fqn(source), {})[tensor.key.fqn] = None

    def _refuse(self, message: str, tensor: str) -> None:
        hint = "correct the rule; `samerun inspect --json` lists names and shapes"
        self._problems.append(Problem("SR-MAP-RULE", message, where={"tensor": tensor}, hint=hint))

    def _follow(self, rule: Rule, found: list[tuple[TensorEntry, int, Binding]]) -> None:
        if not rule.targets:
            self._dropped += [str(entry.key) for entry, _, _ in found]
            for entry, _, _ in found:
                self._by_name.setdefault(entry.key.fqn, {})
            return
        entries = [entry for entry, _, _ in found]
        dtypes = sorted({entry.dtype.name for entry in entries})
        items = [_Item(binding, position, self._shape(entry)) for entry, position, binding in found]
        links = [whole(item.shape, number, number) for number, item in enumerate(items)]
        try:
            if rule.steps:
                _require_complete(rule, items)
            for step in rule.steps:
                items, moved = _take(step, items)
                links = compose(links, moved)
            named = [(_named(rule, item), item) for item in items]
            made = self._build(named, links, entries)
        except ValueError as error:
            self._refuse(str(error), str(entries[0].key))
            return
        if len(dtypes) > 1 and len(named) < len(entries):
            self._refuse(f"tensors of types {' and '.join(dtypes)} would become one", str(entries[0].key))
            return
        for tensor in made:
            self._keep(tensor)

    def _build(
        self, named: list[tuple[str, _Item]], links: list[Link], entries: list[TensorEntry]
    ) -> list[MappedTensor]:
        by_target: dict[int, list[Link]] = {}
        for link in links:
            by_target.setdefault(link.target, []).append(link)
        made: list[MappedTensor] = []
        for number, (name, item) in enumerate(named):
            mine = by_target.get(number, [])
            carried = bool(mine) and self._shape(entries[mine[0].source]) != entries[mine[0].source].shape
            made.append(_mapped(name, item.shape, mine, entries, carried=carried))
        return made

    def _shape(self, entry: TensorEntry) -> Shape:
        """Returns the shape that the steps see: a counter beside a parameter goes through them as the parameter."""
        owner = self._owner(entry)
        return owner.shape if owner is not None and is_carried(entry, owner) else entry.shape

    def _owner(self, entry: TensorEntry) -> TensorEntry | None:
        if entry.key.role is not Role.OPTIM:
            return None
        keys = (str(TensorKey(role, entry.key.fqn)) for role in (Role.PARAM, Role.MASTER))
        found = next((self._state.tensors[key] for key in keys if key in self._state.tensors), None)
        return found or self._widest.get(entry.key.fqn)


def is_carried(entry: TensorEntry, owner: TensorEntry) -> bool:
    """Returns whether an optimizer tensor is one number for the whole parameter, such as its step."""
    return entry.num_elements == 1 and owner.num_elements != 1


def _require_complete(rule: Rule, items: list[_Item]) -> None:
    positions: dict[Binding, set[int]] = {}
    for item in items:
        positions.setdefault(item.binding, set()).add(item.position)
    for binding, there in positions.items():
        missing = [pattern.fill(binding) for i, pattern in enumerate(rule.sources) if i not in there]
        if missing:
            raise ValueError(f"{', '.join(missing)} is needed by the rule and not there")


def _take(step: Step, items: list[_Item]) -> tuple[list[_Item], list[Link]]:
    """Takes one step with every set of tensors that belong together; links are between the whole lists."""
    groups: dict[tuple[Binding, int], list[int]] = {}
    over = step.over if isinstance(step, Stack) else None
    for number, item in enumerate(items):
        if isinstance(step, Stack):
            place = (tuple(pair for pair in item.binding if pair[0] != over), item.position)
        elif isinstance(step, Unstack):
            place = (item.binding, item.position)
        else:
            place = (item.binding, -1)
        groups.setdefault(place, []).append(number)
    made: list[_Item] = []
    links: list[Link] = []
    for (binding, position), members in groups.items():
        members = sorted(members, key=lambda number: _place(items[number], over))
        if isinstance(step, Stack):
            _require_count([items[number] for number in members], step)
        shapes, found = step.apply([items[number].shape for number in members])
        base = len(made)
        for number, shape in enumerate(shapes):
            if isinstance(step, Unstack):
                bound = tuple(sorted((*binding, (step.over, str(step.start + number)))))
                made.append(_Item(bound, position, shape))
            else:
                made.append(_Item(binding, position if isinstance(step, Stack) else number, shape))
        links += [replace(link, source=members[link.source], target=base + link.target) for link in found]
    return made, links


def _place(item: _Item, over: str | None) -> int:
    if over is None:
        return item.position
    value = dict(item.binding).get(over, "")
    if not value.isdecimal():
        raise ValueError(f"stack over {over}, which stands for {value!r}, no number")
    return int(value)


def _require_count(items: list[_Item], step: Stack) -> None:
    found = [_place(item, step.over) for item in items]
    wanted = list(range(step.start, step.start + len(found)))
    if found != wanted:
        missing = sorted(set(wanted) - set(found)) or found
        raise ValueError(f"stack over {step.over}: {missing[0]} is missing of {found[0]} to {found[-1]}")


def _named(rule: Rule, item: _Item) -> str:
    if item.position >= len(rule.targets):
        raise ValueError(f"the steps make more tensors than the {len(rule.targets)} names that they are to have")
    return rule.targets[item.position].fill(item.binding)


def _mapped(name: str, shape: Shape, links: list[Link], entries: list[TensorEntry], *, carried: bool) -> MappedTensor:
    """Returns a tensor of B. One that is `carried` is the same one number, whatever happened to its parameter."""
    used = sorted({link.source for link in links})
    if not used:
        raise ValueError(f"{name} would hold no value of A")
    first = entries[used[0]]
    key = TensorKey.parse(name) if ":" in name else replace(first.key, fqn=name)
    numbers = {source: number for number, source in enumerate(used)}
    sources = tuple(str(entries[source].key) for source in used)
    if carried:
        shape = first.shape
        mine = tuple(whole(shape, number) for number in range(len(used)))
    else:
        mine = tuple(replace(link, source=numbers[link.source], target=0) for link in links)
    return MappedTensor(key, shape, first.dtype, sources, mine)
