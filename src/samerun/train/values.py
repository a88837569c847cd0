"""Numbers and arrays as plain Python and NumPy, whatever tensor, placement or device they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def _whole(value: Any) -> Any:
    """Returns a detached plain tensor on the CPU for any tensor; other things as they are."""
    if not hasattr(value, "detach"):
        return value
    detached = value.detach()
    return (detached.full_tensor() if hasattr(detached, "full_tensor") else detached).cpu()


def number(value: Any) -> float:
    """Returns a number, or a tensor that holds one, as a float. Collective for a DTensor."""
    return float(_whole(value))


def numbers(values: Any) -> list[float]:
    """Returns numbers, or a tensor of them, as floats. Collective for a DTensor."""
    whole = _whole(values)
    return [float(value) for value in (whole.reshape(-1).tolist() if hasattr(whole, "reshape") else whole)]


def array(values: Any) -> npt.NDArray[np.float32]:
    """Returns a tensor or nested numbers as a float32 array. Collective for a DTensor."""
    import numpy as np

    whole = _whole(values)
    return np.asarray(whole.float().numpy() if hasattr(whole, "numpy") else whole, dtype=np.float32)
