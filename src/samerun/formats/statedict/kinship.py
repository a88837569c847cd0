"""Which saved optimizer belongs to which saved model, as far as what they are called tells."""

from __future__ import annotations

import re
from collections.abc import Sequence

from samerun.errors import Problem, Severity

Distance = tuple[int, bool, int]

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_GENERIC = frozenset({
    "optimizer", "optimizers", "optim", "optims", "opt", "opts", "model", "models", "module", "modules", "net", "nets",
    "network", "networks", "state", "states", "dict", "dicts", "params", "weights", "sd", "adam", "adamw", "sgd",
})  # fmt: skip
_COPIES = frozenset({"target", "teacher", "copy", "old", "previous", "prev", "best", "initial", "frozen", "reference"})


def distance(optimizer: str, model: str) -> Distance:
    """Returns how far two names are from each other, smaller for those that more likely belong together.

    In turn: words in common, negative; whether the model is called a copy of another one, which nothing trains; words
    of one that the other has not. `critic_optimizer` and `critic`, `optG` and `netG`, `optimizers.0` and `models.0`
    have one word in common each.
    """
    one, other = _words(optimizer), _words(model)
    return -len(one & other), bool(other & _COPIES), len(one ^ other)


def open_owner(optimizer: str, models: Sequence[str]) -> Problem:
    """Returns the finding for an optimizer that fits several saved models alike, of which the first one is taken."""
    return Problem(
        "SR-OPT-OPEN",
        f"the state of {optimizer or 'the optimizer'} fits {len(models)} saved models alike "
        f"({', '.join(name or 'the whole file' for name in models)}); it was taken for that of {models[0]}",
        severity=Severity.WARNING,
        where={"key": optimizer or "optimizer"},
        hint="call an optimizer as its model is called (actor, actor_optimizer), or keep both in one mapping",
    )


def _words(name: str) -> set[str]:
    words = [word.lower() for word in _WORDS.findall(name)]
    return {word for word in words if word not in _GENERIC}
