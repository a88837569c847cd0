"""What a training script imports. Nothing here is loaded, torch included, before it is used.

from samerun.train import ContributionMean, ElasticSampler, Recorder
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samerun.train.contribution import ContributionMean
    from samerun.train.recorder import Recorder
    from samerun.train.rng import KeyedDropout, SampleKeys, use_keyed_dropout
    from samerun.train.sampler import ElasticSampler
    from samerun.train.sidecar import write_digests
    from samerun.train.stream import ElasticStream
    from samerun.train.token_sampler import TokenSampler

__all__ = [
    "ContributionMean",
    "ElasticSampler",
    "ElasticStream",
    "KeyedDropout",
    "Recorder",
    "SampleKeys",
    "TokenSampler",
    "use_keyed_dropout",
    "write_digests",
]

_HOME = {
    "ContributionMean": "contribution",
    "ElasticSampler": "sampler",
    "ElasticStream": "stream",
    "KeyedDropout": "rng",
    "Recorder": "recorder",
    "SampleKeys": "rng",
    "TokenSampler": "token_sampler",
    "use_keyed_dropout": "rng",
    "write_digests": "sidecar",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
