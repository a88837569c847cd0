"""Writes what a job held when it saved: every tensor's digest, beside the checkpoint, so that reading can prove it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samerun.core.digest import state_digest, to_hex
from samerun.stores.local import write_atomic
from samerun.train.agree import world
from samerun.train.capture import capture_state
from samerun.train.digest import digest_shard
from samerun.train.measure import Local, read_local
from samerun.train.shards import LocalShard, Shard
from samerun.verify.state.sidecar import SCHEMA, sidecar_path

if TYPE_CHECKING:
    from torch import nn

_MAX_RANKS_WITH_PIECES = 256


def write_digests(
    checkpoint: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any = None,
    *,
    update: int | None = None,
    pieces: bool | None = None,
) -> Path:
    """Writes `samerun-digests.json` into a checkpoint directory (beside a checkpoint file) and returns its path.

    Collective: every rank of the default group calls it, after the checkpoint was saved and before anything is trained
    on. Each rank digests the elements that it holds, one all-reduce adds them up, rank 0 writes the file under a
    temporary name and renames it; no rank returns before it is there.

    Args:
        checkpoint: the directory or file that was saved; rank 0 must be able to write into it.
        model: the module, or this rank's pipeline stages.
        optimizer: one or several torch optimizers, or None.
        update: the number of completed updates.
        pieces: also lists the digest of every shard by its box (one line per shard), which lets `inspect --deep` name
            the file that is from another save; by default up to 256 ranks.

    Raises:
        VerificationError: on every rank alike, if any rank holds something that cannot be digested.
        OSError: on rank 0, if the file cannot be written.
    """
    captured = capture_state(model, optimizer)
    rank, size = world()
    listed = pieces if pieces is not None else size <= _MAX_RANKS_WITH_PIECES
    shards = _gather(_digest_boxes(read_local(model, optimizer))) if listed else {}
    path = sidecar_path(Path(checkpoint))
    if rank == 0:
        tensors = {
            key: {"digest": fact.digest, "dtype": fact.dtype, "shape": list(fact.shape), "aliases": list(fact.aliases)}
            | ({"replicas_differ": True} if fact.odd else {})
            | ({"pieces": shards[key]} if key in shards else {})
            for key, fact in captured.tensors.items()
        }
        body = {
            "schema": SCHEMA,
            "update": update,
            "world_size": size,
            "state": state_digest({key: fact.digest for key, fact in captured.tensors.items()}),
            "counters": {key: fact["value"] for key, fact in captured.counters.items()},
            "tensors": tensors,
        }
        write_atomic(path, json.dumps(body, separators=(",", ":")))
    if size > 1:
        import torch.distributed as dist

        dist.barrier()
    return path


Pieces = dict[str, list[list[Any]]]


def _digest_boxes(local: Local) -> Pieces:
    """Returns, by key, [offsets, sizes, digest] of every box that this rank holds of a tensor in several shards."""
    found: Pieces = {}
    for held in local.held:
        if held.shard is None or held.shard.num_elements == 0:
            continue
        for offsets, part in held.shard.boxes():
            if part.numel():
                found.setdefault(held.key, []).append(
                    [list(offsets), list(part.shape), _digest_box(held.key, part, offsets, held.shard)]
                )
    return found


def _digest_box(key: str, part: Any, offsets: tuple[int, ...], shard: Shard) -> str:
    intervals = tuple(((start, start + size),) for start, size in zip(offsets, part.shape, strict=True))
    return to_hex(digest_shard(key, LocalShard(shard.shape, part, intervals, shard.lead)))


def _gather(mine: Pieces) -> Pieces:
    """Returns the boxes of all ranks on rank 0, replicas once; nothing elsewhere. Collective."""
    rank, size = world()
    if size == 1:
        return mine
    import torch.distributed as dist

    every: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, every, dst=0)
    joined: Pieces = {}
    for one in every or ():
        for key, boxes in one.items():
            known = joined.setdefault(key, [])
            known += [box for box in boxes if box not in known]
    return joined
