"""What a run had consumed of an epoch before its first recorded update: looked up, never listed."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from samerun.core.order import GlobalOrder
from samerun.core.orders import KeyedOrder
from samerun.core.progress import Committed
from samerun.verify.order.audit import Ids


class _Before:
    """Which of `asked` the order has before a position of an epoch; looked up when first asked, in slices."""

    def __init__(self, order: GlobalOrder, begin: Committed, asked: Iterable[Any]) -> None:
        self._order, self._begin, self._asked = order, begin, asked

    def __contains__(self, item: object) -> bool:
        return item in self._found

    @cached_property
    def _found(self) -> frozenset[int]:
        epoch, stop = self._begin.epoch, self._begin.samples_in_epoch
        asked = {item for item in self._asked if isinstance(item, int) and 0 <= item < 1 << 63}
        ids = np.fromiter(asked, np.int64, len(asked))
        if isinstance(self._order, KeyedOrder):
            ids = ids[ids < self._order.length]
            return frozenset(ids[self._order.positions(epoch, ids) < stop].tolist())
        found = np.zeros(len(ids), np.bool_)
        for at in range(0, stop, _SLICE):
            found |= np.isin(ids, self._order.ids(epoch, at, min(at + _SLICE, stop)))
        return frozenset(ids[found].tolist())


_SLICE = 1 << 20


def consumed_before(
    order: GlobalOrder, begin: Committed, epoch: int, found: Sequence[tuple[int, Ids]]
) -> Container[Any]:
    """Returns which of the ids in `found`, (update, ids) of an epoch, a run had consumed in it before `begin`."""
    if epoch != begin.epoch or not begin.samples_in_epoch:
        return ()
    return _Before(order, begin, itertools.chain.from_iterable(ids for _, ids in found))
