"""Opens a Lightning checkpoint as logical state (pytorch-lightning 1.5 to lightning 2.6).

A `.ckpt` is one torch.save file: `state_dict`, `optimizer_states`, `lr_schedulers`, `loops`, `callbacks`, counters.
FSDP and model parallel strategies write a directory instead: DCP files with the model and `optimizer_N`, the rest in
`meta.pt`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samerun.core.state import RecordedProgress
from samerun.errors import CorruptCheckpoint, Problem, Severity
from samerun.formats.base import Checkpoint
from samerun.formats.lightning.detect import META, VERSION
from samerun.formats.statedict.adopt import adopt
from samerun.formats.statedict.assemble import assemble
from samerun.formats.statedict.checkpoint import StateDictCheckpoint
from samerun.formats.statedict.recognise import is_state_dict
from samerun.formats.statedict.saved import SavedModel, SavedState
from samerun.formats.statedict.sidefiles import open_beside
from samerun.formats.statedict.stored import Stored
from samerun.formats.statedict.tree import open_file
from samerun.stores.local import MappedFiles

OpenInner = Callable[[Path], Checkpoint]
_AVERAGE = "average_model_state"
POSITION = "samerun/sampler/1"
"""The schema of `ElasticSampler.state_dict`, which `samerun.integrations.lightning` saves with its callback."""
_SORTED = frozenset({"state_dict", "optimizer_states", "lr_schedulers", "current_model_state", VERSION})


def open_lightning(path: Path, open_inner: OpenInner) -> StateDictCheckpoint:
    """Opens a `.ckpt` file, or a sharded directory whose DCP part `open_inner` opens. Tensors stay on disk.

    Raises:
        CorruptCheckpoint: if the file, or the directory's metadata, cannot be decoded at all.
    """
    files = MappedFiles()
    saved = SavedState()
    inners: tuple[Checkpoint, ...] = ()
    if path.is_dir():
        inner = open_inner(path)
        inners = (inner,)
        adopt(inner, saved)
        tree = open_beside(path / META, saved, files)
    else:
        bound = open_file(path, files)
        saved.files.append(path)
        saved.unknown.update(bound.unknown)
        saved.problems += bound.problems
        tree = bound.tree
    if not isinstance(tree, dict):
        raise CorruptCheckpoint([*saved.problems, _no_mapping(path)])
    _sort(tree, saved)
    return assemble(path, "lightning", saved, files, inners)


def _no_mapping(path: Path) -> Problem:
    return Problem(
        "SR-PKL-CONTAINER",
        "this is no Lightning checkpoint",
        where={"file": str(path)},
        hint="restore the file from the source",
    )


def _sort(tree: Mapping[Any, Any], saved: SavedState) -> None:
    saved.written_by["format"] = "Lightning"
    if isinstance(tree.get(VERSION), str):
        saved.written_by["lightning"] = tree[VERSION]
    _add_models(tree, saved)
    for number, state in enumerate(_items(tree.get("optimizer_states"))):
        if isinstance(state, dict):
            saved.optimizers.append((f"optimizer_states.{number}", state))
    for number, state in enumerate(_items(tree.get("lr_schedulers"))):
        saved.schedulers.append((f"lr_schedulers.{number}", state))
    saved.objects |= {str(key): value for key, value in tree.items() if key not in _SORTED}
    if isinstance(tree.get("callbacks"), dict):
        saved.objects["callbacks"] = _without_averages(tree["callbacks"], saved)
    _add_data(tree, saved)
    update, epoch = tree.get("global_step"), tree.get("epoch")
    known = saved.progress or RecordedProgress()
    samples = (_position(tree) or {}).get("samples")
    saved.progress = RecordedProgress(
        update=update if type(update) is int else None,
        epoch=epoch if type(epoch) is int else None,
        samples=samples if type(samples) is int else known.samples,
        tokens=known.tokens,
    )


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _add_models(tree: Mapping[Any, Any], saved: SavedState) -> None:
    """Adds the model. With the WeightAveraging callback `state_dict` is the average, and the model lies beside it."""
    current, model = tree.get("current_model_state"), tree.get("state_dict")
    if isinstance(model, dict) and is_state_dict(model):
        averaged = is_state_dict(current)
        saved.models.append(SavedModel("state_dict", _tensors(model), average=averaged))
        if averaged:
            saved.problems.append(_averaged())
    if isinstance(current, dict) and is_state_dict(current):
        saved.models.append(SavedModel("current_model_state", _tensors(current)))


def _without_averages(callbacks: Mapping[Any, Any], saved: SavedState) -> dict[str, Any]:
    """Adds the averages that callbacks hold (StochasticWeightAveraging) as models. Returns the rest of their state."""
    rest: dict[str, Any] = {}
    for name, state in callbacks.items():
        average = state.get(_AVERAGE) if isinstance(state, dict) else None
        if isinstance(average, dict) and is_state_dict(average):
            saved.models.append(SavedModel(f"callbacks.{name}", _tensors(average), average=True))
            state = {key: item for key, item in state.items() if key != _AVERAGE}
        rest[str(name)] = state
    return rest


def _tensors(node: Mapping[str, Any]) -> dict[str, Stored]:
    return {name: item for name, item in node.items() if isinstance(item, Stored)}


def _add_data(tree: Mapping[Any, Any], saved: SavedState) -> None:
    """Adds what the fit loop knows of its place in the data: the loaders' own state, and how many batches were done."""
    loops = tree.get("loops")
    fit = loops.get("fit_loop") if isinstance(loops, dict) else None
    if not isinstance(fit, dict):
        return
    state = fit.get("state_dict")
    loaders = state.get("combined_loader") if isinstance(state, dict) else None
    progress = fit.get("epoch_loop.batch_progress")
    current = progress.get("current") if isinstance(progress, dict) else None
    batches = current.get("ready") if isinstance(current, dict) else None
    last = isinstance(progress, dict) and progress.get("is_last_batch") is True
    if (position := _position(tree)) is not None:
        saved.data["sampler"] = position
    elif loaders:
        saved.data["combined_loader"] = {"loaders": loaders, "batches": batches}
    elif type(batches) is int and batches > 0 and not last:
        saved.problems.append(_restarts(batches))


def _position(tree: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    """Returns the committed position that samerun's callback keeps among the states of callbacks."""
    callbacks = tree.get("callbacks")
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    return next((state for state in states if isinstance(state, dict) and state.get("schema") == POSITION), None)


def _restarts(batches: int) -> Problem:
    return Problem(
        "SR-PL-EPOCH",
        f"saved after {batches} batches of an epoch, without the data loader's state",
        severity=Severity.WARNING,
        where={"key": "loops.fit_loop"},
        hint="Lightning starts the epoch again from its first sample and counts on as if it had not: use a data loader "
        "with a state_dict (torchdata's StatefulDataLoader), or save at the end of an epoch",
    )


def _averaged() -> Problem:
    return Problem(
        "SR-PL-AVERAGE",
        "state_dict holds the average of the model; the model that the optimizer trains is current_model_state",
        severity=Severity.NOTE,
        where={"key": "state_dict"},
        hint="a tool that takes state_dict for the model resumes from the average with the model's moments",
    )
