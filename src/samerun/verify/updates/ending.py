"""What the window left behind, where rounding has no part in it: settings, step counters, what trains, what moved.

Losses and norms see a setting only if it is large enough. That a script changes one after it has reported its loaded
state, or that it no longer updates a buffer, is seen here: in the states after the last update of both jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samerun.core.plain import MISSING, same_plain
from samerun.core.tolerance import deviation
from samerun.errors import Problem, Severity
from samerun.trace.fields import number
from samerun.verify.evidence.observed import Observed

Body = Mapping[str, Any]
"""The body of a state line."""

_SCHEDULED = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "step"})
"""Compared update by update, or as counters."""
_CYCLED = frozenset({"momentum", "betas", "max_momentum", "base_momentum"})
"""What torch's one-cycle and cyclic schedules move beside the rate."""
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Span:
    """One job's state after loading and after the window; None where it was not recorded."""

    loaded: Body | None
    end: Body | None

    @classmethod
    def of(cls, observed: Observed) -> Span:
        """Returns the span of a job's trace."""
        bodies = [line.body if (line := observed.state(when)) is not None else None for when in ("loaded", "end")]
        return cls(*bodies)


def check_ending(control: Span, candidate: Span, stage: str, *, optimizer: bool = True) -> list[Problem]:
    """Compares what is exact after the window, and names settings that the script changed in the middle of it.

    Args:
        control: a control that ran the same updates.
        candidate: the moved job.
        stage: for the findings' place.
        optimizer: False where the optimizer's state is declared to change with the move.
    """
    if control.end is None or candidate.end is None:
        return []
    problems = [
        *(_check_settings(control, candidate, stage) if optimizer else ()),
        *(_check_counters(control.end, candidate.end, stage) if optimizer else ()),
        *_check_trained(control, candidate, stage),
        *_check_moved(control, candidate, stage),
    ]
    if candidate.loaded is not None:
        problems += _check_edited(candidate.loaded, candidate.end, stage)
    return problems


@dataclass(frozen=True, slots=True)
class _Beside:
    """How far the average of the model lies from it (None: no average), and the norms of buffers."""

    lag: float | None
    buffers: Mapping[str, float]


def _beside(told: Mapping[str, Any]) -> _Beside:
    lag = told["average_lag"]
    return _Beside(None if lag is None else number(lag), {name: number(norm) for name, norm in told["buffers"].items()})


def check_beside(
    controls: Sequence[Body], candidate: Body | None, stage: str, *, floor: float, factor: float
) -> list[Problem]:
    """Compares how far the average of the model lies from it, and the norms of buffers, after the window.

    Both follow the parameters, so that their deviations are those of many updates: the limit is `factor` times what the
    controls differ by, and at least ten times the `floor` of one tensor's change. A buffer outside is a warning: some
    are statistics of one rank's own samples, which another layout deals otherwise.

    Args:
        controls: the end states of the controls, the reference first.
        candidate: that of the moved job.
        stage: for the findings' place.
        floor: of `parameter_delta`. factor: of the same.
    """
    told = [_beside(body["beside"]) for body in (*controls, candidate) if body is not None and body.get("beside")]
    if candidate is None or not candidate.get("beside") or len(told) < 2:
        return []
    reference, *others, found = told

    def limit(values: Sequence[float]) -> float:
        return max(10 * floor, factor * max((deviation(values[0], value) for value in values[1:]), default=0.0))

    problems: list[Problem] = []
    lags = [each.lag for each in (reference, *others) if each.lag is not None]
    lag = found.lag
    if lags and lag is not None and (distance := deviation(lags[0], lag)) > (most := limit(lags)):
        problems.append(
            Problem(
                "SR-UPD-LAG",
                "after the window the average of the model lies at another distance from it than the control's",
                where={"stage": stage, "key": "average"},
                expected=f"{lags[0]:.9g} within {most:.3g}",
                found=f"{lag:.9g}, a deviation of {distance:.3g}",
                hint="it decays at another rate: one that is computed from ranks, samples or passes, or its update is "
                "called another number of times",
            )
        )
    for name, expected in reference.buffers.items():
        values = [expected, *(other.buffers.get(name, expected) for other in others)]
        norm = found.buffers.get(name)
        if norm is not None and deviation(expected, norm) > limit(values):
            problems.append(
                Problem(
                    "SR-UPD-BUFFER",
                    f"after the window the buffer {name} has another norm than in the control",
                    Severity.WARNING,
                    where={"stage": stage, "tensor": f"buffer:{name}"},
                    expected=f"{expected:.9g} within {limit(values):.3g}",
                    found=f"{norm:.9g}",
                    hint="right for statistics of one rank's own samples; otherwise its momentum, or what it follows, "
                    "changed with the move",
                )
            )
    return problems


def check_motion(name: str, control: Observed, first_update: int, num_updates: int) -> list[Problem]:
    """Returns SR-CONTROL-STILL if no update of a control's window moved a parameter: agreeing with it means nothing."""
    window = range(first_update, first_update + num_updates)
    norms = [item.update_norm for item in control.updates if item.update in window and item.update_norm is not None]
    if not norms or any(norms):
        return []
    return [
        Problem(
            "SR-CONTROL-STILL",
            f"none of the control's {len(norms)} updates moved a parameter",
            where={"stage": "control", "control": name, "update": first_update},
            expected="updates that move the model",
            found="update norms of 0",
            hint="the model given to recorder.attach is not the one that is trained, or every learning rate is 0: no "
            "candidate could differ from this control",
        )
    ]


def _settings(body: Body) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in group["hyperparameters"].items() if key not in _SCHEDULED}
        for group in body.get("groups", ())
        for name in group["params"]
    }


def _differing(one: Body, other: Body) -> dict[tuple[str, str, str], tuple[Any, Any, list[str]]]:
    """Returns the settings that differ, with both values and the parameters of which they do."""
    first, second = _settings(one), _settings(other)
    found: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}
    for name in (name for name in first if name in second):
        for setting in dict.fromkeys([*first[name], *second[name]]):
            a, b = first[name].get(setting, MISSING), second[name].get(setting, MISSING)
            if not same_plain(a, b):
                found.setdefault((setting, repr(a), repr(b)), (a, b, []))[2].append(name)
    return found


def _check_settings(control: Span, candidate: Span, stage: str) -> Iterator[Problem]:
    """Settings in which the two part during the window; those that differed from the start are judged at load."""
    before = {setting for setting, _, _ in _differing(control.loaded or {}, candidate.loaded or {})}
    for (setting, _, _), (expected, found, names) in _differing(control.end or {}, candidate.end or {}).items():
        if setting not in before:
            message = f"after the window {setting} of {_several(names)} is not the control's"
            yield _setting(message, setting, names, stage)(expected, found, Severity.ERROR)
    known = set(_settings(control.loaded or {})) ^ set(_settings(candidate.loaded or {}))
    one, other = set(_settings(control.end or {})), set(_settings(candidate.end or {}))
    if odd := sorted((one ^ other) - known):
        yield Problem(
            "SR-UPD-SETTING",
            f"after the window {_several(odd)} is in a parameter group of one job and in none of the other",
            where={"stage": stage, "tensor": f"param:{odd[0]}"},
            expected=f"{len(one)} parameters in groups",
            found=f"{len(other)}",
            hint="the script regroups or unfreezes parameters while it trains, by something that changed with the move",
        )


def _check_edited(loaded: Body, end: Body, stage: str) -> Iterator[Problem]:
    """A setting that changed between loading and the end was not compared with the checkpoint as it was used."""
    for (setting, _, _), (expected, found, names) in _differing(loaded, end).items():
        if setting not in _CYCLED:
            message = f"{setting} of {_several(names)} changed between loading and the end of the window"
            yield _setting(message, setting, names, stage)(expected, found, Severity.WARNING)


def _setting(message: str, setting: str, names: Sequence[str], stage: str) -> Any:
    def made(expected: Any, found: Any, severity: Severity) -> Problem:
        return Problem(
            "SR-UPD-SETTING",
            message,
            severity,
            where={"stage": stage, "tensor": f"param:{names[0]}", "key": setting},
            expected=expected,
            found=found,
            hint="right if the run schedules it; otherwise the script sets it after the checkpoint was loaded, and the "
            "saved value is lost",
        )

    return made


def _check_counters(control: Body, candidate: Body, stage: str) -> Iterator[Problem]:
    one, other = (
        {key: body["value"] for key, body in each.get("counters", {}).items()} for each in (control, candidate)
    )
    odd = [key for key in one if key in other and not same_plain(one[key], other[key])]
    if odd:
        yield Problem(
            "SR-UPD-COUNTER",
            f"after the window {len(odd)} step counters are not the control's",
            where={"stage": stage, "tensor": odd[0]},
            expected=one[odd[0]],
            found=other[odd[0]],
            hint="the optimizer stepped these parameters another number of times: a step was skipped or made twice",
        )


def _check_trained(control: Span, candidate: Span, stage: str) -> Iterator[Problem]:
    """What trains, which tensors are tied, and their types, where the two agreed about it after loading."""
    (was, one), (is_, other) = (_tensors(control), _tensors(candidate))
    for field, what in (("trainable", "trains"), ("aliases", "is tied"), ("dtype", "has its type")):
        odd = [
            key
            for key in one
            if key in other
            and one[key].get(field) != other[key].get(field)
            and was.get(key, {}).get(field) == is_.get(key, {}).get(field)
        ]
        if odd:
            yield Problem(
                "SR-UPD-TENSOR",
                f"after the window {_several(odd)} {what} otherwise than in the control",
                where={"stage": stage, "tensor": odd[0]},
                expected=one[odd[0]].get(field),
                found=other[odd[0]].get(field),
                hint="the script changes it while it trains, by something that changed with the move",
            )


def _tensors(span: Span) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return (span.loaded or {}).get("tensors", {}), (span.end or {}).get("tensors", {})


def _check_moved(control: Span, candidate: Span, stage: str) -> Iterator[Problem]:
    """Buffers that follow training in one job and stand still in the other, which hardly any loss sees."""
    before, after = _stood(control), _stood(candidate)
    odd = sorted(key for key in before if key in after and before[key] != after[key])
    if odd:
        yield Problem(
            "SR-UPD-BUFFER",
            f"{_several(odd)} {'stood still' if after[odd[0]] else 'moved'} during the window, unlike in the control",
            where={"stage": stage, "tensor": odd[0]},
            expected="the digest as loaded" if before[odd[0]] else "another digest than as loaded",
            found="the digest as loaded" if after[odd[0]] else "another digest than as loaded",
            hint="running statistics and averages are used in evaluation, when nobody looks for them; are they "
            "updated on this layout, and from this copy of the model?",
        )


def _stood(span: Span) -> dict[str, bool]:
    """Returns, by buffer, whether it is after the window what it was after loading."""
    loaded, end = ((body or {}).get("tensors", {}) for body in (span.loaded, span.end))
    return {
        key: fact["digest"] == end[key]["digest"]
        for key, fact in loaded.items()
        if key.startswith("buffer:") and key in end
    }


def _several(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
