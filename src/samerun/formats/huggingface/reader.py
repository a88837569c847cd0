"""Opens a Hugging Face checkpoint directory as logical state.

Trainer (transformers 4.20 to 5.24) writes the model as safetensors or torch.save files, whole or in numbered parts with
an index; `optimizer.pt` by position, `scheduler.pt`, `scaler.pt`, one `rng_state_N.pth` per process, and counters in
`trainer_state.json`. Under FSDP or DeepSpeed the model and the optimizer are checkpoints of their own inside, or files
of each rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import RecordedProgress, Topology
from samerun.errors import FormatError, Problem, Severity, UsageError
from samerun.formats.base import Checkpoint
from samerun.formats.huggingface.config import check_config, tied_names
from samerun.formats.huggingface.horizon import check_horizon
from samerun.formats.huggingface.trainer import Trainer, check_trainer, read_trainer
from samerun.formats.statedict.adopt import adopt
from samerun.formats.statedict.assemble import assemble
from samerun.formats.statedict.checkpoint import StateDictCheckpoint
from samerun.formats.statedict.fsdpfiles import add_fsdp_ranks
from samerun.formats.statedict.registered import add_registered, settle_schedulers
from samerun.formats.statedict.safefolder import INDEX_SUFFIX, open_weights
from samerun.formats.statedict.saved import SavedModel, SavedState
from samerun.formats.statedict.sidefiles import add_extra, check_ranks_of, numbered, open_beside, read_json
from samerun.stores.local import MappedFiles

OpenInner = Callable[[Path], Checkpoint]

WEIGHTS = (
    f"model.safetensors{INDEX_SUFFIX}", "model.safetensors", f"pytorch_model.bin{INDEX_SUFFIX}", "pytorch_model.bin",
    "adapter_model.safetensors", "adapter_model.bin", "pytorch_model_fsdp.bin",
)  # fmt: skip
_NUMBERED = re.compile(r"(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)")
_RNG_OF_ALL = "rng_state.pth"  # of a run of one process, as Trainer took itself for
_INNER = re.compile(r"pytorch_model_fsdp_\d+|global_step\d+|optimizer_\d+")


def open_huggingface(path: Path, open_inner: OpenInner) -> StateDictCheckpoint:
    """Opens a directory. `open_inner` opens the checkpoints of other formats inside it. Tensors stay on disk.

    Raises:
        CorruptCheckpoint: if the model's only file, or its index, cannot be used.
    """
    files = MappedFiles()
    saved = SavedState()
    saved.written_by["format"] = "Hugging Face"
    config = read_json(path / "config.json", saved) if (path / "config.json").is_file() else {}
    trainer = read_trainer(path, saved, files)
    _add_model(path, config, saved, files)
    exported = list(saved.models)
    inners = tuple(_open_inners(path, saved, open_inner))
    if exported and len(saved.models) > len(exported):
        saved.models = saved.models[len(exported) :]
        saved.problems.append(_exported(path, exported, inners[0].path))
    _add_optimizer(path, saved, files)
    ranks = add_fsdp_ranks(path, saved, files)
    _add_rng(path, trainer, saved, files)
    _add_accelerate_s(path, saved, files)
    add_extra(path, saved, files)
    settle_schedulers(saved)
    _describe(config, trainer, saved)
    saved.problems += check_config(config, saved.models, files)
    saved.problems += check_trainer(path, trainer, saved)
    for _, scheduler in saved.schedulers[:1]:
        saved.problems += check_horizon(trainer.state, trainer.arguments, scheduler)
    if not saved.models and not inners:
        saved.problems.append(_no_model(path))
    return assemble(path, "huggingface", saved, files, inners, per_rank=ranks > 0)


def _add_model(path: Path, config: Mapping[str, Any], saved: SavedState, files: MappedFiles) -> None:
    name = next((name for name in WEIGHTS if (path / name).is_file()), "")
    name = name or next((other.name for other in sorted(path.iterdir()) if _NUMBERED.fullmatch(other.name)), "")
    if not name:
        return
    weights = open_weights(path, name, files)
    saved.files += weights.files
    saved.problems += weights.problems
    saved.unknown |= weights.unknown
    aliases = weights.aliases | tied_names(config, weights.tensors)
    saved.models.append(SavedModel("", weights.tensors, ordered=weights.ordered, aliases=aliases))
    if name.startswith("adapter_model"):
        saved.problems.append(_adapter(path / name))


def _open_inners(path: Path, saved: SavedState, open_inner: OpenInner) -> list[Checkpoint]:
    inners: list[Checkpoint] = []
    for folder in sorted(path.iterdir()):
        if not folder.is_dir() or not _INNER.fullmatch(folder.name):
            continue
        try:
            inner = open_inner(folder)
        except (FormatError, UsageError) as error:
            saved.problems += error.problems
            continue
        adopt(inner, saved)
        inners.append(inner)
    return inners


def _add_optimizer(path: Path, saved: SavedState, files: MappedFiles) -> None:
    name = "optimizer.pt" if (path / "optimizer.pt").is_file() else "optimizer.bin"  # both: Trainer takes the first
    if (path / name).is_file():
        tree = open_beside(path / name, saved, files)
        if isinstance(tree, dict):
            saved.optimizers.append(("optimizer", tree))
    if (path / "scheduler.pt").is_file():
        saved.schedulers.append(("scheduler", open_beside(path / "scheduler.pt", saved, files)))
    if (path / "scaler.pt").is_file():
        saved.objects["scaler"] = open_beside(path / "scaler.pt", saved, files)


def _add_rng(path: Path, trainer: Trainer, saved: SavedState, files: MappedFiles) -> None:
    found = numbered(path, r"rng_state(?:_(\d+))?\.pth")
    for file in found.values():
        saved.rng[file.stem] = open_beside(file, saved, files)
    known = trainer.world_size or 0
    own = {rank: file for rank, file in found.items() if not known or rank < known}  # others are stale: `check_trainer`
    if any(file.name != _RNG_OF_ALL for file in own.values()):
        saved.problems += check_ranks_of(own, "the generator state", max(known, saved.topology.world_size or 0))
    world = trainer.world_size or (max(found) + 1 if found else None)
    recorded = saved.topology.world_size is not None and saved.topology.inferred is None  # by a checkpoint inside
    if world is not None and not recorded:
        source = "training_args.bin" if trainer.world_size else "the number of rng_state files"
        layout = Layout(dp_replicate=world) if trainer.plain_data_parallel else None
        saved.topology = Topology(world_size=world, layout=layout, inferred=f"from {source}")


def _add_accelerate_s(path: Path, saved: SavedState, files: MappedFiles) -> None:
    """Adds what only Accelerate reads of a directory from which both resume."""
    add_registered(path, saved, files)
    for number, file in numbered(path, r"random_states_(\d+)\.pkl").items():
        tree = open_beside(file, saved, files)
        if isinstance(tree, dict) and "step" in tree:
            saved.objects[f"accelerator.random_states_{number}.passes"] = tree["step"]


def _describe(config: Mapping[str, Any], trainer: Trainer, saved: SavedState) -> None:
    if isinstance(config.get("transformers_version"), str):
        saved.written_by["transformers"] = config["transformers_version"]
    if config:
        saved.objects["config"] = dict(config)
    saved.objects |= trainer.objects
    if trainer.data:
        saved.data["trainer_cursor"] = trainer.data
    inner = saved.progress or RecordedProgress()
    progress = trainer.progress or inner
    samples, tokens = (
        getattr(progress, name) if getattr(inner, name) is None else getattr(inner, name)
        for name in ("samples", "tokens")
    )
    saved.progress = replace(progress, samples=samples, tokens=tokens)


def _no_model(path: Path) -> Problem:
    return Problem(
        "SR-FILE-MISSING",
        "there is no model here: none of the names under which transformers saves one",
        where={"file": str(path)},
        hint=f"looked for {', '.join(WEIGHTS[:4])} and their numbered parts; the save may have failed before the model",
    )


def _exported(path: Path, exported: Sequence[SavedModel], inner: Path) -> Problem:
    return Problem(
        "SR-HF-EXPORT",
        f"the {sum(len(model.tensors) for model in exported)} tensors of the model's own file are an export; the model "
        f"in {inner.name} is what a resume loads and what is shown",
        severity=Severity.NOTE,
        where={"file": str(path)},
        hint="both must be of the same update; compare them with `samerun diff` if the export is to be used",
    )


def _adapter(file: Path) -> Problem:
    return Problem(
        "SR-HF-ADAPTER",
        "only adapters are saved here; the base model that they belong to is somewhere else",
        severity=Severity.NOTE,
        where={"file": str(file)},
        hint="keep the base model's exact revision with the checkpoint",
    )
