"""A run's ordinary per-rank generators when the ranks change: a declared policy, applied and recorded.

A framework saves one set of generator states per rank. On another number of ranks some states have no rank, and some
ranks no state. There is no exact continuation of such a stream, so the policy is the user's decision:

* `keyed`: every rank's generators are seeded anew from (seed, stream, update). The same on every later move.
* `survivors`: ranks that have a saved state go on with it, the others are seeded from (seed, stream, update).

`stream` is whatever must differ where randomness must differ: the batch replica for data-parallel randomness, so that
tensor-parallel ranks of one replica agree; the rank where every rank draws for itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from samerun.core.mix import fold_key
from samerun.core.rng import text_key
from samerun.errors import Problem, UsageError

RankPolicy = Literal["keyed", "survivors"]
_GENERATORS = ("torch", "cuda", "numpy", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRandomness:
    """What was done to one rank's generators; give `to_json()` to the checkpoint and the recorder's `objects`."""

    policy: RankPolicy
    stream: int
    update: int
    kept: tuple[str, ...]
    seeded: tuple[str, ...]
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        lists = {"kept": list(self.kept), "seeded": list(self.seeded)}
        return {"policy": self.policy, "stream": self.stream, "update": self.update, "seed": self.seed, **lists}


def capture_rank_rng() -> dict[str, Any]:
    """Returns the states of this process's torch, CUDA (if any), NumPy and Python generators."""
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def apply_rank_rng(
    policy: RankPolicy, *, seed: int, stream: int, update: int, saved: Mapping[str, Any] | None = None
) -> RankRandomness:
    """Sets this process's generators as the policy says, and returns what was done.

    Args:
        policy: see the module.
        seed: the run's.
        stream: this rank's stream number; ranks that must agree pass the same.
        update: completed updates at the resume.
        saved: what `capture_rank_rng` returned on the rank that this one succeeds; None where there is none.

    Raises:
        UsageError: for an unknown policy, or a saved state of unknown parts (SR-RNG-POLICY). Nothing is set then.
    """
    unknown = sorted(set(saved or ()) - set(_GENERATORS))
    if policy not in get_args(RankPolicy) or unknown:
        found = policy if not unknown else ", ".join(unknown)
        expected = ", ".join(_GENERATORS if unknown else get_args(RankPolicy))
        hint = "say what becomes of generators whose rank is gone; there is no default"
        raise UsageError(
            Problem(
                "SR-RNG-POLICY",
                "the policy for generators cannot be applied",
                expected=expected,
                found=found,
                hint=hint,
            )
        )
    derived = fold_key(text_key("rank"), seed, stream, update)
    kept = tuple(name for name in _GENERATORS if policy == "survivors" and saved is not None and name in saved)
    available = ("torch", "cuda", "numpy", "python") if torch.cuda.is_available() else ("torch", "numpy", "python")
    seeded = tuple(name for name in available if name not in kept)
    for name in seeded:
        _seed(name, derived)
    for name in kept:
        _restore(name, (saved or {})[name])
    return RankRandomness(policy=policy, stream=stream, update=update, kept=kept, seeded=seeded, seed=derived)


def _seed(name: str, seed: int) -> None:
    match name:
        case "torch":
            torch.default_generator.manual_seed(seed)
        case "cuda":
            torch.cuda.manual_seed(seed)
        case "numpy":
            np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        case _:
            random.seed(seed)


def _restore(name: str, state: Any) -> None:
    match name:
        case "torch":
            torch.set_rng_state(state)
        case "cuda":
            torch.cuda.set_rng_state(state)
        case "numpy":
            np.random.set_state(state)
        case _:
            version, words, gauss = state
            random.setstate((version, tuple(words), gauss))


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
