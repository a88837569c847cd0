"""Opens safetensors files as logical state."""

from __future__ import annotations

from pathlib import Path

from samerun.core.state import LogicalState, Role, TensorEntry, TensorKey, Topology
from samerun.errors import CorruptCheckpoint, Problem, UsageError
from samerun.formats.safetensors.sidecar import SCHEMA, Sidecar, parse_sidecar
from samerun.formats.statedict.assemble import assemble
from samerun.formats.statedict.checkpoint import StateDictCheckpoint
from samerun.formats.statedict.safefolder import INDEX_SUFFIX, Weights, find_weights, open_weights
from samerun.formats.statedict.saved import SavedModel, SavedState
from samerun.stores.local import MappedFiles

_SIDECAR_NAMES = ("state.json", "samerun.json")
_MAX_SIDECAR_BYTES = 1 << 30


def open_safetensors(path: Path) -> StateDictCheckpoint:
    """Opens a safetensors file, an index, or a directory of them. Tensors stay on disk.

    Raises:
        UsageError: if a directory holds several models, or none.
        CorruptCheckpoint: if nothing in it can be read. Anything less is a finding of the state.
    """
    folder, name = (path, _choose(path)) if path.is_dir() else (path.parent, path.name)
    files = MappedFiles()
    weights = open_weights(folder, name, files)
    if _is_export(weights):
        return _open_export(path, folder, name, weights, files)
    saved = SavedState(files=weights.files, problems=weights.problems, unknown=weights.unknown)
    saved.models.append(SavedModel("", weights.tensors, ordered=weights.ordered, aliases=weights.aliases))
    saved.written_by["format"] = "safetensors"
    saved.objects |= {f"metadata.{key}": value for key, value in weights.metadata.items() if key not in weights.aliases}
    if weights.num_ranks:
        saved.written_by["format"] = "torch.distributed.checkpoint HuggingFaceStorageWriter"
        saved.topology = Topology(world_size=weights.num_ranks, inferred="from the highest number of a shard file")
    return assemble(path, "safetensors", saved, files)


def _choose(folder: Path) -> str:
    found = [name for name in find_weights(folder) if ".safetensors" in name]
    if not found:
        raise UsageError(Problem("SR-PATH-UNKNOWN", "no safetensors files are here", where={"file": str(folder)}))
    indexes = [name for name in found if name.endswith(INDEX_SUFFIX)]
    chosen = indexes or found
    if len(chosen) > 1:
        raise UsageError(
            Problem(
                "SR-PATH-SEVERAL",
                f"{len(chosen)} models are here: {', '.join(chosen[:8])}",
                where={"file": str(folder)},
                hint="give the path of one of them",
            )
        )
    return chosen[0]


def _is_export(weights: Weights) -> bool:
    """Whether every name is a tensor key, as samerun's own export writes them."""
    return bool(weights.tensors) and all(_parse_key(name) is not None for name in weights.tensors)


def _parse_key(name: str) -> TensorKey | None:
    try:
        return TensorKey.parse(name)
    except ValueError:
        return None


def _open_export(path: Path, folder: Path, name: str, weights: Weights, files: MappedFiles) -> StateDictCheckpoint:
    sidecar, found = _read_sidecar(folder, name)
    problems = list(weights.problems)
    if found is None:
        problems.append(
            Problem(
                "SR-META-MISSING",
                "samerun exported these tensors, but the state beside them (groups, progress, scheduler) is not here",
                where={"file": str(folder)},
                hint=f"look for a JSON file with the schema {SCHEMA}, or export again",
            )
        )
    else:
        weights.files.append(found)
    tensors: dict[str, TensorEntry] = {}
    for text, tensor in weights.tensors.items():
        key = TensorKey.parse(text)
        aliases = sidecar.aliases.get(text, ())
        tensors[text] = TensorEntry(key, tensor.shape, tensor.dtype, tensor.tiling, text, aliases)
    state = LogicalState(
        format="safetensors",
        tensors=dict(sorted(tensors.items(), key=lambda item: _order(item[1].key))),
        groups=sidecar.groups,
        progress=sidecar.progress,
        scheduler=sidecar.scheduler,
        rng=sidecar.rng,
        data=sidecar.data,
        objects=sidecar.objects,
        topology=sidecar.topology,
        written_by={"format": "samerun export", **sidecar.written_by},
        problems=tuple(problems),
    )
    return StateDictCheckpoint(path, state, weights.tensors, files, tuple(weights.files))


def _order(key: TensorKey) -> tuple[int, str, str]:
    return list(Role).index(key.role), key.fqn, key.slot or ""


def _read_sidecar(folder: Path, name: str) -> tuple[Sidecar, Path | None]:
    stem = name.removesuffix(INDEX_SUFFIX).removesuffix(".safetensors").partition("-00001-of-")[0]
    for candidate in (f"{stem}.json", f"{name}.json", *_SIDECAR_NAMES):
        file = folder / candidate
        if not file.is_file() or candidate.endswith(INDEX_SUFFIX):
            continue
        if file.stat().st_size > _MAX_SIDECAR_BYTES:
            raise CorruptCheckpoint(
                Problem("SR-META-SIDECAR", "the state beside the tensors is too large", where={"file": str(file)})
            )
        return parse_sidecar(file.read_bytes(), str(file)), file
    return Sidecar(), None
