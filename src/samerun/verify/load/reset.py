"""Load proof, optimizer state that was not restored at all: absent, all zero, or counting from 0 again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samerun.core.state import Role, TensorKey
from samerun.errors import Problem
from samerun.verify.state.match import is_counter

if TYPE_CHECKING:
    from samerun.verify.load.loaded import Loaded


@dataclass(frozen=True, slots=True)
class Resets:
    """Parameters whose optimizer state starts from nothing, with how that shows; `saved` have state in the checkpoint.

    Names are the checkpoint's, and the job's where those differ (`renamed`).
    """

    how: dict[str, str]
    saved: tuple[str, ...]
    renamed: dict[str, str]

    def covers(self, key: str) -> bool:
        """Returns whether a difference at this optimizer key is already told as a reset."""
        parsed = TensorKey.parse(key)
        return parsed.role is Role.OPTIM and self.renamed.get(parsed.fqn, parsed.fqn) in self.how

    def problems(self, loaded: Loaded) -> list[Problem]:
        """Returns one finding if every parameter was reset, else one per parameter."""
        if not self.how:
            return []
        severity = loaded.declared("optimizer").severity
        hint = (
            "the first updates will be far too large; load the optimizer state after the optimizer has its final groups"
        )
        if len(self.how) == len(self.saved):
            first = next(iter(self.how))
            return [
                Problem(
                    "SR-LOAD-OPT-RESET",
                    f"the optimizer starts from nothing: the state of all {len(self.saved)} parameters is "
                    f"{' or '.join(sorted(set(self.how.values())))}",
                    severity,
                    where={"tensor": f"param:{first}"},
                    hint=hint,
                    expected=f"{len(self.saved)} parameters with the saved state",
                    found="0",
                )
            ]
        return [
            Problem(
                "SR-LOAD-OPT-RESET",
                f"the optimizer state of this parameter is {how}",
                severity,
                where={"tensor": f"param:{name}"},
                hint=hint,
                expected="the saved state",
                found=how,
            )
            for name, how in self.how.items()
        ]


def find_resets(loaded: Loaded) -> Resets:
    """Returns which parameters have optimizer state in the checkpoint and a fresh one, or none, in the job."""
    slots: dict[str, list[str]] = {}
    for key, entry in loaded.state.tensors.items():
        if entry.key.role is Role.OPTIM:
            slots.setdefault(entry.key.fqn, []).append(key)
    job_keys = {pair.saved: pair.key for pair in loaded.match.pairs}
    renamed = {
        TensorKey.parse(job).fqn: TensorKey.parse(saved).fqn
        for saved, job in job_keys.items()
        if saved.startswith("optim.")
    }
    names_in_job = {fqn: name for name, fqn in renamed.items()}
    how: dict[str, str] = {}
    for fqn, keys in slots.items():
        moments = [key for key in keys if not is_counter(loaded.state.tensors[key].key)]
        counter = loaded.found["counters"].get(f"optim.step:{names_in_job.get(fqn, fqn)}")
        reason = _how_reset(loaded, moments, {key: job_keys[key] for key in moments if key in job_keys}, counter)
        if reason:
            how[fqn] = reason
    return Resets(how, tuple(slots), renamed)


def _how_reset(loaded: Loaded, moments: list[str], in_job: dict[str, str], counter: Any) -> str:
    if not moments:
        return ""
    if not in_job:
        return "absent" if counter is None or not counter["value"] else ""
    facts = {saved: loaded.found["tensors"][key] for saved, key in in_job.items()}
    if any(fact["nonzero"] for fact in facts.values()):
        return ""
    changed = any(
        list(loaded.state.tensors[saved].shape) != list(fact["shape"])
        or loaded.state.tensors[saved].dtype.name != fact["dtype"]
        or loaded.digest(saved, in_job[saved]) != fact["digest"]
        for saved, fact in facts.items()
    )
    return "all zero" if changed else ""
