"""Which ranks wrote a DCP directory, as far as the files show. DCP records no world size: it is inferred, and said so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samerun.core.state import Topology
from samerun.formats.dcp.files import ranks_of
from samerun.formats.dcp.index import Index, StoredTensor


def infer_topology(index: Index, stored: Mapping[str, StoredTensor], objects: Mapping[str, Any]) -> Topology:
    """Returns the world size (from the ranks in file names) and, where the tiling shows it, the layout."""
    ranks = ranks_of(index.files)
    if not ranks:
        return Topology()
    return Topology(world_size=ranks[-1] + 1, inferred="from the ranks in the names of data files")
