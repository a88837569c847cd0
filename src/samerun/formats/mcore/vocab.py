"""Rows that pad the vocabulary to a multiple of the tensor-parallel degree: told apart, and left out of the state.

Megatron pads embedding and output layer to a multiple of `--make-vocab-size-divisible-by` times TP. The stored shape
therefore depends on the layout; its own loader ignores the difference and leaves the rows beyond as they were
initialised. The logical shape has as many rows as the vocabulary (`args.vocab_size`). Where that is not recorded, or
rows beyond it were looked up in training (their second moments are not zero), the stored shape is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from samerun.core.state import Role, TensorEntry, TensorKey
from samerun.errors import FormatError, Problem, Severity
from samerun.formats.base import assemble_box
from samerun.formats.mcore.held import Held, Replica, Storage
from samerun.formats.mcore.run import Run

EMBEDDING = "embedding.word_embeddings.weight"
PADDED = frozenset({EMBEDDING, "output_layer.weight", "output_layer.bias"})
_MOST_ROWS = 4_096


def crop_vocabulary(
    run: Run,
    tensors: dict[str, TensorEntry],
    placed: dict[str, Held],
    replicas: list[Replica],
    storage: Storage,
) -> list[Problem]:
    """Takes padding rows out of every tensor of the vocabulary, and says how many there were. Changes its arguments."""
    found = [key for key, entry in tensors.items() if entry.key.fqn in PADDED and entry.shape and key in placed]
    if not found:
        return []
    rows = max(tensors[key].shape[0] for key in found)
    size = run.count("vocab_size")
    if size is None:
        return [_unknown(rows, found[0])]
    if size >= rows:
        return []
    used = _used_rows(run, tensors, placed, storage, size)
    if used:
        return [_used(size, rows, used)]
    for key in found:
        if tensors[key].shape[0] > size:
            shape = (size, *tensors[key].shape[1:])
            placed[key] = placed[key].clip(shape)
            tensors[key] = replace(tensors[key], shape=shape, tiling=placed[key].tiling)
    for number, copy in enumerate(replicas):
        if copy.key in found:
            replicas[number] = Replica(copy.key, copy.held.clip(tensors[copy.key].shape))
    return [_cropped(size, rows)]


def _used_rows(
    run: Run, tensors: Mapping[str, TensorEntry], placed: Mapping[str, Held], storage: Storage, size: int
) -> int:
    """Returns how many embedding rows beyond the vocabulary had a gradient once; 0 where that cannot be told."""
    key = str(TensorKey(Role.OPTIM, EMBEDDING, "exp_avg_sq"))
    entry = tensors.get(key)
    if entry is None or run.tied or len(entry.shape) != 2:
        return 0
    count = min(entry.shape[0] - size, _MOST_ROWS)
    held = placed[key]
    try:
        values = assemble_box(entry, lambda piece: storage.view(held, piece), (size, 0), (count, entry.shape[1]))
    except FormatError:
        return 0  # reported as what it is
    return int(np.any(values != 0, axis=1).sum())


def _cropped(size: int, rows: int) -> Problem:
    return Problem(
        "SR-MEG-VOCAB",
        f"{rows - size} rows of the vocabulary's tensors are padding and not counted as values",
        severity=Severity.NOTE,
        where={"tensor": f"param:{EMBEDDING}"},
        expected=f"{size} rows",
        found=f"{rows} rows stored",
        hint="at another tensor-parallel degree there are other padding rows, which start as initialised; those of "
        "the output layer take part in the softmax",
    )


def _used(size: int, rows: int, used: int) -> Problem:
    return Problem(
        "SR-MEG-VOCABUSED",
        f"{used} embedding rows beyond the recorded vocabulary of {size} were trained: all {rows} rows are kept",
        severity=Severity.WARNING,
        where={"tensor": f"param:{EMBEDDING}"},
        expected=f"{size} rows",
        found=f"{rows} rows stored",
        hint="the tokenizer knows more tokens than args.vocab_size says (NullTokenizer adds one); rows of padding are "
        "among those that are counted",
    )


def _unknown(rows: int, key: str) -> Problem:
    return Problem(
        "SR-MEG-VOCABOPEN",
        f"the size of the vocabulary is not recorded: all {rows} stored rows are counted, padding among them if any",
        severity=Severity.NOTE,
        where={"tensor": key},
        hint="args.vocab_size is empty when a tokenizer gave the size. Compare checkpoints of different TP degrees by "
        "the tokenizer's own number of rows",
    )
