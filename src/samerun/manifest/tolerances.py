"""The bands of a manifest: where each comes from, and what it is made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from samerun.core.dtype import DType
from samerun.core.tolerance import precision_floor
from samerun.manifest.section import Number, Section, Text

METRICS = (*("loss", "grad_norm", "update_norm", "eval_loss", "eval_logits", "parameter_gradient", "parameter_delta"),)


class ControlTolerance(Section):
    """A band measured on the controls: factor x the largest deviation seen between them, and never below floor."""

    source: Literal["control"] = Field(alias="from", description="Where the band comes from.")
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(description="Times the controls' deviation.")
    floor: Number | None = Field(
        description="Smallest half-width of the band; null takes what another order of additions does in run.precision."
    )
    absolute: bool = Field(False, description="Absolute instead of relative deviations.")


class AnalysisTolerance(Section):
    """A band from numerical analysis: what rounding can make of the metric, whatever the controls show."""

    source: Literal["analysis"] = Field(alias="from", description="Where the band comes from.")
    risk: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-6, description="Probability that rounding alone takes any of the compared numbers out of its band."
    )

    @property
    def absolute(self) -> bool:
        """Bounds are relative."""
        return False


class UserTolerance(Section):
    """A band that a person states, with the reason."""

    source: Literal["user"] = Field(alias="from", description="Where the band comes from.")
    limit: Number = Field(description="Half-width of the band.")
    reason: Text = Field(description="Why this limit is right for this run.")
    absolute: bool = Field(False, description="Absolute instead of relative deviations.")


Tolerance = Annotated[ControlTolerance | AnalysisTolerance | UserTolerance, Field(discriminator="source")]


class Tolerances(Section):
    """The band of every metric that is judged. None may be left out: a missing band would be a hidden decision."""

    loss: Tolerance = Field(description="Training loss of each update.")
    grad_norm: Tolerance = Field(description="Global gradient norm before clipping.")
    update_norm: Tolerance = Field(description="Global norm of each update.")
    eval_loss: Tolerance = Field(description="Losses on the fixed examples.")
    eval_logits: Tolerance = Field(description="Logits on the fixed examples.")
    parameter_delta: Tolerance = Field(description="Norm of the change of the named parameters.")
    parameter_gradient: Tolerance | None = Field(
        None,
        description="Norm of every parameter's gradient in the first update, before clipping; null takes that of "
        "parameter_delta, or of grad_norm where that is absolute.",
    )

    def by_metric(self) -> dict[str, ControlTolerance | AnalysisTolerance | UserTolerance]:
        """Returns the tolerances by metric name, in the order of `METRICS`."""
        given = {metric: getattr(self, metric) for metric in METRICS}
        if given["parameter_gradient"] is None:  # an absolute change of a parameter says nothing about gradients
            like = self.grad_norm if self.parameter_delta.absolute else self.parameter_delta
            given["parameter_gradient"] = like
        return given

    def settled(self, precision: DType, terms: int) -> dict[str, ControlTolerance | AnalysisTolerance | UserTolerance]:
        """Returns the tolerances by metric, each floor that was left to the precision as the number that it is.

        Args:
            precision: in which type the forward pass computes.
            terms: tokens of one update.
        """
        found = self.by_metric()
        for metric, item in found.items():
            if isinstance(item, ControlTolerance) and item.floor is None:
                found[metric] = item.model_copy(update={"floor": precision_floor(metric, precision, terms)})
        return found
