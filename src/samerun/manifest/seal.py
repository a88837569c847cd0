"""The seal: a hash over everything that was declared, taken before any candidate runs.

What is sealed: the manifest's content, the plan, the resolved tolerances (bands), and the hashes of the control
evidence from which they come. A change afterwards is refused and named; going on needs a further seal with a reason,
and the earlier seals stay in the record (`sealed.json`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from samerun.errors import Problem, StalePlan
from samerun.manifest.models import Manifest, content_sha256

PARTS = ("manifest", "plan", "tolerances", "controls")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seal:
    """One seal. `digest` is the hash of everything else in it except `sealed_at`.

    `number` counts from 1. `previous` is the digest of the seal before, so that none can be taken out unnoticed.
    `reason` is why there is a further seal; the first has none.
    """

    number: int
    digest: str
    manifest: Mapping[str, Any]
    plan: Mapping[str, Any]
    tolerances: Mapping[str, Any]
    controls: Mapping[str, Any]
    previous: str | None = None
    reason: str | None = None
    sealed_at: str | None = None

    def contents(self) -> dict[str, Any]:
        """Returns what the digest covers."""
        parts = {part: dict(getattr(self, part)) for part in PARTS}
        return {"number": self.number, "previous": self.previous, "reason": self.reason, **parts}

    def to_json(self) -> dict[str, Any]:
        """Returns the form kept in `sealed.json`."""
        return {"digest": self.digest, "sealed_at": self.sealed_at, **self.contents()}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads the form back, without judging it (`check_record` does)."""
        return cls(**{field: body[field] for field in ("number", "digest", *PARTS)}, **_optional(body))


def _optional(body: Mapping[str, Any]) -> dict[str, Any]:
    return {field: body.get(field) for field in ("previous", "reason", "sealed_at")}


@dataclass(frozen=True, slots=True)
class SealRecord:
    """Every seal of a run, oldest first. The last one holds."""

    seals: tuple[Seal, ...]

    def __post_init__(self) -> None:
        if not self.seals:
            raise ValueError("a seal record holds at least one seal")

    @property
    def current(self) -> Seal:
        """The seal that holds."""
        return self.seals[-1]

    def to_json(self) -> dict[str, Any]:
        """Returns the content of `sealed.json`."""
        return {
            "schema": "samerun/seal/1",
            "sealed": self.current.digest,
            "seals": [item.to_json() for item in self.seals],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Reads `sealed.json` back, without judging it (`check_record` does)."""
        return cls(tuple(Seal.from_json(item) for item in body["seals"]))


def seal(
    manifest: Manifest,
    plan: Mapping[str, Any],
    tolerances: Mapping[str, Any],
    controls: Mapping[str, Any],
    *,
    sealed_at: str | None = None,
) -> Seal:
    """Returns the first seal of a run.

    Args:
        manifest: the decided manifest.
        plan: the plan's JSON form.
        tolerances: the resolved bands by metric, as plain data.
        controls: hashes of the control evidence by name, as plain data.
        sealed_at: when, as text; the caller has the clock.

    Raises:
        ValueError: if a part holds a non-finite number or something that is not plain data.
    """
    parts = {"manifest": manifest.to_data(), "plan": plan, "tolerances": tolerances, "controls": controls}
    return _closed(Seal(number=1, digest="", sealed_at=sealed_at, **cast(dict[str, Any], parts)))


def reseal(
    record: SealRecord,
    manifest: Manifest,
    plan: Mapping[str, Any],
    tolerances: Mapping[str, Any],
    controls: Mapping[str, Any],
    *,
    reason: str,
    sealed_at: str | None = None,
) -> SealRecord:
    """Returns the record with a further seal that takes the place of the current one.

    Raises:
        StalePlan: if no reason is given, or the record has been tampered with.
    """
    problems = check_record(record)
    if not reason.strip():
        hint = "`samerun run m.yaml --reseal REASON` records it"
        problems.append(Problem("SR-SEAL-REASON", "a further seal needs a reason", hint=hint))
    if problems:
        raise StalePlan(problems)
    fresh = seal(manifest, plan, tolerances, controls, sealed_at=sealed_at)
    last = record.current
    further = replace(fresh, number=last.number + 1, previous=last.digest, reason=reason.strip())
    return SealRecord((*record.seals, _closed(further)))


def _closed(open_seal: Seal) -> Seal:
    return replace(open_seal, digest=content_sha256(open_seal.contents()))


def check_record(record: SealRecord) -> list[Problem]:
    """Returns a finding for every seal whose content does not match its digest or its place in the chain."""
    problems: list[Problem] = []
    previous: str | None = None
    for number, item in enumerate(record.seals, start=1):
        computed = content_sha256(item.contents())
        if computed != item.digest:
            problems.append(_broken(number, "content does not match its digest", item.digest, computed))
        if item.number != number or item.previous != previous:
            problems.append(_broken(number, "does not follow the seal before it", previous, item.previous))
        if number > 1 and not item.reason:
            problems.append(_broken(number, "is a further seal without a reason", "a reason", item.reason))
        previous = item.digest
    return problems


def _broken(number: int, what: str, expected: Any, found: Any) -> Problem:
    return Problem(
        "SR-SEAL-BROKEN",
        f"seal {number} {what}: sealed.json was edited",
        where={"file": "sealed.json", "key": f"seals.{number - 1}"},
        expected=expected,
        found=found,
        hint="restore the file, or begin a new run directory",
    )


def check_seal(
    held: Seal,
    manifest: Manifest,
    plan: Mapping[str, Any] | None = None,
    tolerances: Mapping[str, Any] | None = None,
    controls: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """Returns a finding for every field that differs from what was sealed; parts that are None are not compared."""
    problems: list[Problem] = []
    if (computed := content_sha256(held.contents())) != held.digest:
        problems.append(_broken(held.number, "content does not match its digest", held.digest, computed))
    now = {"manifest": manifest.to_data(), "plan": plan, "tolerances": tolerances, "controls": controls}
    for part, value in now.items():
        if value is not None:
            problems += [
                _changed(held, key, old, new) for key, old, new in _differences(getattr(held, part), value, part)
            ]
    return problems


def _changed(held: Seal, key: str, old: Any, new: Any) -> Problem:
    return Problem(
        "SR-SEAL-CHANGED",
        f"{key} was {_short(old)} when it was sealed and is {_short(new)} now",
        where={"key": key},
        expected=old,
        found=new,
        hint=f"put it back, or record a further seal with `--reseal REASON` (this is seal {held.number})",
    )


def _short(value: Any) -> str:
    return "absent" if value is None else f"{value}"


def _differences(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, old, new) for every leaf that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        before, after = cast(Mapping[str, Any], old), cast(Mapping[str, Any], new)
        for name in sorted({*before, *after}):
            yield from _differences(before.get(name), after.get(name), f"{key}.{name}")
    elif _plain(old) != _plain(new):
        yield key, old, new


def _plain(value: Any) -> Any:
    """Returns `value` with tuples as lists, as JSON would give it back."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast(list[Any], value)]
    return value
