"""What rounding alone can make of a run's metrics: bounds from the type, the lengths of sums, depth and statistics.

A model of two runs that compute the same update in another order, none of which is measured on them:

1. An inner product of d terms is added up in fp32 (unit round-off a) and its result is rounded once to the compute type
   (u). Rounding errors are taken as independent with mean zero, for which Higham and Mary ("A new approach to
   probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019, theorem 3.1) replace the classical d a by
   sqrt(d) a. The result is off by `e1 = sqrt(u^2 + d a^2)`, relative to the size of such results.
2. A value passes one such product per weight matrix on its way, so it is off by `e = sqrt(depth) e1` at the end of the
   forward pass. The backward pass uses those values and makes two products for each: `eb = sqrt(3 depth) e1`.
3. Two runs differ by sqrt(2) of that. A mean over n tokens averages independent errors: 1 / sqrt(n).
4. `spread = sqrt(2 ln(2 N / risk))` is how many standard deviations the largest of N such numbers stays within, but for
   a probability of `risk` (a union bound over Gaussian tails).
5. A softmax's cross entropy changes by at most sqrt(2) of the change of its logits (its gradient has an L2 norm below
   that), so losses are off by the logits' error times the ratio of the logits' size to the loss.
6. A small gradient is a sum in which much cancels: its error is that of an average tensor of its size, not of itself.
7. An optimizer that divides each element by its own history (Adam) gives elements that are usually small the error of
   an average one: the change of a parameter is off by up to `ADAPTIVE` times as much as its gradient.
8. Update k begins from weights that lie `S = b sum(U_j, j < k)` apart at most, with U_j the norm of update j and b the
   bound for one. To first order the loss changes by `G S`, and the gradient by `H S`, with G the gradient's norm and H
   the largest change of it per step length that the control shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from samerun.core.dtype import DTYPES, DType

ADAPTIVE = 4.0
"""sqrt(E[v] E[1/v]) for second moments v whose logarithm is normal with a standard deviation of 1.7."""

CITATION = "Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019"


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What the bounds are made from.

    `depth` counts the weight matrices of the model, `longest` the terms of the longest inner product, `tokens` (or
    samples) those of one update. `compared` is how many numbers are compared in all, `risk` the probability that
    rounding alone takes one of them out of its bound. `logit_size` is the root mean square of the logits.
    """

    dtype: DType
    depth: int
    longest: int
    tokens: int
    compared: int
    risk: float
    logit_size: float = 1.0

    def __post_init__(self) -> None:
        if min(self.depth, self.longest, self.tokens, self.compared) < 1 or not 0 < self.risk < 1:
            raise ValueError(f"counts must be at least 1 and the risk between 0 and 1: {self}")

    @property
    def product(self) -> float:
        """Relative error of one inner product (1)."""
        own = self.dtype.unit_roundoff
        return math.sqrt(own**2 + self.longest * min(DTYPES["float32"].unit_roundoff, own) ** 2)

    @property
    def spread(self) -> float:
        """How many standard deviations the largest of all compared numbers stays within (4)."""
        return math.sqrt(2 * math.log(2 * self.compared / self.risk))

    @property
    def forward(self) -> float:
        """By how much a logit may differ between two runs, relative to the logits' root mean square (2 to 4)."""
        return self.spread * math.sqrt(2 * self.depth) * self.product

    @property
    def backward(self) -> float:
        """By how much the norm of a gradient over `tokens` may differ, relative to a gradient in which nothing cancels.

        A norm that is held in the compute type cannot be known better than two of its round-offs.
        """
        whole = self.spread * math.sqrt(6 * self.depth / self.tokens) * self.product
        return whole + 2 * self.dtype.unit_roundoff

    def loss(self, loss: float, terms: int) -> float:
        """Returns by how much a mean loss over `terms` tokens may differ, relative to itself (5)."""
        if loss == 0 or not math.isfinite(loss):
            return math.inf
        sums = self.spread * math.sqrt(terms) * DTYPES["float32"].unit_roundoff if self.dtype.num_bytes <= 4 else 0.0
        return self.forward * math.sqrt(2 / terms) * self.logit_size / abs(loss) + sums

    def logits(self, largest: float) -> float:
        """Returns by how much a logit may differ, relative to the largest one."""
        return self.forward * self.logit_size / largest if largest else math.inf

    def tensor(self, norm: float, elements: int, whole_norm: float, whole_elements: int) -> float:
        """Returns by how much a tensor's gradient may differ, relative to its norm (6)."""
        if norm == 0:
            return math.inf
        average = whole_norm * math.sqrt(elements / whole_elements)
        return self.backward * max(1.0, average / norm)

    def describe(self) -> str:
        """Returns the reason that is sealed with a bound."""
        return (
            f"rounding in {self.dtype.name}: {self.depth} weight matrices, inner products of up to {self.longest} "
            f"terms, {self.tokens} tokens per update, logits of size {self.logit_size:.3g}, risk {self.risk:g} over "
            f"{self.compared} numbers ({CITATION})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far the weights of two runs may be apart at each update of a window, and what that makes of the numbers.

    `loss`, `gradient` and `step` are the control's loss, gradient norm and update norm by update.
    """

    bound: float
    loss: Sequence[float]
    gradient: Sequence[float]
    step: Sequence[float]

    def apart(self, place: int) -> float:
        """Returns the largest distance of the weights before update `place` of the window, 0-based (8)."""
        return self.bound * math.fsum(self.step[:place])

    def of_loss(self, place: int) -> float:
        """Returns by how much the loss differs for it, relative to the loss."""
        loss = abs(self.loss[place])
        return self.gradient[place] * self.apart(place) / loss if loss else math.inf

    def of_gradient(self, place: int) -> float:
        """Returns by how much the gradient's norm differs for it, relative to the norm."""
        norm = self.gradient[place]
        return self.steepest(place) * self.apart(place) / norm if norm else math.inf

    def steepest(self, place: int) -> float:
        """Returns the largest change of the gradient's norm per length of a step, up to update `place`."""
        changes = (
            abs(self.gradient[i + 1] - self.gradient[i]) / self.step[i]
            for i in range(min(place, len(self.step) - 1))
            if self.step[i]
        )
        return max(changes, default=0.0)
