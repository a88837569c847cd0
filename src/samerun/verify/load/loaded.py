"""Both sides of the load proof: a checkpoint, and what a job was found to hold after loading it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from samerun.core.dtype import parse_dtype
from samerun.core.state import LogicalState
from samerun.verify.load.declare import Declared, read_declared
from samerun.verify.state.match import Match

if TYPE_CHECKING:
    from samerun.formats.base import Checkpoint

# Digests that are known already: (checkpoint's key, key it is digested under, dtype it is cast to or "") -> hex.
DigestCache = MutableMapping[tuple[str, str, str], str]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Both sides of the comparison. `digests` remembers what was digested, so that a second job costs nothing."""

    checkpoint: Checkpoint
    found: Mapping[str, Any]
    declare: Mapping[str, Any]
    match: Match
    digests: DigestCache = field(default_factory=dict[tuple[str, str, str], str])

    @property
    def state(self) -> LogicalState:
        """The checkpoint's logical state."""
        return self.checkpoint.state

    def declared(self, part: str) -> Declared:
        """Returns what the manifest claims of `part`."""
        return read_declared(self.declare, part)

    def digest(self, saved: str, as_key: str, dtype: str = "") -> str:
        """Returns the digest of a tensor of the checkpoint under the job's key, cast to `dtype` if one is given."""
        from samerun.verify.state.digest import digest_cast, digest_tensor

        known = self.digests.get((saved, as_key, dtype))
        if known is None:
            if dtype:
                known = digest_cast(self.checkpoint, saved, as_key, parse_dtype(dtype))
            else:
                known = digest_tensor(self.checkpoint, saved, as_key=as_key)
            self.digests[saved, as_key, dtype] = known
        return known

    def number(self, saved: str) -> float:
        """Returns the one number that a tensor of the checkpoint holds."""
        return float(self.checkpoint.read(saved).reshape(-1)[0])
