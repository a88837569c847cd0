"""Tied weights, recovered from checksums: DCP writes a tied tensor once per name and records no tie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from samerun.core.state import Role, TensorEntry
from samerun.errors import FormatError
from samerun.formats.dcpfile.index import StoredTensor
from samerun.formats.dcpfile.items import Items

_FEWEST_ELEMENTS = 16


def find_ties(
    tensors: Mapping[str, TensorEntry],
    stored: Mapping[str, StoredTensor],
    known: frozenset[str],
    has_optimizer: bool,
    items: Items,
) -> dict[str, tuple[str, ...]]:
    """Returns, by the owner's key, the keys of tensors that are the same tensor under another name.

    An alias has no optimizer state and no group, where the checkpoint has any; its owner has. Both have the same shape,
    type and pieces, the checksums of all pieces are equal, and the values are not all alike (freshly initialised norms
    are equal without being tied). `known` are the parameters that the optimizer knows.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for key, entry in tensors.items():
        if entry.key.role in (Role.PARAM, Role.BUFFER) and entry.num_elements >= _FEWEST_ELEMENTS:
            alike.setdefault((entry.shape, entry.dtype.name), []).append(key)
    ties: dict[str, tuple[str, ...]] = {}
    for keys in alike.values():
        owners = [key for key in keys if not has_optimizer or tensors[key].key.fqn in known]
        aliases = [key for key in keys if not has_optimizer or tensors[key].key.fqn not in known]
        if not owners or not aliases or len(keys) < 2:
            continue
        if has_optimizer:
            ties |= _match(owners, aliases, stored, items)
        elif len(tensors[keys[0]].shape) > 1:
            ties |= _match_any(keys, stored, items)
    return ties


def _match(
    owners: list[str], aliases: list[str], stored: Mapping[str, StoredTensor], items: Items
) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    first = {glimpse(stored[alias], items) for alias in aliases} - {None}
    likely = [owner for owner in owners if glimpse(stored[owner], items) in first]
    prints = {fingerprint(stored[owner], items): owner for owner in reversed(likely)}
    prints.pop(None, None)
    for alias in aliases if prints else ():
        owner = prints.get(fingerprint(stored[alias], items))
        if owner is not None and _varies(stored[alias], items):
            found.setdefault(owner, []).append(alias)
    return {owner: tuple(names) for owner, names in found.items()}


def _match_any(keys: list[str], stored: Mapping[str, StoredTensor], items: Items) -> dict[str, tuple[str, ...]]:
    """Without an optimizer, the first of two equal matrices owns the other, unless several matrices come in pairs."""
    glimpses = Counter(glimpse(stored[key], items) for key in keys)
    first: dict[object, str] = {}
    found: dict[str, list[str]] = {}
    for key in keys:
        seen = glimpse(stored[key], items)
        if seen is None or glimpses[seen] < 2:
            continue
        print_ = fingerprint(stored[key], items)
        owner = first.setdefault(print_, key) if print_ is not None else key
        if owner != key and _varies(stored[key], items):
            found.setdefault(owner, []).append(key)
    return {owner: tuple(names) for owner, names in found.items() if len(found) == 1}


def glimpse(tensor: StoredTensor, items: Items) -> tuple[object, ...] | None:
    """Returns what `fingerprint` begins with, the first piece that has values, at the cost of reading one header."""
    return next(_prints(tensor, items), None)


def fingerprint(tensor: StoredTensor, items: Items) -> tuple[object, ...] | None:
    """Returns a tensor's pieces with their recorded checksums, in order of place; None if any is not recorded."""
    parts = tuple(_prints(tensor, items))
    return parts if parts and None not in parts else None


def _prints(tensor: StoredTensor, items: Items) -> Iterator[tuple[object, ...] | None]:
    for i in np.lexsort(tensor.tiling.offsets.T[::-1]).tolist() if tensor.shape else range(len(tensor.rows)):
        if not bool((tensor.tiling.sizes[i] > 0).all()):
            continue
        try:
            extent = items.extent(tensor, i)
        except FormatError:
            yield None
            return
        if extent.crc32 is None or not extent.contiguous or extent.storage_bytes != extent.num_bytes:
            yield None
            return
        yield (tuple(tensor.tiling.offsets[i].tolist()), extent.shape, extent.crc32)


def _varies(tensor: StoredTensor, items: Items) -> bool:
    """Whether the values of the first piece that has several are not all alike."""
    for i in range(len(tensor.rows)):
        if int(tensor.tiling.sizes[i].prod()) > 1:
            values = items.view(tensor, i).reshape(-1)[:65_536]
            return bool((values != values[0]).any())
    return False
