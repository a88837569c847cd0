"""Lays out a native DeepSpeed checkpoint (stages 1 to 3, 0.19.8) that stock `load_checkpoint` takes at any degree.

Where values lie depends on the job's own configuration: stage, ranks, `round_robin_gradients`, `parameter_alignment`,
`sub_group_size`, 16-bit type. It is taken from a DeepSpeed source, and the `ds_config` in the files says what was
assumed. Any other source gives stage 3 if its parameters were sharded, else stage 2, and defaults. Files of stages 1
and 2 are alike and load into either, with BF16_Optimizer too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState
from samerun.core.written import DestinationPlan, FilePlan
from samerun.errors import PlanError, Problem, Severity
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
from samerun.formats.deepspeed.dealing import Share, deal_experts, destination_ep, share_of
from samerun.formats.deepspeed.experts import expert_of
from samerun.formats.deepspeed.flat import (
    Buffer,
    alignment_gaps,
    concatenated_buffer,
    partitioned_buffer,
    round_robin,
    sub_groups,
)
from samerun.formats.deepspeed.modelfile import (
    empty_module,
    expert_modules,
    frozen_fragment,
    frozen_shapes,
    whole_module,
    write_shapes,
    write_tensor,
)
from samerun.formats.deepspeed.names import expert_name, layer_name, model_name, optim_name
from samerun.formats.deepspeed.records import WRITTEN_VERSION, fragment, is_dynamic, loss_scaler, stage_number
from samerun.formats.deepspeed.staging import Staged, carry_staged, stage_pipeline
from samerun.formats.deepspeed.states import as_dict
from samerun.formats.deepspeed.training import (
    Trained,
    TrainedGroup,
    Training,
    made_from_masters,
    plan_training,
    scalar_value,
    storage_dtype,
)
from samerun.formats.torchfile.write import Slot, archive_file, gather_slots, text_file

_LOCAL_STAGES = (1, 2, 3)


def lay_out(
    source: WriteSource,
    layout: Layout | None = None,
    *,
    stage: int | None = None,
    parts: Sequence[int] | None = None,
) -> DestinationPlan:
    """Plans the directory: `latest` and one tag with a model file or several, and an optimizer file for every rank.

    A pipeline has a model file for every stage, and its layers in files of their own.

    Args:
        source: the state.
        layout: ranks of the destination; those of the source where none is given. Its batch replicas share the
            optimizer.
        stage: 1, 2 or 3; the source's own, or what fits it, where none is given.
        parts: of a pipeline, the first layer of each stage, where that is not the source's own division.
    """
    state = source.state
    training = plan_training(source, layout, "zero")
    deal_experts(state, training, destination_ep(state, layout))
    ranks = destination_ranks(state, layout)
    settings = read_settings(state, ranks, choose_stage(state, training, stage))
    staged = stage_pipeline(state, training, layout, parts)
    carried = carry_staged(state, staged, ranks) if staged else carry(state, ranks, files_by_rank=settings.stage == 3)
    config = write_config(state, training, settings)
    writer = _Writer(state, training, settings, carried, config)
    tag = f"global_step{updates_of(state, training)}"
    files: list[tuple[FilePlan, list[Slot]]] = [text_file("latest", tag)]
    for name, value in writer.staged_files(staged) if staged else writer.files():
        files.append(archive_file(f"{tag}/{name}", value))
    lost = made_from_masters(training) if settings.stage == 3 else {}
    return DestinationPlan(
        format="zero",
        files=tuple(file for file, _ in files),
        tensors=gather_slots([slots for _, slots in files]),
        dropped={**training.dropped, **carried.dropped, **lost},
        problems=(*training.problems, *carried.problems, *_unsure(training), _assumes(settings, training, staged)),
    )


def destination_ranks(state: LogicalState, layout: Layout | None) -> int:
    """Returns over how many ranks the optimizer is cut: batch replicas times those that share a sequence."""
    chosen = layout or state.topology.layout
    return chosen.batch_replicas * chosen.cp if chosen is not None else 1


def choose_stage(state: LogicalState, training: Training, wanted: int | None) -> int:
    """Returns the stage: the one asked for, the source's, 3 for sharded parameters or those without masters, else 2.

    Raises:
        PlanError: if experts were to be written for stage 3, or a pipeline for another than 1, which refuse them.
    """
    if training.layers:
        if wanted == 3 or training.masterless:
            raise PlanError(_no_experts())
        own = source_stage(state)
        return wanted or (own if own in (1, 2) else 2)
    if state.topology.pipeline is not None:
        if (wanted or 1) != 1 or training.masterless:
            raise PlanError(_no_pipeline())
        return 1
    if wanted is not None:
        return wanted
    own = source_stage(state)
    if training.masterless:
        return 3
    if own in _LOCAL_STAGES:
        return own
    held = state.topology.layout
    return 3 if own is None and held is not None and held.dp_shard > 1 else 2


@dataclass(frozen=True, slots=True, eq=False)
class _Writer:
    """Files of a run, or of stage `number` of a pipeline of `stages`; of no pipeline if there are none."""

    state: LogicalState
    training: Training
    settings: Settings
    carried: Carried
    config: Mapping[str, Any]
    number: int = 0
    stages: int = 0

    def staged_files(self, staged: Staged) -> Iterator[tuple[str, Any]]:
        """Yields names and contents of a pipeline's files."""
        for layer, module in staged.layers.items():
            yield layer_name(layer), module
        for number, training in enumerate(staged.stages):
            yield from replace(self, training=training, number=number, stages=len(staged.stages)).files()

    def files(self) -> Iterator[tuple[str, Any]]:
        """Yields names and contents of the tag's files."""
        whole = self.settings.stage < 3
        for rank in range(1 if whole else self.settings.ranks):
            yield model_name(self.number, None if whole else rank), self._model(rank)
        for layer, number, module in expert_modules(self.training):
            yield expert_name(layer, number), module
        for rank in range(self.settings.ranks):
            held = self._whole_groups(rank) if whole else self._partitioned(rank)
            content = {"optimizer_state_dict": held, "ds_config": self.config, "ds_version": WRITTEN_VERSION}
            precision = "bf16" if self.training.precision == "bf16" else ""
            yield optim_name(self.number, rank, precision), content

    def _model(self, rank: int) -> dict[str, Any]:
        training, ranks = self.training, self.settings.ranks
        if self.settings.stage < 3:
            module = None if self.stages else whole_module(training)  # a pipeline's layers have files of their own
            flattened = [self._order(self._share(group, 0)) for group in training.groups]
            fragments = {held.name: write_tensor(held.entry) for held in training.frozen}
        else:
            module = empty_module(training)
            flattened = [members for group in training.groups for members in self._sub_groups(group)]
            fragments = {held.name: frozen_fragment(held.entry, ranks, rank) for held in training.frozen}
        # A loader would take the first rank's experts for all; pipelines are of stage 1, which lists none at all.
        apart = bool(self.stages) or any(expert_of(name) is not None for name in fragments)
        return {
            "module": module,
            "buffer_names": [held.name for held in training.buffers if _of_first_rank(held.name, training)],
            "optimizer": None,
            "param_shapes": write_shapes(flattened),
            "frozen_param_shapes": None if apart else frozen_shapes(training),
            "shared_params": dict(training.shared) if rank == 0 else {},
            "frozen_param_fragments": None if apart else fragments,
            **({"num_experts": list(training.layers.values()), "ds_autoep_layers": None} if training.layers else {}),
            **self._common(rank),
        }

    def _common(self, rank: int) -> dict[str, Any]:
        updates = updates_of(self.state, self.training)
        holder, stages = (self.number, self.stages) if self.stages else (rank, 1)
        return write_common(self.state, self.settings.ranks, updates, self.config, self.carried, holder, stages)

    def _share(self, group: TrainedGroup, rank: int) -> Share:
        return share_of(group, rank, self.settings.ranks, data_first=self.settings.data_first)

    def _order(self, share: Share) -> tuple[Trained, ...]:
        return round_robin(share.members, share.parts) if self.settings.round_robin else share.members

    def _sub_groups(self, group: TrainedGroup) -> list[tuple[Trained, ...]]:
        return sub_groups(group.members, self.settings.ranks, self.settings.sub_group_size)

    def _state_of(self, group: TrainedGroup, buffer: Buffer) -> dict[str, Any]:
        """Returns the optimizer's state of one flat parameter; each has a counter of its own."""
        counters = {name: scalar_value(values) for name, values in group.scalars.items()}
        return counters | {name: buffer.slot(name, dtype) for name, dtype in group.slots.items()}

    def _globals(self) -> dict[str, Any]:
        saved = self.state.objects.get("loss_scaler")
        return {"loss_scaler": loss_scaler(saved), "dynamic_loss_scale": is_dynamic(saved), "overflow": False}

    def _whole_groups(self, rank: int) -> dict[str, Any]:
        """Returns a rank's optimizer at stages 1 and 2 (`DeepSpeedZeroOptimizer.state_dict`)."""
        groups = self.training.groups
        shares = [self._share(group, rank) for group in groups]
        orders = [self._order(share) for share in shares]
        gaps = [alignment_gaps(order, aligned=self.settings.parameter_alignment) for order in orders]
        buffers = [
            concatenated_buffer(order, gap, share.parts, share.part)
            for order, gap, share in zip(orders, gaps, shares, strict=True)
        ]
        states = {
            number: self._state_of(group, buffer)
            for number, (group, buffer) in enumerate(zip(groups, buffers, strict=True))
        }
        clip = self._clip()
        return {
            **self._globals(),
            **({"clip_grad": clip} if clip is not None else {}),
            "base_optimizer_state": {
                "state": {number: held for number, held in states.items() if held},
                "param_groups": [{**group.settings, "params": [number]} for number, group in enumerate(groups)],
            },
            "single_partition_of_fp32_groups": [
                buffer.masters(storage_dtype(buffer.members[0]), lean=True) for buffer in buffers if buffer.members
            ],
            "zero_stage": stage_number(self.settings.stage),
            "group_paddings": [buffer.padding for buffer in buffers],
            "param_alignment_paddings": [list(gap) for gap in gaps],
            "partition_count": [share.parts for share in shares],
            "ds_version": WRITTEN_VERSION,
            "param_slice_mappings": [_mapping(share, buffer) for share, buffer in zip(shares, buffers, strict=True)],
        }

    def _clip(self) -> float | None:
        """Returns the norm that gradients are clipped to; the loader takes the file's over the job's own."""
        value = self.state.objects.get("optimizer.clip_grad", as_dict(self.config).get("gradient_clipping"))
        return float(value) if isinstance(value, int | float) else None

    def _partitioned(self, rank: int) -> dict[str, Any]:
        """Returns a rank's optimizer at stage 3 (`DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`)."""
        ranks = self.settings.ranks
        states: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        masters: list[Any] = []
        for group in self.training.groups:
            first = len(masters)
            for members in self._sub_groups(group):
                buffer = partitioned_buffer(members, ranks, rank)
                states[len(masters)] = self._state_of(group, buffer)
                masters.append(buffer.masters(storage_dtype(members[0])))
            groups.append({**group.settings, "params": list(range(first, len(masters)))})
        return {
            "zero_stage": stage_number(3),
            **self._globals(),
            "partition_count": ranks,
            "optimizer_state_dict": {
                "state": {number: held for number, held in states.items() if held},
                "param_groups": groups,
            },
            "fp32_flat_groups": masters,
        }


def _mapping(share: Share, buffer: Buffer) -> dict[str, Any]:
    """Returns where each parameter's part lies in a rank's buffer, in the group's own order.

    DeepSpeed writes the places of the unshuffled order here whatever `round_robin_gradients` is; these are the true
    ones.
    """
    held = {segment.name: fragment(segment.start, segment.count) for segment in buffer.segments}
    return {member.name: held[member.name] for member in share.members if member.name in held}


def _of_first_rank(name: str, training: Training) -> bool:
    """Whether the first rank has a tensor under this name: of experts, those that it holds itself."""
    place = expert_of(name)
    return place is None or place[1] < training.layers[place[0]] // training.ep


def _no_experts() -> Problem:
    return Problem(
        "SR-DSW-EXPERTS",
        "DeepSpeed does not train its experts at stage 3, and files of stages 1 and 2 need masters",
        hint="leave --stage 3 out. 16-bit weights without masters have to be converted to dcp or safetensors",
    )


def _no_pipeline() -> Problem:
    return Problem(
        "SR-DSW-STAGES",
        "DeepSpeed's pipelines take ZeRO stages 0 and 1 only, and files of stage 1 need masters",
        where={"key": "zero_optimization.stage"},
        hint="leave --stage out. 16-bit weights without masters have to be converted to dcp or safetensors",
    )


def _unsure(training: Training) -> Iterator[Problem]:
    """Yields what must be decided where the source does not say whether a tensor is a buffer or a frozen parameter.

    DeepSpeed 0.19.8 takes frozen parameters from `frozen_param_fragments` (KeyError where one is missing there), and
    at stage 3 takes buffers from whole tensors and parameters from parts: `engine.load_module_state_dict`.
    """
    unsure = [held for held in (*training.buffers, *training.frozen) if held.entry.role_inferred]
    floating = sorted(str(held.entry.key) for held in unsure if held.entry.dtype.kind == "float")
    if floating:
        shown = ", ".join(floating[:8]) + (f" and {len(floating) - 8} more" if len(floating) > 8 else "")
        yield Problem(
            "SR-DSW-ROLE",
            f"the source does not say which of these are buffers and which are frozen parameters: {shown}",
            where={"tensor": floating[0]},
            hint="DeepSpeed loads them from different places. Where a role is wrong, give the right one with --map "
            'FILE, as in "buffer:NAME": "param:NAME"; then, or if all are right, --allow SR-DSW-ROLE',
        )


def _assumes(settings: Settings, training: Training, staged: Staged | None) -> Problem:
    """Says for which job the files are laid out; loaders check the number of ranks and the alignment only."""
    number = "1" if staged else "1 or 2" if settings.stage < 3 else "3"
    parts = [
        f"stage {number}",
        f"{settings.ranks} data-parallel ranks",
        training.precision or "fp32",
    ]
    parts += ["round_robin_gradients"] if settings.round_robin and settings.stage < 3 else []
    parts += ["parameter_alignment"] if settings.parameter_alignment and settings.stage < 3 else []
    if training.layers:
        parts += [f"ep_size {training.ep}", *(["use_data_before_expert_parallelism"] if settings.data_first else [])]
    parts += [f"sub_group_size {settings.sub_group_size}"] if settings.stage == 3 else []
    parts += [f"{len(staged.stages)} pipeline stages ({staged.text()})"] if staged else []
    return Problem(
        "SR-DSW-ASSUMES",
        f"laid out for a job with {', '.join(parts)}",
        severity=Severity.NOTE,
        hint="the job's configuration must say the same, and its groups must hold the same parameters in the same "
        "order",
    )
