"""Load proof, everything beside tensors and groups: scheduler, saved objects, architecture settings, random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from samerun.core.plain import MISSING, differing_paths, is_opaque, plain, unbox
from samerun.core.schedule import schedulers_of
from samerun.errors import Problem, Severity
from samerun.verify.state.generators import saved_digests

if TYPE_CHECKING:
    from samerun.core.state import LogicalState
    from samerun.verify.load.declare import Declared
from samerun.verify.load.loaded import Loaded

_CONFIG_NAMES = ("config", "model_config", "model_args")
# Objects by the names under which scripts save them, whose kind of failure their name tells.
_KINDS = {
    "scaler": "fp16 scaler",
    "grad_scaler": "fp16 scaler",
    "progress": "counters",
    "settings": "settings that shapes do not show",
}
_OTHER_NAMES = {"scaler": "grad_scaler"}
"""What the recorder calls an object, and what it is saved as by a framework (Megatron) that saves it itself."""
# Settings that name a place or a layout, not an architecture: they may differ between two runs of one model.
_PLACES = frozenset(
    [
        "device",
        "world_size",
        "rank",
        "local_rank",
        "layout",
        "output_dir",
        "save_dir",
        "resume",
        "checkpoint_dir",
        "name_or_path",
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "use_cache",
        "torch_dtype",
        "dtype",
    ]
)


def check_scheduler(loaded: Loaded) -> list[Problem]:
    """Returns differences in the scheduler's state: its position, its base rates, its horizon if it is saved."""
    saved = loaded.state.scheduler
    found = loaded.found.get("scheduler")
    declared = loaded.declared("schedule")
    if saved is None:
        return _check_unsaved(loaded, found, declared)
    if found is None:
        return [
            Problem(
                "SR-LOAD-SCHED",
                "the checkpoint holds a scheduler and the job has none",
                declared.severity,
                where={"key": "scheduler"},
                hint="without it the learning rate stays where it is; give the recorder the restored one",
                expected="a scheduler",
                found="none",
            )
        ]
    parts = [plain(dict(one), "scheduler") for one in schedulers_of(saved)] or [{}]
    elsewhere = "the schedule would go on elsewhere"
    if len(parts) > 1 and not isinstance(found, list):
        first = _leaf_problems("SR-LOAD-SCHED", "scheduler", parts[0], found, declared, elsewhere)
        return [*first, _told_of_one(len(parts))]
    expected = parts if isinstance(found, list) else parts[0]
    return _leaf_problems("SR-LOAD-SCHED", "scheduler", expected, found, declared, elsewhere)


def _told_of_one(saved: int) -> Problem:
    return Problem(
        "SR-LOAD-SCHED",
        f"the checkpoint holds {saved} schedulers and the job told of one; only the first was compared",
        Severity.WARNING,
        where={"key": "scheduler"},
        hint="give the recorder all of them: attach(..., scheduler=[first, second])",
        expected=f"{saved} schedulers",
        found="one",
    )


def _check_unsaved(loaded: Loaded, found: Any, declared: Declared) -> list[Problem]:
    """A schedule that was not saved and begins anew stands at other rates than the optimizer brought back."""
    parts: list[Any] = found if isinstance(found, list) else [found]
    believed = [rate for part in parts if isinstance(part, Mapping) for rate in _numbers(part.get("_last_lr"))]
    saved = [plain(group.hyperparameters.get("lr")) for group in loaded.state.groups]
    rates = [float(rate) for rate in map(unbox, saved) if isinstance(rate, int | float)]
    if len(believed) != len(rates) or np.allclose(sorted(believed), sorted(rates), rtol=1e-6, atol=0.0):
        return []
    return [
        Problem(
            "SR-LOAD-SCHED",
            "the checkpoint holds no scheduler, and the job's stands at other rates than those of the saved groups",
            declared.severity,
            where={"key": "scheduler"},
            hint="it begins anew, with its warm-up: save scheduler.state_dict() with the checkpoint, or make it at its "
            "position",
            expected=rates,
            found=believed,
        )
    ]


def _numbers(value: Any) -> list[float]:
    return [float(item) for item in cast("list[Any]", value)] if isinstance(value, list) else []


def check_objects(loaded: Loaded) -> list[Problem]:
    """Returns differences in the objects that the job names, and names of saved ones that nobody compared."""
    declared = loaded.declared("objects")
    problems: list[Problem] = []
    found: Mapping[str, Any] = loaded.found.get("objects", {})
    for name, value in found.items():
        saved = saved_object(loaded.state, name)
        if saved is MISSING:
            problems.append(_not_saved(name, declared))
        else:
            hint = "the object was not restored, or was changed after it was"
            problems += _leaf_problems("SR-LOAD-OBJECT", name, saved, value, declared, hint)
    compared = {*found, *(_OTHER_NAMES[name] for name in found if name in _OTHER_NAMES), "scheduler", *_CONFIG_NAMES}
    for name in _left_out(loaded.state, compared):
        problems.append(
            Problem(
                "SR-LOAD-OBJECT",
                f"the checkpoint holds {name!r}, and the job did not say what it restored of it",
                Severity.NOTE,
                where={"key": name},
                hint="give it to the recorder as objects={...} to have it compared",
            )
        )
    return problems


def _not_saved(name: str, declared: Declared) -> Problem:
    severity = declared.severity
    return Problem(
        "SR-LOAD-OBJECT",
        f"the job restored {name!r}, which the checkpoint does not hold",
        Severity.WARNING if severity is Severity.ERROR else severity,
        where={"key": name},
        hint="it starts from its initial state; save it with the rest",
        expected="absent",
        found="present",
    )


def _sources(state: LogicalState) -> dict[str, Any]:
    return {**state.objects, **state.data}


def _left_out(state: LogicalState, compared: set[str]) -> list[str]:
    """Returns the top-level names of what is saved beside tensors, groups, scheduler and random state, uncompared."""
    sources = _sources(state)
    streams = {name.partition(".")[0] for name in state.rng}  # compared by check_rng
    places = tuple(f"{place}." for name in compared for place in (name, *_places(sources, name)))
    left = {path.partition(".")[0] for path in _outline(sources) if not f"{path}.".startswith(places)}
    return sorted(left - streams)


def saved_object(state: LogicalState, name: str) -> Any:
    """Returns what a checkpoint holds under `name` as plain data, joined again if it was flattened; else `MISSING`.

    A program may save its objects inside one of its own (`app.sampler`): where `name` stands in exactly one place, that
    is the one which is meant.
    """
    places = _places(_sources(state), name)
    if not places and name in _OTHER_NAMES:
        places = _places(_sources(state), _OTHER_NAMES[name])
    if name in places or len(places) == 1:
        return plain(places[name] if name in places else next(iter(places.values())), name)
    if name == "progress":
        known = {field: getattr(state.progress, field) for field in ("update", "samples", "tokens", "epoch")}
        known = {field: value for field, value in known.items() if value is not None}
        return known or MISSING
    return MISSING


def _places(sources: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns what is saved under `name` by its dotted place, at whatever depth it lies."""
    found: dict[str, Any] = {}
    for key, value in sources.items():
        at = f".{key}.".find(f".{name}.")
        place = key[: at + len(name)]
        if at >= 0 and place not in found:
            inner = {path[len(place) + 1 :]: item for path, item in sources.items() if path.startswith(f"{place}.")}
            found[place] = value if place == key else _unflatten(inner)
        elif at < 0 and isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            nested = _places({str(inner): item for inner, item in items}, name)
            found |= {f"{key}.{path}": item for path, item in nested.items()}
    return found


def _outline(sources: Mapping[str, Any]) -> list[str]:
    """Returns the dotted paths of everything saved, mappings opened."""
    paths: list[str] = []
    for name, value in sources.items():
        if isinstance(value, Mapping) and value:
            items = cast("Mapping[Any, Any]", value).items()
            paths += [f"{name}.{path}" for path in _outline({str(key): item for key, item in items})]
        else:
            paths.append(name)
    return paths


def _unflatten(flat: Mapping[str, Any]) -> Any:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return _lists(tree)


def _lists(node: Any) -> Any:
    """Turns mappings whose keys are 0, 1, 2, ... back into the lists that they were."""
    if not isinstance(node, dict):
        return node
    tree = {name: _lists(value) for name, value in cast("dict[str, Any]", node).items()}
    if tree and set(tree) == {str(number) for number in range(len(tree))}:
        return [tree[str(number)] for number in range(len(tree))]
    return tree


def _leaf_problems(code: str, name: str, saved: Any, found: Any, declared: Declared, hint: str) -> list[Problem]:
    problems: list[Problem] = []
    for path, expected, value in differing_paths(saved, found):
        if is_opaque(expected) or is_opaque(value) or value == MISSING == expected:
            continue
        severity = declared.grade(expected, value)
        if MISSING in (expected, value) and severity is Severity.ERROR:
            severity = Severity.WARNING
        place = f"{name}.{path}" if path else name
        problems.append(
            Problem(
                code,
                f"{place} differs",
                severity,
                where={"key": place},
                hint=hint,
                expected=expected,
                found=value,
                kind=_KINDS.get(name.rpartition(".")[2]) if code == "SR-LOAD-OBJECT" else None,
            )
        )
    return problems


def check_config(loaded: Loaded) -> list[Problem]:
    """Returns architecture settings that differ: what shapes do not show (heads, activation, rope, eps)."""
    found = loaded.found.get("config")
    saved = next((value for name in _CONFIG_NAMES if (value := saved_object(loaded.state, name)) is not MISSING), None)
    if not isinstance(found, Mapping) or not isinstance(saved, Mapping):
        return []
    problems: list[Problem] = []
    for path, expected, value in differing_paths(saved, found):
        if is_opaque(expected) or is_opaque(value):
            continue
        severity = Severity.ERROR
        if MISSING in (expected, value):
            severity = Severity.WARNING
        if path.rpartition(".")[2] in _PLACES:
            severity = Severity.NOTE
        problems.append(
            Problem(
                "SR-LOAD-CONFIG",
                f"the model's setting {path} differs",
                severity,
                where={"key": path},
                hint="equal shapes do not make it the same function; build the model from the saved configuration",
                expected=expected,
                found=value,
            )
        )
    return problems


def check_rng(loaded: Loaded) -> list[Problem]:
    """Returns ranks with a generator whose state is not a saved one, if the manifest claims that it is kept.

    Every generator that was saved and that the job has: torch's, CUDA's, NumPy's, Python's, each of Megatron's tracker.
    Ranks that a declared policy seeded are left out: `check_policy` looks at the policy.
    """
    if loaded.declared("rng").changes or not loaded.state.rng:
        return []
    saved = saved_digests(loaded.state)
    applied: Mapping[str, Any] = loaded.found.get("rank_rng") or {}
    job = {"torch": loaded.found.get("rng", {}), **(loaded.found.get("generators") or {})}
    problems: list[Problem] = []
    for name in [name for name in job if name in saved]:
        everywhere = set[str]().union(*saved[name].values())
        for rank, found in job[name].items():
            if rank in applied and name not in (applied[rank] or {}).get("kept", ()):
                continue  # seeded by a policy that the job told
            own = saved[name].get(rank) or everywhere
            if found not in own:
                problems.append(_other_state(name, int(rank), own, found))
    return problems


def _other_state(name: str, rank: int, saved: Set[str], found: str) -> Problem:
    which = "random-number state" if name == "torch" else f"state of the {name} generator"
    return Problem(
        "SR-LOAD-OBJECT",
        f"the {which} of rank {rank} is not the saved one",
        kind="random numbers",
        where={"key": "rng", "rank": rank},
        hint="restore it last, just before the first batch; or declare `rng: expected-to-change`",
        expected=sorted(saved),
        found=found,
    )
