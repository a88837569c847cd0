"""Tied weights: names that share one stored tensor, or whose recorded checksums are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from samerun.errors import FormatError
from samerun.formats.statedict.stored import Stored, checksum_of, place_of
from samerun.stores.local import MappedFiles

_FEWEST_ELEMENTS = 16
_COMPARED_ELEMENTS = 65_536


def find_shared(tensors: Mapping[str, Stored], known: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Returns, by owner, the other names of tensors that a file stores once under several.

    The owner is the one that the optimizer knows (`known`), the first one where it knows none or several.
    """
    alike: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        place = place_of(tensor)
        if place is not None:
            alike.setdefault(place, []).append(name)
    return _owned(alike.values(), known)


def _owned(families: Iterable[list[str]], known: frozenset[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for names in families:
        if len(names) > 1:
            owner = next((name for name in names if name in known), names[0])
            found[owner] = tuple(name for name in names if name != owner)
    return found


def find_copies(
    tensors: Mapping[str, Stored], known: frozenset[str], files: MappedFiles, *, has_optimizer: bool
) -> dict[str, tuple[str, ...]]:
    """Returns, by owner, names whose tensors were stored again with the same checksum.

    With an optimizer, a copy is what it does not know of a tensor that it does; without one, the second of the only
    pair of equal matrices. Tensors of one value repeated (fresh norms and biases) prove nothing.
    """
    alike: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.num_elements >= _FEWEST_ELEMENTS and (has_optimizer or len(tensor.shape) > 1):
            alike.setdefault((tensor.shape, tensor.dtype.name), []).append(name)
    found: dict[str, tuple[str, ...]] = {}
    for names in alike.values():
        if len(names) < 2 or (has_optimizer and not known.intersection(names)):
            continue
        equal: dict[object, list[str]] = {}
        for name in names:
            checksum = checksum_of(tensors[name])
            if checksum is not None:
                equal.setdefault(checksum, []).append(name)
        for family in equal.values():
            aliases = _copies(family, known, has_optimizer=has_optimizer)
            if aliases and _varies(tensors[aliases[1][0]], files):
                found[aliases[0]] = aliases[1]
    return found if has_optimizer or len(found) == 1 else {}


def _copies(family: list[str], known: frozenset[str], *, has_optimizer: bool) -> tuple[str, tuple[str, ...]] | None:
    owners = [name for name in family if name in known] if has_optimizer else family[:1]
    copies = tuple(name for name in family if name not in known) if has_optimizer else tuple(family[1:])
    return (owners[0], copies) if owners and copies else None


def _varies(tensor: Stored, files: MappedFiles) -> bool:
    """Whether the values of the first box that has several are not all alike."""
    for box in range(len(tensor.tiling)):
        if int(tensor.tiling.sizes[box].prod()) > 1:
            try:
                values = tensor.view(box, files).reshape(-1)[:_COMPARED_ELEMENTS]
            except FormatError:
                return False
            return bool((values != values[0]).any())
    return False
