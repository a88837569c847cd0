"""Findings that need no values: counts of layers and experts, routers, schedule, tracker, and what is unverified."""

from __future__ import annotations

import os
import re
from collections.abc import Set
from pathlib import Path

from samerun.core.state import LogicalState
from samerun.errors import Problem, Severity
from samerun.formats.mcore.run import Run, is_whole

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d+)")
_MOST_BYTES = 4_096
_KNOWN_CLASSES = ("megatron.core.", "megatron.training.", "signal.Signals", "argparse.")


def check_state(state: LogicalState, run: Run, root: Path) -> list[Problem]:
    """Returns the findings about a state that both formats share."""
    names = {entry.key.fqn for entry in state.tensors.values()}
    return [
        *check_experts(state, run, names),
        *check_layers(names, state, run),
        *check_schedule(state),
        *check_tracker(root),
        *check_verified(run, names, root),
        *([] if run.args else [_no_args(root, run)]),
    ]


def check_experts(state: LogicalState, run: Run, names: set[str]) -> list[Problem]:
    """Checks that experts come with what routes to them, and that there are as many as the run had."""
    experts = run.count("num_experts")
    if experts is None:
        return []
    problems: list[Problem] = []
    if not any(name.endswith(".router.weight") for name in names):
        problems.append(_router(root=run, what="router weights", name="mlp.router.weight"))
    if run.flag("moe_router_enable_expert_bias") and not any(name.endswith(".expert_bias") for name in names):
        problems.append(_router(root=run, what="the routers' balancing bias", name="mlp.router.expert_bias"))
    held = _count_experts(state, names)
    if held != experts:
        problems.append(_counted("SR-MEG-EXPERTS", "experts", experts, held))
    return problems


def _count_experts(state: LogicalState, names: set[str]) -> int:
    numbered = {
        int(match[1]) for name in names if (match := re.search(r"\.experts\.(?:local_experts|experts)\.(\d+)\.", name))
    }
    grouped = {int(match[1]) for name in names if (match := re.search(r"\.experts\.linear_fc\d\.\w+?(\d+)$", name))}
    stacked = [
        entry.shape[1 if re.search(r"layers\.(?!\d)", entry.key.fqn) else 0]
        for entry in state.tensors.values()
        if ".experts.experts." in entry.key.fqn and len(entry.shape) > 2 and entry.key.slot is None
    ]
    return max(len(numbered), len(grouped), max(stacked, default=0))


def check_layers(names: set[str], state: LogicalState, run: Run) -> list[Problem]:
    """Checks that there are as many decoder layers as the run had."""
    expected = run.count("num_layers")
    numbered = {int(match[1]) for name in names if (match := re.match(r"decoder\.layers\.(\d+)\.", name))}
    stacked = [
        entry.shape[0]
        for entry in state.tensors.values()
        if re.match(r"decoder\.layers\.(?!\d)", entry.key.fqn) and entry.shape and entry.key.slot is None
    ]
    held = max(len(numbered), max(stacked, default=0))
    return [] if expected in (None, held) or not names else [_counted("SR-MEG-LAYERS", "layers", expected, held)]


def check_schedule(state: LogicalState) -> list[Problem]:
    """Compares the schedule's position, which Megatron counts in samples, with the samples that were consumed."""
    position = (state.scheduler or {}).get("num_steps")
    samples = state.progress.samples
    if not is_whole(position) or samples is None or position == samples:
        return []
    return [
        Problem(
            "SR-MEG-SCHEDULE",
            "the learning-rate schedule stands at another number of samples than were consumed",
            severity=Severity.NOTE,
            where={"key": "opt_param_scheduler.num_steps"},
            expected=samples,
            found=position,
            hint="skipped updates do not advance the schedule. If none were skipped, a counter is of another save",
        )
    ]


def check_tracker(root: Path) -> list[Problem]:
    """Says what a run that is pointed at the directory above would load."""
    parent = root.parent
    match = _ITERATION.fullmatch(root.name)
    if match is None and root.name != "release":
        return []
    try:
        with open(parent / TRACKER, "rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return [_no_tracker(parent)] if not os.path.lexists(parent / TRACKER) else []
    named = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else text
    return [] if named == root.name else [_other_tracked(parent, named, root.name)]


def check_verified(run: Run, names: set[str], root: Path) -> list[Problem]:
    """Names what of this checkpoint no real sample was compared with."""
    odd: list[str] = []
    if run.local_spec is False:
        odd.append("Transformer Engine layers")
    if run.flag("moe_grouped_gemm"):
        odd.append("grouped experts")
    if run.cp > 1:
        odd.append("context parallelism")
    if run.args.get("fp8") or run.flag("fp8_param_gather"):
        odd.append("fp8")
    if any(".mixer." in name or name.startswith("mtp.") for name in names):
        odd.append("layers of other kinds than attention and MLP")
    if run.flag("multi_latent_attention"):
        odd.append("latent attention")
    return [unverified(root, ", ".join(odd))] if odd else []


def unverified(root: Path, what: str) -> Problem:
    """Returns the note that something was built from a description, not compared with a real checkpoint."""
    return Problem(
        "SR-MEG-UNVERIFIED",
        f"read from its description, not compared with a checkpoint of a real run: {what}",
        severity=Severity.NOTE,
        where={"file": str(root)},
        hint="compare a few tensors with what Megatron loads before you rely on this",
    )


def unknown_classes(root: Path, names: Set[str]) -> list[Problem]:
    """Returns the note about classes that are kept as records, except those that Megatron's own files hold."""
    odd = sorted(name for name in names if not name.startswith(_KNOWN_CLASSES))
    if not odd:
        return []
    return [
        Problem(
            "SR-PKL-UNKNOWN",
            f"objects of classes that samerun does not know are kept as inert records: {', '.join(odd[:5])}",
            severity=Severity.NOTE,
            where={"file": str(root)},
            hint="nothing of them was executed; Megatron would",
        )
    ]


def _router(root: Run, what: str, name: str) -> Problem:
    return Problem(
        "SR-MEG-ROUTER",
        f"the model has {root.count('num_experts')} experts, but {what} are not saved",
        where={"tensor": f"param:decoder.layers.{name}"},
        hint="tokens would go to other experts than in training; save the whole model, or use another checkpoint",
    )


def _counted(code: str, what: str, expected: int | None, found: int) -> Problem:
    return Problem(
        code,
        f"the run had {expected} {what}, the checkpoint holds {found}",
        where={"key": what},
        expected=expected,
        found=found,
        hint="a rank's part was never saved, or the arguments are of another model",
    )


def _no_tracker(parent: Path) -> Problem:
    return Problem(
        "SR-MEG-NOTRACKER",
        f"there is no {TRACKER} beside the checkpoint: a run that loads from there starts at iteration 0",
        severity=Severity.WARNING,
        where={"file": str(parent / TRACKER)},
        hint="Megatron says so in its log only; write the iteration's number into that file, or pass --ckpt-step",
    )


def _other_tracked(parent: Path, named: str, opened: str) -> Problem:
    return Problem(
        "SR-MEG-TRACKED",
        "the tracker beside the checkpoint names another one: that is what Megatron loads",
        severity=Severity.NOTE,
        where={"file": str(parent / TRACKER)},
        expected=opened,
        found=named[:80],
        hint="pass --ckpt-step to resume from this one",
    )


def _no_args(root: Path, run: Run) -> Problem:
    return Problem(
        "SR-MEG-ARGS",
        "the run's arguments are not saved: degrees of parallelism and the vocabulary's size are not known from them",
        severity=Severity.WARNING,
        where={"file": str(root)},
        found=run.inferred,
        hint="training loops of their own over megatron.core save no args. Flat optimizer state of a pipeline with "
        "virtual stages cannot be placed without them",
    )
