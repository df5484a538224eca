"""Floor 1. Is it time? Given what waits and a free slot, dispatch now or hold until when.

Pure: policies take `now` and a `Waiting` and return an instant. They know no clock, loop or queue, and
are asked only while a slot is free, so no policy can close a batch early: what arrives until then rides
along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from batchyard.batching.latency import LatencyCurve
from batchyard.errors import UsageError

NOW = -math.inf


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for one dispatch, and what is known when the policy is asked."""

    #: Items that could ride together, and what they cost.
    items: int
    cost: float
    #: When the oldest of them arrived, and the sum of all their arrival times.
    oldest_at: float
    arrivals_sum: float
    #: The earliest instant by which one of them wants its answer.
    first_due: float
    #: Items and cost that fill a dispatch.
    full_items: int
    full_cost: float
    max_wait_s: float
    curve: LatencyCurve
    #: Arrivals per second, smoothed.
    arrival_rate: float

    @property
    def full(self) -> bool:
        """Whether nothing more would fit."""
        return self.items >= self.full_items or self.cost >= self.full_cost


class Policy(Protocol):
    """What decides when to dispatch and how many items at most."""

    name: str
    #: Whether it may hold even where `max_wait_s` is 0; False skips all bookkeeping for holding.
    holds: bool

    def hold_until(self, waiting: Waiting, now: float) -> float:
        """The instant to dispatch at; anything up to *now* means at once."""
        ...

    def item_limit(self, max_items: int, curve: LatencyCurve) -> int:
        """The most items that the next dispatch may carry, 1 to *max_items*."""
        ...

    def observe(self, items: int, took_s: float, oldest_s: float, *, full: bool) -> None:
        """Hear of a dispatch that ended: how long it took, and its oldest item from arrival to answer."""
        ...


@dataclass(slots=True)
class _Plain:
    name: str = field(default="", init=False)
    holds: bool = field(default=True, init=False)

    def item_limit(self, max_items: int, curve: LatencyCurve) -> int:  # noqa: ARG002 - part of the protocol
        return max_items

    def observe(self, items: int, took_s: float, oldest_s: float, *, full: bool) -> None:
        """Fixed policies learn nothing."""


@dataclass(slots=True)
class Greedy(_Plain):
    """Dispatch what waits the moment a slot is free.

    Within 1 % of the best policy for mean latency on one server under Poisson load. With `max_wait_s`
    above zero it holds a batch that is not full until its oldest item has waited that long.
    """

    def __post_init__(self) -> None:
        self.name = "greedy"
        self.holds = False

    def hold_until(self, waiting: Waiting, now: float) -> float:  # noqa: ARG002 - part of the protocol
        if waiting.full or waiting.max_wait_s <= 0.0:
            return NOW
        return waiting.oldest_at + waiting.max_wait_s


@dataclass(slots=True)
class Threshold(_Plain):
    """Hold until *items* wait, at most `max_wait_s` for the oldest.

    Where `max_wait_s` is 0, the oldest waits as long as a full dispatch takes by the curve. Without
    *items* the count follows the economic order quantity, sqrt(2·c·rate / h), where c is the curve's
    fixed time times *weight* and a waiting item costs one per second.
    """

    items: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        self.name = "threshold"
        if self.items is not None and self.items < 1:
            raise UsageError(f"Threshold(items={self.items}) can never be met. Give 1 or more.")

    def hold_until(self, waiting: Waiting, now: float) -> float:  # noqa: ARG002 - part of the protocol
        if self.items is not None:
            enough = float(self.items)
        else:
            enough = math.sqrt(2.0 * self.weight * waiting.curve.fixed_s * waiting.arrival_rate)
        if waiting.full or waiting.items + 0.5 >= enough:
            return NOW
        wait_s = waiting.max_wait_s
        if wait_s <= 0.0:
            wait_s = waiting.curve.predict_s(min(waiting.full_items, 1 << 20), waiting.cost)
        return waiting.oldest_at + wait_s


@dataclass(slots=True)
class TcpAck(_Plain):
    """Hold until the waiting times add up to the cost of a dispatch: never more than twice the optimum.

    The bound holds for any traffic, even an adversary's (dynamic TCP acknowledgement, Dooly, Goldman and
    Scott 1998). *cost_s* defaults to the curve's fixed time.
    """

    cost_s: float | None = None

    def __post_init__(self) -> None:
        self.name = "tcp_ack"

    def hold_until(self, waiting: Waiting, now: float) -> float:  # noqa: ARG002 - part of the protocol
        if waiting.full:
            return NOW
        cost_s = waiting.curve.fixed_s if self.cost_s is None else self.cost_s
        at = (cost_s + waiting.arrivals_sum) / waiting.items
        if waiting.max_wait_s > 0.0:
            at = min(at, waiting.oldest_at + waiting.max_wait_s)
        return at


@dataclass(slots=True)
class Deadline(_Plain):
    """Hold as long as every deadline is still met with one more item aboard.

    Dispatches at once while the curve is unknown. *margin_s* is kept free on top of three errors of the
    curve. Needs `deadline_s`, a tier, or `max_wait_s` to know how long to hold.
    """

    margin_s: float = 0.0

    def __post_init__(self) -> None:
        self.name = "deadline"

    def hold_until(self, waiting: Waiting, now: float) -> float:  # noqa: ARG002 - part of the protocol
        curve = waiting.curve
        if waiting.full or not curve.known:
            return NOW
        each = waiting.cost / waiting.items
        needed_s = curve.predict_s(waiting.items + 1, waiting.cost + each) + 3.0 * curve.error_s
        at = waiting.first_due - needed_s - self.margin_s
        if waiting.max_wait_s > 0.0:
            at = min(at, waiting.oldest_at + waiting.max_wait_s)
        # Nothing waits for a deadline that nobody set.
        return NOW if at == math.inf else at


class Adaptive:
    """Greedy, with the batch kept small enough for a latency goal.

    An item that just misses a dispatch waits for a whole one and rides the next, so the goal holds a
    full batch to half of it. By `curve`, the limit is the largest n with 2·(a + b·n) ≤ goal. By `aimd`,
    it grows by one item while the oldest item of a full dispatch met the goal, and shrinks by a tenth
    when it did not.
    """

    __slots__ = ("_aimd_limit", "by", "goal_s", "holds", "name")

    def __init__(self, goal_s: float, by: str = "curve") -> None:
        if goal_s <= 0.0:
            raise UsageError(f"A latency goal of {goal_s} s cannot be met. Give goal_s above zero.")
        if by not in {"curve", "aimd"}:
            raise UsageError(f'Adaptive(by="{by}") is not known. Use by="curve" or by="aimd".')
        self.name = "adaptive"
        self.holds = False
        self.goal_s = goal_s
        self.by = by
        self._aimd_limit = 1.0

    def __repr__(self) -> str:
        return f'Adaptive(goal_s={self.goal_s}, by="{self.by}")'

    def hold_until(self, waiting: Waiting, now: float) -> float:  # noqa: ARG002 - part of the protocol
        if waiting.full or waiting.max_wait_s <= 0.0:
            return NOW
        return waiting.oldest_at + waiting.max_wait_s

    def item_limit(self, max_items: int, curve: LatencyCurve) -> int:
        if self.by == "aimd":
            return max(1, min(max_items, int(self._aimd_limit)))
        if not curve.known:
            return max_items
        limit = curve.largest_within(self.goal_s / 2.0)
        if not curve.spread:
            # All dispatches so far had one size: look a little further to learn the slope, no more.
            limit = min(max(limit, 1), 2 * curve.largest)
        return max(1, min(max_items, limit))

    def observe(self, items: int, took_s: float, oldest_s: float, *, full: bool) -> None:
        missed = oldest_s > self.goal_s or took_s > self.goal_s / 2.0
        if missed:
            self._aimd_limit = max(1.0, min(self._aimd_limit, items / 0.9) * 0.9)
        elif full:
            self._aimd_limit += 1.0


def make_policy(policy: str | Policy, goal_s: float | None) -> Policy:
    """The policy that *policy* names, or *policy* itself.

    Raises:
        UsageError: the name is unknown, or `adaptive` has no goal.
    """
    if not isinstance(policy, str):
        return policy
    if policy == "adaptive":
        if goal_s is None:
            raise UsageError('policy="adaptive" needs a latency goal. Give goal_s, such as goal_s=0.2.')
        return Adaptive(goal_s)
    simple: dict[str, type[Greedy | Threshold | TcpAck | Deadline]] = {
        "greedy": Greedy,
        "threshold": Threshold,
        "tcp_ack": TcpAck,
        "deadline": Deadline,
    }
    if policy not in simple:
        known = ", ".join([*simple, "adaptive"])
        raise UsageError(f'policy="{policy}" is not known. Use one of: {known}.')
    return simple[policy]()
