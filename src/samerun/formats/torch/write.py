"""Lays out one `torch.save` file that a stock script loads: `{"model", "optimizer", "lr_scheduler", ...}`.

`torch.load` opens it with `weights_only=True`, `model.load_state_dict(strict=True)` takes the model under its own
names, and `optimizer.load_state_dict` the optimizer by position, in the order of the groups. RNG, data and everything
else keep the names that the source gave them; only the three names above are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role
from samerun.core.written import DestinationPlan
from samerun.errors import Problem
from samerun.formats.base import WriteSource
from samerun.formats.statedict.carry import carry_objects
from samerun.formats.statedict.optimizers import plan_optimizer
from samerun.formats.statedict.trees import check_positions, write_model, write_optimizer
from samerun.formats.torchfile.write import Pieces, add_archive, gather_slots

MODEL, OPTIMIZER, SCHEDULER, AVERAGE = "model", "optimizer", "lr_scheduler", "ema"
FILE = "checkpoint.pt"


def lay_out(source: WriteSource, layout: Layout | None = None, *, bare: bool = False) -> DestinationPlan:
    """Plans the file. A layout changes nothing in it. Tied weights share one storage under all of their names.

    With `bare`, for a state that is a model alone, the file is the model's state dict and not a mapping that holds it.
    """
    state = source.state
    if bare:
        return _file(write_model(state, Role.PARAM, Role.BUFFER))
    optimizer = plan_optimizer(state)
    carried = carry_objects(state, numpy=False)
    sections = carried.sections
    if carried.scheduler in sections:  # before everything else: the first that looks like a scheduler is taken for it
        others = ((name, value) for name, value in sections.items() if name != carried.scheduler)
        rest = {f"{name}_objects" if name == SCHEDULER else name: value for name, value in others}
        sections = {SCHEDULER: sections[carried.scheduler], **rest}
    tree: dict[str, Any] = {}
    for name, section in (
        (MODEL, write_model(state, Role.PARAM, Role.BUFFER)),
        (AVERAGE, write_model(state, Role.EMA)),
        (OPTIMIZER, write_optimizer(optimizer)),
    ):
        if section:
            tree[name] = section
    loose, misplaced = _place_in_slots(state, sections, tree.get(OPTIMIZER, {}))
    sections = loose
    taken = [name for name in sections if name in tree]
    tree |= {f"{name}_objects" if name in taken else name: value for name, value in sections.items()}
    return replace(
        _file(tree),
        dropped={**carried.dropped, **optimizer.dropped},
        problems=(*carried.problems, *optimizer.problems, *misplaced, *check_positions(state)),
    )


def _file(tree: Mapping[str, Any]) -> DestinationPlan:
    pieces = Pieces()
    add_archive(pieces, tree, FILE.removesuffix(".pt"))
    return DestinationPlan(
        format="torch", files=(pieces.file(FILE),), tensors=gather_slots([pieces.slots]), single_file=True
    )


def _place_in_slots(
    state: LogicalState, sections: Mapping[str, Any], optimizer: dict[str, Any]
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """Puts what an optimizer keeps beside tensors (the history lists of LBFGS) back under its parameters.

    Such objects are named by position. Only of a source that counts as this file does is the position theirs here.
    """
    found = {name: section["state"] for name, section in sections.items() if _holds_slots(section)}
    loose = {name: section for name, section in sections.items() if name not in found}
    for name, held in found.items():
        rest = {key: value for key, value in sections[name].items() if key != "state"}
        if rest:
            loose[name] = rest
        if state.format != "torch" or len(found) > 1 or not optimizer:
            return dict(sections), (_misplaced(name, held),)
        for position, slots in held.items():
            optimizer["state"].setdefault(int(position), {}).update(slots)
    return loose, ()


def _holds_slots(section: Any) -> bool:
    """Whether a section is what is left of an optimizer: `state`, with slots by position."""
    held = section.get("state") if isinstance(section, Mapping) else None
    if not isinstance(held, Mapping) or not held:
        return False
    return all(str(key).isdecimal() and isinstance(slots, Mapping) for key, slots in held.items())


def _misplaced(name: str, held: Mapping[str, Any]) -> Problem:
    slots = sorted({f"{slot}" for slots in held.values() for slot in slots})
    return Problem(
        "SR-WRITE-OBJECT",
        f"{name}.state keeps {', '.join(slots)} beside tensors, by a position that means nothing here",
        where={"key": f"{name}.state"},
        hint="they are written under their own name, where no optimizer looks for them: --allow SR-WRITE-OBJECT if the "
        "run can do without them",
    )
