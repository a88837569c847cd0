"""Runs of a tensor's elements, as sharded optimizers keep them: their digests add up to the tensor's."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.digest import MASK, to_hex
from samerun.integrations.tagged import SAMPLE_IDS, WithSampleIds
from samerun.train.digest import digest_shard, digest_tensor
from samerun.train.flatpart import FlatPart
from samerun.train.shards import local_shard


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    size = int(torch.empty(shape).numel())
    inner = draw(st.lists(st.integers(0, size), max_size=4))
    return shape, sorted([0, *inner, size])


@given(cuts(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
@settings(max_examples=150, deadline=None)
def test_parts_add_up_to_the_tensor(cut: tuple[tuple[int, ...], list[int]], dtype: torch.dtype) -> None:
    shape, ends = cut
    whole = (torch.randn(shape) * 9).to(dtype)
    flat = whole.reshape(-1)
    parts = [FlatPart(shape, flat[start:stop], start) for start, stop in itertools.pairwise(ends)]
    rebuilt = torch.full(shape, 77).to(dtype)
    for part in parts:
        assert local_shard(part) is part
        for offsets, values in part.boxes():
            rebuilt[tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))] = values
    assert torch.equal(rebuilt, whole)
    total = sum(digest_shard("optim.exp_avg:w", part) for part in parts) & MASK
    assert to_hex(total) == digest_tensor("optim.exp_avg:w", whole)


def test_a_part_in_the_wrong_place_has_another_digest() -> None:
    whole = torch.randn(5, 3)
    right, wrong = (FlatPart((5, 3), whole.reshape(-1)[4:9], start) for start in (4, 5))
    assert digest_shard("param:w", right) != digest_shard("param:w", wrong)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_carry_their_ids_through_a_loader(workers: int) -> None:
    data = WithSampleIds([{"x": torch.tensor(float(i))} for i in range(7)])
    loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=[6, 0, 5, 1], num_workers=workers)
    batches = list(loader)
    assert [batch[SAMPLE_IDS].tolist() for batch in batches] == [[6, 0, 5], [1]]
    assert [batch["x"].tolist() for batch in batches] == [[6.0, 0.0, 5.0], [1.0]]
    assert len(data) == 7
