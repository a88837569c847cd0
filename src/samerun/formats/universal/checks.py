"""What a universal checkpoint shows of the mistakes that its converter and loader make without an error (0.19.8)."""

from __future__ import annotations

import contextlib
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from samerun.core.mesh import Layout
from samerun.core.state import Role, normalize_fqn
from samerun.errors import FormatError, Problem, Severity, has_errors
from samerun.formats.base import Array, PayloadCheck
from samerun.formats.deepspeed.states import as_dict, missing_file
from samerun.formats.deepspeed.values import (
    Odd,
    Readable,
    check_checksums,
    compare_masters,
    compare_replicas,
    find_rounded,
    rounded_problem,
)
from samerun.formats.universal.assemble import Assembled
from samerun.formats.universal.source import COMMON, FOLDER, Source

_SAMPLED_TENSORS = 256
_SAMPLED_ELEMENTS = 256
NO_MOMENTS = frozenset({"fp32", "step"})


def check_assembled(checkpoint: Readable, assembled: Assembled) -> list[Problem]:
    """Returns every finding that names, shapes, counters and a few values give."""
    source = assembled.source
    return [
        *check_lost(assembled),
        *check_dropped(assembled),
        *check_buffers(assembled),
        *check_stale(assembled),
        *check_sample(checkpoint, assembled),
        *check_steps(assembled),
        *check_groups(assembled),
        *check_loader(assembled),
        *_unknown(source),
    ]


def check_lost(assembled: Assembled) -> list[Problem]:
    """Finds parameters without folder, those that the converter wrote without moments, and files that were removed."""
    source = assembled.source
    problems: list[Problem] = []
    gone = [name for name in assembled.slots.lost if name not in source.slots]
    if gone:
        path = source.root / FOLDER / gone[0] / "fp32.pt"
        problems.append(missing_file(path, f"{len(gone)} trained parameters have no folder: {_some(gone)}"))
    damaged = {name for name, _ in source.unreadable}
    lost = {name: slots for name, slots in assembled.slots.lost.items() if name in source.slots and name not in damaged}
    bare = [name for name in lost if _has_no_moments(source, name)]
    if bare:
        moments = sorted({slot for name in bare for slot in lost[name] if slot not in NO_MOMENTS})
        problems.append(_lost(source, bare, moments))
    removed = [f"{name}/{slot}.pt" for name, slots in lost.items() for slot in slots if name not in bare]
    if removed:
        path = source.root / FOLDER / removed[0]
        problems.append(missing_file(path, f"{len(removed)} files of trained parameters are gone: {_some(removed)}"))
    return problems


def _has_no_moments(source: Source, name: str) -> bool:
    """Whether the converter found nothing for a parameter: it then writes the master alone, otherwise every slot."""
    held = source.slots[name]
    return "fp32" in held and not held.keys() - NO_MOMENTS


def _lost(source: Source, names: list[str], slots: list[str]) -> Problem:
    return Problem(
        "SR-UNI-LOST",
        f"{len(names)} trained parameters have no {', '.join(slots)}: {_some(names)}",
        where={"file": str(source.root / FOLDER / names[0]), "tensor": names[0]},
        hint="the converter found no optimizer values for them, kept quiet, and made masters from the rounded weights: "
        "an optimizer file was missing. Convert again from a complete checkpoint",
    )


def check_dropped(assembled: Assembled) -> list[Problem]:
    """Finds slots that the optimizer has and the converter does not know: it keeps Adam's two moments only."""
    source = assembled.source
    expected = {slot for shard in source.common.shards for slot in shard.slots} if source.common is not None else set()
    if any(group.hyperparameters.get("amsgrad") is True for group in assembled.state.groups):
        expected.add("max_exp_avg_sq")
    held = {entry.key.slot for entry in assembled.state.tensors.values() if entry.key.slot is not None}
    dropped = sorted(expected - held)
    if not dropped:
        return []
    return [
        Problem(
            "SR-UNI-DROPPED",
            f"the optimizer keeps {', '.join(dropped)}, and the conversion left that out",
            where={"file": str(source.root / FOLDER), "key": dropped[0]},
            hint="DeepSpeed's converter knows exp_avg and exp_avg_sq only. Convert the original with samerun",
        )
    ]


def check_buffers(assembled: Assembled) -> list[Problem]:
    """Finds buffers that the model has and no file holds: pipeline layers' files are not copied by the converter."""
    source, names = assembled.source, assembled.names
    gone = sorted(name for name in names.buffers if f"buffer:{normalize_fqn(name)}" not in assembled.state.tensors)
    if not gone:
        return []
    path = source.root / "layer_00-model_states.pt"
    return [missing_file(path, f"{len(gone)} buffers are in no file, nor are frozen parameters: {_some(gone)}")]


def check_stale(assembled: Assembled) -> list[Problem]:
    """Finds the working folder of a conversion, and folders of parameters that no model file knows."""
    source, names = assembled.source, assembled.names
    problems: list[Problem] = []
    if (source.root / "tmp").is_dir():
        problems.append(
            Problem(
                "SR-UNI-TMP",
                "the converter's working folder is still there: the conversion was interrupted, or told to keep it",
                severity=Severity.WARNING,
                where={"file": str(source.root / "tmp")},
                hint="a later conversion into the same folder mixes its fragments in without an error. Convert into a "
                "folder that does not exist yet",
            )
        )
    known = names.trained | names.buffers | set(names.order) | set(names.shared)
    known |= {name for model in source.models.values() for name in model.frozen}
    strange = [name for name in source.slots if name not in known] if known else []
    if strange:
        problems.append(
            Problem(
                "SR-UNI-STALE",
                f"{len(strange)} folders are of parameters that no model file knows: {_some(strange)}",
                severity=Severity.WARNING,
                where={"file": str(source.root / FOLDER / strange[0])},
                hint="another model was converted into the same folder before; convert into an empty one",
            )
        )
    return problems


def check_sample(checkpoint: Readable, assembled: Assembled) -> list[Problem]:
    """Compares the first values of some parameters with the second copy that exists of them, if one does."""
    source = assembled.source
    odd: list[str] = []
    pairs = [*_copied_values(checkpoint, assembled), *_weights_and_masters(checkpoint, assembled)]
    for key, values, others in pairs:
        with np.errstate(all="ignore"):
            if not np.array_equal(others.astype(values.dtype), values):
                odd.append(key)
    return [_wrong(source, odd, f"{len(odd)} of {len(pairs)} compared")] if odd else []


def _copied_values(checkpoint: Readable, assembled: Assembled) -> Iterator[tuple[str, Array, Array]]:
    """Yields, for some of the second copies, the tensor's first values and the copy's."""
    stride = max(1, len(assembled.replicas) // _SAMPLED_TENSORS)
    for copy in islice(assembled.replicas, 0, None, stride):
        if copy.key in checkpoint.state.tensors and len(copy.placement.tiling):
            offsets = tuple(copy.placement.tiling.offsets[0].tolist())
            sizes = tuple(copy.placement.tiling.sizes[0].tolist())
            with contextlib.suppress(FormatError):  # a gap there is a finding of its own
                own = checkpoint.read(copy.key, offsets, sizes)
                yield copy.key, _head(own), _head(copy.placement.view(0, assembled.source.files))


def _weights_and_masters(checkpoint: Readable, assembled: Assembled) -> Iterator[tuple[str, Array, Array]]:
    """Yields, for some parameters that model files hold, their first values and their masters'."""
    for master, parameter in _sampled_masters(assembled):
        with contextlib.suppress(FormatError):
            yield parameter, _head(checkpoint.read(parameter)), _head(checkpoint.read(master))


def _sampled_masters(assembled: Assembled) -> list[tuple[str, str]]:
    pairs = [
        (key, f"param:{entry.key.fqn}")
        for key, entry in assembled.state.tensors.items()
        if entry.key.role is Role.MASTER and len(entry.tiling)
    ]
    own = [
        (key, parameter)
        for key, parameter in pairs
        if parameter in assembled.placements
        and assembled.placements[parameter].cast is None
        and len(assembled.placements[parameter].tiling) == 1
    ]
    return own[:: max(1, len(own) // _SAMPLED_TENSORS)]


def _head(values: Array) -> Array:
    return values.reshape(-1)[:_SAMPLED_ELEMENTS]


def _wrong(source: Source, tensors: list[str], count: str) -> Problem:
    shuffled = as_dict(source.config.get("zero_optimization")).get("round_robin_gradients") is True
    cause = (
        "the run used round_robin_gradients, whose slice maps are in another order than its buffers"
        if shuffled
        else "a rank file was missing, swapped or of another save, or an old working folder was mixed in"
    )
    return Problem(
        "SR-UNI-ROUNDROBIN" if shuffled else "SR-UNI-VALUES",
        f"the converted values are not the run's ({count}): {_some(tensors)}",
        where={"file": str(source.root / FOLDER), "tensor": tensors[0]},
        expected="the values that the run's own files in this folder hold",
        hint=f"{cause}. The converter says nothing, and moments are wrong in the same places. Convert the original "
        "checkpoint with `samerun convert --to zero`",
    )


def check_steps(assembled: Assembled) -> list[Problem]:
    """Finds parameters at different steps, and the counter that DeepSpeed's loader would count up too often."""
    source = assembled.source
    steps = {key: counter.value for key, (entry, counter) in assembled.slots.counters.items() if entry.slot == "step"}
    counts = Tally(steps.values())
    problems: list[Problem] = []
    if len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        odd = [key for key, step in steps.items() if step != usual]
        problems.append(
            Problem(
                "SR-UNI-STEP",
                f"the steps of {len(odd)} parameters differ from the others': {_some(odd)}",
                where={"file": str(source.root / FOLDER), "tensor": odd[0]},
                expected=usual,
                found=steps[odd[0]],
                hint="rank files of two saves were converted together; convert again from one",
            )
        )
    common = source.common
    tensor_steps = common is not None and any("step" in shard.scalars for shard in common.shards)
    if source.stage == 3 and not source.any_stage and common is not None and len(common.shards) > 1 and tensor_steps:
        problems.append(_shared_step(source, len(common.shards)))
    return problems


def _shared_step(source: Source, count: int) -> Problem:
    return Problem(
        "SR-UNI-SHAREDSTEP",
        f"DeepSpeed gives one step counter to all {count} sub-groups when it loads this",
        severity=Severity.NOTE,
        where={"file": str(source.root / FOLDER / COMMON)},
        hint="with an optimizer that keeps step in a tensor (torch.optim.AdamW), each update then counts once per "
        "sub-group and bias correction is wrong; give every sub-group a counter of its own after loading",
    )


def check_groups(assembled: Assembled) -> list[Problem]:
    """Finds lost groups, and groups whose hyperparameters DeepSpeed's loader overwrites with the first one's."""
    source = assembled.source
    groups = [dict(group.hyperparameters) for group in assembled.state.groups]
    plain = [{key: value for key, value in group.items() if key != "name"} for group in groups]
    problems: list[Problem] = []
    first = source.first
    flattened = first.groups if first is not None and source.common is not None and source.stage < 3 else None
    if flattened is not None and len(groups) != len(flattened):
        problems.append(
            Problem(
                "SR-UNI-GROUPS",
                "the common file has hyperparameters for another number of groups than the model has",
                where={"file": str(source.root / FOLDER / COMMON)},
                expected=f"{len(flattened)} groups",
                found=f"{len(groups)} groups",
                hint="groups were lost on the way; take them from the original checkpoint",
            )
        )
    if source.stage == 3 and not source.any_stage and any(group != plain[0] for group in plain[1:]):
        problems.append(
            Problem(
                "SR-UNI-GROUPZERO",
                "DeepSpeed gives group 0's hyperparameters to all groups when it loads this",
                severity=Severity.WARNING,
                where={"file": str(source.root / FOLDER / COMMON), "key": "param_groups"},
                hint="learning rate, betas and decay differ between groups here; set them again after loading",
            )
        )
    return problems


def check_loader(assembled: Assembled) -> list[Problem]:
    """Says what DeepSpeed's loader leaves out: buffers and frozen parameters; and which stages it can load onto."""
    source = assembled.source
    fqns = {fqn for group in assembled.state.groups for fqn in group.params}
    left = [
        key
        for key, entry in assembled.state.tensors.items()
        if entry.key.role is Role.BUFFER or (entry.key.role is Role.PARAM and fqns and entry.key.fqn not in fqns)
    ]
    problems: list[Problem] = []
    if left:
        problems.append(
            Problem(
                "SR-UNI-MODELSTATE",
                f"DeepSpeed does not restore {len(left)} buffers and frozen parameters from here: {_some(left)}",
                severity=Severity.WARNING,
                where={"file": str(source.root), "tensor": left[0]},
                hint="load_universal reads only what the optimizer trains. Copy these into the model yourself, from "
                "the "
                "model files beside it: docs/formats/universal.md has the lines",
            )
        )
    if source.any_stage:
        return problems
    other = "1 or 2" if source.stage == 3 else "3"
    problems.append(
        Problem(
            "SR-UNI-STAGE",
            f"this was made from ZeRO stage {source.stage}; DeepSpeed cannot load it into stage {other}",
            severity=Severity.NOTE,
            where={"file": str(source.root)},
            hint="any number of data-parallel ranks is fine, and tensor-parallel degrees that the model's patterns "
            "describe. Another stage ends in an empty AssertionError: `samerun convert --to universal` makes one for "
            "all "
            "stages",
        )
    )
    return problems


def check_values(
    checkpoint: Readable, assembled: Assembled, advance: Callable[[int], None] | None = None
) -> PayloadCheck:
    """Reads every byte: checksums, masters against weights, rank 0's shard against the whole, rebuilt masters."""
    source = assembled.source
    problems = check_checksums(source.state_files(), source.files, advance)
    broken = bool(problems)
    odd = _merge([*compare_replicas(checkpoint, assembled.replicas, source.files).values()])
    masters = compare_masters(checkpoint, assembled.placements, source.files)
    odd = _merge([odd, masters])
    known = any(problem.code in ("SR-UNI-VALUES", "SR-UNI-ROUNDROBIN") for problem in checkpoint.state.problems)
    if odd.tensors and not known:
        problems.append(_wrong(source, list(odd.tensors), f"{len(odd.tensors)} tensors, all values read"))
    trained = {
        entry.key.fqn: entry.dtype for entry in checkpoint.state.tensors.values() if entry.key.role is Role.PARAM
    }
    rounded = find_rounded(checkpoint, assembled.placements, source.files, trained)
    coarse = sorted({trained[key.partition(":")[2]].name for key in rounded.tensors})
    problems += rounded_problem(rounded, " or ".join(coarse), "SR-UNI-ROUNDED")
    count = sum(len(file.archive.records) for file in source.state_files())
    intact = False if broken else None
    doubts = [] if problems or has_errors(checkpoint.state.problems) else [_open(source)]
    return PayloadCheck(count, count, intact, (*problems, *doubts))


def _open(source: Source) -> Problem:
    return Problem(
        "SR-UNI-OPEN",
        "whether the conversion took the right values cannot be told from its output alone",
        severity=Severity.NOTE,
        where={"file": str(source.root / FOLDER)},
        hint="checksums agree, and so does what is kept twice. Moments are kept once: compare with the original "
        "checkpoint (`samerun diff`)",
    )


def _merge(found: list[Odd]) -> Odd:
    merged = Odd()
    for odd in found:
        merged.tensors.update(odd.tensors)
        merged.files.update(odd.files)
        merged.compared += odd.compared
    return merged


def check_destination(source: Source, destination: Layout) -> list[Problem]:
    """Checks whether DeepSpeed would load the checkpoint at another layout."""
    first = source.first
    if destination.tp == source.degrees.tp and destination.pp == source.degrees.pp:
        return []
    if first is not None and first.parallel_info:
        return []
    return [
        Problem(
            "SR-UNI-RIGID",
            "the checkpoint does not say how tensors are cut over tensor-parallel ranks",
            severity=Severity.WARNING,
            where={"file": str(source.root)},
            expected=f"tp={source.degrees.tp},pp={source.degrees.pp}",
            found=f"tp={destination.tp},pp={destination.pp}",
            hint="only the data-parallel degree can change; save with universal_checkpoint_info to change the others",
        )
    ]


def _unknown(source: Source) -> list[Problem]:
    names = source.unknown_classes()
    if not names:
        return []
    return [
        Problem(
            "SR-PKL-UNKNOWN",
            f"objects of classes that samerun does not know are kept as inert records: {_some(names)}",
            severity=Severity.NOTE,
            where={"file": str(source.root)},
            hint="nothing of them was executed; torch.load with weights_only=False would",
        )
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
