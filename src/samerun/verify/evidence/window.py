"""What is compared of the updates of a window, and how strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from samerun.core.tolerance import Band
from samerun.plan.schedule import PlannedRates


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """What is compared, and how strictly.

    `bands` are the sealed ones. `rate_factor` multiplies the control's learning rates (a declared policy); None leaves
    them out, `rate_bound` allows a relative difference; `planned_rates` are those that the plan printed. `samples` says
    whether each update must consume the control's samples (`exact`), only the same order in other portions because the
    batch changes on purpose (`portions`), or whatever it likes (`free`). `window_updates` is how many updates the
    control has from the first one on. `boundaries` are (what, every) pairs the window must cross. `trainable` tells for
    each parameter whether it trains; None when the job did not say.
    """

    stage: str
    first_update: int
    num_updates: int
    bands: tuple[Band, ...]
    global_batch: int
    window_updates: int = 0
    rate_factor: float | None = 1.0
    rate_bound: float = 0.0
    planned_rates: PlannedRates | None = None
    samples: Literal["exact", "portions", "free"] = "exact"
    replay_bound: int = 0
    omission_bound: int = 0
    boundaries: tuple[tuple[str, int], ...] = ()
    trainable: Mapping[str, bool] | None = None

    @property
    def indices(self) -> range:
        """The updates that are compared."""
        return range(self.first_update, self.first_update + self.num_updates)

    @property
    def window(self) -> range:
        """The updates that the control has, of which those compared may be only the first."""
        return range(self.first_update, self.first_update + max(self.num_updates, self.window_updates))
