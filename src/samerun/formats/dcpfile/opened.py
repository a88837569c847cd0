"""Opening a directory that torch.distributed.checkpoint wrote: its metadata, its files, and what is wrong with them."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path

import numpy as np

from samerun.errors import CorruptCheckpoint, Problem
from samerun.formats.dcpfile.detect import metadata_files
from samerun.formats.dcpfile.files import check_leftovers, check_places, find_files
from samerun.formats.dcpfile.index import NOWHERE, Index, Ints, merge_indexes, read_index
from samerun.formats.dcpfile.items import Items, no_place, transformed
from samerun.stores.local import MappedFiles
from samerun.stores.remote import Buffer, RemoteFile

_MAX_METADATA_BYTES = 16 << 30  # about 200 bytes per chunk: 80 million chunks
_SMALLEST_ARCHIVE_BYTES = 200
_LARGEST = 1 << 62


def read_metadata(root: Path, maps: MappedFiles) -> tuple[Index, tuple[Path, ...]]:
    """Returns what all metadata files of a directory say together, and the files.

    Raises:
        CorruptCheckpoint: if one cannot be used at all. Anything less is a finding of the index.
    """
    metadata = metadata_files(root)
    for file in metadata:
        _check_size(file)
    return merge_indexes([(file, read_index(_whole(maps.map(file)), file)) for file in metadata]), metadata


def _whole(buffer: Buffer) -> mmap.mmap | bytes:
    return bytes(buffer) if isinstance(buffer, RemoteFile) else buffer


def _check_size(file: Path) -> None:
    size = os.stat(file).st_size
    if size > _MAX_METADATA_BYTES:
        raise CorruptCheckpoint(
            Problem(
                "SR-PKL-HOSTILE",
                f"the metadata is {size} bytes long, more than any checkpoint needs",
                where={"file": str(file)},
                hint="restore it from the source",
            )
        )


def open_items(root: Path, index: Index, metadata: tuple[Path, ...], maps: MappedFiles) -> tuple[Items, list[Problem]]:
    """Finds the files that hold the items, and returns every finding about places, sizes and leftovers."""
    files, problems = find_files(root, index)
    placing, readable = check_places(index, files, _smallest_items(index))
    items = Items(index, files, readable, maps)
    problems = [*index.problems, *problems, *placing, *check_places_given(index, items)]
    return items, problems + check_leftovers(root, index.files, [file.name for file in metadata])


def _smallest_items(index: Index) -> Ints:
    """Returns by row the fewest bytes that an item needs: its values and the least that an archive adds."""
    smallest = np.full(len(index.places), _SMALLEST_ARCHIVE_BYTES, np.int64)
    for tensor in index.tensors:
        placed = tensor.rows != NOWHERE
        sizes = np.clip(tensor.tiling.sizes, 0, None)
        if math.prod(tensor.shape) * tensor.dtype.num_bytes < _LARGEST:
            counts = sizes.prod(axis=1) * tensor.dtype.num_bytes
        else:
            exact = [min(math.prod(row) * tensor.dtype.num_bytes, _LARGEST) for row in sizes.tolist()]
            counts = np.array(exact, np.int64)
        smallest[tensor.rows[placed]] += counts[placed]
    smallest[list(index.transforms)] = 1  # what a compressed item takes is known only when it is unpacked
    return smallest


def check_places_given(index: Index, items: Items) -> list[Problem]:
    """Checks that every chunk with values and every object has a place, and bytes as torch.save left them."""
    problems: list[Problem] = []
    for tensor in index.tensors:
        lost = (tensor.rows == NOWHERE) & (tensor.tiling.sizes > 0).all(axis=1)
        if bool(lost.any()):
            problems.append(no_place(tensor.name))
    problems += [no_place(item.name) for item in index.objects if not item.rows]
    packed = [(row, names) for row, names in index.transforms.items() if not items.unpacks(row)]
    for row, names in packed[:1]:
        file = items.files[int(index.places.file[row])]
        problems.append(transformed(file.path, f"{len(packed)} items", names))
    return problems
