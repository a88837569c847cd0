"""From saved optimizers and models to names: which model an optimizer drives, and which parameter each key means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from samerun.core.state import normalize_fqn
from samerun.errors import Problem, Severity
from samerun.formats.statedict.kinship import Distance, distance, open_owner
from samerun.formats.statedict.optimizer import Optimizer, has_state, shape_of
from samerun.formats.statedict.order import Candidate, Matching, Position, match_order, match_shapes
from samerun.formats.statedict.recognise import is_buffer_name, looks_like_model, looks_other
from samerun.formats.statedict.registration import match_registration
from samerun.formats.statedict.saved import SavedModel
from samerun.formats.statedict.stored import Stored
from samerun.formats.statedict.ties import find_shared

_SHOWN = 4


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """An optimizer with a name for every key: `names[key]`; `#key` for one that could not be named.

    `model` is the saved model that it drives, None if that is not in the checkpoint. `open` are keys whose name is the
    likeliest of several that fit: nothing in the files decides it.
    """

    optimizer: Optimizer
    model: SavedModel | None
    names: Mapping[str, str]
    problems: tuple[Problem, ...] = ()
    open: frozenset[str] = frozenset()


def name_optimizers(optimizers: Sequence[Optimizer], models: Sequence[SavedModel]) -> list[Named]:
    """Names the parameters of all optimizers. One model's parameters are dealt to all that know them by position.

    Optimizers whose names say most come first. A model that an optimizer drives already is taken for another one only
    if no other fits as well.
    """
    nameless = [optimizer for optimizer in optimizers if optimizer.positional and not _has_names(optimizer)]
    together = _name_together(nameless, models[0]) if len(nameless) > 1 and len(models) == 1 else None
    named: dict[int, Named] = {}
    for number in sorted(range(len(optimizers)), key=lambda number: _least_distance(optimizers[number], models)):
        optimizer = optimizers[number]
        if together is not None and optimizer in nameless:
            named[number] = together[nameless.index(optimizer)]
            continue
        driven = [one.model for one in named.values()]
        named[number] = name_optimizer(optimizer, models, driven)
    return [named[number] for number in range(len(optimizers))]


def _least_distance(optimizer: Optimizer, models: Sequence[SavedModel]) -> Distance:
    return min((distance(optimizer.name, model.name) for model in models), default=(0, False, 0))


def _has_names(optimizer: Optimizer) -> bool:
    return len(optimizer.names) == len(optimizer.keys) and bool(optimizer.names)


def name_optimizer(
    optimizer: Optimizer, models: Sequence[SavedModel], driven: Sequence[SavedModel | None] = ()
) -> Named:
    """Names an optimizer's parameters, and finds the model among `models` that has them.

    Where several models have them alike, what the two are called decides; where that does not either, one that no
    other optimizer drives (`driven`) is taken, with a finding.
    """
    if not optimizer.positional or _has_names(optimizer):
        labels = optimizer.names if optimizer.positional else {key: key for key in optimizer.keys}
        names = {key: normalize_fqn(name) for key, name in labels.items()}
        every = set(names.values())
        found = [Named(optimizer, model, names) for model in models if _count_names(every, model)]
        empty = Named(optimizer, None, names)
    else:
        found = [_name_by_position(optimizer, model) for model in models]
        empty = Named(optimizer, None, {key: f"#{key}" for key in optimizer.keys}, (_no_model(optimizer),))
    ranked = sorted(((*_doubt(one), one.model in driven, number) for number, one in enumerate(found)))
    if not ranked:
        return empty
    best = found[ranked[0][-1]]
    fitting = [found[number].model for *doubt, held, number in ranked if doubt == list(ranked[0][:-2]) and not held]
    alike = [model.name for model in fitting if model is not None]
    return replace(best, problems=(*best.problems, open_owner(optimizer.name, alike))) if alike[1:] else best


def _doubt(named: Named) -> tuple[int, int, Distance, int]:
    """Returns how little speaks for a naming: keys without a name or not in the model, findings, and what the
    optimizer and the model are called."""
    assert named.model is not None
    nameless = len(named.names) - _count_names(set(named.names.values()), named.model)
    called = named.model.name
    unlikely = 0 if looks_like_model(called) else 2 if looks_other(called) else 1
    findings = sum(problem.severity is not Severity.NOTE for problem in named.problems)
    return nameless, findings, distance(named.optimizer.name, called), unlikely


def _count_names(names: set[str], model: SavedModel) -> int:
    return len(names.intersection(map(normalize_fqn, model.tensors)))


def candidates_of(model: SavedModel, *, unlikely: bool) -> list[Candidate]:
    """Returns the tensors that an optimizer may hold: floating, each shared one once, no known buffers.

    With `unlikely`, also those that are named like buffers, and the originals of modules that PEFT trains a copy of.
    """
    aliases = {name for names in find_shared(model.tensors, frozenset()).values() for name in names}
    aliases |= model.aliases.keys()
    return [
        Candidate(normalize_fqn(name), tensor.shape)
        for name, tensor in model.tensors.items()
        if _may_train(tensor)
        and name not in aliases
        and name not in (model.buffers or ())
        and (unlikely or not (is_buffer_name(name) or _has_trained_copy(name, model)))
    ]


def _has_trained_copy(name: str, model: SavedModel) -> bool:
    """Whether PEFT (0.21) freezes a tensor and trains a copy of it (`modules_to_save`)."""
    module, original, tail = name.rpartition(".original_module.")
    copies = f"{module}.modules_to_save."
    return bool(original) and any(other.startswith(copies) and other.endswith(f".{tail}") for other in model.tensors)


def _may_train(tensor: Stored) -> bool:
    return tensor.dtype.kind in ("float", "complex")


def _name_together(optimizers: Sequence[Optimizer], model: SavedModel) -> list[Named] | None:
    """Deals one model's parameters to the groups of several optimizers, none to two. Returns None if that fails."""
    groups = [
        [Position(f"{number} {place.key}", place.shape) for place in group]
        for number, optimizer in enumerate(optimizers)
        for group in _groups_of(optimizer)
    ]
    for unlikely in (False, True):
        found = _deal(model, candidates_of(model, unlikely=unlikely), groups)
        if found is None:
            continue
        named: list[Named] = []
        for number, optimizer in enumerate(optimizers):
            mine = {f"{number} {key}": key for key in optimizer.keys}
            names = {key: found[0].names[joint] for joint, key in mine.items() if joint in found[0].names}
            doubts = [frozenset(mine[joint] for joint in part if joint in mine) for part in (found[0].open, found[1])]
            matching = Matching(names, doubts[0])
            problems = _explain(optimizer, model, matching, doubts[1])
            every = {key: names.get(key, f"#{key}") for key in optimizer.keys}
            named.append(Named(optimizer, model, every, tuple(problems), doubts[0] | doubts[1]))
        return named
    return None


def _groups_of(optimizer: Optimizer) -> list[list[Position]]:
    groups = [[Position(key, shape_of(optimizer.members.get(key))) for key in group.keys] for group in optimizer.groups]
    return groups or [[Position(key, shape_of(member)) for key, member in optimizer.members.items()]]


def _name_by_position(optimizer: Optimizer, model: SavedModel) -> Named:
    groups = _groups_of(optimizer)
    candidates = candidates_of(model, unlikely=False)
    found = _match(optimizer, model, candidates, groups)
    if found is None:
        candidates = candidates_of(model, unlikely=True)
        found = _match(optimizer, model, candidates, groups)
    if found is None:
        matching = match_shapes(candidates, groups)
        found = matching, [_unmatched(optimizer, model, matching)]
    matching, problems = found
    fixed = {key: normalize_fqn(name) for key, name in optimizer.names.items()}
    names = {key: fixed.get(key) or matching.names.get(key) or f"#{key}" for key in optimizer.keys}
    return Named(optimizer, model, names, tuple(problems), matching.open - fixed.keys())


def _match(
    optimizer: Optimizer, model: SavedModel, candidates: Sequence[Candidate], groups: Sequence[Sequence[Position]]
) -> tuple[Matching, list[Problem]] | None:
    found = _deal(model, candidates, groups)
    if found is None:
        return None
    matching, assumed = found
    return replace(matching, open=matching.open | assumed), _explain(optimizer, model, matching, assumed)


def _deal(
    model: SavedModel, candidates: Sequence[Candidate], groups: Sequence[Sequence[Position]]
) -> tuple[Matching, frozenset[str]] | None:
    """Deals candidates to groups. Returns the matching and the keys that only convention tells; None if none fits."""
    if model.ordered:
        matching = match_order(candidates, groups)
        return (matching, frozenset[str]()) if matching else None
    registered = match_registration(candidates, groups)
    return (registered.matching, registered.assumed) if registered else None


def _explain(optimizer: Optimizer, model: SavedModel, matching: Matching, assumed: frozenset[str]) -> list[Problem]:
    if model.ordered:
        return _explain_order(optimizer, matching)
    return _explain_registration(optimizer, matching, assumed)


def _explain_order(optimizer: Optimizer, matching: Matching) -> list[Problem]:
    stateful = sorted((key for key in matching.open if has_state(optimizer.members.get(key))), key=int)
    if not stateful:
        return [_by_position(optimizer, matching)]
    shown = _some([f"{key} ({matching.names[key]}?)" for key in stateful])
    return [
        Problem(
            "SR-OPT-OPEN",
            f"optimizer state is kept by position, and {len(stateful)} positions fit more than one parameter: {shown}",
            severity=Severity.WARNING,
            where={"key": optimizer.name or "state"},
            hint="they were given to the earliest parameter of that shape; if groups were built in another order than "
            "the model's, moments belong to others. Save param_names (build the optimizer from named_parameters())",
        )
    ]


def _by_position(optimizer: Optimizer, matching: Matching) -> Problem:
    return Problem(
        "SR-OPT-ORDER",
        f"optimizer state is kept by position; all {len(matching.names)} positions were named by the model's order and "
        "by shape",
        severity=Severity.NOTE,
        where={"key": optimizer.name or "state"},
        hint="torch compares only the number of parameters when it loads this: a model whose parameters come in "
        "another order gets the wrong moments without an error",
    )


def _explain_registration(optimizer: Optimizer, matching: Matching, assumed: frozenset[str]) -> list[Problem]:
    assumed |= {key for key in matching.open if _is_shapeless(optimizer, key)}
    if not assumed:
        return [_by_position(optimizer, matching)]
    shown = _some(sorted({matching.names[key] for key in assumed}))
    return [
        Problem(
            "SR-OPT-ASSUMED",
            f"optimizer state is kept by position and the model's file sorts its names: {len(assumed)} of "
            f"{len(matching.names)} were told apart only by the usual order of registration: {shown}",
            severity=Severity.WARNING,
            where={"key": optimizer.name or "state"},
            hint="compare with the order of model.named_parameters(); shapes rule out a wrong order only where they "
            "differ (query, key and value projections do not)",
        )
    ]


def _is_shapeless(optimizer: Optimizer, key: str) -> bool:
    """Whether a parameter has state that does not show its shape: quantised moments, an optimizer that is not known."""
    member = optimizer.members.get(key)
    return has_state(member) and shape_of(member) is None


def _unmatched(optimizer: Optimizer, model: SavedModel, matching: Matching) -> Problem:
    total = len(optimizer.keys)
    return Problem(
        "SR-OPT-UNMATCHED",
        f"the optimizer's {total} positions do not fit the {len(model.tensors)} tensors of {model.name or 'the model'} "
        f"in any order that keeps each group in the model's order; {total - len(matching.names)} stay numbers",
        where={"key": optimizer.name or "state"},
        hint="the optimizer was built over other or more parameters than the model saved here has, or its groups are "
        "not in the model's order",
    )


def _no_model(optimizer: Optimizer) -> Problem:
    return Problem(
        "SR-OPT-UNMATCHED",
        f"the optimizer knows its {len(optimizer.keys)} parameters by position only and there is no model to name them",
        where={"key": optimizer.name or "state"},
        hint="inspect the checkpoint together with its model",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
