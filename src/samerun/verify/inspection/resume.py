"""Whether a logical state holds what a resume needs, and whether its parts agree with each other."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from samerun.core.plain import is_blank
from samerun.core.state import LogicalState, ParamGroup, Role, TensorEntry
from samerun.errors import Problem, Severity, has_errors
from samerun.verify.inspection.resume_schedule import check_scheduler
from samerun.verify.inspection.resume_streams import check_streams

Verdict = Literal["yes", "partial", "no"]
NEEDED = ("params", "optimizer", "groups", "scheduler", "rng", "data", "progress")
_SHOWN = 4
_SAME_SHAPE_SLOTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"})
# What torch.optim (2.13), DeepSpeed and Megatron themselves keep in a group; anything else is the script's.
_HYPERPARAMETERS = frozenset({
    "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "rho", "alpha", "lambd", "t0",
    "centered", "etas", "step_sizes", "amsgrad",
    "momentum_decay", "beta2_decay", "d", "ns_steps", "ns_coefficients", "initial_lr",
    "max_lr", "min_lr", "bias_correction", "wd_mult", "lr_mult", "is_expert", "is_decoupled_lr",
})  # fmt: skip
_NUMBERED = re.compile(r"(?:global_?step|step|iter|iteration|checkpoint|ckpt|update)[-_=]?0*(\d+)", re.IGNORECASE)
_SCALER = re.compile(r"(?:^|[._])(?:grad_?)?scaler|\.growth_interval$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Resumable:
    """The verdict: whether a run can go on from here, what there is for it, and what there is not."""

    verdict: Verdict
    have: tuple[str, ...]
    lack: tuple[str, ...]


def judge_resumable(state: LogicalState, problems: Iterable[Problem]) -> Resumable:
    """Returns `no` if anything blocks, `yes` if nothing is lacking, `partial` in between."""
    held = find_parts(state)
    have = tuple(name for name, there in held.items() if there)
    lack = tuple(name for name in NEEDED if not held[name])
    if has_errors(problems) or "params" in lack or "optimizer" in lack:
        return Resumable("no", have, lack)
    return Resumable("partial" if lack else "yes", have, lack)


def find_parts(state: LogicalState) -> dict[str, bool]:
    """Returns, part by part, whether the checkpoint has it."""
    roles = Counter(entry.key.role for entry in state.tensors.values())
    return {
        "params": roles[Role.PARAM] + roles[Role.MASTER] > 0,
        "buffers": roles[Role.BUFFER] > 0,
        "masters": roles[Role.MASTER] > 0,
        "optimizer": roles[Role.OPTIM] > 0 or _stateless(state.groups),
        "groups": any(group.hyperparameters for group in state.groups),
        "scheduler": bool(state.scheduler),
        "scaler": any(_SCALER.search(name) and not is_blank(value) for name, value in state.objects.items()),
        "ema": roles[Role.EMA] > 0,
        "rng": bool(state.rng),
        "data": bool(state.data),
        "progress": state.progress.update is not None,
    }


def _stateless(groups: Sequence[ParamGroup]) -> bool:
    """Whether the groups are those of plain gradient descent, which keeps no state."""
    return bool(groups) and all(
        "momentum" in group.hyperparameters and not group.hyperparameters["momentum"] for group in groups
    )


def check_resume(state: LogicalState, name: str, steps: Mapping[str, float]) -> list[Problem]:
    """Returns every finding about what is there to resume from.

    `name` is the checkpoint's own directory or file name; `steps` the values of the optimizer's step counters by FQN.
    """
    return [
        *check_parts(state),
        *check_optimizer(state),
        *check_groups(state),
        *check_counters(state, name, steps),
        *check_scheduler(state),
        *(check_streams(state) if find_parts(state)["optimizer"] else ()),
    ]


def check_parts(state: LogicalState) -> list[Problem]:
    """Names what is missing altogether, except what other checks name with more detail."""
    held = find_parts(state)
    problems: list[Problem] = []
    if not held["params"]:
        problems.append(
            Problem(
                "SR-RES-PARAMS",
                "there are no parameters here",
                hint="a model saved beside its optimizer lies in a directory of its own; inspect that one too",
            )
        )
    if not held["optimizer"]:
        problems.append(
            Problem(
                "SR-OPT-MISSING",
                "there is no optimizer state: this can start a run from these weights, not resume one",
                hint="save the optimizer with the model (get_state_dict), or declare a warm start in the manifest; "
                "`samerun convert --weights-only` writes the weights as such",
            )
        )
    elif not held["groups"]:
        problems.append(
            Problem(
                "SR-GROUP-NONE",
                "the optimizer's parameter groups are not saved: learning rate and weight decay come from the script",
                severity=Severity.WARNING,
                hint="check that the script rebuilds the same groups with the same hyperparameters",
            )
        )
    if held["optimizer"] and not held["scheduler"]:
        problems.append(
            Problem(
                "SR-SCHED-MISSING",
                "no learning-rate scheduler is saved",
                severity=Severity.WARNING,
                hint="if the run has one, it would start again from warm-up; save scheduler.state_dict() too",
            )
        )
    if held["optimizer"] and state.progress.update is None:
        problems.append(
            Problem(
                "SR-CNT-MISSING",
                "nothing says how many updates were done",
                severity=Severity.WARNING,
                hint="save the update, samples and tokens so far; the manifest will ask for them",
            )
        )
    return problems


def check_optimizer(state: LogicalState) -> list[Problem]:
    """Checks that every parameter of a group has the same slots as its neighbours, of the right shape and type."""
    slots = _slots(state)
    model = {entry.key.fqn for entry in state.tensors.values() if entry.key.role in (Role.PARAM, Role.MASTER)}
    problems: list[Problem] = []
    if not slots:
        return problems
    orphans = sorted({*slots, *_grouped(state)} - model - {fqn for fqn in slots if fqn.startswith("#")})
    if orphans and model:
        problems.append(_orphans(orphans))
    dims = {entry.key.fqn: len(entry.shape) for entry in state.tensors.values() if entry.key.role is not Role.OPTIM}
    for group in state.groups or (ParamGroup(tuple(slots), {}),):
        problems += _check_group_slots(group, slots, dims)
    problems += _check_slot_tensors(state)
    return problems


def _slots(state: LogicalState) -> dict[str, set[str]]:
    slots: dict[str, set[str]] = defaultdict(set)
    for entry in state.tensors.values():
        if entry.key.role is Role.OPTIM:
            slots[entry.key.fqn].add(entry.key.slot or "")
    return slots


def _grouped(state: LogicalState) -> set[str]:
    return {fqn for group in state.groups for fqn in group.params if not fqn.startswith("#")}


def _check_group_slots(group: ParamGroup, slots: Mapping[str, set[str]], dims: Mapping[str, int]) -> list[Problem]:
    held = {fqn: slots[fqn] for fqn in group.params if fqn in slots}
    without = [fqn for fqn in group.params if fqn not in slots]
    problems: list[Problem] = []
    if without and held:
        problems.append(
            Problem(
                "SR-OPT-NOSTATE",
                f"{len(without)} of {len(group.params)} parameters of a group have no optimizer state: "
                f"{_some(without)}",
                severity=Severity.WARNING,
                where={"tensor": without[0]},
                hint="right for frozen or never-used parameters; if these are trained, their moments were not saved",
            )
        )
    usual = Counter(slot for mine in held.values() for slot in mine)
    for slot, count in sorted(usual.items()):
        lacking = sorted(fqn for fqn, mine in held.items() if slot not in mine)
        if lacking and count * 2 >= len(held) and not _by_design(slot, lacking, held, dims):
            problems.append(
                Problem(
                    "SR-OPT-SLOT",
                    f"{slot} is missing for {len(lacking)} of {len(held)} parameters of a group: {_some(lacking)}",
                    where={"tensor": f"optim.{slot}:{lacking[0]}"},
                    hint="the optimizer would start them from zero beside others that go on; use another checkpoint",
                )
            )
    return problems


def _by_design(slot: str, lacking: Sequence[str], held: Mapping[str, set[str]], dims: Mapping[str, int]) -> bool:
    """Whether other slots stand in for this one in tensors of another number of dimensions.

    So it is in factored optimizers: Adafactor keeps rows and columns of matrices and every element of vectors.
    """
    having = [fqn for fqn, mine in held.items() if slot in mine]
    theirs: set[str] = set().union(*(held[fqn] for fqn in having))
    apart = not {dims.get(fqn) for fqn in lacking} & {dims.get(fqn) for fqn in having}
    return apart and all(held[fqn] - theirs for fqn in lacking)


def _check_slot_tensors(state: LogicalState) -> list[Problem]:
    params = {entry.key.fqn: entry for entry in state.tensors.values() if entry.key.role is Role.PARAM}
    problems: list[Problem] = []
    narrow: list[str] = []
    for key, entry in state.tensors.items():
        param = params.get(entry.key.fqn) if entry.key.role is Role.OPTIM else None
        if param is None or entry.key.slot not in _SAME_SHAPE_SLOTS:
            continue
        if entry.shape != param.shape:
            problems.append(_shape_differs(key, param, entry))
        elif entry.dtype.kind == "float" and entry.dtype.mantissa_bits < param.dtype.mantissa_bits:
            narrow.append(key)
    if narrow:
        problems.append(
            Problem(
                "SR-OPT-DTYPE",
                f"{len(narrow)} moments are stored with fewer bits than their parameters: {_some(narrow)}",
                severity=Severity.WARNING,
                where={"tensor": narrow[0]},
                hint="if the run keeps them wider, they were rounded on saving and the resumed run differs at once",
            )
        )
    return problems


def _shape_differs(key: str, param: TensorEntry, entry: TensorEntry) -> Problem:
    return Problem(
        "SR-OPT-SHAPE",
        "an optimizer slot has another shape than its parameter",
        where={"tensor": key},
        expected=list(param.shape),
        found=list(entry.shape),
        hint="it belongs to another model, or was saved flat where the parameter was saved whole",
    )


def _orphans(orphans: Sequence[str]) -> Problem:
    return Problem(
        "SR-OPT-ORPHAN",
        f"the optimizer knows {len(orphans)} parameters that the model does not have under that name: {_some(orphans)}",
        severity=Severity.WARNING,
        where={"tensor": orphans[0]},
        hint="right where the model saves a fused weight in parts (torchtitan's wqkv); otherwise this state is lost",
    )


def check_groups(state: LogicalState) -> list[Problem]:
    """Checks that the groups hold every parameter with state exactly once, and carry the same hyperparameters."""
    if not state.groups:
        return []
    problems: list[Problem] = []
    listed = Counter(fqn for group in state.groups for fqn in group.params)
    stateful = [fqn for fqn in _slots(state) if not fqn.startswith("#")]
    lost = sorted(fqn for fqn in stateful if fqn not in listed)
    if lost:
        problems.append(
            Problem(
                "SR-GROUP-LOST",
                f"{len(lost)} of {len(stateful)} parameters with optimizer state are in no parameter group: "
                f"{_some(lost)}",
                where={"tensor": lost[0]},
                hint="pipeline stages that save nested optimizer state overwrite each other's groups; save flattened "
                "(flatten_optimizer_state_dict=True), or restore learning rate and weight decay of these by hand",
            )
        )
    twice = sorted(fqn for fqn, count in listed.items() if count > 1)
    if twice:
        problems.append(
            Problem(
                "SR-GROUP-TWICE",
                f"{len(twice)} parameters are in more than one group: {_some(twice)}",
                where={"tensor": twice[0]},
                hint="which learning rate and weight decay applies cannot be told",
            )
        )
    problems += _check_hyperparameters(state.groups, usual=state.format == "huggingface")
    return problems


def _check_hyperparameters(groups: Sequence[ParamGroup], *, usual: bool) -> list[Problem]:
    """Checks groups' settings and members. Trainer always makes a group without weight decay: it is `usual` that it is
    empty where only matrices are trained (adapters)."""
    problems: list[Problem] = []
    every = sorted({name for group in groups for name in group.hyperparameters} - {"name"})  # labels set nothing
    for number, group in enumerate(groups):
        missing = [name for name in every if name not in group.hyperparameters]
        if missing:
            problems.append(_hyperparameters_missing(number, missing, _has_its_own(group, groups)))
        if not group.params:
            trainers = usual and len(groups) == 2 and group.hyperparameters.get("weight_decay") == 0
            problems.append(
                Problem(
                    "SR-GROUP-EMPTY",
                    f"group {number} has no parameters",
                    severity=Severity.NOTE if trainers else Severity.WARNING,
                    where={"key": f"param_groups.{number}"},
                    hint="its parameters may have been filed under another group, with that group's weight decay and "
                    "rate; compare with how the script builds the optimizer",
                )
            )
    return problems


def _has_its_own(group: ParamGroup, groups: Sequence[ParamGroup]) -> bool:
    """Whether a group has hyperparameters that another lacks: so do groups of two algorithms, not cut-off ones."""
    return any(group.hyperparameters.keys() - other.hyperparameters.keys() for other in groups)


def _hyperparameters_missing(number: int, missing: list[str], has_its_own: bool) -> Problem:
    mild = has_its_own or not _HYPERPARAMETERS.intersection(missing)
    return Problem(
        "SR-GROUP-HYPER",
        f"group {number} lacks hyperparameters that others have: {_some(missing)}",
        severity=Severity.WARNING if mild else Severity.ERROR,
        where={"key": f"param_groups.{number}"},
        hint="right where groups follow different algorithms (Muon beside AdamW) or the script marks some of them; "
        "otherwise part of the groups was lost on saving"
        if mild
        else "part of the groups was lost on saving; set them again from the training configuration",
    )


def _counts_saves(state: LogicalState, name: str) -> bool:
    """Whether Accelerate named the checkpoint (`automatic_checkpoint_naming`): it numbers its saves, not updates."""
    return state.format == "accelerate" and name.startswith("checkpoint_")


def check_counters(state: LogicalState, name: str, steps: Mapping[str, float]) -> list[Problem]:
    """Compares every place that counts updates: progress, the optimizer's steps, and the name of the checkpoint."""
    problems: list[Problem] = []
    update = state.progress.update
    values = Counter(steps.values())
    if len(values) > 1:
        problems.append(_steps_differ(steps, values))
    if values and update is not None and update not in values:
        usual = values.most_common(1)[0][0]
        problems.append(
            Problem(
                "SR-CNT-OPTIMIZER",
                "the optimizer's own step differs from the number of updates that the checkpoint counts",
                severity=Severity.WARNING,
                where={"tensor": f"optim.step:{next(iter(steps))}"},
                expected=update,
                found=usual,
                hint="bias correction uses the optimizer's; find out which is right (skipped steps also cause this, "
                "and a counter that names the last update, counted from 0)",
            )
        )
    numbered = _NUMBERED.fullmatch(name)
    if numbered and update is not None and int(numbered.group(1)) != update and not _counts_saves(state, name):
        problems.append(
            Problem(
                "SR-CNT-DIRECTORY",
                "the checkpoint's name says another update than its content",
                severity=Severity.WARNING,
                where={"file": name},
                expected=int(numbered.group(1)),
                found=update,
                hint="it may have been renamed, or its content is from another save",
            )
        )
    problems += _check_step_types(state, steps)
    return problems


def _steps_differ(steps: Mapping[str, float], values: Counter[float]) -> Problem:
    usual = values.most_common(1)[0][0]
    others = [f"{fqn} = {step:g}" for fqn, step in steps.items() if step != usual]
    return Problem(
        "SR-CNT-STEPS",
        f"the optimizer's steps differ between parameters: {len(others)} of {len(steps)} are not {usual:g}, "
        f"{_some(others)}",
        severity=Severity.WARNING,
        where={"tensor": f"optim.step:{others[0].partition(' = ')[0]}"},
        expected=usual,
        found=min(value for value in values if value != usual),
        hint="right for parameters that are not trained at every update; otherwise parts of two saves are mixed",
    )


def _check_step_types(state: LogicalState, steps: Mapping[str, float]) -> list[Problem]:
    """A counter in bfloat16 stops at 256, in float16 at 2048: adding one rounds to the same value."""
    narrow = [
        entry
        for entry in state.tensors.values()
        if entry.key.slot == "step" and entry.dtype.kind == "float" and entry.dtype.mantissa_bits < 20
    ]
    if not narrow:
        return []
    limit = 2 ** (narrow[0].dtype.mantissa_bits + 1)
    stuck = any(step >= limit for step in steps.values())
    return [
        Problem(
            "SR-CNT-DTYPE",
            f"the optimizer's step is a {narrow[0].dtype.name}, which cannot count beyond {limit}",
            severity=Severity.ERROR if stuck else Severity.WARNING,
            where={"tensor": str(narrow[0].key)},
            hint="keep step in float32; casting a whole optimizer to half precision does this",
        )
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
