"""What a loop says about each pass, until the optimizer's step makes an update of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Noted:
    """An update's passes on this rank. `loss` is the mean over all ranks and passes, or None where nobody told one."""

    ids: tuple[int | str, ...]
    loss: float | None
    tokens: int | None


class Passes:
    """Gathers sample ids, losses and tokens of one update's passes."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.count = 0
        self._ids: list[int | str] = []
        self._tokens: int | None = None
        self._sum: torch.Tensor | None = None
        self._weight = 0.0

    def note(self, ids: Sequence[int | str] | None, loss: Any, tokens: int | None, weight: float | None) -> None:
        """Adds one pass. The loss stays where it is, as a tensor: a pass waits for no device."""
        self.count += 1
        self._ids += [item if isinstance(item, str) else int(item) for item in ids or ()]
        if tokens is not None:
            self._tokens = (self._tokens or 0) + int(tokens)
        if loss is None:
            return
        share = float(weight if weight is not None else 1 if ids is None else len(ids))
        if share:
            part = _plain(loss) * share
            self._sum = part if self._sum is None else self._sum + part
            self._weight += share

    def take(self) -> Noted:
        """Ends the update. Collective: every rank calls it, also one that noted nothing (a pipeline's first stage)."""
        import torch

        from samerun.train.norms import add_over_ranks

        own = torch.zeros((), dtype=torch.float64) if self._sum is None else self._sum.cpu()
        total, weight = add_over_ranks(torch.stack([own, torch.tensor(self._weight, dtype=torch.float64)]))
        noted = Noted(tuple(self._ids), total / weight if weight else None, self._tokens)
        self._clear()
        return noted


def _plain(loss: Any) -> torch.Tensor:
    import torch

    if not isinstance(loss, torch.Tensor):
        return torch.tensor(float(loss), dtype=torch.float64)
    whole: Any = loss.detach()
    whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
    return whole.reshape(()).to(torch.float32 if whole.device.type == "mps" else torch.float64)
