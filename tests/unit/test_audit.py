"""The sample audit, against a dumb oracle and against the ways in which positions are really lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.errors import Severity
from samerun.verify.order.audit import Audit, audit_prefix, audit_window, check_audit

Window = list[tuple[int, tuple[int, ...]]]


def deal(ids: list[int], batch: int, first: int = 13) -> Window:
    return [(first + i, tuple(ids[i * batch : (i + 1) * batch])) for i in range(len(ids) // batch)]


def codes(audit: Audit, **bounds: int) -> list[str]:
    return [problem.code for problem in check_audit(audit, **bounds)]


@settings(deadline=None)
@given(st.permutations(range(24)), st.randoms())
def test_how_an_update_is_dealt_makes_no_difference(order: list[int], random: object) -> None:
    control = deal(order, 6)
    candidate = [(update, tuple(random.sample(ids, len(ids)))) for update, ids in control]  # type: ignore[attr-defined]
    audit = audit_window(control, candidate)
    assert audit.exactly_once
    assert codes(audit) == []


@given(st.lists(st.integers(0, 11), min_size=12, max_size=12), st.lists(st.integers(0, 11), min_size=12, max_size=12))
def test_against_multisets(wanted: list[int], got: list[int]) -> None:
    control, candidate = deal(wanted, 4), deal(got, 4)
    audit = audit_window(control, candidate)
    same = all(Counter(a[1]) == Counter(b[1]) for a, b in zip(control, candidate, strict=True))
    assert audit.exactly_once == same
    extra = Counter(got) - Counter(wanted)
    named = Counter(item for _, item in (*audit.replayed, *audit.overlap, *audit.other))
    assert named == extra
    missing = Counter(wanted) - Counter(got)
    assert Counter(item for _, item in (*audit.omitted, *audit.pending)) == missing
    assert bool(codes(audit)) != same


def test_a_sampler_that_starts_again_is_named() -> None:
    control = deal(list(range(100, 124)), 6)
    again = audit_window(control, deal(list(range(24)), 6), before=range(100))
    assert codes(again) == ["SR-SAMPLE-REPLAYED"]
    unknown = audit_window(control, deal(list(range(24)), 6))  # nobody recorded what came before
    assert "SR-SAMPLE-OTHER" in codes(unknown)
    assert again.first_difference == 13


def test_a_loader_one_batch_ahead_omits_one_batch() -> None:
    control, ahead = deal(list(range(24)), 6), deal(list(range(6, 30)), 6)
    audit = audit_window(control, ahead)
    assert [item for _, item in audit.omitted] == list(range(6))
    assert "SR-SAMPLE-OMITTED" in codes(audit)
    assert audit.to_json()["bound"] == 6


def test_one_batch_replayed_leaves_the_last_one_pending() -> None:
    control = deal(list(range(24)), 6)
    behind = deal(list(range(6)) + list(range(18)), 6)
    audit = audit_window(control, behind)
    assert [item for _, item in audit.replayed] == list(range(6))
    assert not audit.omitted
    assert [item for _, item in audit.pending] == list(range(18, 24))
    assert codes(audit) == ["SR-SAMPLE-REPLAYED"]


def test_one_sample_given_to_two_replicas() -> None:
    control = deal(list(range(12)), 6)
    candidate = [(13, (0, 1, 2, 3, 4, 4)), control[1]]
    audit = audit_window(control, candidate)
    assert audit.overlap == ((13, 4),)
    assert codes(audit) == ["SR-SAMPLE-OVERLAP", "SR-SAMPLE-OMITTED"]


def test_the_smallest_exchange_is_seen() -> None:
    control = deal(list(range(12)), 6)
    swapped = [(13, (0, 1, 2, 3, 4, 6)), (14, (5, 7, 8, 9, 10, 11))]
    assert codes(audit_window(control, swapped)) == ["SR-SAMPLE-ORDER"]


def test_declared_bounds_turn_a_difference_into_a_note() -> None:
    control = deal(list(range(24)), 6)
    behind = audit_window(control, deal(list(range(6)) + list(range(18)), 6))
    within = check_audit(behind, replay_bound=6)
    assert [problem.severity for problem in within] == [Severity.NOTE]
    beyond = check_audit(behind, replay_bound=5)
    assert [problem.severity for problem in beyond] == [Severity.ERROR]


@given(st.permutations(range(48)), st.sampled_from([3, 4, 5, 8, 12]), st.randoms())
def test_another_batch_that_walks_the_same_order_is_clean(order: list[int], batch: int, random: object) -> None:
    control = deal(order, 6)
    candidate = [(u, tuple(random.sample(ids, len(ids)))) for u, ids in deal(order, batch)]  # type: ignore[attr-defined]
    assert audit_prefix(control, candidate).exactly_once


def test_another_batch_that_skips_or_repeats_is_not() -> None:
    order = list(range(48))
    control = deal(order, 6)
    skipping = audit_prefix(control, deal(order[:4] + order[8:], 4))
    assert [item for _, item in skipping.omitted] == [4, 5]  # the rest of the control's first update
    repeating = audit_prefix(control, deal(order[:4] + order[:20], 4))
    assert not repeating.exactly_once
    assert repeating.replayed
