"""State coverage: what the control's job holds after loading, by role, and what of it the candidate's job holds.

Both jobs loaded the same checkpoint and digested what they then had in memory. The digest of a tensor does not depend
on how it is sharded, so the two can be compared across layouts, and against the checkpoint's own bytes (load stage).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from samerun.core.dtype import DTYPES
from samerun.report.model import ReportModel
from samerun.report.updates import first_movements

Body = Mapping[str, Any]
Agreement = Literal["equal", "differs", "missing", "unexpected", "unseen"]

_ROLES: Mapping[str, str] = {
    "param": "parameters",
    "buffer": "buffers",
    "master": "fp32 masters",
    "ema": "moving averages",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """One role (or optimizer slot): how many tensors of it there are, and on how many the two jobs agree.

    Without a candidate every count but `tensors`, `elements` and `size_bytes` is 0.
    """

    role: str
    tensors: int
    elements: int
    size_bytes: int
    equal: int
    differing: int
    missing: int
    unexpected: int

    @property
    def share(self) -> float:
        """The share of tensors that the candidate holds with equal values."""
        return self.equal / self.tensors if self.tensors else 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Something beside the tensors: its name, whether the two jobs agree, and in a few words what it is."""

    name: str
    agreement: Agreement
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """One parameter or buffer: what both jobs hold of it and how far its first change deviates."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trains: bool | None
    agreement: Agreement
    slots: Mapping[str, Agreement]
    moved: float | None
    deviation: float | None
    limit: float | None
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateView:
    """All of it. `compared` is false while there is no candidate."""

    compared: bool
    coverage: tuple[Coverage, ...]
    settings: tuple[Setting, ...]
    rows: tuple[ParameterRow, ...]
    digests: tuple[tuple[str, str], ...]


def view_state(model: ReportModel) -> StateView | None:
    """Returns the coverage, or None if no job captured a state."""
    reference = next((state.body for job in model.controls if (state := job.state()) is not None), None)
    candidate_job = model.loaded
    candidate = state.body if candidate_job and (state := candidate_job.state()) else None
    one, two = reference or candidate, candidate if reference else None
    if one is None:
        return None
    tensors, found = _tensors(one), _tensors(two) if two else {}
    named = [("control", reference), ("candidate", candidate)]
    return StateView(
        compared=two is not None,
        coverage=tuple(_coverage(tensors, found, compared=two is not None)),
        settings=tuple(_settings(one, two)),
        rows=tuple(_rows(model, tensors, found, compared=two is not None)),
        digests=tuple((name, str(body.get("state"))) for name, body in named if body is not None),
    )


def _tensors(body: Body) -> dict[str, Body]:
    """Returns tensors and step counters by key. A counter has a value instead of a digest."""
    tensors: Body = body.get("tensors") or {}
    counters: Body = body.get("counters") or {}
    return {**tensors, **{key: {"shape": [], "digest": fact.get("value"), **fact} for key, fact in counters.items()}}


def role_of(key: str) -> str:
    """Returns the role of a tensor key in words.

    >>> role_of("param:a.b"), role_of("optim.exp_avg:a.b")
    ('parameters', 'optimizer exp_avg')
    """
    role, _, slot = key.partition(":")[0].partition(".")
    return f"optimizer {slot}" if role == "optim" else _ROLES.get(role, role)


def _coverage(one: Mapping[str, Body], two: Mapping[str, Body], *, compared: bool) -> Iterator[Coverage]:
    by_role: dict[str, list[str]] = {}
    for key in {**one, **two}:
        by_role.setdefault(role_of(key), []).append(key)
    for role, keys in by_role.items():
        held = [key for key in keys if key in one]
        agreed = [_agreement(one.get(key), two.get(key), compared=compared) for key in keys]
        yield Coverage(
            role=role,
            tensors=len(held),
            elements=sum(math.prod(one[key]["shape"]) for key in held),
            size_bytes=sum(_size_bytes(one[key]) for key in held),
            equal=agreed.count("equal"),
            differing=agreed.count("differs"),
            missing=agreed.count("missing"),
            unexpected=agreed.count("unexpected"),
        )


def _size_bytes(fact: Body) -> int:
    dtype = DTYPES.get(str(fact.get("dtype")))
    return math.prod(fact["shape"]) * (dtype.num_bytes if dtype else 0)


def _agreement(one: Body | None, two: Body | None, *, compared: bool) -> Agreement:
    if not compared:
        return "unseen"
    if one is None:
        return "unexpected"
    if two is None:
        return "missing"
    same = one.get("digest") == two.get("digest") and not two.get("odd") and not two.get("missing_elements")
    return "equal" if same else "differs"


def _settings(one: Body, two: Body | None) -> Iterator[Setting]:
    groups = one.get("groups") or []
    detail = f"{len(groups)} groups of {', '.join(str(len(group.get('params', ()))) for group in groups)} parameters"
    yield _setting("parameter groups", one, two, "groups", detail if groups else "none")
    optimizers = [str(body.get("class", "?")).rpartition(".")[2] for body in one.get("optimizers") or []]
    yield _setting("optimizer semantics", one, two, "optimizers", ", ".join(optimizers) or "none")
    rates = [f"{rate:g}" for rate in one.get("learning_rates") or []]
    yield _setting("learning rates", one, two, "learning_rates", ", ".join(rates) or "none")
    yield _setting("scheduler", one, two, "scheduler", _counter_text(one.get("scheduler")))
    yield _setting("architecture settings", one, two, "config", f"{_size(one.get('config'))} values")
    mine: Body = one.get("objects") or {}
    theirs: Body = (two.get("objects") or {}) if two is not None else {}
    for name in {**mine, **theirs}:
        yield Setting(str(name), _same(mine, theirs, name, two is not None), f"{_size(mine.get(name))} values")
    streams, other = one.get("rng") or {}, (two.get("rng") or {}) if two is not None else {}
    equal = sum(1 for name, value in streams.items() if other.get(name) == value)
    text = f"{len(streams)} streams" + (f", {len(other)} on the destination, {equal} equal" if two is not None else "")
    yield Setting("random number streams", _same({"rng": streams}, {"rng": other}, "rng", two is not None), text)


def _setting(title: str, one: Body, two: Body | None, name: str, detail: str) -> Setting:
    return Setting(title, _same(one, two or {}, name, two is not None), detail)


def _same(one: Body, two: Body, name: str, compared: bool) -> Agreement:
    if not compared:
        return "unseen"
    if one.get(name) is None or two.get(name) is None:
        return "equal" if one.get(name) is two.get(name) else "missing" if two.get(name) is None else "unexpected"
    return "equal" if one[name] == two[name] else "differs"


def _counter_text(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "none" if value is None else "saved"
    known = {name: value[name] for name in ("last_epoch", "_step_count") if name in value}
    return ", ".join(f"{name} {number}" for name, number in known.items()) or f"{len(value)} values"


def _size(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_size(item) for item in value.values())
    return 0 if value is None else 1


def _rows(
    model: ReportModel, one: Mapping[str, Body], two: Mapping[str, Body], *, compared: bool
) -> Iterator[ParameterRow]:
    slots: dict[str, dict[str, Agreement]] = {}
    for key in {**one, **two}:
        role, _, fqn = key.partition(":")
        if role.partition(".")[0] not in ("param", "buffer"):
            name = role.removeprefix("optim.")
            slots.setdefault(fqn, {})[name] = _agreement(one.get(key), two.get(key), compared=compared)
    moved, changed = first_movements(model)
    bands = {band.tensor: band for band in model.bands if band.metric == "parameter_delta"}
    for key in {**one, **two}:
        role, _, fqn = key.partition(":")
        if role not in ("param", "buffer"):
            continue
        fact = one.get(key) or two[key]
        band = bands.get(fqn)
        yield ParameterRow(
            name=fqn,
            shape=tuple(fact["shape"]),
            dtype=str(fact.get("dtype")),
            trains=fact.get("trainable") if role == "param" else None,
            agreement=_agreement(one.get(key), two.get(key), compared=compared),
            slots=slots.get(fqn, {}),
            moved=moved.get(fqn),
            deviation=_moved_deviation(moved.get(fqn), changed.get(fqn), bool(band and band.absolute)),
            limit=band.limits[0] if band else None,
            replicas=int(fact.get("replicas", 1)),
        )


def _moved_deviation(one: float | None, two: float | None, absolute: bool) -> float | None:
    from samerun.core.tolerance import deviation

    return None if one is None or two is None else deviation(one, two, absolute=absolute)
