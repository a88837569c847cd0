"""Load proof, optimizer settings: groups and hyperparameters by parameter name, what the class does, step counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samerun.core.plain import MISSING, plain, same_plain, unbox
from samerun.core.state import TensorKey
from samerun.errors import Problem, Severity
from samerun.verify.state.match import group_settings, is_counter

if TYPE_CHECKING:
    from samerun.verify.load.loaded import Loaded

_RATES = frozenset({"lr", "initial_lr", "max_lr", "min_lr"})
_SEMANTICS = frozenset({"amsgrad", "maximize", "decoupled_weight_decay", "nesterov", "decoupled"})
# How a step is carried out, not what it computes (up to rounding). Megatron's says which ranks share a group's state.
_EXECUTION = frozenset({"foreach", "fused", "capturable", "differentiable", "is_expert_parallel"})
_COUNTERS = frozenset({"step"})
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class _Difference:
    name: str
    expected: str
    found: str


def check_groups(loaded: Loaded) -> list[Problem]:
    """Returns hyperparameters that differ, by parameter name and not by position, and parameters in no group."""
    saved = group_settings(loaded.state)
    held = {name: group["hyperparameters"] for group in loaded.found["groups"] for name in group["params"]}
    problems = _check_strangers(loaded)
    if not saved:
        return problems
    problems += _check_membership(loaded, saved, held)
    params: dict[_Difference, list[str]] = {}
    values: dict[_Difference, tuple[Any, Any]] = {}
    for name in (name for name in held if name in saved):
        for setting in dict.fromkeys([*saved[name], *held[name]]):
            expected, found = saved[name].get(setting, MISSING), held[name].get(setting, MISSING)
            if setting not in _COUNTERS and not same_plain(expected, found):
                difference = _Difference(setting, repr(expected), repr(found))
                params.setdefault(difference, []).append(name)
                values[difference] = (expected, found)
    return problems + [
        _setting_problem(loaded, difference.name, *values[difference], names) for difference, names in params.items()
    ]


def _check_strangers(loaded: Loaded) -> list[Problem]:
    """An optimizer made before the model was wrapped or moved steps tensors that nothing reads."""
    return [
        Problem(
            "SR-LOAD-GROUP",
            f"the optimizer steps {group['unknown_params']} tensors that are not the model's parameters",
            where={"key": f"group {number}"},
            hint="make the optimizer after the model has been parallelised and moved to its device",
            expected=0,
            found=group["unknown_params"],
        )
        for number, group in enumerate(loaded.found["groups"])
        if group.get("unknown_params")
    ]


def _check_membership(loaded: Loaded, saved: Mapping[str, Any], held: Mapping[str, Any]) -> list[Problem]:
    severity = loaded.declared("optimizer").severity
    known = {name for group in loaded.state.groups for name in group.params}
    aliases = {
        key.partition(":")[2]: fact.get("aliases", ())
        for key, fact in loaded.found["tensors"].items()
        if key.startswith("param:")
    }
    covered = set(held) | {alias for name in held for alias in aliases.get(name, ())}
    problems: list[Problem] = []
    if lost := [name for name in known if name not in covered and not _aliased(loaded, name, covered)]:
        problems.append(
            _membership_problem(severity, "in the checkpoint's parameter groups and in none now", sorted(lost))
        )
    if gained := [name for name in held if name not in saved and not set(aliases.get(name, ())) & set(saved)]:
        problems.append(_membership_problem(severity, "in a parameter group now and in none in the checkpoint", gained))
    return problems


def _aliased(loaded: Loaded, name: str, covered: set[str]) -> bool:
    entry = loaded.state.tensors.get(f"param:{name}")
    return entry is not None and bool(set(entry.aliases) & covered)


def _membership_problem(severity: Severity, what: str, names: list[str]) -> Problem:
    return Problem(
        "SR-LOAD-GROUP",
        f"{_several(names)} {'is' if len(names) == 1 else 'are'} {what}",
        severity,
        where={"tensor": f"param:{names[0]}"},
        hint="a parameter in no group never moves; freeze and group parameters as the saved run did",
        expected="the same parameters in groups",
        found=f"{len(names)} that differ",
    )


def _several(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def _setting_problem(loaded: Loaded, setting: str, expected: Any, found: Any, names: list[str]) -> Problem:
    rate = setting in _RATES
    declared = loaded.declared("schedule" if rate else "optimizer")
    severity = declared.grade(expected, found)
    if setting in _EXECUTION:
        severity = Severity.NOTE
    elif MISSING in (expected, found) and severity is Severity.ERROR:
        severity = Severity.WARNING
    return Problem(
        "SR-LOAD-LR" if rate else "SR-LOAD-CLASS" if setting in _SEMANTICS else "SR-LOAD-GROUP",
        f"{setting} of {_several(names)} differs",
        severity,
        where={"tensor": f"param:{names[0]}", "key": setting},
        hint=_setting_hint(setting),
        expected=expected,
        found=found,
    )


def _setting_hint(setting: str) -> str:
    if setting in _RATES:
        return (
            "restore the optimizer's groups and the scheduler after both exist; look for a rate set on the command line"
        )
    if setting in _EXECUTION:
        return "the same update up to rounding"
    return "the optimizer's constructor arguments won over the saved ones, or groups were matched by position"


def check_optimizer_class(loaded: Loaded, optimizer: str | None) -> list[Problem]:
    """Returns a difference between the optimizer's class and the one that the manifest or the saved slots tell of."""
    severity = loaded.declared("optimizer").severity
    problems: list[Problem] = []
    classes = [body["class"] for body in loaded.found.get("optimizers", ())]
    # A run with several optimizers, such as Muon beside AdamW, names one of them.
    if optimizer and classes and optimizer.lower() not in map(str.lower, classes):
        problems.append(_class_problem(severity, "the optimizer's class", optimizer, ", ".join(classes)))
    for body in loaded.found.get("optimizers", ()):
        decay = _saved_decay(loaded)
        if decay and body["decay"] and body["decay"] != decay and not _decay_in_groups(loaded):
            problems.append(_class_problem(severity, "how weight decay is applied", decay, body["decay"]))
    return problems


def _decay_in_groups(loaded: Loaded) -> bool:
    return any("decoupled_weight_decay" in group["hyperparameters"] for group in loaded.found["groups"])


def _saved_decay(loaded: Loaded) -> str | None:
    flags = {
        bool(group.hyperparameters["decoupled_weight_decay"])
        for group in loaded.state.groups
        if "decoupled_weight_decay" in group.hyperparameters
    }
    return None if len(flags) != 1 else "decoupled" if flags == {True} else "coupled"


def _class_problem(severity: Severity, what: str, expected: str, found: str) -> Problem:
    return Problem(
        "SR-LOAD-CLASS",
        f"{what} differs",
        severity,
        where={"key": "optimizer"},
        hint="the same numbers under another update rule are another run",
        expected=expected,
        found=found,
    )


def check_counters(loaded: Loaded) -> list[Problem]:
    """Returns step counters that differ, wherever each side keeps them: per parameter or per group, in any type."""
    saved = _saved_counters(loaded)
    severity = loaded.declared("optimizer").severity
    differing: dict[tuple[Any, Any], list[str]] = {}
    problems: list[Problem] = []
    names = _job_names(loaded)
    for key, body in loaded.found["counters"].items():
        fqn = TensorKey.parse(key).fqn
        expected = saved.get(fqn, MISSING)
        if not same_plain(expected, body["value"]):
            differing.setdefault((expected, body["value"]), []).append(fqn)
        problems += _check_odd_counter(key, body)
    for fqn in saved:
        job = names.get(fqn, fqn)
        if saved and f"optim.step:{job}" not in loaded.found["counters"] and _has_state(loaded, job):
            differing.setdefault((saved[fqn], MISSING), []).append(job)
    return problems + [
        Problem(
            "SR-LOAD-STEP",
            f"the step counter of {_several(fqns)} differs",
            _counter_severity(severity, expected, found),
            where={"tensor": f"optim.step:{fqns[0]}"},
            hint="the counter sets the bias correction of the next updates",
            expected=expected,
            found=found,
        )
        for (expected, found), fqns in differing.items()
    ]


def _counter_severity(severity: Severity, expected: Any, found: Any) -> Severity:
    """A counter that the checkpoint does not have and that is 0 or 1 comes from a dummy step."""
    dummy = expected == MISSING and isinstance(found, int | float) and found <= 1
    return Severity.WARNING if dummy and severity is Severity.ERROR else severity


def _has_state(loaded: Loaded, fqn: str) -> bool:
    return any(key.startswith("optim.") and TensorKey.parse(key).fqn == fqn for key in loaded.found["tensors"])


def _check_odd_counter(key: str, body: Mapping[str, Any]) -> list[Problem]:
    return [
        Problem(
            "SR-LOAD-REPLICA",
            f"the step counter on rank {odd['rank']} is not that of the other ranks",
            where={"tensor": key, "rank": odd["rank"]},
            hint="the replicas would take different updates: load the optimizer state on every rank",
            expected=body["value"],
            found=odd["value"],
        )
        for odd in body.get("odd", ())
    ]


def _job_names(loaded: Loaded) -> dict[str, str]:
    """Returns the job's name of each parameter by the checkpoint's, where a tie is saved under another name."""
    return {
        TensorKey.parse(pair.saved).fqn: TensorKey.parse(pair.key).fqn
        for pair in loaded.match.pairs
        if pair.key.startswith("optim.")
    }


def _saved_counters(loaded: Loaded) -> dict[str, float]:
    """Returns the checkpoint's step of each parameter by the job's name, from its own counter or its group's."""
    names = _job_names(loaded)
    counters: dict[str, float] = {}
    with_state = {entry.key.fqn for entry in loaded.state.tensors.values() if entry.key.role == "optim"}
    for group in loaded.state.groups:
        if group.hyperparameters.get("step") is None:
            continue
        step: Any = unbox(plain(group.hyperparameters["step"]))
        counters |= {names.get(fqn, fqn): float(step) for fqn in group.params if fqn in with_state}
    for key, entry in loaded.state.tensors.items():
        if is_counter(entry.key) and entry.num_elements == 1:
            counters[names.get(entry.key.fqn, entry.key.fqn)] = loaded.number(key)
    return counters


def check_update(loaded: Loaded) -> list[Problem]:
    """Returns a difference between the update that the job believes it continues after and the checkpoint's own."""
    expected, found = loaded.state.progress.update, loaded.found.get("update")
    if expected is None or found is None or expected == found:
        return []
    return [
        Problem(
            "SR-LOAD-STEP",
            "the job continues after another update than the checkpoint holds",
            where={"key": "update"},
            hint="the first update's number, and with it the schedule and the samples, would be off",
            expected=expected,
            found=found,
        )
    ]
