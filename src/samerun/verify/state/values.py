"""What the values themselves show: non-finite numbers, impossible moments, replicas that differ. Reads every byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from samerun.core.digest import bits_of
from samerun.core.state import LogicalState, Role, TensorEntry
from samerun.errors import FormatError, Problem, Severity
from samerun.formats.base import Checkpoint
from samerun.verify.state.digest import blocks, read_piece_blocks

_WINDOW_ELEMENTS = 4 << 20
_SQUARED_SLOTS = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "variance", "exp_avg_sq_row", "exp_avg_sq_col"}
)
Array = npt.NDArray[Any]


def check_values(checkpoint: Checkpoint, advance: Callable[[int], None] | None = None) -> list[Problem]:
    """Reads every tensor piece by piece and returns what is wrong with its values.

    Memory stays at blocks of some tens of megabytes. `advance` is told the bytes read. Pieces that cannot
    be read are skipped: other checks name them.
    """
    problems: list[Problem] = []
    silent: list[str] = []
    trained = _trained(checkpoint.state)
    for key, entry in checkpoint.state.tensors.items():
        found = _check_tensor(checkpoint, key, entry, advance)
        problems += found.problems(key, entry, mask=bool(trained) and entry.key.fqn not in trained)
        whole = found.seen >= entry.num_elements > 0  # nothing is said of a tensor that is partly missing
        if found.all_zero and whole and entry.key.slot in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            silent.append(key)
    problems += _check_silent(checkpoint.state, silent)
    return problems


class _Found:
    """What was seen in one tensor."""

    def __init__(self) -> None:
        self.nonfinite = 0
        self.nan = 0
        self.negative = 0
        self.seen = 0
        self.all_zero = True
        self.replicas: list[int] = []

    def look(self, values: Array, *, squared: bool) -> None:
        flat = values.reshape(-1)
        self.seen += flat.size
        for start in range(0, flat.size, _WINDOW_ELEMENTS):
            window = flat[start : start + _WINDOW_ELEMENTS]
            nonfinite = count_nonfinite(window)
            self.nonfinite += nonfinite
            self.nan += count_nan(window) if nonfinite else 0
            if squared:
                self.negative += count_negative(window)
            self.all_zero = (
                self.all_zero and not bool(window.view(f"u{window.dtype.itemsize}").any())
                if (window.dtype.itemsize <= 8)
                else False
            )

    def problems(self, key: str, entry: TensorEntry, *, mask: bool) -> list[Problem]:
        """Returns what is wrong; `mask`: the optimizer does not know the tensor, which may be a mask of infinities."""
        made: list[Problem] = []
        if mask and self.nonfinite and not self.nan:
            made.append(
                Problem(
                    "SR-VAL-NONFINITE",
                    f"{self.nonfinite} of {entry.num_elements} values are infinite, in a tensor that nobody trains",
                    Severity.WARNING,
                    where={"tensor": key},
                    hint="right for a mask that is saved as a buffer; a frozen weight is broken",
                )
            )
        elif self.nonfinite:
            made.append(
                Problem(
                    "SR-VAL-NONFINITE",
                    f"{self.nonfinite} of {entry.num_elements} values are infinite or not a number",
                    where={"tensor": key},
                    hint="the run had diverged, or the file is damaged; resume from an earlier checkpoint",
                )
            )
        if self.negative:
            made.append(
                Problem(
                    "SR-VAL-NEGATIVE",
                    f"{self.negative} of {entry.num_elements} second moments are negative, which a mean of squares "
                    "cannot be",
                    where={"tensor": key},
                    hint="the bytes are not those of this slot; restore the checkpoint from the source",
                )
            )
        made += [
            Problem(
                "SR-COV-REPLICA",
                f"piece {piece} is a replica of another piece but holds other values",
                where={"tensor": key},
                hint="replicas drifted apart in training, or files of two saves are mixed",
            )
            for piece in self.replicas[:4]
        ]
        return made


def _check_tensor(
    checkpoint: Checkpoint, key: str, entry: TensorEntry, advance: Callable[[int], None] | None
) -> _Found:
    found = _Found()
    first: dict[bytes, int] = {}
    for piece in range(len(entry.tiling)):
        box = entry.tiling.offsets[piece].tobytes() + entry.tiling.sizes[piece].tobytes()
        original = first.setdefault(box, piece)
        try:
            for _, values in read_piece_blocks(checkpoint, key, piece):
                for _, block in blocks(values):
                    found.look(block, squared=entry.key.slot in _SQUARED_SLOTS)
                if advance is not None:
                    advance(values.nbytes)
            if original != piece and not _same_bits(checkpoint, key, piece, original):
                found.replicas.append(piece)
        except FormatError:
            found.all_zero = False
    return found


def _same_bits(checkpoint: Checkpoint, key: str, piece: int, other: int) -> bool:
    """Whether two pieces of one box hold the same values bit by bit; compared block by block."""
    pairs = zip(blocks(checkpoint.read_piece(key, piece)), blocks(checkpoint.read_piece(key, other)), strict=True)
    return all(np.array_equal(bits_of(x), bits_of(y)) for (_, x), (_, y) in pairs)


def count_nonfinite(values: Array) -> int:
    """Returns how many values are infinite or NaN; 0 for integers."""
    kind = values.dtype
    if kind.kind in "fc":
        return int(values.size - np.count_nonzero(np.isfinite(values)))
    if kind.name == "bfloat16":
        return int(np.count_nonzero((values.view(np.uint16) & 0x7F80) == 0x7F80))
    if kind.name.startswith("float8"):
        return int(values.size - np.count_nonzero(np.isfinite(values.astype(np.float32))))
    return 0


def count_nan(values: Array) -> int:
    """Returns how many values are not a number; 0 for integers."""
    if values.dtype.kind in "fc":
        return int(np.count_nonzero(np.isnan(values)))
    if values.dtype.name == "bfloat16" or values.dtype.name.startswith("float8"):
        return int(np.count_nonzero(np.isnan(values.astype(np.float32))))
    return 0


def count_negative(values: Array) -> int:
    """Returns how many values of a real floating type are below zero (negative zero is not)."""
    if values.dtype.name == "bfloat16":
        bits = values.view(np.uint16)
        return int(np.count_nonzero((bits > 0x8000) & ((bits & 0x7FFF) <= 0x7F80)))
    if values.dtype.kind == "f":
        return int(np.count_nonzero(values < 0))
    return 0


def _trained(state: LogicalState) -> set[str]:
    """Returns the names that the optimizer knows: by state or in a group."""
    stateful = {entry.key.fqn for entry in state.tensors.values() if entry.key.role in (Role.OPTIM, Role.MASTER)}
    return stateful | {name for group in state.groups for name in group.params}


def _check_silent(state: LogicalState, silent: list[str]) -> list[Problem]:
    """Moments that are zero everywhere although updates were counted: reinitialised, or never given a gradient."""
    if not silent or not state.progress.update:
        return []
    moments = [
        key
        for key, entry in state.tensors.items()
        if entry.key.role is Role.OPTIM and entry.key.slot in ("exp_avg", "exp_avg_sq", "momentum_buffer")
    ]
    shown = ", ".join(silent[:4]) + (f" and {len(silent) - 4} more" if len(silent) > 4 else "")
    return [
        Problem(
            "SR-VAL-ZERO",
            f"{len(silent)} of {len(moments)} moments are zero everywhere after {state.progress.update} updates: "
            f"{shown}",
            severity=Severity.ERROR if len(silent) == len(moments) else Severity.WARNING,
            where={"tensor": silent[0]},
            hint="right for parameters that never had a gradient; otherwise the optimizer was made anew before saving",
        )
    ]
