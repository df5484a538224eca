"""Floor 1. Which of those that wait ride in the next dispatch, within the limits.

Pure: takes a line, limits and `now`, returns the entries drawn. The first in line always rides; later
ones ride where they fit, so a large item that does not fit leads a later dispatch and is never passed
over for good. An item never overtakes another of the same tier and the same cost.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from batchyard.batching.latency import LatencyCurve
from batchyard.batching.queue import Entry, Line


@dataclass(frozen=True, slots=True)
class Limits:
    """What one dispatch may carry."""

    max_items: int
    max_cost: float = math.inf
    #: Whether a dispatch costs `max(cost) * n` rather than `sum(cost)`.
    padded: bool = False
    #: Sizes that the function takes, ascending; empty for any size.
    sizes: tuple[int, ...] = ()
    #: How many entries that do not fit are looked past before the dispatch is closed.
    lookahead: int = 32

    def size_of(self, n: int) -> int:
        """The size that *n* items are padded to."""
        return self.sizes[bisect_left(self.sizes, n)] if self.sizes else n

    def cost_of(self, n: int, total: float, largest: float, smallest: float) -> float:
        """Cost of *n* items, padding to an allowed size included (it repeats the smallest item)."""
        size = self.size_of(n)
        return largest * size if self.padded else total + (size - n) * smallest

    def cost_alone(self, cost: float) -> float:
        """What a dispatch of one item costs."""
        return self.cost_of(1, cost, cost, cost)


@dataclass(slots=True)
class Drawn:
    """The entries of one dispatch."""

    entries: list[Entry]
    #: Cost of the dispatch as the function sees it, padding included.
    cost: float
    #: The part of it that is not padding.
    real_cost: float
    #: `full`, `budget`, `deadline` (one more would have made somebody late) or `free`.
    reason: str
    #: Entries whose deadline cannot be met any more, taken out unserved.
    late: list[Entry]


def draw(
    line: Line,
    limits: Limits,
    item_limit: int,
    now: float,
    curve: LatencyCurve | None,
    *,
    max_waste: float = math.inf,
) -> Drawn:
    """Draw the next dispatch from *line*.

    At most *item_limit* items ride. Where a *curve* is given, an entry that would be late even alone is
    dropped, and the dispatch grows only while nobody aboard becomes late by it. A padded dispatch takes
    those next in cost to its first, of the *item_limit* and `lookahead` first in line, and nobody whose
    presence would add more padding than *max_waste*.
    """
    entries: list[Entry] = []
    skipped: list[Entry] = []
    late: list[Entry] = []
    n = 0
    total = largest = dispatch_cost = 0.0
    smallest = first_due = math.inf
    reason = "free"
    max_cost = limits.max_cost
    ragged = not limits.padded and not limits.sizes
    window: list[Entry] = []
    candidates: Iterable[Entry] = line.drain()
    if limits.padded:
        window = list(islice(candidates, item_limit + limits.lookahead))
        candidates = _by_likeness(window, now)
    for entry in candidates:
        if entry.hard and entry.due <= now:
            late.append(entry)
            continue
        cost = entry.cost
        if ragged:
            new_cost = total + cost
        else:
            low, high = min(smallest, cost), max(largest, cost)
            new_cost = limits.cost_of(n + 1, total + cost, high, low)
        fits = n == 0 or (new_cost <= max_cost and new_cost - dispatch_cost - cost <= max_waste)
        if curve is not None and fits:
            if entry.hard and now + curve.predict_s(limits.size_of(1), limits.cost_alone(cost)) > entry.due:
                late.append(entry)
                continue
            due = entry.due if entry.hard and entry.due < first_due else first_due
            fits = n == 0 or now + curve.predict_s(limits.size_of(n + 1), new_cost) <= due
            if fits:
                first_due = due
            else:
                reason = "deadline"
        elif not fits:
            reason = "budget"
        if not fits:
            skipped.append(entry)
            if len(skipped) > limits.lookahead:
                break
            continue
        entries.append(entry)
        total += cost
        dispatch_cost = new_cost
        if not ragged:
            largest, smallest = high, low
        n += 1
        if n >= item_limit:
            reason = "full"
            break
    if window:
        gone = {id(entry) for entry in (*entries, *late)}
        skipped = [entry for entry in window if id(entry) not in gone]
    if skipped:
        line.put_back(skipped)
    line.leave(entries)
    if late:
        line.leave(late)
    return Drawn(entries, dispatch_cost, total, reason, late)


def _by_likeness(window: list[Entry], now: float) -> list[Entry]:
    """*window* with its first entry in time ahead, then those nearest to it in cost."""
    first = next((entry for entry in window if not (entry.hard and entry.due <= now)), None)
    return window if first is None else sorted(window, key=lambda entry: abs(entry.cost - first.cost))
