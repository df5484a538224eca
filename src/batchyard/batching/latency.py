"""Floor 1. How long does a dispatch take? t = a + b·n + c·cost, learnt while running.

Pure: it is told how long dispatches took, and knows no clock and no loop.

The fit is recursive least squares with forgetting, written in its normal-equation form: decayed sums of
x·xᵀ and x·t plus a prior that does not decay. That form cannot wind up when the data say nothing new,
and it answers the case that ruins a plain least-squares fit: while every dispatch had the same size,
a and b cannot be told apart, and the prior puts the time on b, so that a larger batch is promised as
slow, never as free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

#: Samples kept until somebody reads the curve. Older ones would weigh less than a tenth anyway.
KEPT = 128
#: Strength of the prior on (a, b, c), as a share of the data's own scale: a is held to zero a thousand
#: times harder than b, so b takes what cannot be told apart.
_PRIOR = (1e-3, 1e-6, 1e-6)


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """Time of a dispatch: `fixed_s + per_item_s * n + per_cost_s * cost`, with its error."""

    fixed_s: float = 0.0
    per_item_s: float = 0.0
    per_cost_s: float = 0.0
    #: Standard error of one prediction inside the range seen, in seconds.
    error_s: float = 0.0
    #: How many dispatches it rests on, older ones counting less.
    weight: float = 0.0
    #: The smallest and the largest batch seen; outside, the curve is an extrapolation.
    smallest: int = 0
    largest: int = 0

    @property
    def known(self) -> bool:
        """Whether enough was seen to plan by it."""
        return self.weight >= 4.0

    @property
    def spread(self) -> bool:
        """Whether batches of different sizes were seen, so that a and b are told apart."""
        return self.largest > self.smallest

    def predict_s(self, n: int, cost: float = 0.0) -> float:
        """Expected seconds of a dispatch of *n* items that cost *cost* together."""
        return self.fixed_s + self.per_item_s * n + self.per_cost_s * cost

    def largest_within(self, goal_s: float, cost_per_item: float = 0.0) -> int:
        """The most items whose dispatch stays within *goal_s*; 0 when not even one does."""
        room = goal_s - self.fixed_s
        each = self.per_item_s + self.per_cost_s * cost_per_item
        if room <= 0:
            return 0
        return int(room / each + 1e-9) if each > 0 else 1 << 30


class LatencyFit:
    """Learns a `LatencyCurve` from dispatches; folding is put off until somebody asks.

    Args:
        forgetting: weight of the previous sample beside the newest, 0 to 1. 0.98 looks back about
            fifty dispatches.
    """

    __slots__ = ("_b", "_curve", "_error2", "_forgetting", "_new", "_s", "_sizes", "_weight")

    def __init__(self, forgetting: float = 0.98) -> None:
        self._forgetting = forgetting
        self._new: deque[tuple[int, float, float]] = deque(maxlen=KEPT)
        # Upper triangle of the decayed sum of x·xᵀ (1, n, cost), then of x·t.
        self._s = [0.0] * 6
        self._b = [0.0] * 3
        self._weight = 0.0
        self._error2 = 0.0
        self._sizes: deque[int] = deque(maxlen=64)
        self._curve = LatencyCurve()

    def observe(self, n: int, cost: float, took_s: float) -> None:
        """Remember one dispatch of *n* items, costing *cost*, that took *took_s* seconds."""
        self._new.append((n, cost, took_s))

    @property
    def curve(self) -> LatencyCurve:
        """The curve as of the last dispatch."""
        new = self._new
        if new:
            while new:
                self._fold(*new.popleft())
            self._curve = self._read()
        return self._curve

    def _fold(self, n: int, cost: float, took_s: float) -> None:
        forget = self._forgetting
        if self._weight >= 8.0:
            # A pause of the machine is no property of the function: a far outlier pulls only as much as
            # five errors. A true change of speed grows the error, and so soon counts in full.
            expected = self._solved_predict(n, cost)
            limit = 5.0 * max(self._error2**0.5, 0.02 * expected)
            residual = took_s - expected
            self._error2 += (
                (1.0 - forget) * 4.0 * (min(residual * residual, 25 * limit * limit) - self._error2)
            )
            took_s = min(max(took_s, expected - limit), expected + limit)
        else:
            expected = self._solved_predict(n, cost) if self._weight >= 3.0 else took_s
            share = 1.0 / (self._weight + 1.0)
            self._error2 += share * ((took_s - expected) ** 2 - self._error2)
        s, b = self._s, self._b
        self._weight = self._weight * forget + 1.0
        s[0] = self._weight
        s[1] = s[1] * forget + n
        s[2] = s[2] * forget + cost
        s[3] = s[3] * forget + n * n
        s[4] = s[4] * forget + n * cost
        s[5] = s[5] * forget + cost * cost
        b[0] = b[0] * forget + took_s
        b[1] = b[1] * forget + n * took_s
        b[2] = b[2] * forget + cost * took_s
        self._sizes.append(n)

    def _solved_predict(self, n: int, cost: float) -> float:
        a, per_item, per_cost = self._solve()
        return a + per_item * n + per_cost * cost

    def _read(self) -> LatencyCurve:
        a, per_item, per_cost = self._solve()
        return LatencyCurve(
            fixed_s=a,
            per_item_s=per_item,
            per_cost_s=per_cost,
            error_s=self._error2**0.5,
            weight=self._weight,
            smallest=min(self._sizes),
            largest=max(self._sizes),
        )

    def _solve(self) -> tuple[float, float, float]:
        """Least squares with the prior; a coefficient that comes out negative is held at zero.

        A dispatch cannot get faster by more work, so a negative coefficient is noise, and would let a
        plan promise a batch that pays for itself.
        """
        s0, s1, s2, s3, s4, s5 = self._s
        weight = max(self._weight, 1.0)
        scale_n = s3 / weight or 1.0
        scale_c = s5 / weight or 1.0
        matrix = [
            [s0 + _PRIOR[0] * weight, s1, s2],
            [s1, s3 + _PRIOR[1] * scale_n * weight, s4],
            [s2, s4, s5 + _PRIOR[2] * scale_c * weight],
        ]
        active = [0, 1, 2]
        while active:
            solution = _gauss([[matrix[i][j] for j in active] for i in active], [self._b[i] for i in active])
            negative = [i for i, value in zip(active, solution, strict=True) if value < 0.0]
            if not negative:
                out = [0.0, 0.0, 0.0]
                for i, value in zip(active, solution, strict=True):
                    out[i] = value
                return out[0], out[1], out[2]
            worst = min(negative, key=lambda i: solution[active.index(i)])
            active.remove(worst)
        return 0.0, 0.0, 0.0


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive system in place."""
    size = len(right)
    for i in range(size):
        pivot = matrix[i][i] or 1e-300
        for j in range(i + 1, size):
            factor = matrix[j][i] / pivot
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
            right[j] -= factor * right[i]
    for i in range(size - 1, -1, -1):
        rest = sum(matrix[i][k] * right[k] for k in range(i + 1, size))
        right[i] = (right[i] - rest) / (matrix[i][i] or 1e-300)
    return right
