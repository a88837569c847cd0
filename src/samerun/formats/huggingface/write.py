"""Lays out a directory from which a stock Trainer, a stock Accelerate, or either, resumes.

Trainer (transformers 5.24, `resume_from_checkpoint`) reads `model.safetensors` or its numbered parts, `optimizer.pt`,
`scheduler.pt`, `scaler.pt`, `trainer_state.json` and `rng_state[_N].pth`. Accelerate (1.15, `load_state`) reads
`model.safetensors` (never parts), `optimizer.bin`, `scheduler.bin`, `scaler.pt`, `random_states_N.pkl` and the states
of loaders and registered objects. Only the model and the scaler have one name in both, so a directory for both holds
the optimizer twice. What neither reads lies in `extra_state.pt`, where samerun finds it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role
from samerun.core.written import DestinationPlan, FilePlan
from samerun.errors import Problem, Severity
from samerun.formats.base import WriteSource
from samerun.formats.huggingface.generators import check_generators, collect_generators
from samerun.formats.huggingface.groups import Dealt, deal_groups
from samerun.formats.statedict.carry import Carried, carry_objects
from samerun.formats.statedict.optimizers import plan_optimizer
from samerun.formats.statedict.recognise import is_scaler
from samerun.formats.statedict.safewrite import NamedTensor, has_type, lay_out_weights, report_type, text_file
from samerun.formats.statedict.sidefiles import EXTRA
from samerun.formats.statedict.trees import check_positions, write_model, write_optimizer
from samerun.formats.torchfile.write import Pieces, Slot, add_archive, gather_slots

Flavour = Literal["trainer", "accelerate", "both"]
FLAVOURS: tuple[Flavour, ...] = ("trainer", "accelerate", "both")
_MAX_SHARD_BYTES = 50_000_000_000  # `save_pretrained` of transformers 5
_LOADERS = ("sampler", "dl_state_dict", "custom_checkpoint")
_COUNTERS = ("update", "samples", "tokens", "epoch")
# What Trainer insists on finding in its state. It goes by these steps and not by its arguments when it resumes, and
# compares the batch: 0 is no batch of any job.
_UNKNOWN = {"train_batch_size": 0, "logging_steps": 500, "eval_steps": 500, "save_steps": 500}
# What every scheduler of torch.optim keeps. One that keeps nothing else and works by functions is a LambdaLR, such as
# Trainer's; its `lr_lambdas` are empty mappings, which torch's DCP does not save (2.13).
_BARE_SCHEDULER = frozenset(
    {"base_lrs", "last_epoch", "verbose", "_step_count", "_is_initial", "_get_lr_called_within_step", "_last_lr"}
)
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")


def lay_out(
    source: WriteSource,
    layout: Layout | None = None,
    *,
    flavour: Flavour = "both",
    max_shard_bytes: int | None = None,
) -> DestinationPlan:
    """Plans the directory. Tensors are written whole; of the layout, only the number of ranks is looked at.

    Args:
        source: the state to be written.
        layout: that of the job which will resume, where it is known.
        flavour: whose names the optimizer, scheduler, generators and counters get.
        max_shard_bytes: the most that one part of the model holds, unless one tensor is larger. By default 50 GB for
            Trainer alone, as `save_pretrained` does, and one file where Accelerate reads it.
    """
    writer = _Writer(source.state, layout, flavour)
    writer.weights(max_shard_bytes)
    writer.optimizers()
    writer.objects()
    return writer.plan()


@dataclass(slots=True, eq=False)
class _Writer:
    state: LogicalState
    layout: Layout | None
    flavour: Flavour
    files: list[tuple[FilePlan, list[Slot]]] = field(default_factory=list[tuple[FilePlan, list[Slot]]])
    weight_slots: tuple[Any, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])
    dealt: Dealt = field(default_factory=lambda: Dealt(()))

    @property
    def for_trainer(self) -> bool:
        return self.flavour != "accelerate"

    @property
    def for_accelerate(self) -> bool:
        return self.flavour != "trainer"

    def archive(self, name: str, value: Any) -> None:
        pieces = Pieces()
        add_archive(pieces, value, name.rpartition(".")[0])
        self.files.append((pieces.file(name), pieces.slots))

    def text(self, name: str, value: Any) -> None:
        self.files.append((text_file(name, json.dumps(value, indent=2, sort_keys=True) + "\n"), []))

    def weights(self, max_shard_bytes: int | None) -> None:
        """The model under its own names, each shared tensor once; its other names stand in the header."""
        kept: list[NamedTensor] = []
        aliases: dict[str, str] = {}
        for key, entry in self.state.tensors.items():
            if entry.key.role not in (Role.PARAM, Role.BUFFER):
                continue
            if not has_type(entry):
                self.problems.append(report_type(entry))
                self.dropped[key] = f"safetensors has no element type {entry.dtype.name}"
                continue
            kept.append(NamedTensor(entry.key.fqn, entry))
            aliases |= dict.fromkeys(entry.aliases, entry.key.fqn)
        if max_shard_bytes is None and not self.for_accelerate:
            max_shard_bytes = _MAX_SHARD_BYTES
        made = lay_out_weights("model", kept, max_shard_bytes=max_shard_bytes, metadata=aliases)
        self.files += [(file, []) for file in made.files]
        self.weight_slots = made.tensors
        if len(made.files) > 1 and self.for_accelerate:
            self.problems.append(_parts(len(made.files) - 1, alone=not self.for_trainer))

    def optimizers(self) -> None:
        """Trainer's file has Trainer's groups, Accelerate's the source's: its script made them."""
        self.dealt = deal_groups(self.state) if self.for_trainer else Dealt(self.state.groups)
        written = plan_optimizer(replace(self.state, groups=self.dealt.groups))
        self.dropped |= written.dropped
        self.problems += (*self.dealt.problems, *written.problems)
        if not self.dealt.problems:
            self.problems += check_positions(self.state)
        if tree := write_optimizer(written):
            if self.for_trainer:
                self.archive("optimizer.pt", tree)
            if self.for_accelerate:
                self.archive("optimizer.bin", write_optimizer(plan_optimizer(self.state)))
            if self.flavour == "both":
                self.problems.append(_twice(sum(slot_bytes(slot) for slot in self.files[-1][1])))

    def objects(self) -> None:
        carried = carry_objects(self._without_arguments(), numpy=False)
        sections = dict(carried.sections)
        self.dropped |= carried.dropped
        self.problems += carried.problems
        self._scheduler(sections, carried)
        self._generators(sections)
        # By its keys alone: DeepSpeed's `loss_scaler` is none of torch's, and is there in fp32 and bf16 too.
        scaler = next((name for name, value in sections.items() if is_scaler("", value)), None)
        if scaler is not None:
            self.archive("scaler.pt", sections.pop(scaler))
        if isinstance(sections.get("config"), dict) and "model_type" in sections["config"]:
            self.text("config.json", sections.pop("config"))
        if self.for_trainer:
            self._trainer_state(sections)
        if self.for_accelerate:
            for name in [name for name in sections if name.startswith(_LOADERS)]:
                ending = "pkl" if name.startswith("custom_checkpoint") else "bin"
                self.archive(f"{name}.{ending}", sections.pop(name))
            counters = {name: getattr(self.state.progress, name) for name in _COUNTERS}
            counted = {name: value for name, value in counters.items() if value is not None}
            if counted and "progress" not in sections:
                sections["progress"] = counted
        if average := write_model(self.state, Role.EMA):
            sections = {"ema": average, **sections}
        if sections:
            self.archive(EXTRA, sections)
            if beside := [name for name in sections if name != "progress"]:
                self.problems.append(_beside(beside))

    def _without_arguments(self) -> LogicalState:
        """Leaves out the pickled arguments of a Trainer, which no resume reads, and what is derived from them."""
        named = [name for name in self.state.objects if name.partition(".")[0] == "training_args"]
        if named:
            self.dropped["objects.training_args"] = "the arguments of the source's Trainer: a job is given its own"
        kept = {name: value for name, value in self.state.objects.items() if name not in set(named)}
        data = {
            name: value for name, value in self.state.data.items() if name != "trainer_cursor" or not self.for_trainer
        }
        derived = self.state.data.keys() - data.keys()
        kept = {name: value for name, value in kept.items() if name.partition(".")[0] not in derived}
        return replace(self.state, objects=kept, data=data)

    def _scheduler(self, sections: dict[str, Any], carried: Carried) -> None:
        tree = sections.get(carried.scheduler or "")
        if not (isinstance(tree, Mapping) and "last_epoch" in tree):
            self._position(tree)
            return
        del sections[carried.scheduler or ""]
        if isinstance(tree, dict) and "base_lrs" in tree and tree.keys() <= _BARE_SCHEDULER:
            tree = {**tree, "lr_lambdas": [None] * len(tree["base_lrs"])}
            self.dropped["scheduler.lr_lambdas"] = "written as empty, which is what the source's format made nothing of"
            self.problems.append(_lambdas())
        if self.for_accelerate:  # a scheduler that was registered, not prepared, has a registered object's name
            registered = str(carried.scheduler).startswith("custom_checkpoint")
            self.archive(f"{carried.scheduler}.pkl" if registered else "scheduler.bin", tree)
        if self.for_trainer:
            if self.dealt.split:
                tree = self._for_two_groups(tree)
            self.archive("scheduler.pt", tree)

    def _position(self, schedule: Any) -> None:
        """Writes how many updates the job's own schedule has behind it. Trainer loads no optimizer without a schedule.

        One of another library stays under its own name in `extra_state.pt`.
        """
        updates = self.state.progress.update
        if updates is None or not self.dealt.groups:
            return
        tree = {"last_epoch": updates, "_step_count": updates + 1, "lr_lambdas": [None] * len(self.dealt.groups)}
        if self.for_trainer:
            self.archive("scheduler.pt", tree)
        if self.for_accelerate:
            self.archive("scheduler.bin", tree)
        self.problems.append(_schedule(schedule, updates))

    def _for_two_groups(self, tree: Any) -> Any:
        """Repeats what a scheduler keeps once per group, where the one group became two."""
        short = [name for name in _BY_GROUP if isinstance(tree.get(name), list) and len(tree[name]) == 1]
        for name in short:
            self.dropped[f"scheduler.{name}"] = "written once for each of the two groups"
        return {**tree, **{name: tree[name] * 2 for name in short}}

    def _generators(self, sections: dict[str, Any]) -> None:
        found = collect_generators({name: sections[name] for name in self.state.rng if name in sections})
        for name in found.taken:
            del sections[name]
        passes: Any = sections.pop("accelerator", {}) if self.for_accelerate and found.ranks else {}
        if self.for_trainer:
            for name, value in found.for_trainer().items():
                self.archive(name, value)
        if self.for_accelerate:
            for name, value in found.for_accelerate(passes if isinstance(passes, Mapping) else {}).items():
                self.archive(name, value)
        self.problems += check_generators(found, self.layout)

    def _trainer_state(self, sections: dict[str, Any]) -> None:
        kept = sections.get("trainer_state")
        if isinstance(kept, dict) and "global_step" in kept and _is_json(kept):
            self.text("trainer_state.json", _listed(sections.pop("trainer_state")))
            return
        progress = self.state.progress
        if progress.update is None:
            if self.state.groups:
                self.problems.append(_no_counter(alone=not self.for_accelerate))
            return
        counters = {"global_step": progress.update, "epoch": float(progress.epoch or 0)}
        self.text("trainer_state.json", counters | _UNKNOWN)
        self.problems.append(_derived(progress.update))

    def plan(self) -> DestinationPlan:
        names = {file.path for file, _ in self.files}
        model_alone = all(name.startswith("model") for name in names)
        return DestinationPlan(
            format="safetensors" if model_alone else "huggingface" if self.for_trainer else "accelerate",
            files=tuple(file for file, _ in self.files),
            tensors=(*self.weight_slots, *gather_slots([slots for _, slots in self.files])),
            dropped=self.dropped,
            problems=tuple(self.problems),
            read_as=("accelerate",) if self.flavour == "both" and "optimizer.bin" in names else (),
        )


def slot_bytes(slot: Slot) -> int:
    """Returns the size of a box in its file."""
    size = slot.dtype.num_bytes
    for length in slot.sizes:
        size *= length
    return size


def _listed(value: Any) -> Any:
    """Makes lists again of mappings whose keys count: the flat names of the log's entries."""
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(item) for key, item in value.items()}
    if inner and list(inner) == [str(number) for number in range(len(inner))]:
        return list(inner.values())
    return inner


def _schedule(schedule: Any, updates: int) -> Problem:
    names = ", ".join(sorted(map(str, schedule))[:4]) if isinstance(schedule, Mapping) else ""
    what = f"the source's schedule is none of torch's (it keeps {names})" if names else "the source has no schedule"
    return Problem(
        "SR-HFW-SCHEDULE",
        f"{what}: scheduler.pt and scheduler.bin hold the position alone, {updates} updates",
        severity=Severity.WARNING,
        hint="the next update has the source's rates, which lie in the groups; later ones follow the job's own "
        "schedule: give it the source's peak, warm-up and horizon. A job that steps its schedule more than once an "
        "update, as Accelerate does on several processes, has to set last_epoch itself",
    )


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _parts(count: int, *, alone: bool) -> Problem:
    return Problem(
        "SR-HFW-PARTS",
        f"the model would lie in {count} parts, and Accelerate's load_state reads model.safetensors only",
        severity=Severity.ERROR if alone else Severity.WARNING,
        hint="leave --max-shard out, or write for Trainer alone (--flavour trainer)",
    )


def _twice(num_bytes: int) -> Problem:
    return Problem(
        "SR-HFW-TWICE",
        f"the optimizer ({num_bytes} bytes) is written twice: Trainer reads optimizer.pt, Accelerate optimizer.bin",
        severity=Severity.NOTE,
        hint="--flavour trainer or --flavour accelerate writes the one that the job reads",
    )


def _no_counter(*, alone: bool) -> Problem:
    return Problem(
        "SR-HFW-COUNTER",
        "the source does not say how many updates were made: there is no trainer_state.json, and without it Trainer "
        "does not resume",
        severity=Severity.ERROR if alone else Severity.WARNING,
        hint="--flavour accelerate needs none; or write global_step and epoch into trainer_state.json by hand",
    )


def _derived(update: int) -> Problem:
    return Problem(
        "SR-HFW-STATE",
        f"trainer_state.json is made of the source's counters: global_step {update}. Trainer keeps its place in the "
        "data as a number of updates, which is the source's place only with the same samples in each",
        severity=Severity.WARNING,
        hint="keep the samples per update and the order of the data, or set ignore_data_skip=True and place the data "
        "yourself. A resumed Trainer logs, evaluates and saves at the steps in this file (500), not in its arguments",
    )


def _lambdas() -> Problem:
    return Problem(
        "SR-HFW-LAMBDAS",
        "the source's scheduler has no lr_lambdas, which a LambdaLR, such as Trainer's, insists on: None is written "
        "for each",
        severity=Severity.NOTE,
        where={"key": "scheduler.lr_lambdas"},
        hint="the job's own functions are kept, as with plain functions they always are",
    )


def _beside(names: list[str]) -> Problem:
    return Problem(
        "SR-HFW-BESIDE",
        f"{len(names)} parts of the source lie in {EXTRA}, which neither Trainer nor Accelerate reads: "
        f"{', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}",
        severity=Severity.WARNING,
        where={"file": EXTRA},
        hint=f"{EXTRA} is a torch.save file that holds them by the source's names; the job must take what it needs",
    )
