"""Keyed randomness: published vectors, NumPy's and torch's bits alike, and masks that follow their sample."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from samerun import rng
from samerun.catalog import load_catalog
from samerun.core.rng import StreamKey, generator, keep_threshold, philox, uniforms, words
from samerun.errors import UsageError
from samerun.train.rank_rng import apply_rank_rng, capture_rank_rng, check_streams
from samerun.train.rng import (
    KeyedDropout,
    SampleKeys,
    keyed_normal_,
    keyed_uniform_,
    signed,
    use_keyed_dropout,
    words32,
)
from samerun.train.rng import philox as torch_philox

WORD = st.integers(0, 2**64 - 1)


def test_published_vectors() -> None:
    """The first is Random123's own known answer for an all-zero key and counter; the others are docs/rng.md's."""
    assert [f"{word:016x}" for word in philox([0, 0], 0).tolist()] == [
        "16554d9eca36314c",
        "db20fe9d672d0fdc",
        "d7e772cee186176b",
        "7e68b68aec7ba23b",
    ]
    key = StreamKey.of(5, epoch=1, sample=7, operation="crop")
    assert key.words == (0x6D41D0AB46B552A8, 7)
    assert [f"{word:016x}" for word in words(key, 0, 2).tolist()] == ["6217c2061ca53195", "f30979c682667e98"]


@given(WORD, WORD, st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_numpy_and_torch_give_the_same_bits(k0: int, k1: int, start: int, count: int) -> None:
    key = StreamKey((k0, k1))
    raw = np.random.Philox(key=np.array([k0, k1], dtype=np.uint64)).random_raw(start + count)[start:]
    assert np.array_equal(words(key, start, start + count), raw)
    keys = torch.tensor([signed(k0)]), torch.tensor([signed(k1)])
    blocks = torch_philox(*keys, torch.arange(1, 17))
    assert np.array_equal(blocks.numpy().view(np.uint64), philox([k0, k1], np.arange(1, 17)))
    halves = words32(*keys, 2 * start, 2 * (start + count))[0].numpy()
    assert np.array_equal(halves[::2] + (halves[1::2] << 32).view(np.uint64), raw.astype(np.int64).view(np.uint64))


def test_a_samples_generator_depends_on_everything_it_is_keyed_by() -> None:
    def draw(**key: Any) -> float:
        return float(generator(**{"seed": 1, "epoch": 2, "sample": 3, "operation": "crop", **key}).random())

    drawn = {draw(), draw(seed=2), draw(epoch=1), draw(sample=4), draw(operation="flip"), draw(sample=-1)}
    assert len(drawn) == 6
    assert draw() == draw() == float(uniforms(StreamKey.of(1, epoch=2, sample=3, operation="crop"), 0, 1)[0])
    assert rng.generator is generator
    many = np.array([draw(sample=sample) for sample in range(2000)])
    assert abs(many.mean() - 0.5) < 4 / math.sqrt(12 * len(many))
    with pytest.raises(ValueError, match="no part"):
        words(StreamKey((0, 0)), 3, 2)


class TestDropout:
    def masks(
        self, ids: list[int], shape: tuple[int, ...], *, epoch: int = 0, name: str = "drop"
    ) -> dict[int, torch.Tensor]:
        keys = SampleKeys(3)
        keys.set(ids, epoch=epoch)
        mask = KeyedDropout(0.3, name, keys).mask(torch.ones(len(ids), *shape))
        return dict(zip(ids, mask, strict=True))

    @given(st.permutations(range(7)), st.integers(1, 6))
    @settings(max_examples=20, deadline=None)
    def test_a_mask_follows_its_sample(self, order: list[int], cut: int) -> None:
        whole = self.masks(list(range(7)), (5, 3))
        dealt = self.masks(order[:cut], (5, 3)) | self.masks(order[cut:], (5, 3))
        assert all(torch.equal(whole[sample], dealt[sample]) for sample in whole)

    def test_padding_in_time_changes_nothing_before_it(self) -> None:
        short, long = self.masks([4, 2], (5, 3)), self.masks([2], (9, 3))
        assert torch.equal(short[2], long[2][:5])

    def test_other_layers_epochs_and_samples_get_other_masks(self) -> None:
        first = self.masks([1, 2], (64,))
        assert not torch.equal(first[1], first[2])
        assert not torch.equal(first[1], self.masks([1], (64,), epoch=1)[1])
        assert not torch.equal(first[1], self.masks([1], (64,), name="other")[1])

    def test_rate_and_scale(self) -> None:
        keys = SampleKeys()
        keys.set(range(40))
        layer = KeyedDropout(0.25, "drop", keys)
        out = layer(torch.ones(40, 1000))
        assert abs(float((out == 0).float().mean()) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / out.numel())
        assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
        assert torch.equal(layer.eval()(torch.ones(3, 2)), torch.ones(3, 2))
        assert keep_threshold(0.5) == 1 << 31
        with pytest.raises(ValueError, match="rate"):
            KeyedDropout(1.0, "drop", keys)

    def test_recomputed_in_the_backward_pass_it_is_the_same(self) -> None:
        from torch.utils.checkpoint import checkpoint

        keys = SampleKeys(1)
        keys.set([5, 9])
        layer = nn.Sequential(nn.Linear(4, 4), KeyedDropout(0.5, "drop", keys))
        x = torch.randn(2, 4)
        layer(x).sum().backward()
        plain = layer[0].weight.grad.clone()
        layer.zero_grad()
        checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
        assert torch.equal(plain, layer[0].weight.grad)

    def test_it_takes_the_place_of_ordinary_dropout(self) -> None:
        keys = SampleKeys()
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Sequential(nn.Dropout(0.2)))
        assert use_keyed_dropout(model, keys) == ["1", "2.0"]
        assert (model[1].rate, model[2][0].name) == (0.1, "2.0")
        assert "name='1'" in repr(model)
        for ids in (None, [1, 2, 3]):
            if ids:
                keys.set(ids)
            with pytest.raises(UsageError) as caught:
                model(torch.ones(2, 2))
            assert [problem.code for problem in caught.value.problems] == ["SR-RNG-KEYS"]
        keys.set([], num_rows=2)
        assert model(torch.ones(2, 2)).shape == (2, 2)


def test_initial_weights_belong_to_names_and_not_to_shards() -> None:
    whole = keyed_normal_(torch.empty(11, 5), 3, "layers.0.w")
    parts = [keyed_normal_(torch.empty(n, 5), 3, "layers.0.w", first_row=at) for at, n in ((0, 4), (4, 6), (10, 1))]
    assert torch.equal(torch.cat(parts), whole)
    flat = keyed_uniform_(torch.empty(7), 3, "b", -1, 1)
    assert torch.equal(keyed_uniform_(torch.empty(3), 3, "b", -1, 1, first_row=4), flat[4:])
    assert not torch.equal(whole, keyed_normal_(torch.empty(11, 5), 3, "layers.1.w"))
    large = keyed_normal_(torch.empty(20_000), 0, "x", mean=1, std=2).double()
    assert abs(float(large.mean()) - 1) < 0.06
    assert abs(float(large.std()) - 2) < 0.05
    expected = uniforms(StreamKey.named(3, "b"), 0, 7) * 2 - 1
    assert torch.allclose(flat.double(), torch.from_numpy(expected), atol=1e-7)


class TestRankPolicy:
    def drawn(self) -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    def test_keyed_seeds_everything_from_seed_stream_and_update(self) -> None:
        done = apply_rank_rng("keyed", seed=1, stream=2, update=30, saved=capture_rank_rng())
        first = self.drawn()
        assert done.kept == ()
        assert {"torch", "numpy", "python"} <= set(done.seeded)
        assert done.to_json()["policy"] == "keyed"
        apply_rank_rng("keyed", seed=1, stream=2, update=30)
        assert self.drawn() == first
        for more in ({"stream": 3}, {"update": 31}, {"seed": 2}):
            apply_rank_rng("keyed", **{"seed": 1, "stream": 2, "update": 30, **more})
            assert self.drawn() != first

    def test_survivors_go_on_and_the_others_are_seeded(self) -> None:
        saved = capture_rank_rng()
        expected = self.drawn()
        done = apply_rank_rng("survivors", seed=1, stream=0, update=5, saved=saved)
        assert done.seeded == ()
        assert self.drawn() == expected
        fresh = apply_rank_rng("survivors", seed=1, stream=4, update=5)
        assert fresh.kept == ()
        assert self.drawn() != expected

    def test_nonsense_sets_nothing(self) -> None:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        for policy, saved in (("guess", None), ("survivors", {"xla": 1})):
            with pytest.raises(UsageError) as caught:
                apply_rank_rng(policy, seed=1, stream=0, update=0, saved=saved)  # type: ignore[arg-type]
            assert [problem.code for problem in caught.value.problems] == ["SR-RNG-POLICY"]
        assert torch.equal(before, torch.get_rng_state())

    def test_ranks_that_must_agree_or_differ(self) -> None:
        one, two = torch.Generator().manual_seed(1).get_state(), torch.Generator().manual_seed(2).get_state()
        streams = {0: 0, 1: 0, 2: 1, 3: 1}  # two replicas of two tensor-parallel ranks
        assert check_streams({0: one, 1: one, 2: two, 3: two}, streams) == []
        assert [p.code for p in check_streams({0: one, 1: two, 2: two, 3: two}, streams)] == ["SR-RNG-AGREE"]
        assert [p.code for p in check_streams(dict.fromkeys(range(4), one), streams)] == ["SR-RNG-SAME"]
        assert {"SR-RNG-KEYS", "SR-RNG-POLICY", "SR-RNG-AGREE", "SR-RNG-SAME"} <= set(load_catalog())
