"""From the columns of `.metadata` to logical state: roles, slots, groups, progress, tied names, and findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samerun.core.box import check_tilings
from samerun.core.dtype import DTYPES, DType
from samerun.core.state import LogicalState, ParamGroup, RecordedProgress, Role, TensorEntry, TensorKey, Tiling
from samerun.errors import CorruptCheckpoint, FormatError, Problem, Severity
from samerun.formats.base import coverage_problems
from samerun.formats.dcp.averages import find_lists, name_list
from samerun.formats.dcp.optimizer import MASTER_SLOTS, Optimizer, find_roots, read_optimizer
from samerun.formats.dcp.roles import Models, find_models, infer_role, usual_pieces
from samerun.formats.dcp.sections import plant, recognise
from samerun.formats.dcp.ties import find_ties
from samerun.formats.dcp.topology import find_topology
from samerun.formats.dcpfile.index import NOWHERE, Index, StoredTensor
from samerun.formats.dcpfile.items import Items, no_place
from samerun.formats.dcpfile.opened import open_items
from samerun.formats.statedict.geometry import find_distributed
from samerun.formats.statedict.kinship import open_owner
from samerun.formats.statedict.records import check_read
from samerun.formats.torchfile.unpickle import decode_pickle
from samerun.formats.torchfile.values import Inert
from samerun.stores.local import MappedFiles

_SMALL_TENSOR_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """The logical state, and for each of its keys the stored tensor, or the number that an object keeps."""

    state: LogicalState
    stored: Mapping[str, StoredTensor]
    constants: Mapping[str, int | float]
    items: Items
    index: Index
    num_metadata: int


def assemble_state(root: Path, index: Index, metadata: tuple[Path, ...], maps: MappedFiles) -> Assembled:
    """Builds the logical state of an opened directory. Reads small objects, no tensor of the model."""
    items, problems = open_items(root, index, metadata, maps)
    return _Assembly(root, index, items, problems, len(metadata)).assemble()


class _Assembly:
    """The steps of building one state, in order; each leaves its result for the next."""

    def __init__(self, root: Path, index: Index, items: Items, problems: list[Problem], num_metadata: int) -> None:
        self.root = root
        self.index = index
        self.items = items
        self.problems = problems
        self.num_metadata = num_metadata
        self.unknown: set[str] = set()
        self._values: dict[str, Any] = {}
        self._failed: set[str] = set()
        self._tensors = {tensor.name: tensor for tensor in index.tensors}
        self._objects = {item.name: item for item in index.objects}
        self._paths = {item.name: item.path for item in (*index.tensors, *index.objects)}
        self.tensors: dict[str, TensorEntry] = {}
        self.stored: dict[str, StoredTensor] = {}
        self.constants: dict[str, int | float] = {}

    def assemble(self) -> Assembled:
        optimizers = self.find_optimizers(frozenset())
        claimed = frozenset[str]().union(*(optimizer.claimed for optimizer in optimizers))
        free = [tensor for tensor in self.index.tensors if tensor.name not in claimed]
        fqns = {optimizer.root: optimizer.fqns for optimizer in optimizers}
        models = find_models(free, fqns, structured=self.index.structured)
        self.problems += [open_owner(root, names) for root, names in zip(fqns, models.alike, strict=True) if names[1:]]
        optimizers = self.find_optimizers(frozenset(model.fqn for model in models.tensors))
        groups = self.add_groups(optimizers, models)
        known = self.add_slots(optimizers, models) | {fqn for group in groups for fqn in group.params}
        self.add_models(models, known, groups)
        rest = self.add_averages(models, groups)
        objects = self.read_objects(claimed, rest)
        tree = plant((self._paths[name], value) for name, value in objects.items())
        self.problems.extend(_loose_coverage(rest))
        self.problems.extend(self.report_unread(objects))
        sections = recognise(tree)
        self.problems.extend(sections.problems)
        ties = find_ties(self.tensors, self.stored, frozenset(known), bool(optimizers), self.items)
        self.apply_ties(ties)
        self.report_unknown()
        state = LogicalState(
            format="dcp",
            tensors=self.tensors,
            groups=groups,
            progress=self.complete_progress(sections.progress),
            scheduler=sections.scheduler,
            rng=sections.rng,
            data=sections.data,
            objects=objects,
            topology=find_topology(self.index, self.tensors, self.stored, tree),
            written_by=self.written_by(optimizers),
            problems=tuple(self.problems),
        )
        return Assembled(state, self.stored, self.constants, self.items, self.index, self.num_metadata)

    def find_optimizers(self, model_fqns: frozenset[str]) -> list[Optimizer]:
        return [
            read_optimizer(root, list(self._paths), model_fqns, self.value_of, self._paths)
            for root in find_roots(self._paths)
        ]

    def value_of(self, name: str) -> Any:
        """Returns the plain value of a named item, None (and a finding, once) if it cannot be read."""
        if name in self._values or name in self._failed:
            return self._values.get(name)
        try:
            value = self._read_tensor(name) if name in self._tensors else self._read_object(name)
        except FormatError as error:
            self._failed.add(name)
            self._report_failure(name, error)
            return None
        self._values[name] = value
        return value

    def _report_failure(self, name: str, error: FormatError) -> None:
        """Adds what went wrong with one item, unless its whole file is already known to be missing or cut off."""
        tensor, item = self._tensors.get(name), self._objects.get(name)
        rows = list(item.rows[:1]) if item else tensor.rows.tolist() if tensor else []
        if rows and all(row != NOWHERE and self.items.readable(row) for row in rows):
            self.problems.extend(error.problems)

    def _read_object(self, name: str) -> Any:
        rows = self._objects[name].rows
        if not rows:
            raise CorruptCheckpoint(no_place(name))
        decoded = self.items.value(rows[0], name)
        self.unknown.update(decoded.unknown)
        return decoded.value

    def _read_tensor(self, name: str) -> Any:
        """Returns a small tensor as a number or an array; of a large one only a record that it is there."""
        tensor = self._tensors[name]
        num_bytes = math.prod(tensor.shape) * tensor.dtype.num_bytes
        if num_bytes > _SMALL_TENSOR_BYTES:
            return Inert("tensor", (tensor.dtype.name, list(tensor.shape)))
        array = self.items.assemble(tensor)
        return array.item() if tensor.shape == () and tensor.dtype.kind != "complex" else array

    def add(self, key: TensorKey, item: StoredTensor, *, inferred: bool = False) -> None:
        """Files a tensor under its key; two that meet under one key are a finding, and both are kept."""
        text = str(key)
        if text in self.tensors:
            self.problems.append(_twice(text, self.tensors[text].original, item.name))
            key = TensorKey(key.role, item.name, key.slot)
            text = str(key)
        self.tensors[text] = TensorEntry(key, item.shape, item.dtype, item.tiling, item.name, role_inferred=inferred)
        self.stored[text] = item

    def add_groups(self, optimizers: list[Optimizer], models: Models) -> tuple[ParamGroup, ...]:
        groups: list[ParamGroup] = []
        for optimizer, prefix in zip(optimizers, models.prefixes, strict=True):
            groups += [
                ParamGroup(tuple(prefix + fqn for fqn in group.params), group.hyperparameters)
                for group in optimizer.groups
            ]
            if optimizer.positional:
                self.problems.append(_positional(optimizer.root))
        return tuple(groups)

    def add_slots(self, optimizers: list[Optimizer], models: Models) -> set[str]:
        known: set[str] = set()
        for optimizer, prefix in zip(optimizers, models.prefixes, strict=True):
            for slot in optimizer.slots:
                fqn = prefix + slot.fqn
                known.add(fqn)
                self._add_slot(slot.item, fqn, slot.slot)
            for group in optimizer.groups:
                self._spread_step(group, prefix)
        return known

    def _add_slot(self, name: str, fqn: str, slot: str) -> None:
        tensor = self._tensors.get(name)
        if tensor is not None:
            master = slot in MASTER_SLOTS
            self.add(TensorKey(Role.MASTER, fqn) if master else TensorKey(Role.OPTIM, fqn, slot or "state"), tensor)
            return
        value = self.value_of(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._add_constant(TensorKey(Role.OPTIM, fqn, slot or "state"), value, name)

    def _spread_step(self, group: ParamGroup, prefix: str) -> None:
        """Gives each parameter of a group the step that some optimizers keep once per group."""
        step = group.hyperparameters.get("step")
        if isinstance(step, int | float) and not isinstance(step, bool):
            for fqn in group.params:
                key = TensorKey(Role.OPTIM, prefix + fqn, "step")
                if str(key) not in self.tensors:
                    self._add_constant(key, step, "param_groups.step")

    def _add_constant(self, key: TensorKey, value: int | float, original: str) -> None:
        dtype: DType = DTYPES["int64" if isinstance(value, int) else "float64"]
        self.tensors[str(key)] = TensorEntry(key, (), dtype, Tiling.whole(()), original)
        self.constants[str(key)] = value

    def add_models(self, models: Models, known: set[str], groups: tuple[ParamGroup, ...]) -> None:
        usual = usual_pieces(models.tensors)
        for model in models.tensors:
            if model.average:
                self.add(TensorKey(Role.EMA, model.fqn), model.item)
                continue
            role, inferred = infer_role(model, frozenset(known), groups_known=bool(groups), usual_pieces=usual)
            self.add(TensorKey(role, model.fqn), model.item, inferred=inferred)

    def add_averages(self, models: Models, groups: tuple[ParamGroup, ...]) -> list[StoredTensor]:
        """Adds averages that were saved as lists. Returns the tensors that belong to no model after that."""
        taken: set[str] = set()
        for name, tensors in find_lists(models.rest).items():
            names, problems = name_list(name, tensors, models.tensors, groups)
            self.problems.extend(problems)
            for fqn, tensor in zip(names, tensors, strict=True):
                self.add(TensorKey(Role.EMA, fqn), tensor)
                taken.add(tensor.name)
        return [tensor for tensor in models.rest if tensor.name not in taken]

    def read_objects(self, claimed: frozenset[str], rest: Iterable[StoredTensor]) -> dict[str, Any]:
        names = [item.name for item in self.index.objects if item.name not in claimed]
        names += [tensor.name for tensor in rest]
        values: dict[str, Any] = {}
        for name in names:
            value = self.value_of(name)
            if name not in self._failed:
                values[name] = self._decode_inner(name, value)
        return values

    def _decode_inner(self, name: str, value: Any) -> Any:
        """Decodes bytes that are themselves a pickle, as torchtitan's data loader states are."""
        if not (isinstance(value, bytes) and value[:1] == b"\x80" and value[-1:] == b"."):
            return value
        try:
            decoded = decode_pickle(value, name)
        except CorruptCheckpoint:
            return value
        self.unknown.update(decoded.unknown)
        return decoded.value

    def report_unread(self, objects: Mapping[str, Any]) -> list[Problem]:
        """Finds distributed tensors that were pickled into objects: of those only one rank's part was saved."""
        found = {name: one.name for name, value in objects.items() if (one := find_distributed(value)) is not None}
        return check_read({name: f"{kind}, of one rank" for name, kind in found.items()}, str(self.root))

    def apply_ties(self, ties: Mapping[str, tuple[str, ...]]) -> None:
        for owner, aliases in ties.items():
            entry = self.tensors[owner]
            names = tuple(self.tensors[alias].key.fqn for alias in aliases)
            self.tensors[owner] = TensorEntry(
                entry.key, entry.shape, entry.dtype, entry.tiling, entry.original, names, entry.role_inferred
            )
            for alias in aliases:
                del self.tensors[alias], self.stored[alias]

    def report_unknown(self) -> None:
        if self.unknown:
            names = sorted(self.unknown)
            self.problems.append(_unknown_classes(self.root, names))

    def complete_progress(self, progress: RecordedProgress) -> RecordedProgress:
        """Falls back to the optimizer's own step where nothing else counts updates."""
        if progress.update is not None:
            return progress
        steps = [self.step_of(key) for key, entry in self.tensors.items() if entry.key.slot == "step"]
        known = [int(step) for step in steps if step is not None]
        if not known:
            return progress
        return RecordedProgress(
            update=max(known), samples=progress.samples, tokens=progress.tokens, epoch=progress.epoch
        )

    def step_of(self, key: str) -> float | None:
        """Returns an optimizer step counter's value, None if it cannot be read."""
        if key in self.constants:
            return float(self.constants[key])
        value = self.value_of(self.stored[key].name)
        return float(value) if isinstance(value, int | float) else None

    def written_by(self, optimizers: list[Optimizer]) -> dict[str, str]:
        found = {"format": f"torch.distributed.checkpoint {self.index.version or ''}".strip()}
        if any(optimizer.flattened for optimizer in optimizers):
            found["optimizer_state"] = "flattened"
        return found | ({"save_id": self.index.save_id} if self.index.save_id else {})


def _loose_coverage(tensors: Iterable[StoredTensor]) -> list[Problem]:
    """Checks tensors that are in no model and no optimizer, such as RNG states; the others are checked by role."""
    loose = list(tensors)
    found = check_tilings([(tensor.shape, tensor.tiling) for tensor in loose])
    return [
        problem for tensor, one in zip(loose, found, strict=True) for problem in coverage_problems(tensor.name, one)
    ]


def _twice(key: str, first: str, second: str) -> Problem:
    return Problem(
        "SR-KEY-TWICE",
        f"two stored tensors are both {key}",
        where={"tensor": key},
        severity=Severity.ERROR,
        expected=first,
        found=second,
        hint="a model was saved wrapped and unwrapped, or two optimizers share names; a run resumes from one of them",
    )


def _positional(root: str) -> Problem:
    return Problem(
        "SR-OPT-POSITIONAL",
        "optimizer state is kept by position (0, 1, 2, ...), not by parameter name",
        where={"key": root or "state"},
        severity=Severity.ERROR,
        hint="it fits only an optimizer built over the same parameters in the same order; save it again through "
        "torch.distributed.checkpoint.state_dict.get_state_dict",
    )


def _unknown_classes(root: Path, names: list[str]) -> Problem:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return Problem(
        "SR-PKL-UNKNOWN",
        f"objects of classes that samerun does not know are kept as inert records: {shown}",
        where={"file": str(root)},
        severity=Severity.NOTE,
        hint="nothing of them was executed; torch.load with weights_only=False would",
    )
