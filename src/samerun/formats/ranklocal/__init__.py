"""One torch.save file per rank: replicas, pickled DTensors, or bare shards that do not say where they belong."""

from samerun.formats.ranklocal.reader import open_ranklocal

__all__ = ["open_ranklocal"]
