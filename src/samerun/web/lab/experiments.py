"""What the lab resumes from a checkpoint and what a candidate can lose, with the checks that notice it."""

from __future__ import annotations

from dataclasses import dataclass

from samerun.catalog import Entry, load_catalog
from samerun.core.lab import BETA1, BETA2, HORIZON_UPDATES, MOMENTUM, SAMPLES, Rule


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the state that a resume can lose."""

    name: str
    """The field of `LabState`."""
    symbol: str
    title: str
    loses: str
    """What the candidate has in its place."""
    codes: tuple[str, ...]
    """The findings that name it, in the order in which a migration meets them."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One checkpoint, resumed twice: whole, and without some parts."""

    rule: Rule
    title: str
    formula: str
    lead: str
    eta: float
    parts: tuple[Part, ...]

    def findings(self) -> list[tuple[Entry, tuple[str, ...]]]:
        """Returns what names a lost part, each finding once with the parts' symbols: after loading first."""
        codes = dict.fromkeys(code for part in self.parts for code in part.codes)
        ordered = sorted(codes, key=lambda code: not code.startswith("SR-LOAD-"))
        catalog = load_catalog()
        return [(catalog[code], tuple(part.symbol for part in self.parts if code in part.codes)) for code in ordered]


RATE_CODES = ("SR-LOAD-LR", "SR-UPD-LR", "SR-UPD-UPDATENORM")
"""What notices another learning rate, which is the difference between the two runs of the exercise."""

_CENTRES = ", ".join(f"{c:g}" for c in SAMPLES).replace("-", "−")

EXPERIMENTS = (
    Experiment(
        Rule.MOMENTUM,
        "Momentum",
        f"m ← {MOMENTUM:g} m + g,  x ← x − η m",
        "The buffer m remembers earlier gradients. A resume without it has the very same x, and so the very same loss "
        "in an evaluation; its next update is another one.",
        0.1,
        (
            Part(
                "m",
                "m",
                "momentum buffer",
                "zero: no history",
                ("SR-LOAD-OPT-RESET", "SR-UPD-UPDATENORM"),
            ),
        ),
    ),
    Experiment(
        Rule.ADAM,
        "Adam",
        f"m ← {BETA1:g} m + {1 - BETA1:.1g} g,  v ← {BETA2:g} v + {1 - BETA2:.1g} g²,  "
        f"x ← x − η m̂ / (√v̂ + ε),  m̂ = m / (1 − {BETA1:g}ᵗ),  v̂ = v / (1 − {BETA2:g}ᵗ)",
        "Three hidden parts: the mean of gradients, the mean of their squares, and the count of updates that corrects "
        "both for their start at zero. Losing any of them, or all, leaves x as it is.",
        0.3,
        (
            Part("m", "m", "mean of gradients", "zero", ("SR-LOAD-OPT", "SR-LOAD-OPT-RESET", "SR-UPD-UPDATENORM")),
            Part(
                "v",
                "v",
                "mean of squares",
                "zero: the step explodes",
                ("SR-LOAD-OPT", "SR-LOAD-OPT-RESET", "SR-UPD-UPDATENORM"),
            ),
            Part("step", "t", "count of updates", "zero: corrected twice", ("SR-LOAD-STEP", "SR-UPD-UPDATENORM")),
        ),
    ),
    Experiment(
        Rule.SCHEDULE,
        "Schedule",
        f"η(k) = η · (1 − k / {HORIZON_UPDATES}),  x ← x − η(k) g",
        "The learning rate falls with the index k of the update. Equal x and equal base rate at another index are "
        "another run.",
        0.4,
        (
            Part(
                "index",
                "k",
                "the schedule's index",
                "zero: the schedule begins again",
                ("SR-LOAD-SCHED", "SR-UPD-LR", "SR-UPD-UPDATENORM"),
            ),
        ),
    ),
    Experiment(
        Rule.SAMPLES,
        "Sample order",
        f"fᵢ(x) = (x − cᵢ)² / 2,  c = {_CENTRES},  x ← x − η (x − cᵢ),  i the next sample",
        "Four samples are taken in turn; together they make f. Equal x at another place in the order sees other "
        "samples: some again, some not at all. The loss may even look better, so only the samples' names tell.",
        0.3,
        (
            Part(
                "cursor",
                "i",
                "place in the sample order",
                "zero: the epoch begins again",
                ("SR-LOAD-OBJECT", "SR-SAMPLE-REPLAYED", "SR-SAMPLE-OTHER"),
            ),
        ),
    ),
)
