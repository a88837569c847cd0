"""Averages of a model (EMA, SWA): saved by name, as `AveragedModel`'s state, or as a list in the model's order.

`torch.optim.swa_utils.AveragedModel` saves the model's own names under `module.` beside a count `n_averaged`. The
`EMAModel` of diffusers and torch_ema save `shadow_params`, a list in the order of `model.parameters()` (diffusers 0.42,
timm 1.0, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence

from samerun.core.state import normalize_fqn
from samerun.errors import Problem, Severity
from samerun.formats.statedict.naming import Named, name_optimizer
from samerun.formats.statedict.optimizer import Group, Member, Optimizer, shape_of
from samerun.formats.statedict.saved import SavedModel
from samerun.formats.statedict.stored import Stored

_SHOWN = 4


def name_averages(
    lists: Sequence[tuple[str, Sequence[Stored]]], mains: Sequence[SavedModel], named: Sequence[Named]
) -> tuple[list[SavedModel], list[Problem]]:
    """Names averages that were saved as lists. `named` are the optimizers, which know the same parameters.

    What fits no parameter is called `#<position>`.
    """
    models: list[SavedModel] = []
    problems: list[Problem] = []
    for name, tensors in lists:
        optimizer = _as_optimizer(name, tensors)
        names = _names_of_optimizer(tensors, named)
        if names is None:
            found = name_optimizer(optimizer, mains)
            names = [found.names[key] for key in optimizer.keys]
            problems += _explain(name, tensors, names, len(found.open), mains)
        models.append(SavedModel(name, dict(zip(names, tensors, strict=True)), ordered=False, average=True))
    return models, problems


def _as_optimizer(name: str, tensors: Sequence[Stored]) -> Optimizer:
    """Returns the list as an optimizer over all parameters in one group: what it means by position is the same."""
    members = {str(number): Member(str(number), {"master": tensor}) for number, tensor in enumerate(tensors)}
    return Optimizer(name, members, (Group(tuple(members), (), {}),), True, {})


def _names_of_optimizer(tensors: Sequence[Stored], named: Sequence[Named]) -> list[str] | None:
    """Returns the names that an optimizer of one group, which lists the same parameters in the same order, gives."""
    for one in named:
        keys = one.optimizer.groups[0].keys if len(one.optimizer.groups) == 1 else ()
        shapes = [shape_of(one.optimizer.members.get(key)) for key in keys]
        agree = len(keys) == len(tensors) and all(
            shape in (None, tensor.shape) for shape, tensor in zip(shapes, tensors, strict=True)
        )
        if keys and agree and not any(one.names[key].startswith("#") for key in keys):
            return [one.names[key] for key in keys]
    return None


def _explain(
    name: str, tensors: Sequence[Stored], names: Sequence[str], num_open: int, mains: Sequence[SavedModel]
) -> list[Problem]:
    if not mains:
        return [_no_model(name, len(tensors))]
    nameless = [number for number, fqn in enumerate(names) if fqn.startswith("#")]
    if nameless:
        return [_unmatched(name, tensors, nameless, mains)]
    return [
        Problem(
            "SR-EMA-ORDER",
            f"the average {name} is a list of {len(names)} tensors without names; they were named by the model's order "
            f"and by shape" + (f", which leaves {num_open} open" if num_open else ""),
            severity=Severity.WARNING if num_open else Severity.NOTE,
            where={"key": name},
            hint="a model whose parameters come in another order gets another parameter's average without an error",
        )
    ]


def _unmatched(name: str, tensors: Sequence[Stored], nameless: Sequence[int], mains: Sequence[SavedModel]) -> Problem:
    held = sum(tensor.dtype.kind == "float" for model in mains[:1] for tensor in model.tensors.values())
    shapes = ", ".join(str(list(tensors[number].shape)) for number in nameless[:_SHOWN])
    return Problem(
        "SR-EMA-UNMATCHED",
        f"the {len(tensors)} tensors of the average {name} do not fit the model's parameters in its order; "
        f"{len(nameless)} stay numbers, of shape {shapes}",
        where={"key": name},
        expected=f"at most {held} tensors, of the parameters' shapes",
        found=f"{len(tensors)} tensors",
        hint="loaders of such lists pair them with parameters until one of the two ends, and say nothing; the average "
        "is of another model, or part of it was lost",
    )


def _no_model(name: str, count: int) -> Problem:
    return Problem(
        "SR-EMA-UNMATCHED",
        f"the average {name} is a list of {count} tensors without names, and there is no model here to name them",
        severity=Severity.WARNING,
        where={"key": name},
        hint="inspect it together with its model, or save the average by name",
    )


def prefixes_of(averages: Sequence[SavedModel]) -> dict[int, str]:
    """Returns, by average, what its names must begin with: nothing for the first, its own name where others clash."""
    taken: set[str] = set()
    prefixes: dict[int, str] = {}
    for model in averages:
        names = {normalize_fqn(name) for name in model.tensors}
        prefixes[id(model)] = f"{model.name}." if names & taken and model.name else ""
        taken |= names
    return prefixes
