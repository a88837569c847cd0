"""Models and optimizers that Accelerate lets each rank save for itself under FSDP, one file per rank.

`pytorch_model_fsdp[_N]_rankR.bin` holds a local state dict (`LOCAL_STATE_DICT`, FSDP1) or, with `use_dcp=False`, a
sharded one, beside which `optimizer_N_rankR.bin` lies; a local model's optimizer is the DCP directory `optimizer_N`
(`accelerate/utils/fsdp_utils.py`, 1.15). That one has names and shapes, which give the model's back.
"""

from __future__ import annotations

import re
from pathlib import Path

from samerun.errors import FormatError
from samerun.formats.statedict.localranks import place_ranks
from samerun.formats.statedict.rankfiles import RankFiles, find_rank_files
from samerun.formats.statedict.ranks import Merged, merge_ranks
from samerun.formats.statedict.rankset import open_rank_files
from samerun.formats.statedict.saved import SavedModel, SavedState
from samerun.formats.statedict.stored import Stored
from samerun.formats.statedict.unflatten import Known, known_shapes
from samerun.stores.local import MappedFiles

_MODEL = re.compile(r"(?P<stem>pytorch_model_fsdp(?:_(?P<number>\d{1,4}))?)_rank\*\.bin")
_OPTIMIZER = re.compile(r"(?P<stem>optimizer_(?P<number>\d{1,4}))_rank\*\.bin")


def is_fsdp_rank_file(name: str) -> bool:
    """Whether a file's name is that of one rank's model or optimizer under FSDP."""
    return re.fullmatch(r"(?:pytorch_model_fsdp(?:_\d{1,4})?|optimizer_\d{1,4})_rank\d+\.bin", name) is not None


def add_fsdp_ranks(path: Path, saved: SavedState, files: MappedFiles) -> int:
    """Adds the models and optimizers that the rank files of a directory hold. Returns how many ranks saved them.

    Call it when the optimizers that lie in directories of their own are in `saved` already. Findings go to `saved`.
    """
    found = find_rank_files(path)
    num_ranks = 0
    for match, rank_files in _sets(found, _OPTIMIZER):
        opened = _open(rank_files, saved, files)
        if opened is not None:
            num_ranks = max(num_ranks, opened[0].num_ranks)
            saved.optimizers.append((match["stem"], opened[0].tree))
    models = _sets(found, _MODEL)
    known = [known_shapes(tree) for _, tree in saved.optimizers]
    for match, rank_files in models:
        number = int(match["number"] or 0)
        shapes = known[number] if len(known) == len(models) > number else None
        opened = _open(rank_files, saved, files, shapes)
        if opened is None:
            continue
        merged, parameters = opened
        num_ranks = max(num_ranks, merged.num_ranks, max(rank_files.files) + 1)
        tensors = {str(name): item for name, item in merged.tree.items() if isinstance(item, Stored)}
        buffers = None if parameters is None else frozenset(tensors.keys() - parameters)
        saved.models.append(SavedModel(match["stem"] if len(models) > 1 else "", tensors, buffers=buffers))
    return num_ranks


def _sets(found: tuple[RankFiles, ...], pattern: re.Pattern[str]) -> list[tuple[re.Match[str], RankFiles]]:
    matched = [(match, files) for files in found if (match := pattern.fullmatch(files.pattern)) is not None]
    return sorted(matched, key=lambda pair: int(pair[0]["number"] or 0))


def _open(
    rank_files: RankFiles, saved: SavedState, files: MappedFiles, known: Known | None = None
) -> tuple[Merged, frozenset[str] | None] | None:
    """Opens one set of files and puts its tensors together; None (and findings) if that gives no state dict."""
    try:
        ranks = open_rank_files(rank_files, files, saved)
    except FormatError as error:
        saved.problems += error.problems
        return None
    merged = merge_ranks(ranks.trees, files)
    saved.problems += merged.problems
    parameters = place_ranks(merged, list(ranks.trees), files, saved, known)
    saved.problems += ranks.check(merged.num_ranks)
    return (merged, parameters) if isinstance(merged.tree, dict) else None
