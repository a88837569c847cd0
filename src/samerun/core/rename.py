"""Name maps: how the names of one state become those of another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from samerun.core.state import TensorKey


@dataclass(frozen=True, slots=True)
class NameMap:
    """Renames tensors by rules that are tried in order; the first that fits decides, and no rule leaves a name alone.

    A rule maps a parameter name to a parameter name, for every role and slot (`wte.weight: tok.weight`), or a whole key
    to a whole key (`param:a: buffer:a`). One `*` on both sides stands for the same text (`model.*: *`).

    >>> NameMap.of({"model.*": "*"}).rename("optim.exp_avg:model.w")
    'optim.exp_avg:w'
    """

    rules: tuple[tuple[str, str], ...] = field(default_factory=tuple[tuple[str, str], ...])

    @classmethod
    def of(cls, rules: Mapping[str, str]) -> NameMap:
        """Returns the map with these rules.

        Raises:
            ValueError: for a rule that has a `*` on one side only, or more than one; the message names every such rule.
        """
        bad = [
            f"{old}: {new}"
            for old, new in rules.items()
            if old.count("*") != new.count("*") or old.count("*") > 1 or (":" in old) != (":" in new)
        ]
        if bad:
            raise ValueError(
                f"a rule has one * on each side or none, and keys on both sides or names: {'; '.join(bad)}"
            )
        return cls(tuple(rules.items()))

    def rename(self, key: str) -> str:
        """Returns the new key of the tensor called `key`."""
        parsed = TensorKey.parse(key)
        for old, new in self.rules:
            subject = key if ":" in old else parsed.fqn
            renamed = _apply(old, new, subject)
            if renamed is not None:
                return renamed if ":" in old else str(replace(parsed, fqn=renamed))
        return key

    def unused(self, keys: Iterable[str]) -> list[str]:
        """Returns the left sides that no key fits: a rule that does nothing is usually a misspelt one."""
        subjects = {text for key in keys for text in (key, TensorKey.parse(key).fqn)}
        return [
            old for old, new in self.rules if not any(_apply(old, new, subject) is not None for subject in subjects)
        ]


def _apply(old: str, new: str, subject: str) -> str | None:
    if "*" not in old:
        return new if subject == old else None
    before, after = old.split("*")
    if len(subject) < len(before) + len(after) or not (subject.startswith(before) and subject.endswith(after)):
        return None
    return new.replace("*", subject[len(before) : len(subject) - len(after)])
