"""Floor 1. What a batcher counts: a few additions for each dispatch, none for each item.

Knows no loop and no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """A snapshot of a batcher's counts since it was made.

    `submitted = waiting + running + completed + failed + cancelled + expired + dropped` at every moment.
    """

    policy: str
    submitted: int
    #: In the queue now, those that wait for room included.
    waiting: int
    #: Aboard a dispatch now.
    running: int
    completed: int
    #: Ended with an error: of the function, of the cost or key function, too large, or shut out by close.
    failed: int
    #: Given up by their callers, before or during a dispatch.
    cancelled: int
    #: Missed their deadline in the queue.
    expired: int
    #: Refused or pushed out because the queue was full.
    dropped: int
    dispatches: int
    #: Items that rode in them.
    dispatched: int
    #: Dispatches by what closed them: full, budget, deadline, free (a slot was free), waited, drain.
    reasons: dict[str, int]
    #: Further calls that isolating a failed dispatch took.
    retries: int
    largest_batch: int
    #: Seconds in the queue, summed over dispatched items, and the longest of any.
    wait_sum_s: float
    wait_max_s: float
    #: Seconds that dispatches took, summed.
    busy_s: float
    #: Cost of all dispatches, padding included, and the part of it that was padding.
    cost: float
    padding_cost: float
    #: Items repeated to reach an allowed size.
    padding_items: int

    @property
    def mean_batch(self) -> float:
        """Items in a dispatch, on average."""
        return self.dispatched / self.dispatches if self.dispatches else 0.0

    @property
    def mean_wait_s(self) -> float:
        """Seconds in the queue, on average over dispatched items."""
        return self.wait_sum_s / self.dispatched if self.dispatched else 0.0

    @property
    def padding_share(self) -> float:
        """Share of the dispatched cost that was padding, 0 to 1."""
        return self.padding_cost / self.cost if self.cost else 0.0


@dataclass(slots=True)
class Tally:
    """The running counts behind `BatcherStats`."""

    dispatches: int = 0
    dispatched: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    dropped: int = 0
    retries: int = 0
    running: int = 0
    largest_batch: int = 0
    wait_sum_s: float = 0.0
    wait_max_s: float = 0.0
    busy_s: float = 0.0
    cost: float = 0.0
    padding_cost: float = 0.0
    padding_items: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def snapshot(self, policy: str, waiting: int, unmet: int) -> BatcherStats:
        """The counts as a value; *unmet* are cancelled items that no draw has met yet."""
        cancelled = self.cancelled + unmet
        ended = self.completed + self.failed + cancelled + self.expired + self.dropped
        return BatcherStats(
            policy=policy,
            submitted=waiting + self.running + ended,
            waiting=waiting,
            running=self.running,
            completed=self.completed,
            failed=self.failed,
            cancelled=cancelled,
            expired=self.expired,
            dropped=self.dropped,
            dispatches=self.dispatches,
            dispatched=self.dispatched,
            reasons=dict(self.reasons),
            retries=self.retries,
            largest_batch=self.largest_batch,
            wait_sum_s=self.wait_sum_s,
            wait_max_s=self.wait_max_s,
            busy_s=self.busy_s,
            cost=self.cost,
            padding_cost=self.padding_cost,
            padding_items=self.padding_items,
        )
