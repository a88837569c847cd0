"""What candidates are compared with: the controls, completed from each other, and what bounds are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from samerun.core.dtype import DType
from samerun.manifest.tolerances import AnalysisTolerance, ControlTolerance, UserTolerance
from samerun.verify.evidence.observed import Observed, ObservedUpdate
from samerun.verify.updates.analysis import Evidence, read_evidence
from samerun.verify.updates.evaluate import Evaluation
from samerun.verify.updates.oracle import Oracle

Tolerance = ControlTolerance | AnalysisTolerance | UserTolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The evidence that candidates are compared with. `observed[0]` is the reference, named by `names[0]`.

    `oracle` is the same update in fp64, where the manifest has one: the truth, and no control.
    """

    names: tuple[str, ...]
    observed: tuple[Observed, ...]
    evaluations: tuple[Evaluation | None, ...]
    oracle: Oracle | None = None

    @property
    def reference(self) -> Observed:
        """The control that a candidate's numbers are compared with."""
        return self.observed[0]

    @property
    def evaluation(self) -> Evaluation | None:
        """The fixed-example evaluation that a candidate's is compared with: the first one that was recorded."""
        return next((item for item in self.evaluations if item is not None), None)


def complete_reference(controls: Controls) -> Controls:
    """Returns the controls with what the reference did not record taken from the first control that did.

    The ledger of an uninterrupted run has no first-update record of every tensor at the update in question, while the
    control that resumed there has.
    """
    reference = controls.observed[0]
    filled = tuple(
        replace(
            item,
            moved=donor.moved if item.moved is None else item.moved,
            gradients=donor.gradients if item.gradients is None else item.gradients,
            moved_direction=item.moved_direction or donor.moved_direction,
            gradients_direction=item.gradients_direction or donor.gradients_direction,
            deltas=item.deltas or donor.deltas,
        )
        if (donor := _donor(controls.observed[1:], item.update)) is not None
        else item
        for item in reference.updates
    )
    return replace(controls, observed=(replace(reference, updates=filled), *controls.observed[1:]))


def _donor(others: Sequence[Observed], update: int) -> ObservedUpdate | None:
    return next((found for other in others if (found := other.by_update().get(update)) is not None), None)


def analysed(tolerances: Mapping[str, Tolerance]) -> list[AnalysisTolerance]:
    return [item for item in tolerances.values() if isinstance(item, AnalysisTolerance)]


def evidence_for(
    controls: Controls, tolerances: Mapping[str, Tolerance], indices: range, precision: DType
) -> Evidence | None:
    """Returns what bounds from analysis are made from, or None where none is wanted or too little was recorded."""
    if not (wanted := analysed(tolerances)):
        return None
    return read_evidence(
        controls.observed,
        controls.evaluations,
        indices=indices,
        dtype=precision,
        risk=min(item.risk for item in wanted),
        oracle=controls.oracle,
    )
