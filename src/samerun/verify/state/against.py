"""Compares a checkpoint with an earlier one of the same run: what should have moved and did not, what went backwards.

Saves that write the first save's tensors again, or some layers of an older step, load without an error. Beside the
previous checkpoint they show: tensors that training moves have the same bytes, although updates were counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samerun.core.schedule import position_of
from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.errors import FormatError, Problem, Severity
from samerun.formats.base import Checkpoint
from samerun.verify.state.fingerprint import fingerprint_tensor

_SMALL_ELEMENTS = 64
_SHOWN = 4
# What a schedule, or the counting of updates, moves in a group.
_SCHEDULED = frozenset({"lr", "step", "momentum", "betas"})

# What moves in the state of torch's schedulers and of Megatron's and DeepSpeed's.
_MOVES = frozenset({
    "last_epoch", "_step_count", "_last_lr", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "num_steps",
    "last_batch_iteration", "lr_lambdas",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What the comparison gave. Keys are the checkpoint's.

    `by` counts how tensors were compared: `digest` (every byte read), `crc32` (recorded checksums, nothing read),
    `read` (small ones) or `undecided`. `unchanged` should have moved and did not; `still` need not have moved.
    """

    path: str
    update: tuple[int | None, int | None]
    by: Mapping[str, int]
    moved: int
    unchanged: tuple[str, ...]
    still: tuple[str, ...]
    missing: tuple[str, ...]
    new: tuple[str, ...]
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the value of `against` in the `samerun/inspect/1` document."""
        return {
            "path": self.path,
            "update": list(self.update),
            "compared_by": dict(self.by),
            "moved": self.moved,
            "unchanged": list(self.unchanged),
            "still": list(self.still),
            "missing": list(self.missing),
            "new": list(self.new),
        }


@dataclass(slots=True)
class _Seen:
    by: Counter[str] = field(default_factory=Counter[str])
    moved: list[str] = field(default_factory=list[str])
    same: list[str] = field(default_factory=list[str])
    reshaped: list[str] = field(default_factory=list[str])


def compare_previous(
    checkpoint: Checkpoint, previous: Checkpoint, *, digests: Mapping[str, str] | None = None
) -> Against:
    """Compares `checkpoint` with an earlier one. `digests` are its own, if every byte is to be read.

    Nothing about either raises: a tensor that cannot be read counts as undecided, other checks name it.
    """
    now, then = checkpoint.state, previous.state
    seen = _Seen()
    for key, entry in now.tensors.items():
        if key in then.tensors:
            _compare(seen, checkpoint, previous, key, entry, digests)
    advanced = _advanced(now, then)
    owes = _movers(now)
    unchanged = [key for key in seen.same if key in owes and not _all_zero(checkpoint, key)] if advanced else []
    dead = {now.tensors[key].key.fqn for key in seen.same if _is_moment(now, key) and key not in unchanged}
    unchanged = [key for key in unchanged if now.tensors[key].key.fqn not in dead]
    missing = tuple(key for key in then.tensors if key not in now.tensors)
    new = tuple(key for key in now.tensors if key not in then.tensors)
    problems = [
        *_check_progress(now, then),
        *_check_unchanged(unchanged, [key for key in owes if key in seen.same or key in set(seen.moved)], now),
        *_check_names(missing, new, seen.reshaped),
        *_check_groups(now, then),
        *_check_schedule(now, then),
        *_check_open(seen.by),
    ]
    return Against(
        path=str(previous.path),
        update=(then.progress.update, now.progress.update),
        by=dict(seen.by),
        moved=len(seen.moved),
        unchanged=tuple(unchanged),
        still=tuple(key for key in seen.same if key not in set(unchanged)),
        missing=missing,
        new=new,
        problems=tuple(problems),
    )


def _compare(
    seen: _Seen,
    checkpoint: Checkpoint,
    previous: Checkpoint,
    key: str,
    entry: TensorEntry,
    digests: Mapping[str, str] | None,
) -> None:
    other = previous.state.tensors[key]
    if (entry.shape, entry.dtype) != (other.shape, other.dtype):
        seen.reshaped.append(key)
        return
    if entry.num_elements == 0:
        return
    how, a, b = _prints(checkpoint, previous, key, entry, digests)
    seen.by[how] += 1
    if how != "undecided":
        (seen.same if a == b else seen.moved).append(key)


def _prints(
    checkpoint: Checkpoint, previous: Checkpoint, key: str, entry: TensorEntry, digests: Mapping[str, str] | None
) -> tuple[str, Any, Any]:
    """Returns how a tensor is compared, and the two values to compare."""
    try:
        if entry.num_elements <= _SMALL_ELEMENTS:
            return "read", checkpoint.read(key).tobytes(), previous.read(key).tobytes()
        if digests is not None:
            from samerun.verify.state.digest import digest_tensor

            return ("digest", digests[key], digest_tensor(previous, key)) if key in digests else ("undecided", 0, 0)
    except FormatError:
        return "undecided", None, None
    a, b = fingerprint_tensor(checkpoint, key), fingerprint_tensor(previous, key)
    alike = a is not None and b is not None and a.partition(":")[0] == b.partition(":")[0]
    if alike and a is not None and b is not None and a.startswith("pieces") and _cut(a) != _cut(b):
        alike = False
    return ("crc32", a, b) if alike else ("undecided", None, None)


def _cut(pieces: str) -> list[str]:
    """Returns the boxes of a fingerprint of pieces, without the checksums."""
    return [part[:-8] for part in pieces.removeprefix("pieces:").split(",(")]


def _advanced(now: LogicalState, then: LogicalState) -> bool:
    """Whether updates were made between the two, as far as is known: unknown counts as yes."""
    if now.progress.update is None or then.progress.update is None:
        return True
    return now.progress.update > then.progress.update


def _movers(state: LogicalState) -> set[str]:
    """Returns the keys of tensors that an update moves: trained parameters, their masters and slots, averages."""
    trained = {entry.key.fqn for entry in state.tensors.values() if entry.key.role is Role.OPTIM}
    still = {name for group in state.groups if group.hyperparameters.get("lr") == 0 for name in group.params}
    movers: set[str] = set()
    for key, entry in state.tensors.items():
        role, fqn = entry.key.role, entry.key.fqn
        if role is Role.OPTIM or (fqn in trained and fqn not in still and role in (Role.PARAM, Role.MASTER, Role.EMA)):
            movers.add(key)
    return movers


def _is_moment(state: LogicalState, key: str) -> bool:
    key_ = state.tensors[key].key
    return key_.role is Role.OPTIM and key_.slot != "step"


def _all_zero(checkpoint: Checkpoint, key: str) -> bool:
    """Whether a moment is zero everywhere: its parameter never had a gradient and need not move."""
    entry = checkpoint.state.tensors[key]
    if not _is_moment(checkpoint.state, key):
        return False
    try:
        return not any(bool(checkpoint.read_piece(key, piece).any()) for piece in range(len(entry.tiling)))
    except FormatError:
        return False


def _check_progress(now: LogicalState, then: LogicalState) -> list[Problem]:
    problems: list[Problem] = []
    for name in ("update", "samples", "tokens", "epoch"):
        before, after = getattr(then.progress, name), getattr(now.progress, name)
        if before is not None and after is not None and after < before:
            problems.append(_backwards(name, before, after))
    before, after = _position(then), _position(now)
    if before is not None and after is not None and after < before:
        problems.append(_backwards("scheduler.last_epoch", before, after))
    if now.progress.update is not None and now.progress.update == then.progress.update:
        problems.append(
            Problem(
                "SR-AGAINST-SAME",
                f"both checkpoints are of update {now.progress.update}: nothing has to have moved",
                severity=Severity.NOTE,
                hint="give an earlier checkpoint of the run; to see whether these two are equal, use `samerun diff`",
            )
        )
    return problems


def _position(state: LogicalState) -> int | None:
    return position_of(state.scheduler)


def _backwards(name: str, before: int, after: int) -> Problem:
    return Problem(
        "SR-AGAINST-BACKWARDS",
        f"{name} went backwards since the previous checkpoint",
        where={"key": name},
        expected=f"at least {before}",
        found=after,
        hint="the two are in the wrong order, of different runs, or a counter was not restored when the run went on",
    )


def _check_unchanged(unchanged: Sequence[str], movers: Sequence[str], state: LogicalState) -> list[Problem]:
    """One finding per kind of tensor: all of them unchanged is a save that wrote old tensors again."""
    of_kind = Counter(_kind(state, key) for key in movers)
    stuck: dict[str, list[str]] = defaultdict(list)
    for key in unchanged:
        stuck[_kind(state, key)].append(key)
    return [_stuck(kind, keys, of_kind[kind]) for kind, keys in stuck.items()]


def _kind(state: LogicalState, key: str) -> str:
    return key.partition(":")[0]


def _stuck(kind: str, keys: Sequence[str], total: int) -> Problem:
    shown = ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
    if len(keys) == total:
        return Problem(
            "SR-AGAINST-STUCK",
            f"all {total} tensors of {kind} are those of the previous checkpoint, although updates were made",
            where={"tensor": keys[0]},
            hint="the save wrote tensors that it had copied before; what was trained since is not in this checkpoint",
        )
    return Problem(
        "SR-AGAINST-PARTLY",
        f"{len(keys)} of {total} tensors of {kind} did not change since the previous checkpoint: {shown}",
        severity=Severity.WARNING,
        where={"tensor": keys[0]},
        hint="right for parameters without a gradient, or updates below the type's resolution; otherwise a part of "
        "this checkpoint is from the earlier save",
    )


def _check_names(missing: Sequence[str], new: Sequence[str], reshaped: Sequence[str]) -> list[Problem]:
    rows = (
        ("SR-AGAINST-MISSING", missing, "tensors of the previous checkpoint are not in this one", Severity.ERROR),
        ("SR-AGAINST-NEW", new, "tensors are new since the previous checkpoint", Severity.NOTE),
        ("SR-AGAINST-SHAPE", reshaped, "tensors changed their shape or type since the previous checkpoint", None),
    )
    return [
        Problem(
            code,
            f"{len(keys)} {text}: {', '.join(keys[:_SHOWN])}{' ...' if len(keys) > _SHOWN else ''}",
            severity=severity or Severity.ERROR,
            where={"tensor": keys[0]},
            hint="the model or optimizer was changed, the two are of different runs, or a part was not saved",
        )
        for code, keys, text, severity in rows
        if keys
    ]


def _check_groups(now: LogicalState, then: LogicalState) -> list[Problem]:
    if not now.groups or not then.groups:
        return []
    before, after = _settings(then), _settings(now)
    changed = [name for name in before if name in after and before[name] != after[name]]
    if not changed:
        return []
    old, new = before[changed[0]], after[changed[0]]
    differing = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    return [
        Problem(
            "SR-AGAINST-GROUPS",
            f"{', '.join(differing)} of {len(changed)} parameters changed since the previous checkpoint",
            severity=Severity.WARNING,
            where={"tensor": changed[0], "key": differing[0]},
            expected=old.get(differing[0]),
            found=new.get(differing[0]),
            hint="right if the script changed them; otherwise a group was lost or parameters moved between groups",
        )
    ]


def _settings(state: LogicalState) -> dict[str, dict[str, str]]:
    """Returns by parameter every hyperparameter that a schedule does not move."""
    return {
        name: {key: repr(value) for key, value in group.hyperparameters.items() if key not in _SCHEDULED}
        for group in state.groups
        for name in group.params
    }


def _check_schedule(now: LogicalState, then: LogicalState) -> list[Problem]:
    """Compares what does not move in a schedule: its horizon, warm-up, factors and base rates."""
    before, after = _horizon(then), _horizon(now)
    changed = [name for name in before if name in after and after[name] != before[name]]
    if not changed:
        return []
    told = ", ".join(f"{name}: {before[name]} -> {after[name]}" for name in changed[:_SHOWN])
    more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return [
        Problem(
            "SR-AGAINST-SCHEDULE",
            f"the learning-rate schedule is another one than before: {told}{more}",
            severity=Severity.WARNING,
            where={"key": changed[0]},
            expected=before[changed[0]],
            found=after[changed[0]],
            hint="a horizon computed from the number of processes changes when they do; if it was not meant, resume "
            "from the previous checkpoint with the old horizon",
        )
    ]


def _horizon(state: LogicalState) -> dict[str, Any]:
    """Returns the settings of a schedule by name, and the horizon that Trainer records beside one."""
    found: dict[str, Any] = {}
    stack: list[tuple[str, Any]] = [("scheduler", dict(state.scheduler or {}))]
    while stack:
        name, node = stack.pop()
        last = name.rpartition(".")[2]
        if last in _MOVES:
            continue
        if isinstance(node, Mapping):
            stack += [(f"{name}.{key}", item) for key, item in node.items()]
        elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
            stack += [(f"{name}.{number}", item) for number, item in enumerate(node)]
        elif isinstance(node, int | float | str | list) and not isinstance(node, bool):
            found[name] = node
    horizon = state.objects.get("trainer_state.max_steps")
    return found | ({"trainer_state.max_steps": horizon} if horizon is not None else {})


def _check_open(by: Mapping[str, int]) -> list[Problem]:
    if not by.get("undecided"):
        return []
    return [
        Problem(
            "SR-AGAINST-OPEN",
            f"{by['undecided']} of {sum(by.values())} tensors were not compared: no checksum is recorded for them, or "
            "they could not be read",
            severity=Severity.NOTE,
            hint="--deep reads every byte of both",
        )
    ]
