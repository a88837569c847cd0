"""What a directory shows without reading its tensors: files of other saves, swapped ranks, lost groups and experts."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from typing import Any

from samerun.errors import Problem, Severity
from samerun.formats.deepspeed.client import Sections
from samerun.formats.deepspeed.model import ModelStates, enabled
from samerun.formats.deepspeed.model_tensors import Cutter, Names, layer_numbers
from samerun.formats.deepspeed.shards import OptimStates
from samerun.formats.deepspeed.states import as_count, as_dict, as_list, missing_file
from samerun.formats.zero.loadable import check_loadable
from samerun.formats.zero.optimizer_tensors import Flat
from samerun.formats.zero.source import Source
from samerun.formats.zero.swaps import check_swapped

_RUN_SETTINGS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_source(source: Source, names: Names, cutter: Cutter, flat: Flat, sections: Sections | None) -> list[Problem]:
    """Returns every finding that names, shapes and counters give."""
    return [
        *(sections.problems if sections else ()),
        *check_generations(source),
        *check_steps(source, flat, sections),
        *check_scheduler(source, sections),
        *check_swapped(source, names),
        *check_groups(source),
        *check_owned(source, names),
        *check_excluded(source),
        *check_layers(source, names),
        *check_experts(source),
        *check_slots(source),
        *check_tensor_parallel(source, names, cutter),
        *check_unverified(source),
        *check_unknown(source),
        *check_loadable(source, flat),
    ]


def check_generations(source: Source) -> list[Problem]:
    """Finds files of another save: with other counters, another world size, or another batch in their configuration."""
    problems: list[Problem] = []
    first = source.first
    if first is not None:
        for model in source.models.values():
            problems += _other_counters(first, model)
    lowest = next((optim for _, optim in sorted(source.optims.items(), key=lambda item: item[0][::-1])), None)
    usual = max(lowest.partitions, default=0) if lowest is not None else 0
    for optim in source.optims.values():
        held = max(optim.partitions, default=0)
        if held != usual:
            problems.append(_mixed(optim, f"parts for {usual} ranks", f"parts for {held} ranks"))
        elif first is not None:
            problems += _other_config(first, optim)
    return problems


def _other_counters(first: ModelStates, model: ModelStates) -> list[Problem]:
    for key in ("global_steps", "dp_world_size", "mp_world_size", "global_samples"):
        if model.count(key) != first.count(key):
            return [_mixed(model, f"{key} = {first.count(key)}", f"{key} = {model.count(key)}")]
    return []


def _other_config(first: ModelStates, optim: OptimStates) -> list[Problem]:
    own, whole = as_dict(as_dict(optim.file.value).get("ds_config")), first.config
    for key in _RUN_SETTINGS if own and whole else ():
        if own.get(key) != whole.get(key):
            return [_mixed(optim, f"{key} = {whole.get(key)}", f"{key} = {own.get(key)}")]
    return []


def _mixed(file: ModelStates | OptimStates, expected: str, found: str) -> Problem:
    return Problem(
        "SR-FILE-GENERATION",
        "the file is of another save than the others in its directory",
        where={"file": str(file.file.path), "rank": file.name.dp or 0},
        expected=expected,
        found=found,
        hint="the same tag was saved twice, and one of the saves did not finish or had other ranks; use another tag",
    )


def check_steps(source: Source, flat: Flat, sections: Sections | None) -> list[Problem]:
    """Compares the optimizer's step over ranks. With the run's own counter, every format's is compared elsewhere."""
    problems: list[Problem] = []
    by_group: dict[int, dict[tuple[int, int], int | float]] = {}
    for (mp, dp, number), step in flat.steps.items():
        by_group.setdefault(number, {})[(mp, dp)] = step
    odd: dict[tuple[int, int], tuple[int | float, int | float]] = {}
    for steps in by_group.values():
        most = _majority(steps, sections)
        for place, step in steps.items():
            if step != most:
                odd.setdefault(place, (most, step))
    if source.stage:
        problems += [_other_step(source.optims[place], *steps) for place, steps in odd.items()]
    return problems


def _majority(steps: Mapping[tuple[int, int], int | float], sections: Sections | None) -> int | float:
    """Returns the step of most ranks; of equally many, the one that the run's own counter confirms."""
    counts = Tally(steps.values())
    update = sections.progress.update if sections else None
    return max(counts, key=lambda step: (counts[step], step == update, step))


def _other_step(optim: OptimStates, most: int | float, step: int | float) -> Problem:
    return Problem(
        "SR-FILE-GENERATION",
        f"rank {optim.name.dp}'s optimizer is at step {step:g}, other ranks' are at step {most:g}",
        where={"file": str(optim.file.path), "rank": optim.name.dp},
        expected=most,
        found=step,
        hint="the file is of another save. Its part of every parameter and moment is of another time than the rest; "
        "DeepSpeed loads it without an error. Use another tag",
    )


def check_scheduler(source: Source, sections: Sections | None) -> list[Problem]:
    """Compares the position of one of DeepSpeed's own schedulers with the steps. It counts from 0."""
    first = source.first
    position = as_count(as_dict(sections.scheduler if sections else None).get("last_batch_iteration"))
    steps = first.count("global_steps") if first is not None else None
    if position is None or steps is None or first is None:
        return []
    skipped = first.count("skipped_steps") or 0
    if position + 1 in (steps, steps - skipped):
        return []
    return [
        Problem(
            "SR-CNT-DISAGREE",
            f"the scheduler is at iteration {position} after {steps} steps",
            severity=Severity.WARNING,
            where={"file": str(first.file.path), "key": "lr_scheduler.last_batch_iteration"},
            expected=steps - 1,
            found=position,
            hint="it is stepped more or less often than the optimizer; compare the learning rate with the plan",
        )
    ]


def check_groups(source: Source) -> list[Problem]:
    """Finds lost parameter groups, and hyperparameters that ranks disagree about."""
    problems: list[Problem] = []
    first = next(iter(source.optims.values()), None)
    for optim in source.optims.values():
        if optim.groups and optim.stage != 3 and len(optim.groups) != len(optim.shards):
            problems.append(_lost_groups(optim))
            break
    for optim in source.optims.values():
        if first is not None and first.groups and optim.groups:
            problems += list(_other_settings(first, optim))[:1]
    return problems


def _other_settings(first: OptimStates, optim: OptimStates) -> Iterator[Problem]:
    for number, (own, other) in enumerate(zip(first.groups, optim.groups, strict=False)):
        keys = [key for key in own if key != "step" and own[key] != other.get(key)]
        if keys and optim.name.mp == first.name.mp:
            yield Problem(
                "SR-ZERO-GROUPS",
                f"rank {optim.name.dp} has other hyperparameters in group {number}: {', '.join(sorted(keys))}",
                where={"file": str(optim.file.path), "rank": optim.name.dp, "key": keys[0]},
                expected=own[keys[0]],
                found=other.get(keys[0]),
                hint="ranks share their groups; the file is of another save or another run. Use another tag",
            )


def _lost_groups(optim: OptimStates) -> Problem:
    return Problem(
        "SR-ZERO-GROUPS",
        "the optimizer file has flat buffers for more or fewer groups than it has hyperparameters for",
        where={"file": str(optim.file.path), "rank": optim.name.dp},
        expected=f"{len(optim.shards)} groups",
        found=f"{len(optim.groups)} groups",
        hint="groups were lost on the way; give them to the optimizer as the run had them",
    )


def check_owned(source: Source, names: Names) -> list[Problem]:
    """Finds parameters that are neither in a group nor recorded as frozen (stages 2 and 3 record frozen ones)."""
    if source.stage < 2:
        return []
    problems: list[Problem] = []
    for model in source.models.values():
        if model.groups is None or model.value.get("frozen_param_shapes") is None or model.module is None:
            continue
        known = names.trained | names.buffers | set(names.shared) | set(model.frozen)
        lost = [name for name in model.module if name not in known]
        if lost and not problems:
            problems.append(_unowned(model, lost))
    return problems


def _unowned(model: ModelStates, lost: list[str]) -> Problem:
    shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
    return Problem(
        "SR-ZERO-UNOWNED",
        f"{len(lost)} parameters are in no group and not recorded as frozen: {shown}",
        severity=Severity.WARNING,
        where={"file": str(model.file.path), "tensor": lost[0]},
        hint="they are trained by nothing and, at stage 3, saved by nothing. Check how the optimizer's groups are made",
    )


def check_excluded(source: Source) -> list[Problem]:
    """Finds what `exclude_frozen_parameters` leaves: at stages 2 and 3 the places of frozen parameters hold None.

    A run without frozen parameters records an empty mapping there. Stage 1 records nothing either way.
    """
    without = [
        model
        for model in source.models.values()
        if model.module is not None and model.value.get("frozen_param_shapes", {}) is None
    ]
    if source.stage < 2 or not without:
        return []
    return [
        Problem(
            "SR-ZERO-EXCLUDED",
            "it was saved without frozen parameters (exclude_frozen_parameters): any that the model has are not here",
            severity=Severity.WARNING,
            where={"file": str(without[0].file.path)},
            hint="the job that resumes must load them from where the run had them, before it loads this",
        )
    ]


def check_layers(source: Source, names: Names) -> list[Problem]:
    """Finds pipeline layers whose parameters the optimizer knows and whose file is not there."""
    if source.degrees.pp == 1 and not source.layers:
        return []
    held = {(name.layer, name.tp) for name in source.layers}
    return [
        missing_file(
            source.root / _layer_file(number, tensor, source.degrees.tp),
            f"the file of pipeline layer {number} is not there",
        )
        for number in sorted(layer_numbers(names))
        for tensor in range(source.degrees.tp)
        if (number, tensor) not in held and not any(name.layer == number for name in _unreadable(source))
    ]


def _unreadable(source: Source) -> list[Any]:
    from samerun.formats.zero.directory import read_directory

    return [name for name in read_directory(source.root).layers if name not in source.layers]


def _layer_file(number: int, tensor: int, degree: int) -> str:
    return f"layer_{number:02d}{f'-model_{tensor:02d}' if degree > 1 else ''}-model_states.pt"


def check_experts(source: Source) -> list[Problem]:
    """Finds experts that the run has and no file holds, counted by global number in every layer."""
    first = source.first
    counts = as_list(first.value.get("num_experts")) if first is not None else []
    if not source.experts and (not counts or source.stage == 3):
        return []
    held: dict[int, set[int]] = {}
    for name in source.experts:
        held.setdefault(name.layer or 0, set()).add(name.expert or 0)
    problems: list[Problem] = []
    for layer, count in enumerate(counts):
        lost = sorted(set(range(as_count(count) or 0)) - held.get(layer, set()))
        if lost:
            problems.append(
                missing_file(
                    source.root / f"layer_{layer}_expert_{lost[0]}_mp_rank_00_model_states.pt",
                    f"{len(lost)} of {count} experts of MoE layer {layer} have no file: {lost[:8]}",
                )
            )
    return problems


def check_slots(source: Source) -> list[Problem]:
    """Names optimizer slots whose shape fits neither a flat buffer nor a counter: they are not read."""
    odd = sorted({slot for optim in source.optims.values() for shard in optim.shards for slot in shard.odd})
    first = next((optim for optim in source.optims.values() if any(shard.odd for shard in optim.shards)), None)
    if first is None:
        return []
    return [
        Problem(
            "SR-COV-SLOT",
            f"optimizer state of another shape than its parameters is not read: {', '.join(odd)}",
            where={"file": str(first.file.path)},
            hint="a resume through samerun would lose it. Resume with DeepSpeed at the same world size instead",
        )
    ]


def check_tensor_parallel(source: Source, names: Names, cutter: Cutter) -> list[Problem]:
    """Finds tensors whose cut over tensor-parallel ranks is not recorded."""
    problems: list[Problem] = []
    first = source.first
    where = {"file": str(first.file.path if first else source.root)}
    if cutter.slicer.newer_map:
        problems.append(
            Problem(
                "SR-ZERO-TPUNKNOWN",
                "the map of tensor-parallel slices is in a newer version than samerun knows",
                severity=Severity.WARNING,
                where=where,
                hint="slices are placed by the patterns that the checkpoint holds beside it; update samerun",
            )
        )
    if names.unplaced:
        lost = list(names.unplaced)
        problems.append(
            Problem(
                "SR-ZERO-TPUNKNOWN",
                f"the checkpoint does not say how {len(lost)} tensors were cut over {source.degrees.tp} tensor-"
                f"parallel ranks, {lost[0]} among them",
                where={**where, "tensor": lost[0]},
                hint="each rank's part is listed under its own name. Save with universal_checkpoint_info on the model, "
                "or join the parts with the tools of the library that cut them",
            )
        )
    return problems


def check_unverified(source: Source) -> list[Problem]:
    """Says when a layout was read from its description only."""
    if not enabled(source.config, "fp16"):
        return []
    return [
        Problem(
            "SR-ZERO-UNVERIFIED",
            "fp16 checkpoints of DeepSpeed are read by their description: none was at hand to compare with",
            severity=Severity.NOTE,
            where={"file": str(source.root)},
            hint="compare a few tensors with the running job before trusting the rest",
        )
    ]


def check_unknown(source: Source) -> list[Problem]:
    """Names the classes of objects that are kept as inert records."""
    names = source.unknown_classes()
    if not names:
        return []
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [
        Problem(
            "SR-PKL-UNKNOWN",
            f"objects of classes that samerun does not know are kept as inert records: {shown}",
            severity=Severity.NOTE,
            where={"file": str(source.root)},
            hint="nothing of them was executed; torch.load with weights_only=False would",
        )
    ]
