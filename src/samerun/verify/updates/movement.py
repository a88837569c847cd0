"""What must have moved in the first update and what not, and what must be equal after the last one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samerun.errors import Problem, Severity
from samerun.verify.evidence.observed import ObservedUpdate
from samerun.verify.evidence.window import WindowPlan


def check_movement(pairs: Sequence[tuple[ObservedUpdate, ObservedUpdate]], plan: WindowPlan) -> Iterator[Problem]:
    first = next((pair for pair in pairs if pair[1].update == plan.first_update), None)
    if first is None or first[1].moved is None or first[1].skipped:
        return
    control, candidate = first[0].moved or {}, first[1].moved
    trainable = plan.trainable or {}
    for tensor, norm in sorted(candidate.items()):
        moves_in_control = control.get(tensor, math.nan) > 0
        if norm == 0 and (moves_in_control or (trainable.get(tensor) and tensor not in control)):
            yield Problem(
                "SR-UPD-STILL",
                "a trainable tensor did not move in the first update",
                where=first[1].where(stage=plan.stage, tensor=tensor),
                expected=f"a change of about {control.get(tensor, math.nan):.3g}",
                found=0.0,
                hint="it is in no parameter group of the optimizer, or its gradient never reaches it",
            )
        elif norm == 0 and trainable.get(tensor):
            yield Problem(
                "SR-UPD-STILL",
                "a trainable tensor moved neither here nor in the control",
                Severity.NOTE,
                where=first[1].where(stage=plan.stage, tensor=tensor),
                hint="it has no gradient in this model; nothing about it changed with the move",
            )
        elif norm > 0 and (trainable.get(tensor) is False or control.get(tensor) == 0):
            yield Problem(
                "SR-UPD-FROZEN-MOVED",
                "a frozen tensor moved in the first update",
                where=first[1].where(stage=plan.stage, tensor=tensor),
                expected=0.0,
                found=norm,
                hint="requires_grad is set before the optimizer is built and must be set again after the model is "
                "rebuilt; weight decay also moves a tensor without gradient",
            )


def check_averages(
    control: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    candidate: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    stage: str,
) -> list[Problem]:
    """Returns a finding when averages of the model stayed as they were loaded, which the control's did not.

    Both arguments are the bodies of the state lines after loading and after the window. No loss and no norm shows it:
    an average that is no longer updated is missed when it is used, at the end of training.
    """
    moved, still = _averages(*control)[0], _averages(*candidate)[1]
    stuck = sorted(still & moved)
    if not stuck:
        return []
    return [
        Problem(
            "SR-UPD-AVERAGE",
            f"{len(stuck)} tensors of the model's average are after the window what they were after loading",
            where={"stage": stage, "tensor": stuck[0]},
            expected="another digest after updates, as in the control",
            found="the same digest",
            hint="the average is not updated any more: its update is not called, or follows another copy of the model",
        )
    ]


def _averages(loaded: Mapping[str, Any] | None, end: Mapping[str, Any] | None) -> tuple[set[str], set[str]]:
    """Returns the averages' keys that moved between two states, and those that did not."""
    before, after = ((state or {}).get("tensors", {}) for state in (loaded, end))
    both = [key for key in before if key.startswith("ema:") and key in after]
    still = {key for key in both if before[key]["digest"] == after[key]["digest"]}
    return set(both) - still, still


def check_end(control: Mapping[str, Any] | None, candidate: Mapping[str, Any] | None, stage: str) -> list[Problem]:
    """Compares the replicas of every tensor after the window; both arguments are the bodies of `end` state lines.

    A tensor whose replicas drift apart in the control as well does not distinguish the two runs: a warning.
    """
    if candidate is None:
        return [
            Problem(
                "SR-UPD-UNRECORDED",
                "the job did not report its state after the window",
                where={"stage": stage, "key": "end"},
                hint="call recorder.close() before the process group is destroyed",
            )
        ]
    drifting = {key for key, fact in (control or {}).get("tensors", {}).items() if fact.get("odd")}
    odd = {key: fact["odd"] for key, fact in candidate.get("tensors", {}).items() if fact.get("odd")}
    problems: list[Problem] = []
    for known in (False, True):
        names = sorted(key for key in odd if (key in drifting) is known)
        if names:
            ranks = sorted({int(replica["rank"]) for name in names for replica in odd[name]})
            problems.append(
                Problem(
                    "SR-UPD-REPLICA",
                    f"after the window the replicas of {len(names)} tensors differ"
                    + (", as they do in the control" if known else ""),
                    Severity.WARNING if known else Severity.ERROR,
                    where={"stage": stage, "tensor": names[0], "rank": ranks[0]},
                    expected="every replica the same",
                    found=f"another value on the replica of rank {', '.join(map(str, ranks))}",
                    hint="gradients are not reduced over every replica, or a replica started from other weights",
                )
            )
    before = (control or {}).get("tensors", {})
    masks = {key: fact["digest"] for key, fact in before.items() if key.startswith("buffer:")}
    broken = sorted(
        key
        for key, fact in candidate.get("tensors", {}).items()
        if fact.get("nonfinite") and masks.get(key) != fact["digest"]  # a mask of infinities is the control's too
    )
    if broken:
        problems.append(
            Problem(
                "SR-UPD-NONFINITE",
                f"after the window {len(broken)} tensors hold values that are not finite",
                where={"stage": stage, "tensor": broken[0]},
                hint="the losses were finite until then: look at the last update, and at tensors that no loss sees",
            )
        )
    return problems
