"""What a clean job would have recorded, as values to be varied: for checks that are pure functions of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from samerun.core.batch import deal
from samerun.core.mesh import Layout
from samerun.trace import EvalLine, Header, StateLine
from samerun.verify.evidence.job import JobPlan
from samerun.verify.evidence.observed import Observed, ObservedUpdate
from samerun.verify.updates.evaluate import Evaluation

FIRST, COUNT, BATCH = 13, 20, 12
TENSORS = {"embedding.weight": 0.5, "norm.weight": 0.02, "frozen.weight": 0.0}


def make_update(index: int, *, replicas: int = 3, noise: float = 0.0, **changes: Any) -> ObservedUpdate:
    """Returns update `index` of a clean run; `noise` moves every number by that relative amount."""
    ids = range((index - 1) * BATCH, index * BATCH)
    scale = 1.0 + noise
    base = ObservedUpdate(
        update=index,
        loss=(3.0 - 0.01 * index) * scale,
        grad_norm=(1.0 + 0.1 * math.sin(index)) * scale,
        update_norm=0.3 * scale,
        lr=(1e-3 * (1 - index / 200), 2e-3 * (1 - index / 200)),
        loss_scale=None,
        skipped=0,
        finite=True,
        ids={replica: tuple(ids[replica::replicas]) for replica in range(replicas)},
        samples=BATCH,
        tokens=BATCH * 31,
        deltas={name: value * scale for name, value in TENSORS.items() if value},
        moved={name: value * scale for name, value in TENSORS.items()} if index == FIRST else None,
        seconds=float(index),
    )
    return replace(base, **changes)


def make_header(rank: int, layout: Layout, /, *, stage: str = "window", **changes: Any) -> Header:
    """Returns the header of a rank of a clean job on `layout`."""
    dealing = deal(BATCH, layout.batch_replicas, 2)
    base = Header(
        rank=rank,
        world_size=layout.world_size,
        stage=stage,
        coordinate=layout.coordinate(rank),
        layout=layout.to_dict(short=True),
        declared_layout=layout.to_dict(short=True),
        batch={
            "global_batch": BATCH,
            "max_microbatch": 2,
            "passes": dealing.passes,
            "replicas": dealing.replicas,
            "microbatches": dealing.to_json(),
        },
        versions={"torch": "2.13.0"},
        environment={"threads": 1},
    )
    return replace(base, **changes)


def make_job_plan(layout: Layout, stage: str = "window") -> JobPlan:
    """Returns what the plan says of a clean job on `layout`."""
    dealing = deal(BATCH, layout.batch_replicas, 2)
    return JobPlan(
        world_size=layout.world_size,
        layout=layout,
        global_batch=BATCH,
        passes=dealing.passes,
        max_microbatch=2,
        microbatches=dealing.microbatches,
        stage=stage,
    )


def make_state(when: str = "loaded", **odd: Any) -> StateLine:
    """Returns a state line whose tensors are the parameters of `make_update`; `odd` adds to each tensor's fact."""
    tensors = {f"param:{name}": {"trainable": value > 0, "digest": "0" * 16, **odd} for name, value in TENSORS.items()}
    return StateLine(when=when, update=FIRST - 1, body={"tensors": tensors, "state": "f" * 16})


def make_observed(
    *changed: ObservedUpdate, layout: Layout | None = None, replicas: int = 3, noise: float = 0.0, **changes: Any
) -> Observed:
    """Returns a clean job's whole account, with the given updates in place of the clean ones."""
    layout = layout or Layout(dp_shard=replicas)
    updates = {index: make_update(index, replicas=replicas, noise=noise) for index in range(FIRST, FIRST + COUNT)}
    updates |= {item.update: item for item in changed}
    base = Observed(
        headers={rank: make_header(rank, layout) for rank in range(layout.world_size)},
        updates=tuple(updates[index] for index in sorted(updates)),
        evals=(
            EvalLine(
                update=FIRST - 1,
                num_examples=2,
                losses=(3.0, 2.5),
                logits=None,
                state_unchanged=True,
                rng_unchanged=True,
                changed=(),
            ),
        ),
        states=(make_state("loaded"), make_state("end")),
        boundaries=frozenset({("log", 20), ("log", 30), ("eval", 20)}),
        ended=True,
        finished=True,
        problems=(),
    )
    return replace(base, **changes)


def make_evaluation(**changes: Any) -> Evaluation:
    """Returns a clean evaluation of two examples with three logits each."""
    import numpy as np

    logits = np.array([[1.0, -4.0, 0.5], [2.0, 0.0, 1.0]], np.float32)
    return replace(Evaluation(FIRST - 1, (3.0, 2.5), logits, (2, 3), ()), **changes)
