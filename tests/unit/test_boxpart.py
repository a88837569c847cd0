"""Parts that are boxes of a tensor: digested and measured as the whole tensor is, however it is cut."""

from __future__ import annotations

import torch

from samerun.core.digest import whole_digest
from samerun.train.boxpart import BoxPart
from samerun.train.digest import digest_shard, digest_tensor, dtype_of
from samerun.train.norms import local_part, squared_norm
from samerun.train.shards import local_shard, whole_shape

WHOLE = torch.randn((3, 7, 5), generator=torch.Generator().manual_seed(1))
CUTS = [
    [((0, 0, 0), (1, 4, 5)), ((2, 1, 2), (1, 3, 2))],
    [((0, 4, 0), (1, 3, 5)), ((1, 0, 0), (1, 7, 5)), ((2, 0, 0), (1, 1, 5))],
    [((2, 1, 0), (1, 3, 2)), ((2, 1, 4), (1, 3, 1)), ((2, 4, 0), (1, 3, 5))],
    [],
]


def part(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], whole: torch.Tensor = WHOLE) -> BoxPart:
    def read() -> list[tuple[tuple[int, ...], torch.Tensor]]:
        return [(at, whole[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))]) for at, sizes in boxes]

    return BoxPart(tuple(whole.shape), whole.dtype, read)


def digest_of(parts: list[BoxPart]) -> str:
    total = sum(digest_shard("param:w", found) for p in parts if (found := local_shard(p)) is not None)
    return whole_digest(total % 2**64, "param:w", dtype_of(parts[0]), parts[0].shape)


def test_digests_of_parts_add_up_to_that_of_the_tensor() -> None:
    assert sum(p.num_elements for p in map(part, CUTS)) == WHOLE.numel()
    assert digest_of([part(cut) for cut in CUTS]) == digest_tensor("param:w", WHOLE)


def test_a_box_in_another_place_shows() -> None:
    values = WHOLE[1:2]
    digests = {
        digest_shard("param:w", BoxPart((3, 7, 5), WHOLE.dtype, lambda layer=layer: [((layer, 0, 0), values)]))
        for layer in range(3)
    }
    assert len(digests) == 3


def test_norms_of_parts_add_up() -> None:
    squares = sum(float(squared_norm(local_part(part(cut)))) for cut in CUTS)
    assert abs(squares - float(squared_norm(WHOLE))) < 1e-4
    assert part([]).local.dtype == WHOLE.dtype
    assert whole_shape(part([])) == (3, 7, 5)


def test_a_part_is_read_anew_each_time() -> None:
    values = torch.zeros(3, 7, 5)
    found = part(CUTS[0], values)
    before = found.local
    values += 1
    assert not torch.equal(before, found.local)
