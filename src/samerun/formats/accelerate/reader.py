"""Opens what Accelerate's `save_state` wrote as logical state (accelerate 0.20 to 1.15).

Per prepared object one file, the first without a number: `model.safetensors` (or `pytorch_model.bin`, or numbered parts
with an index), `optimizer.bin`, `scheduler.bin`, `sampler.bin`, `dl_state_dict.bin`, `custom_checkpoint_N.pkl`,
`scaler.pt`, and per process `random_states_N.pkl`. Under FSDP models are `pytorch_model_fsdp_N` and optimizers
`optimizer_N`, directories of DCP, single files of full state dicts, or one file per rank; under DeepSpeed the engine's
own checkpoint lies in `pytorch_model`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from samerun.core.state import Topology
from samerun.errors import FormatError, Problem, Severity, UsageError
from samerun.formats.base import Checkpoint
from samerun.formats.statedict.adopt import adopt
from samerun.formats.statedict.assemble import assemble
from samerun.formats.statedict.checkpoint import StateDictCheckpoint
from samerun.formats.statedict.fsdpfiles import add_fsdp_ranks
from samerun.formats.statedict.recognise import looks_averaged
from samerun.formats.statedict.registered import add_registered, numbered_name, settle_schedulers
from samerun.formats.statedict.safefolder import INDEX_SUFFIX, open_weights
from samerun.formats.statedict.saved import SavedModel, SavedState
from samerun.formats.statedict.sidefiles import add_extra, check_ranks_of, numbered, open_beside, read_json
from samerun.formats.statedict.tree import Tree
from samerun.stores.local import MappedFiles

OpenInner = Callable[[Path], Checkpoint]

_WHOLE_MODEL = re.compile(
    r"(?P<stem>(?:model|pytorch_model|pytorch_model_fsdp)(?:_(?P<number>\d{1,4}))?)\.(?:safetensors|bin)(?P<index>\.index\.json)?"
)
_PARTS = re.compile(r"(?P<stem>(?:model|pytorch_model)(?:_(?P<number>\d{1,4}))?)-00001-of-\d{5}\.(?:safetensors|bin)")
_FOLDER_WEIGHTS = tuple(
    f"{stem}.{ending}{index}"
    for stem in ("diffusion_pytorch_model", "model", "pytorch_model", "adapter_model", "pytorch_lora_weights")
    for ending in ("safetensors", "bin")
    for index in (INDEX_SUFFIX, "")
)
_INNER = re.compile(r"(?:pytorch_model_fsdp|optimizer)_(\d+)|pytorch_model(?:_(\d+))?")


def open_accelerate(path: Path, open_inner: OpenInner) -> StateDictCheckpoint:
    """Opens a directory. `open_inner` opens the checkpoints of other formats inside it. Tensors stay on disk.

    Anything that is missing or damaged is a finding of the state.
    """
    files = MappedFiles()
    saved = SavedState()
    saved.written_by["format"] = "Accelerate save_state"
    inners = tuple(_open_inners(path, saved, open_inner))
    _add_models(path, saved, files)
    _add_folders(path, saved, files)
    _add_optimizers(path, saved, files)
    ranks = add_fsdp_ranks(path, saved, files)
    if (path / "scaler.pt").is_file():
        saved.objects["scaler"] = open_beside(path / "scaler.pt", saved, files)
    add_registered(path, saved, files)
    if ranks and saved.topology.world_size is None:
        saved.topology = Topology(world_size=ranks, inferred="from the number of rank files")
    random = _add_random(path, saved, files)
    add_extra(path, saved, files)
    settle_schedulers(saved)
    loaders = [name for name in saved.data if name.startswith("dl_state_dict")]
    if loaders and len(random) > 1:
        saved.problems.append(_cursor(path, loaders[0], len(random)))
    if not saved.models and not inners:
        saved.problems.append(_no_model(path))
    return assemble(path, "accelerate", saved, files, inners, per_rank=ranks > 0)


def _open_inners(path: Path, saved: SavedState, open_inner: OpenInner) -> Iterator[Checkpoint]:
    for folder in sorted(path.iterdir()):
        if not folder.is_dir() or not _INNER.fullmatch(folder.name):
            continue
        try:
            inner = open_inner(folder)
        except (FormatError, UsageError) as error:
            saved.problems += error.problems
            continue
        adopt(inner, saved)
        yield inner


def _add_models(path: Path, saved: SavedState, files: MappedFiles) -> None:
    chosen: dict[str, str] = {}
    for name in sorted(file.name for file in path.iterdir() if file.is_file()):
        match = _WHOLE_MODEL.fullmatch(name) or _PARTS.fullmatch(name)
        if match is None:
            continue
        stem = match["stem"]
        if stem not in chosen or name.endswith(INDEX_SUFFIX):
            chosen[stem] = name
    several = len(chosen) > 1
    for stem, name in chosen.items():
        try:
            weights = open_weights(path, name, files)
        except FormatError as error:
            saved.problems += error.problems
            continue
        saved.files += weights.files
        saved.problems += weights.problems
        saved.unknown |= weights.unknown
        saved.models.append(
            SavedModel(stem if several else "", weights.tensors, ordered=weights.ordered, aliases=weights.aliases)
        )


def _add_folders(path: Path, saved: SavedState, files: MappedFiles) -> None:
    """Adds the models that hooks of the script saved in folders of their own, as diffusers' training scripts do."""
    for folder in sorted(path.iterdir()):
        if not folder.is_dir() or _INNER.fullmatch(folder.name):
            continue
        name = next((name for name in _FOLDER_WEIGHTS if (folder / name).is_file()), None)
        if name is None:
            continue
        try:
            weights = open_weights(folder, name, files)
        except FormatError as error:
            saved.problems += error.problems
            continue
        saved.files += weights.files
        saved.problems += weights.problems
        average = looks_averaged(folder.name)
        saved.models.append(
            SavedModel(folder.name, weights.tensors, weights.ordered, average=average, aliases=weights.aliases)
        )
        if (folder / "config.json").is_file():
            saved.objects[f"{folder.name}.config"] = read_json(folder / "config.json", saved)


def _add_optimizers(path: Path, saved: SavedState, files: MappedFiles) -> None:
    for number, file in numbered(path, r"optimizer(?:_(\d+))?\.bin").items():
        tree = open_beside(file, saved, files)
        if isinstance(tree, dict):
            saved.optimizers.append((numbered_name("optimizer", number), tree))
    for number, file in numbered(path, r"scheduler(?:_(\d+))?\.bin").items():
        saved.schedulers.append((numbered_name("scheduler", number), open_beside(file, saved, files)))


def _add_random(path: Path, saved: SavedState, files: MappedFiles) -> dict[int, Path]:
    """Adds every process's generators. Their file also counts how often `accumulate` was entered, as `step`."""
    found = numbered(path, r"random_states_(\d+)\.pkl")
    for file in found.values():
        tree: Tree = open_beside(file, saved, files)
        saved.rng[file.stem] = _without_step(tree)
        if isinstance(tree, dict) and "step" in tree:
            saved.objects[f"accelerator.{file.stem}.passes"] = tree["step"]
    world = max(found, default=-1) + 1
    known = saved.topology.world_size or 0
    saved.problems += check_ranks_of(found, "the generator state", known)
    if found and known < world:
        told = "from the number of random_states files, one per process; the last one's loss would not show"
        saved.topology = Topology(world_size=world, inferred=told)
    return found


def _without_step(tree: Any) -> Any:
    return {key: value for key, value in tree.items() if key != "step"} if isinstance(tree, dict) else tree


def _cursor(path: Path, name: str, world: int) -> Problem:
    return Problem(
        "SR-ACC-CURSOR",
        f"the data loader's position is one process's of {world} ({name}.bin): batches that it has seen, not samples "
        "of the run",
        severity=Severity.WARNING,
        where={"file": str(path / f"{name}.bin"), "key": name},
        hint="every process resumes from it; on another number of processes samples are seen again or never. Rewrite "
        "it to the samples consumed divided by the new number of processes, where that divides",
    )


def _no_model(path: Path) -> Problem:
    return Problem(
        "SR-FILE-MISSING",
        "there is no model here: none of the names under which save_state writes one",
        where={"file": str(path)},
        hint="looked for model.safetensors, pytorch_model.bin, numbered parts of either, pytorch_model_fsdp_0",
    )
