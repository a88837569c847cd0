"""The batch equation: dealings against card dealing by hand, options against what each claims, bad input."""

from __future__ import annotations

import doctest
import importlib
import json
import math

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samerun.catalog import load_catalog
from samerun.cli import root
from samerun.core.batch import (
    BatchOption,
    Dealing,
    SourceBatch,
    check_batch,
    deal,
    learning_rate_factor,
    plan_batch,
)
from samerun.errors import Problem, UsageError

SOURCE = SourceBatch(replicas=16, micro=2, accum=8)

counts = st.integers(1, 60)
dealings = st.integers(1, 6).flatmap(
    lambda replicas: (
        st.lists(st.lists(st.integers(0, 4), min_size=replicas, max_size=replicas).map(tuple), min_size=1, max_size=5)
        .map(tuple)
        .filter(lambda rows: any(map(any, rows)))
    )
)


def codes(problems: list[Problem] | tuple[Problem, ...]) -> list[str]:
    return [problem.code for problem in problems]


def deal_cards(rows: tuple[tuple[int, ...], ...]) -> list[list[list[int]]]:
    """The dumb oracle: `[pass][replica]` -> positions, one sample at a time to whoever has room in this pass."""
    next_position = 0
    hands: list[list[list[int]]] = []
    for row in rows:
        hand: list[list[int]] = [[] for _ in row]
        while any(len(cards) < size for cards, size in zip(hand, row, strict=True)):
            for cards, size in zip(hand, row, strict=True):
                if len(cards) < size and len(cards) == min(
                    len(other) for other, room in zip(hand, row, strict=True) if len(other) < room
                ):
                    cards.append(next_position)
                    next_position += 1
        hands.append(hand)
    return hands


class TestDealing:
    @given(dealings)
    def test_positions_are_dealt_like_cards(self, rows: tuple[tuple[int, ...], ...]) -> None:
        dealing = Dealing(rows)
        expected = deal_cards(rows)
        for replica in range(dealing.replicas):
            swept = dealing.replica_positions(replica)
            for pass_index in range(dealing.passes):
                assert list(dealing.positions(pass_index, replica)) == expected[pass_index][replica]
                assert list(swept[pass_index]) == expected[pass_index][replica]
        assert sorted(p for hand in expected for cards in hand for p in cards) == list(range(dealing.global_batch))

    @given(counts, counts, counts)
    def test_deal_is_the_most_even_in_the_fewest_passes(self, batch: int, replicas: int, micro: int) -> None:
        dealing = deal(batch, replicas, micro)
        assert dealing.global_batch == batch
        assert dealing.replicas == replicas
        assert dealing.max_microbatch <= micro
        assert max(dealing.shares) - min(dealing.shares) <= 1
        assert dealing.shares == tuple(dealing.share(replica) for replica in range(replicas))
        assert dealing.passes == math.ceil(math.ceil(batch / replicas) / micro)
        avoidable = [share for share in dealing.shares if share >= dealing.passes]
        empty = [sum(not row[replica] for row in dealing.microbatches) for replica in range(replicas)]
        assert dealing.num_empty == sum(empty)
        assert all(not holes for share, holes in zip(dealing.shares, empty, strict=True) if share in avoidable)
        assert all(isinstance(part, range) for r in range(replicas) for part in dealing.replica_positions(r))

    @given(counts, counts, counts)
    def test_three_numbers_say_it_all(self, batch: int, replicas: int, micro: int) -> None:
        dealing = deal(batch, replicas, micro)
        assert deal(dealing.global_batch, dealing.replicas, dealing.max_microbatch) == dealing
        assert Dealing.from_json(json.loads(json.dumps(dealing.to_json()))) == dealing

    @pytest.mark.parametrize("rows", [(), ((),), ((1, 2), (1,)), ((-1, 2),), ((0, 0),), ((True, 1),), ((1.0, 1),)])
    def test_what_is_no_dealing_is_refused(self, rows: tuple[tuple[int, ...], ...]) -> None:
        with pytest.raises(ValueError):
            Dealing(rows)

    def test_large_worlds_are_dealt_quickly(self) -> None:
        dealing = deal(1_000_000, 16_384, 2)
        assert dealing.passes == 31
        assert sum(map(len, dealing.replica_positions(16_383))) == 61


class TestOptions:
    def test_the_case_in_the_literature(self) -> None:
        options = plan_batch(256, 10, 2, source=SOURCE)
        found = [(o.kind, o.global_batch, o.replicas, o.passes, o.max_microbatch, o.idle_replicas) for o in options]
        assert found == [
            ("ragged", 256, 10, 13, 2, 0),
            ("fewer-replicas", 256, 8, 16, 2, 2),
            ("changed-batch", 260, 10, 13, 2, 0),
            ("changed-batch", 250, 10, 25, 1, 0),
            ("changed-batch", 240, 10, 12, 2, 0),
            ("changed-batch", 160, 10, 8, 2, 0),  # 10 x 2 x 8: what the old accumulation gives
        ]
        ragged, fewer = options[:2]
        assert ragged.dealing.shares == (26,) * 6 + (25,) * 4
        assert ragged.dealing.num_empty == 0
        assert ragged.exact
        assert ragged.needs == ("weighted-normalisation",)
        assert ragged.utilisation == pytest.approx(256 / 260)
        assert fewer.exact
        assert fewer.needs == ("idle-replicas",)
        assert fewer.utilisation == pytest.approx(0.8)
        for option in options[2:]:
            assert not option.exact
            assert option.needs == ("learning-rate-policy",)
        kept = options[-1].learning_rate
        assert kept is not None
        assert (kept.keep, kept.linear) == (1.0, 0.625)
        assert kept.square_root == pytest.approx(math.sqrt(0.625))

    def test_a_degree_that_divides_leaves_nothing_to_decide(self) -> None:
        (option,) = plan_batch(256, 8, 2)
        assert (option.kind, option.passes, option.exact, option.needs) == ("uniform", 16, True, ())
        assert option.utilisation == 1.0

    def test_what_kept_accumulation_would_do_is_shown_even_then(self) -> None:
        uniform, kept = plan_batch(256, 8, 4, source=SOURCE)
        assert uniform.kind == "uniform"
        assert (kept.kind, kept.global_batch, kept.passes, kept.max_microbatch) == ("changed-batch", 128, 8, 2)

    def test_a_uniform_option_with_small_microbatches_stands_beside_a_ragged_one(self) -> None:
        kinds = {option.kind: option for option in plan_batch(250, 10, 2)}
        assert (kinds["uniform"].passes, kinds["uniform"].max_microbatch) == (25, 1)
        assert kinds["ragged"].passes == 13
        assert "fewer-replicas" not in kinds  # none needs fewer passes than the uniform one

    def test_a_batch_near_by_that_keeping_the_passes_makes_too_is_listed_once(self) -> None:
        reasons = [option.reason for option in plan_batch(29, 2, 2, source=SOURCE) if option.global_batch == 32]
        kept = "what keeping 8 passes of 2 silently makes of it"
        assert reasons == [f"the nearest batch above with full microbatches, and {kept}"]

    @given(counts, counts, counts, st.booleans())
    @example(29, 2, 2, True)
    @settings(max_examples=300)
    def test_every_option_is_what_it_says(self, batch: int, replicas: int, micro: int, with_source: bool) -> None:
        options = plan_batch(batch, replicas, micro, source=SOURCE if with_source else None)
        assert any(option.exact and not option.idle_replicas for option in options)
        assert len({(o.kind, o.dealing) for o in options}) == len(options)
        best = deal(batch, replicas, micro)
        for option in options:
            dealing = option.dealing
            assert deal(dealing.global_batch, option.replicas, option.max_microbatch) == dealing
            assert option.exact == (dealing.global_batch == batch)
            assert option.replicas + option.idle_replicas == replicas
            assert option.max_microbatch <= micro
            assert 0 < option.utilisation <= 1
            assert option.utilisation == dealing.global_batch / (dealing.passes * replicas * micro)
            assert ("weighted-normalisation" in option.needs) == (not dealing.is_uniform)
            assert ("empty-microbatches" in option.needs) == bool(dealing.num_empty)
            assert ("learning-rate-policy" in option.needs) == (option.kind == "changed-batch")
            assert (option.learning_rate is None) == option.exact
            assert dealing.is_uniform or option.kind == "ragged"
            assert (option.idle_replicas > 0) == (option.kind == "fewer-replicas")
            assert not option.exact or option.passes >= best.passes
            assert BatchOption.from_json(json.loads(json.dumps(option.to_json()))) == option

    @given(counts, counts, counts)
    def test_the_nearest_batch_that_divides_is_among_the_changes(self, batch: int, replicas: int, micro: int) -> None:
        changed = [o.global_batch for o in plan_batch(batch, replicas, micro) if o.kind == "changed-batch"]
        if batch % replicas:
            dividing = range(replicas, batch + replicas + 1, replicas)
            assert min(abs(size - batch) for size in changed) == min(abs(size - batch) for size in dividing)

    def test_tokens_are_not_dealt_as_if_they_were_samples(self) -> None:
        (option,) = plan_batch(65_536, 3, 4096, unit="tokens")
        assert not option.exact
        assert set(option.needs) == {"weighted-normalisation", "measured-token-counts"}
        (even,) = plan_batch(65_536, 4, 4096, unit="tokens")  # a target that divides proves nothing
        assert not even.exact
        assert "measured-token-counts" in even.needs

    def test_learning_rate_policies(self) -> None:
        assert learning_rate_factor("keep", 256, 64) == 1.0
        assert learning_rate_factor("linear", 256, 64) == 0.25
        assert learning_rate_factor("square-root", 256, 64) == 0.5


class TestFindings:
    def test_all_nonsense_is_named_at_once(self) -> None:
        with pytest.raises(UsageError) as caught:
            plan_batch(0, -1, True, source=SourceBatch(replicas=0, micro=2, accum=8), unit="words")  # type: ignore[arg-type]
        assert codes(caught.value.problems) == ["SR-BATCH-INVALID"] * 5

    def test_a_slip_of_the_keyboard_is_refused_before_memory_is_filled(self) -> None:
        assert codes(check_batch(10**12, 1, 1)) == ["SR-BATCH-HUGE"]
        assert check_batch(10**6, 1000, 8) == []

    def test_fewer_samples_than_replicas(self) -> None:
        assert codes(check_batch(7, 10, 2)) == ["SR-BATCH-SMALL"]
        assert check_batch(10, 10, 2) == []

    def test_a_source_that_does_not_multiply_up(self) -> None:
        assert codes(check_batch(240, 10, 2, source=SOURCE)) == ["SR-BATCH-SOURCE"]
        assert check_batch(256, 10, 2, source=SOURCE) == []

    def test_tokens_are_remarked_upon(self) -> None:
        assert codes(check_batch(4096, 10, 2, unit="tokens")) == ["SR-BATCH-TOKENS"]
        assert check_batch(4096, 10, 2) == []

    def test_the_source_text(self) -> None:
        assert SourceBatch.parse("replicas=16, micro=2,accum=8") == SOURCE
        with pytest.raises(UsageError) as caught:
            SourceBatch.parse("replicas=16,replicas=4,micro=0,steps=8")
        assert codes(caught.value.problems) == ["SR-BATCH-FROM"] * 4

    def test_every_code_is_catalogued(self) -> None:
        catalog = load_catalog()
        for name in ("INVALID", "FROM", "HUGE", "SMALL", "SOURCE", "TOKENS"):
            assert f"SR-BATCH-{name}" in catalog


class TestCommand:
    def run(self, *words: str) -> tuple[int, str]:
        result = CliRunner(env={"COLUMNS": "120"}).invoke(root, ["batch", *words], standalone_mode=False)
        if isinstance(result.exception, UsageError):
            return result.exception.exit_code, "\n".join(codes(result.exception.problems))
        assert result.exception is None, result.exception
        return 0, result.output

    def test_json_is_as_promised(self) -> None:
        code, text = self.run(
            *("--global-batch", "256", "--replicas", "10", "--max-microbatch", "2"),
            *("--from", "replicas=16,micro=2,accum=8", "--json"),
        )
        document = json.loads(text)
        assert code == 0
        assert (document["schema"], document["target"], document["unit"]) == ("samerun/batch/1", 256, "samples")
        ragged = document["options"][0]
        assert round(ragged.pop("utilisation"), 3) == 0.985
        assert ragged.pop("microbatches") == [[2] * 10] * 12 + [[2] * 6 + [1] * 4]
        assert ragged.pop("reason")
        assert ragged == {
            "kind": "ragged",
            "replicas": 10,
            "passes": 13,
            "global_batch": 256,
            "exact": True,
            "max_microbatch": 2,
            "idle_replicas": 0,
            "needs": ["weighted-normalisation"],
            "learning_rate": None,
        }
        assert document["options"][-1]["learning_rate"]["policy"] is None

    def test_the_table_says_what_decides(self) -> None:
        code, text = self.run("--global-batch", "256", "--replicas", "10", "--max-microbatch", "2")
        assert code == 0
        for words in ("12.8 passes", "12 x 2, then (2 on 6, 1 on 4)", "98.5%", "+2 idle", "x0.9375 (linear)"):
            assert words in text

    def test_a_layout_counts_batch_replicas_and_not_ranks(self) -> None:
        code, text = self.run("--global-batch", "8", "--layout", "tp=2,dp_shard=4", "--max-microbatch", "2", "--json")
        assert code == 0
        assert json.loads(text)["replicas"] == 4

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (("--replicas", "0"), ["SR-BATCH-INVALID"]),
            ((), ["SR-BATCH-INVALID"]),
            (("--replicas", "2", "--layout", "dp_shard=2"), ["SR-BATCH-INVALID"]),
            (("--layout", "dp=x", "--from", "micro=2"), ["SR-BATCH-FROM", "SR-BATCH-FROM", "SR-BATCH-INVALID"]),
        ],
    )
    def test_nonsense_exits_2_with_every_reason(self, words: tuple[str, ...], expected: list[str]) -> None:
        code, text = self.run("--global-batch", "8", "--max-microbatch", "2", *words)
        assert code == 2
        assert text.split() == expected


WITH_EXAMPLES = ["batch.dealing", "batch.ramp", "order", "permutation", "mix", "idset", "rng", "packing"]
WITH_EXAMPLES += ["orders.keyed", "orders.randperm", "orders.read"]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"samerun.core.{module}"))
    assert (found.failed, found.attempted > 0) == (0, True)
