"""Random number streams of ranks, as a job on real gloo ranks records them, against the control's and the policy."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samerun.catalog import load_catalog
from samerun.core.mesh import Layout
from samerun.errors import Severity
from samerun.train.rank_rng import apply_rank_rng, capture_rank_rng
from samerun.train.recorder import Recorder
from samerun.verify.load.streams import check_kept_streams, check_policy
from support.gloo import run_ranks


def body(layout: str, digests: str) -> dict[str, Any]:
    """A state line whose ranks have the generators that the letters name."""
    return {"layout": Layout.parse(layout).to_dict(), "rng": {str(rank): name for rank, name in enumerate(digests)}}


DP, TP, HSDP = "dp_shard=4", "dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2"


@pytest.mark.parametrize(
    ("control", "candidate", "found"),
    [
        ((DP, "abcd"), ("dp_shard=3", "abc"), []),
        ((DP, "abcd"), ("dp_shard=5", "abcda"), [("SR-RNG-SAME", "error", 4)]),
        ((DP, "aaaa"), ("dp_shard=3", "aaa"), []),  # seeded alike on purpose
        ((HSDP, "abcd"), ("dp_shard=3", "aaa"), [("SR-RNG-SAME", "error", 1)]),
        (("dp_shard=1", "a"), ("dp_shard=2", "aa"), [("SR-RNG-SAME", "warning", 1)]),
        ((TP, "aabb"), ("dp_shard=3,tp=2", "aabbcc"), []),
        ((TP, "aabb"), ("dp_shard=3,tp=2", "aabbcd"), [("SR-RNG-AGREE", "error", 5)]),
        ((TP, "abcd"), ("dp_shard=3,tp=2", "abcdef"), []),  # every rank draws for itself
        ((DP, "abcd"), (TP, "abcd"), [("SR-RNG-AGREE", "warning", 1)]),
        ((TP, "aabb"), (TP, "aaaa"), [("SR-RNG-SAME", "error", 2)]),
        (("pp=2,dp_shard=2", "abcd"), ("pp=2,dp_shard=3", "abcabc"), []),  # stages may share or not
        (("cp=2,dp_shard=2", "aabb"), ("cp=2,dp_shard=2", "axby"), []),
        ((DP, "abcd"), ("dp_shard=3", "ab"), []),  # a rank did not tell: nothing is said
    ],
)
def test_ranks_relate_as_in_the_control(
    control: tuple[str, str], candidate: tuple[str, str], found: list[tuple[str, str, int]]
) -> None:
    problems = check_kept_streams(body(*control), body(*candidate))
    assert [(p.code, p.severity.value, p.where["rank"]) for p in problems] == found
    assert {code for code, *_ in found} <= set(load_catalog())


MODEL, DATA = "megatron:model-parallel-rng", "megatron:data-parallel-rng"


@pytest.mark.parametrize(
    ("name", "control", "candidate", "found"),
    [
        (MODEL, (TP, "abab"), ("dp_shard=3,tp=2", "ababab"), []),  # Megatron's rule: one for each tensor-parallel rank
        (MODEL, (TP, "abab"), ("dp_shard=3,tp=2", "ababaa"), [("SR-RNG-SAME", "error", 5)]),
        (MODEL, (TP, "abcd"), ("dp_shard=1,tp=4", "abcb"), [("SR-RNG-SAME", "error", 3)]),
        (MODEL, (DP, "aaaa"), (TP, "abab"), []),
        (MODEL, (DP, "aaaa"), (TP, "aaaa"), [("SR-RNG-SAME", "warning", 1)]),
        (MODEL, (TP, "aaaa"), (TP, "aaaa"), []),  # as in the control, whatever it means there
        (DATA, (TP, "aaaa"), ("dp_shard=3,tp=2", "aaaaaa"), []),
        (DATA, (TP, "aaaa"), ("dp_shard=3,tp=2", "aaaaab"), [("SR-RNG-AGREE", "error", 5)]),
        ("cuda", (TP, "aabb"), ("dp_shard=3,tp=2", "aabbcd"), [("SR-RNG-AGREE", "error", 5)]),
        ("cuda", (DP, "abcd"), ("dp_shard=5", "abcda"), [("SR-RNG-SAME", "error", 4)]),
        ("numpy", (DP, "abcd"), ("dp_shard=5", "abcde"), []),
        ("python", (DP, "abcd"), ("dp_shard=5", "abcca"), [("SR-RNG-SAME", "error", 3)]),
        ("numpy", (TP, "abcd"), ("dp_shard=3,tp=2", "aabbcc"), []),  # now by replica: peers need no states of their own
    ],
)
def test_every_generator_is_compared(
    name: str, control: tuple[str, str], candidate: tuple[str, str], found: list[tuple[str, str, int]]
) -> None:
    bodies = []
    for layout, digests in (control, candidate):
        whole = body(layout, "x" * len(digests))
        bodies.append({**whole, "rng": {}, "generators": {name: body(layout, digests)["rng"]}})
    problems = check_kept_streams(*bodies)
    assert [(p.code, p.severity.value, p.where["rank"]) for p in problems] == found
    assert all(p.where["key"] == name for p in problems)


def test_without_a_layout_nothing_is_said() -> None:
    for layout in (None, {"rings": 2}):
        assert check_kept_streams(body(DP, "abcd"), {"layout": layout, "rng": {"0": "a", "1": "a"}}) == []


def record(**changes: Any) -> dict[str, Any]:
    return {"policy": "survivors", "update": 12, "kept": ["torch"], "seeded": [], "stream": 0, "seed": 1, **changes}


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ([record(), record(stream=1, kept=[])], None),
        ([record(policy="keyed", kept=[]), record(policy="keyed", kept=[], stream=1)], None),
        ([record(), record(policy="keyed", stream=1)], "SR-RNG-POLICY"),
        ([record(), None], "SR-RNG-POLICY"),
        ([record(), record(stream=1, update=11)], "SR-RNG-POLICY"),
        ([record(kept=[]), record(stream=1, kept=[])], "SR-RNG-POLICY"),
        ([record(), record()], "SR-RNG-SAME"),
    ],
)
def test_the_policy_that_was_applied(records: list[Any], code: str | None) -> None:
    found = {**body("dp_shard=2", "ab"), "update": 12, "rank_rng": {str(r): item for r, item in enumerate(records)}}
    problems = check_policy(found, has_saved=True)
    assert [(p.code, p.severity) for p in problems] == ([(code, Severity.ERROR)] if code else [])
    assert check_policy({**found, "rank_rng": {}}, has_saved=True) == []


@pytest.mark.parametrize(
    ("tracked", "code"),
    [
        ([(0, 0), (0, 1), (0, 0), (0, 1)], None),  # (data-parallel, model-parallel) by rank
        ([(0, 0), (0, 1), (1, 2), (1, 3)], None),
        ([(0, 0), (0, 0), (0, 0), (0, 0)], "SR-RNG-SAME"),
        ([(0, 0), (1, 1), (0, 0), (1, 1)], "SR-RNG-AGREE"),
    ],
)
def test_the_trackers_streams_in_the_policy(tracked: list[tuple[int, int]], code: str | None) -> None:
    names = ("data-parallel-rng", "model-parallel-rng")
    records = {
        str(rank): record(stream=rank // 2, tracker=dict(zip(names, streams, strict=True)))
        for rank, streams in enumerate(tracked)
    }
    problems = check_policy({**body(TP, "aabb"), "update": 12, "rank_rng": records}, has_saved=True)
    assert [p.code for p in problems] == ([code] if code else [])


def applies(rank: int, world_size: int, folder: str, tell: bool) -> None:
    """Ranks 0 and 1 have a saved state, the others are new; only the first of two jobs tells what it did."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    saved = capture_rank_rng() if rank < 2 else None
    torch.manual_seed(99)
    done = apply_rank_rng("survivors", seed=3, stream=rank, update=4, saved=saved)
    model = torch.nn.Linear(2, 1)
    recorder = Recorder(folder)
    recorder.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), layout={"dp_replicate": world_size})
    recorder.loaded(update=4, rank_rng=done if tell or rank else None)
    recorder.close()


@pytest.mark.multiprocess
def test_every_rank_tells_what_it_did(tmp_path: Path) -> None:
    for name, tell in (("told", True), ("one-silent", False)):
        run_ranks(3, applies, str(tmp_path / name), tell)
    told, silent = (
        next(
            line
            for line in map(json.loads, (tmp_path / name / "rank-00000.jsonl").read_text().splitlines())
            if line["kind"] == "state"
        )
        for name in ("told", "one-silent")
    )
    rows = told["rank_rng"]
    assert [rows[str(rank)]["stream"] for rank in range(3)] == [0, 1, 2]
    assert [bool(rows[str(rank)]["kept"]) for rank in range(3)] == [True, True, False]
    assert rows["2"]["seed"] == apply_rank_rng("keyed", seed=3, stream=2, update=4).seed
    assert told["disagreements"] == []
    assert check_policy(told, has_saved=True) == []
    assert len(set(told["rng"].values())) == 3
    assert {name: len(set(ranks.values())) for name, ranks in told["generators"].items()} == {"numpy": 3, "python": 3}
    assert [p.code for p in check_policy(silent, has_saved=True)] == ["SR-RNG-POLICY"]
