"""Floor 4. How long a run will take, what it will cost, and whether it meets its deadline.

Pure: figures in, figures out. Every estimate says where its figures come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    GIVEN = "given"
    ASSUMED = "assumed"


class Verdict(StrEnum):
    """How a run stands against its deadline."""

    EARLY = "early"  # done with a fifth of the time to spare, or more
    TIGHT = "tight"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Figure:
    """One estimated number, the range it likely lies in, and its source."""

    value: float
    low: float
    high: float
    source: Source


def total_of_sample(sample: Sequence[int], population: int) -> Figure:
    """The total of a population from the values of an evenly drawn sample.

    The range is the mean plus and minus two standard errors, with the finite population correction. One
    value alone tells nothing of the spread: the range then goes from that value to twice the estimate.
    """
    size, known = len(sample), sum(sample)
    if not size or not population:
        return Figure(0.0, 0.0, 0.0, Source.MEASURED)
    if size >= population:
        return Figure(known, known, known, Source.MEASURED)
    mean = known / size
    if size == 1:
        return Figure(mean * population, mean, 2 * mean * population, Source.MEASURED)
    variance = sum((one - mean) ** 2 for one in sample) / (size - 1)
    error = 2 * (variance / size * (1 - size / population)) ** 0.5
    # What was counted is certain, so the total is never below it.
    low = max((mean - error) * population, known)
    return Figure(mean * population, low, (mean + error) * population, Source.MEASURED)


@dataclass(frozen=True, slots=True)
class Price:
    """Money per million tokens."""

    input: float
    output: float


def cost(input_tokens: Figure, output_tokens: Figure, price: Price) -> Figure:
    """What so many tokens cost, in the unit of the price."""

    def at(inputs: float, outputs: float) -> float:
        return (inputs * price.input + outputs * price.output) / 1e6

    source = Source.ASSUMED if Source.ASSUMED in {input_tokens.source, output_tokens.source} else Source.GIVEN
    return Figure(
        at(input_tokens.value, output_tokens.value),
        at(input_tokens.low, output_tokens.low),
        at(input_tokens.high, output_tokens.high),
        source,
    )


def verdict(eta_s: float | None, left_s: float) -> Verdict | None:
    """How *eta_s* seconds of work stand against *left_s* seconds until the deadline."""
    if eta_s is None:
        return None
    if eta_s > left_s:
        return Verdict.LATE
    return Verdict.EARLY if eta_s <= 0.8 * left_s else Verdict.TIGHT


class RateMeter:
    """A rate over a sliding window, from growing totals.

    Until the window is full the rate is that since the start, so that the first seconds say something.
    Where little happens the window grows until it holds *min_growth*: a request that takes minutes must not
    make the rate fall to nothing between two answers.
    """

    def __init__(self, window_s: float = 10.0, min_growth: float = 8.0) -> None:
        self.window_s = window_s
        self.min_growth = min_growth
        self._points: deque[tuple[float, float]] = deque()

    def add(self, now: float, total: float) -> None:
        """Note that *total* had been reached at *now*."""
        points = self._points
        # While nothing grows, two points say as much as a thousand.
        if len(points) >= 2 and points[-1][1] == points[-2][1] == total:
            points.pop()
        points.append((now, total))
        # One point older than the window stays, so that the window is always covered.
        while (
            len(points) > 2
            and points[1][0] <= now - self.window_s
            and total - points[1][1] >= self.min_growth
        ):
            points.popleft()

    @property
    def per_s(self) -> float:
        """The rate; 0 until two points are known."""
        if len(self._points) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._points[0], self._points[-1]
        return max(last - first, 0.0) / (last_at - first_at) if last_at > first_at else 0.0


def eta_s(remaining: int, per_s: float) -> float | None:
    """Seconds until *remaining* are done at this rate; None where it cannot be told."""
    if remaining <= 0:
        return 0.0
    return remaining / per_s if per_s > 0 else None
