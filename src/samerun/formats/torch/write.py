"""Lays out one `torch.save` file that a stock script loads: `{"model", "optimizer", "lr_scheduler", ...}`.

`torch.load` opens it with `weights_only=True`, `model.load_state_dict(strict=True)` takes the model under its own
names, and `optimizer.load_state_dict` the optimizer by position, in the order of the groups. RNG, data and everything
else keep the names that the source gave them; only the three names above are fixed.
"""

from __future__ import annotations

from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import Role
from samerun.core.written import DestinationPlan
from samerun.formats.base import WriteSource
from samerun.formats.statedict.carry import carry_objects
from samerun.formats.statedict.optimizers import plan_optimizer
from samerun.formats.statedict.trees import check_positions, write_model, write_optimizer
from samerun.formats.torchfile.write import Pieces, add_archive, gather_slots

MODEL, OPTIMIZER, SCHEDULER, AVERAGE = "model", "optimizer", "lr_scheduler", "ema"
FILE = "checkpoint.pt"


def lay_out(source: WriteSource, layout: Layout | None = None) -> DestinationPlan:
    """Plans the file. A layout changes nothing in it. Tied weights share one storage under all of their names."""
    state = source.state
    optimizer = plan_optimizer(state)
    carried = carry_objects(state, numpy=False)
    sections = carried.sections
    if carried.scheduler in sections:  # before everything else: the first that looks like a scheduler is taken for it
        rest = {name: value for name, value in sections.items() if name != carried.scheduler}
        sections = {SCHEDULER: sections[carried.scheduler], **rest}
    tree: dict[str, Any] = {}
    for name, section in (
        (MODEL, write_model(state, Role.PARAM, Role.BUFFER)),
        (AVERAGE, write_model(state, Role.EMA)),
        (OPTIMIZER, write_optimizer(optimizer)),
    ):
        if section:
            tree[name] = section
    taken = [name for name in sections if name in tree]
    tree |= {f"{name}_objects" if name in taken else name: value for name, value in sections.items()}
    pieces = Pieces()
    add_archive(pieces, tree, FILE.removesuffix(".pt"))
    return DestinationPlan(
        format="torch",
        files=(pieces.file(FILE),),
        tensors=gather_slots([pieces.slots]),
        single_file=True,
        dropped={**carried.dropped, **optimizer.dropped},
        problems=(*carried.problems, *optimizer.problems, *check_positions(state)),
    )
