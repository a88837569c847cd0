"""Whether something that must change nothing changed something: tensors, random numbers, positions."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from samerun.train.digest import state_fingerprint
from samerun.train.generators import generator_digests
from samerun.train.named import as_list, reshard
from samerun.train.objects import object_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """This rank's state at one moment. Local and cheap; only good for comparing a rank with itself."""

    tensors: Mapping[str, str]
    rng: Mapping[str, str]
    objects: Mapping[str, str]

    def changed_tensors(self, after: Fingerprint) -> list[str]:
        """Returns the keys of tensors and the names of objects that differ."""
        return _differences(self.tensors, after.tensors) + _differences(self.objects, after.objects)

    def changed_rng(self, after: Fingerprint) -> list[str]:
        """Returns the names of random number generators that moved."""
        return _differences(self.rng, after.rng)


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def fingerprint(model: nn.Module | Sequence[nn.Module], optimizer: Any, objects: Mapping[str, Any]) -> Fingerprint:
    """Returns the fingerprint of model, optimizer, this process's random number generators, and `objects`."""
    return Fingerprint(
        tensors=state_fingerprint(model, optimizer),
        rng={f"rng.{name}": digest for name, digest in generator_digests().items()},
        objects={name: _hash(object_state(value, name)) for name, value in objects.items() if value is not None},
    )


def _hash(plain: Any) -> str:
    return blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).hexdigest()


@contextmanager
def evaluating(model: nn.Module | Sequence[nn.Module]) -> Generator[None]:
    """Puts every module into evaluation mode without gradients, and back into the mode that it had."""
    import torch

    modes = [(module, module.training) for part in as_list(model) for module in part.modules()]
    for part in as_list(model):
        part.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        reshard(model)
