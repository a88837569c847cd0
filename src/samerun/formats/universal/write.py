"""Lays out a universal checkpoint that stock DeepSpeed (0.19.8, `load_universal`) takes at any degree and any stage.

Two model files make it fit every stage: stages 1 and 2 look for `mp_rank_00_model_states.pt`, stage 3 for
`zero_pp_rank_0_mp_rank_00_model_states.pt`. What DeepSpeed's loader cannot take from any file is a finding with the
lines that do it after loading: buffers and frozen parameters at every stage; group hyperparameters and steps at stage
3, where nothing wrong is put into the place that its loader reads (only what all groups share).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from samerun.core.dtype import DType
from samerun.core.mesh import Layout
from samerun.core.state import TensorEntry
from samerun.core.written import DestinationPlan, FilePlan
from samerun.errors import Problem, Severity
from samerun.formats.base import WriteSource
from samerun.formats.deepspeed.carried import (
    Carried,
    Settings,
    carry,
    read_settings,
    source_stage,
    updates_of,
    write_common,
    write_config,
)
from samerun.formats.deepspeed.dealing import deal_experts
from samerun.formats.deepspeed.flat import concatenated_buffer
from samerun.formats.deepspeed.modelfile import frozen_shapes, untrained_module, write_shapes
from samerun.formats.deepspeed.names import model_name
from samerun.formats.deepspeed.records import WRITTEN_VERSION, is_dynamic, loss_scaler, stage_number
from samerun.formats.deepspeed.states import as_dict
from samerun.formats.deepspeed.training import (
    STEP,
    Trained,
    Training,
    made_from_masters,
    plan_training,
    scalar_value,
    storage_dtype,
)
from samerun.formats.torchfile.emit import Storage, Tensor, whole
from samerun.formats.torchfile.write import Pieces, Slot, archive_file, gather_slots
from samerun.formats.universal.source import COMMON, FOLDER, GROUPS

_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
_WHOLE_GROUPS = 2  # the recorded stage: groups lie whole in the common file, whatever stage the source had


def lay_out(source: WriteSource, layout: Layout | None = None) -> DestinationPlan:
    """Plans the directory: `latest_universal` and one tag. Of the layout, only the number of ranks is looked at."""
    state = source.state
    training = plan_training(source, layout, "universal")
    deal_experts(state, training, 1)
    chosen = layout or state.topology.layout
    ranks = chosen.batch_replicas * chosen.cp if chosen is not None else 1
    settings = read_settings(state, ranks, source_stage(state) or _WHOLE_GROUPS)
    carried = carry(state, ranks, files_by_rank=False)
    config = write_config(state, training, settings)
    writer = _Writer(source, training, carried, config, ranks)
    tag = f"global_step{updates_of(state, training)}_universal"
    pieces = Pieces()
    pieces.write(tag.encode())
    files: list[tuple[FilePlan, list[Slot]]] = [(pieces.file("latest_universal"), [])]
    files += [archive_file(f"{tag}/{name}", value) for name, value in writer.files()]
    return DestinationPlan(
        format="universal",
        files=tuple(file for file, _ in files),
        tensors=gather_slots([slots for _, slots in files]),
        dropped={**training.dropped, **carried.dropped, **made_from_masters(training)},
        problems=(*training.problems, *carried.problems, *check_loader(training, ranks), *_check_order(settings)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Writer:
    source: WriteSource
    training: Training
    carried: Carried
    config: Mapping[str, Any]
    ranks: int

    def files(self) -> Iterator[tuple[str, Any]]:
        """Yields names and contents of the tag's files."""
        yield model_name(0, None), self._model(untrained_module(self.training))
        yield model_name(0, 0), self._model({})
        yield f"{FOLDER}/{COMMON}", self._common()
        for group in self.training.groups:
            for member in group.members:
                folder = f"{FOLDER}/{member.name}"
                yield f"{folder}/fp32.pt", _slot(member.masters, storage_dtype(member), member)
                for name, entry in member.slots.items():
                    if name in group.slots:
                        yield f"{folder}/{name}.pt", _slot(entry, entry.dtype, member)
                for name, dtype in group.slots.items():
                    if name not in member.slots:
                        yield f"{folder}/{name}.pt", _zeros(dtype, member)
                for name, values in group.scalars.items():
                    yield f"{folder}/{name}.pt", scalar_value(values)

    def _model(self, module: Mapping[str, Any]) -> dict[str, Any]:
        training = self.training
        updates = updates_of(self.source.state, training)
        return {
            "module": dict(module),
            "buffer_names": [held.name for held in training.buffers],
            "optimizer": None,
            "param_shapes": write_shapes([group.members for group in training.groups]),
            "frozen_param_shapes": frozen_shapes(training),
            "shared_params": dict(training.shared),
            "frozen_param_fragments": None,
            **write_common(self.source.state, self.ranks, updates, self.config, self.carried),
            GROUPS: [dict(group.settings) for group in training.groups],
        }

    def _common(self) -> dict[str, Any]:
        """Returns what loaders read before parameters: stages 1 and 2 the groups, stage 3 one step and one group."""
        saved = self.source.state.objects.get("loss_scaler")
        groups = self.training.groups
        settings = [dict(group.settings) for group in groups]
        shared = {name: value for name, value in (settings or [{}])[0].items() if _in_all(name, settings)}
        steps = {name: scalar_value(values) for name, values in (groups[0].scalars if groups else {}).items()}
        clip = as_dict(self.config).get("gradient_clipping")
        return {
            "loss_scaler": loss_scaler(saved),
            "dynamic_loss_scale": is_dynamic(saved),
            "overflow": False,
            **({"clip_grad": float(clip)} if isinstance(clip, int | float) else {}),
            "zero_stage": stage_number(_WHOLE_GROUPS),
            "ds_version": WRITTEN_VERSION,
            "param_groups": [{**group, "params": [number]} for number, group in enumerate(settings)],
            "optimizer_state_dict": {"state": {0: steps}, "param_groups": [{**shared, "params": [0]}]},
        }


def _in_all(name: str, settings: list[dict[str, Any]]) -> bool:
    return all(name in other and other[name] == settings[0][name] for other in settings)


def _slot(entry: TensorEntry, dtype: DType, member: Trained) -> dict[str, Any]:
    return {"param": whole(str(entry.key), dtype, member.shape), "cat_dim": 0}


def _zeros(dtype: DType, member: Trained) -> dict[str, Any]:
    return {"param": Tensor(Storage(dtype, math.prod(member.shape)), member.shape), "cat_dim": 0}


def check_loader(training: Training, ranks: int) -> list[Problem]:
    """Says what DeepSpeed's loader leaves undone, and the lines that do it."""
    problems: list[Problem] = []
    held = [one.name for one in (*training.buffers, *training.frozen)]
    if held:
        problems.append(_left(held))
    settings = [group.settings for group in training.groups]
    differing = sorted({name for group in settings for name in group if not _in_all(name, settings)} - {"name"})
    if differing:
        problems.append(_groups(differing))
    steps = [group.scalars[STEP] for group in training.groups if STEP in group.scalars]
    if len(steps) > 1 and any(values.dtype.kind == "f" for values in steps):
        problems.append(_steps())
    slots = sorted({name for group in training.groups for name in group.slots} - _ADAM)
    if slots:
        problems.append(_slots(slots))
    small = [number for number, group in enumerate(training.groups) if _leaves_a_rank_empty(group.members, ranks)]
    if small:
        problems.append(_small(small, ranks))
    return problems


def _check_order(settings: Settings) -> list[Problem]:
    """Refuses, for a job as the source was, what `load_universal` would shuffle."""
    if not settings.round_robin or settings.stage == 3:
        return []
    return [
        Problem(
            "SR-UNI-SHUFFLE",
            "the run uses round_robin_gradients, with which load_universal puts values into wrong places without an "
            "error",
            where={"key": "zero_optimization.round_robin_gradients"},
            hint="the files are right: with the setting off, the job loads them right, and updates are the same. If "
            "it will "
            "be off, allow this: --allow SR-UNI-SHUFFLE. `--to zero` is right with it on",
        )
    ]


def _leaves_a_rank_empty(members: tuple[Trained, ...], ranks: int) -> bool:
    last = concatenated_buffer(members, [0] * len(members), ranks, ranks - 1)
    return bool(members) and last.padding == last.length


def _left(names: list[str]) -> Problem:
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return Problem(
        "SR-UNI-REMEDY",
        f"load_universal never restores buffers and frozen parameters: {some}",
        severity=Severity.WARNING,
        where={"tensor": names[0]},
        hint="they are in `module` of mp_rank_00_model_states.pt; docs/formats/universal.md has the three lines that "
        "load them. "
        "`--to zero` needs none",
    )


def _groups(names: list[str]) -> Problem:
    return Problem(
        "SR-UNI-GROUPS3",
        f"at stage 3, load_universal restores only what all groups share, not {', '.join(names)}",
        severity=Severity.WARNING,
        where={"key": names[0]},
        hint=f"groups keep what the script gave them until `for group, saved in zip(engine.optimizer.param_groups, "
        f"client['{GROUPS}']): group.update(saved)` after loading. Stages 1 and 2, and `--to zero`, need none",
    )


def _steps() -> Problem:
    return Problem(
        "SR-UNI-STEP3",
        "at stage 3, load_universal gives one step tensor to all sub-groups, which then count it up together",
        severity=Severity.WARNING,
        where={"key": STEP},
        hint="after loading: `for state in engine.optimizer.optimizer.state.values(): state['step'] = "
        "state['step'] + 0`, which makes each its own. Stages 1 and 2, and `--to zero`, need none",
    )


def _slots(names: list[str]) -> Problem:
    return Problem(
        "SR-UNI-SLOTS3",
        f"at stage 3, load_universal loads exp_avg and exp_avg_sq only, not {', '.join(names)}",
        severity=Severity.WARNING,
        where={"key": names[0]},
        hint="stages 1 and 2 load every slot. For stage 3 use `--to zero`",
    )


def _small(groups: list[int], ranks: int) -> Problem:
    return Problem(
        "SR-UNI-SMALL",
        f"group {groups[0]} has too few elements for {ranks} ranks: at stages 1 and 2 load_universal stops with an "
        "IndexError",
        severity=Severity.WARNING,
        where={"key": f"param_groups.{groups[0]}"},
        hint="a rank without any parameter of a group is more than its loader expects; use `--to zero`",
    )
