"""Whether shard sizes prove how many ranks cut a tensor."""

from __future__ import annotations

from collections.abc import Iterable

from samerun.errors import Problem, Severity
from samerun.formats.statedict.stored import Stored


def check_last_shard(tensors: Iterable[Stored], num_shards: int, what: str) -> list[Problem]:
    """Checks that shapes prove that no shard is missing at the end, and says so where they do not.

    `torch.chunk` cuts into equal chunks of the ceiling, a shorter one and empty ones. A tensor whose last chunk is
    shorter ends there, and its size and its chunk's tell how many ranks cut it. Where every tensor divides evenly, one
    more rank would leave no other trace. `what` names the shards in the message.
    """
    for tensor in tensors:
        sizes = chunk_sizes(tensor)
        if sizes is None or len(sizes) > num_shards or (sizes[-1] == sizes[0] and len(sizes) == num_shards):
            continue
        if -(-sum(sizes) // (num_shards + 1)) != sizes[0]:
            return []
    return [
        Problem(
            "SR-RANK-OPEN",
            f"nothing shows that {num_shards} {what} are all: every tensor divides evenly, or would with one more",
            severity=Severity.WARNING,
            hint="with the last one lost, tensors would only look shorter; compare their shapes with the model's",
        )
    ]


def chunk_sizes(tensor: Stored) -> list[int] | None:
    """Returns the sizes of a tensor's boxes along the one dimension that was cut, in order; None if there is not one.

    Boxes without values and replicas count once or not at all.
    """
    if not tensor.shape or len(tensor.tiling) < 2:
        return None
    filled = (tensor.tiling.sizes > 0).all(axis=1)
    offsets, sizes = tensor.tiling.offsets[filled], tensor.tiling.sizes[filled]
    varying = [dim for dim in range(len(tensor.shape)) if len(set(offsets[:, dim].tolist())) > 1]
    if len(varying) != 1:
        return None
    pairs = sorted(set(zip(offsets[:, varying[0]].tolist(), sizes[:, varying[0]].tolist(), strict=True)))
    return [size for _, size in pairs]
