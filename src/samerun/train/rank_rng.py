"""A run's ordinary per-rank generators when the ranks change: a declared policy, applied and recorded.

A framework saves one set of generator states per rank. On another number of ranks some states have no rank, and some
ranks no state. There is no exact continuation of such a stream, so the policy is the user's decision:

* `keyed`: every rank's generators are seeded anew from (seed, stream, update). The same on every later move.
* `survivors`: ranks that have a saved state go on with it, the others are seeded from (seed, stream, update).

`stream` is whatever must differ where randomness must differ: the batch replica for data-parallel randomness, so that
tensor-parallel ranks of one replica agree; the rank where every rank draws for itself. Megatron's tracker has further
generators, which differ on other ranks than the ordinary ones do; each has a stream of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch

from samerun.core.generators import TRACKER
from samerun.core.mix import fold_key
from samerun.core.rng import text_key
from samerun.errors import Problem, UsageError
from samerun.train.generators import (
    generator_states,
    restore_generator,
    seed_generator,
    seeded_state,
    set_tracker_states,
    tracker_states,
)

RankPolicy = Literal["keyed", "survivors"]
_GENERATORS = ("torch", "cuda", "numpy", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRandomness:
    """What was done to one rank's generators; give it to `Recorder.loaded` and `to_json()` to the checkpoint.

    `kept` and `seeded` name generators; those of Megatron's tracker are `megatron:NAME`, and `tracker` has their
    streams.
    """

    policy: RankPolicy
    stream: int
    update: int
    kept: tuple[str, ...]
    seeded: tuple[str, ...]
    seed: int
    tracker: Mapping[str, int] = field(default_factory=dict[str, int])

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        lists = {"kept": list(self.kept), "seeded": list(self.seeded)}
        body = {"policy": self.policy, "stream": self.stream, "update": self.update, "seed": self.seed, **lists}
        return {**body, "tracker": dict(self.tracker)} if self.tracker else body


def capture_rank_rng() -> dict[str, Any]:
    """Returns the states of this process's torch, CUDA (if any), NumPy and Python generators.

    Those of Megatron's tracker, where the job has one, stand under `megatron:NAME`.
    """
    return generator_states()


def apply_rank_rng(
    policy: RankPolicy,
    *,
    seed: int,
    stream: int,
    update: int,
    saved: Mapping[str, Any] | None = None,
    tracker: Mapping[str, int] | None = None,
) -> RankRandomness:
    """Sets this process's generators as the policy says, and returns what was done.

    Args:
        policy: see the module.
        seed: the run's.
        stream: this rank's stream number; ranks that must agree pass the same.
        update: completed updates at the resume.
        saved: what `capture_rank_rng` returned on the rank that this one succeeds; None where there is none.
        tracker: where the job has Megatron's tracker, the stream number of each of its generators by name:
            `samerun.core.generators.tracker_streams(layout, rank)` gives those of Megatron's own rule.

    Raises:
        UsageError: for an unknown policy, a saved state of parts that this process does not have, or a tracker whose
            generators were given no stream (SR-RNG-POLICY). Nothing is set then.
    """
    own = tracker_states()
    if problems := _problems(policy, saved or {}, own, tracker or {}):
        raise UsageError(problems)
    derived = fold_key(text_key("rank"), seed, stream, update)
    available = [name for name in _GENERATORS if name != "cuda" or torch.cuda.is_available()]
    names = [*available, *(TRACKER + name for name in own)]
    kept = tuple(name for name in names if policy == "survivors" and name in (saved or {}))
    seeded = tuple(name for name in names if name not in kept)
    states: dict[str, Any] = {}
    for name in names:
        if name.startswith(TRACKER):
            of = name.removeprefix(TRACKER)
            fresh = fold_key(text_key(name), seed, (tracker or {})[of], update)
            states[of] = (saved or {})[name] if name in kept else seeded_state(fresh)
        elif name in kept:
            restore_generator(name, (saved or {})[name])
        else:
            seed_generator(name, derived)
    if states:
        set_tracker_states(states)
    streams = {name: (tracker or {})[name] for name in own}
    return RankRandomness(
        policy=policy, stream=stream, update=update, kept=kept, seeded=seeded, seed=derived, tracker=streams
    )


def _problems(
    policy: str, saved: Mapping[str, Any], own: Mapping[str, Any], streams: Mapping[str, int]
) -> list[Problem]:
    ours = [*_GENERATORS, *(TRACKER + name for name in own)]
    problems: list[Problem] = []
    if policy not in get_args(RankPolicy):
        hint = "say what becomes of generators whose rank is gone; there is no default"
        problems.append(_policy("there is no such policy for generators", get_args(RankPolicy), policy, hint))
    if unknown := sorted(set(saved) - set(ours)):
        hint = "make the generators (Megatron's tracker) first, or leave the states out"
        problems.append(_policy("the saved states have parts that this process does not have", ours, unknown, hint))
    if "cuda" in saved and policy == "survivors" and not torch.cuda.is_available():
        hint = "take the state out of `saved` where the run goes on without a GPU"
        problems.append(_policy("a CUDA generator's state was saved", "a CUDA device", "none", hint))
    if set(own) != set(streams):
        hint = "tracker=tracker_streams(layout, rank) gives Megatron's own rule (samerun.core.generators)"
        text = "the generators of Megatron's tracker and the streams that were given are not the same"
        problems.append(_policy(text, sorted(own), sorted(streams), hint))
    return problems


def _policy(message: str, expected: Any, found: Any, hint: str) -> Problem:
    shown = [item if isinstance(item, str) else ", ".join(item) or "none" for item in (expected, found)]
    return Problem("SR-RNG-POLICY", message, expected=shown[0], found=shown[1], hint=hint)


def check_streams(states: Mapping[int, Any], streams: Mapping[int, int]) -> list[Problem]:
    """Returns what is wrong with torch generator states by rank, given each rank's stream.

    SR-RNG-AGREE where ranks of one stream (tensor-parallel ranks) differ, SR-RNG-SAME where ranks of different streams
    have the same state, as after loading one rank's file everywhere.
    """
    problems: list[Problem] = []
    keys = {rank: bytes(np.asarray(state).tobytes()) for rank, state in states.items()}
    first_of: dict[int, int] = {}
    for rank in sorted(keys):
        lead = first_of.setdefault(streams[rank], rank)
        if keys[lead] != keys[rank]:
            problems.append(
                Problem(
                    "SR-RNG-AGREE",
                    f"ranks {lead} and {rank} share stream {streams[rank]} but their generators differ",
                    where={"rank": rank},
                    hint="tensor-parallel ranks must draw the same masks for activations that they all hold",
                )
            )
    leads: dict[bytes, int] = {}
    for rank in first_of.values():
        other = leads.setdefault(keys[rank], rank)
        if other != rank:
            problems.append(
                Problem(
                    "SR-RNG-SAME",
                    f"ranks {other} and {rank} are of different streams but have the same generator state",
                    where={"rank": rank},
                    hint="one rank's state was loaded by both: their samples get the same noise; apply a policy",
                )
            )
    return problems
