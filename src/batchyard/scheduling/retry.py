"""Floor 2. Whether a fault is worth another attempt, and when.

Pure: the elapsed time and the dice come as arguments. Delays follow exponential back-off with full
jitter (delay uniform between 0 and the exponential bound), so that many requests that failed together
do not come back together. A 4xx is an answer, not a fault, and never comes here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from batchyard.types import Fault, FaultKind

#: Kinds that the request itself may have caused, so that fewer attempts are spent on it.
SUSPECT_KINDS = frozenset({FaultKind.TIMEOUT, FaultKind.INVALID_ANSWER, FaultKind.ENGINE_DIED})


class Dice(Protocol):
    """Where chance comes from; `random.Random` is one."""

    def random(self) -> float:
        """A number in [0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long one request is kept trying. `max_attempts=1` means no retry at all."""

    #: Attempts in all, for the kinds that only the upstream can be blamed for.
    max_attempts: int = 6
    #: Attempts in all after a timeout, an invalid answer or a dead engine.
    max_suspect_attempts: int = 3
    #: Attempts in all at a rate limit: it says nothing about the request, and waiting ends it.
    max_rate_limited_attempts: int = 100
    #: No attempt begins later than this after the request's first one.
    budget_s: float = 3600.0
    #: The first bound of the exponential back-off.
    base_s: float = 0.5
    #: No bound of the back-off is above this.
    cap_s: float = 60.0
    #: A `Retry-After` above this is cut to it.
    retry_after_cap_s: float = 600.0

    def attempts_for(self, kind: FaultKind) -> int:
        """How many attempts a request that meets *kind* may have in all."""
        if self.max_attempts <= 1:
            return 1
        if kind is FaultKind.RATE_LIMITED:
            return max(self.max_attempts, self.max_rate_limited_attempts)
        if kind in SUSPECT_KINDS:
            return min(self.max_attempts, self.max_suspect_attempts)
        return self.max_attempts

    def back_off_s(self, attempt: int) -> float:
        """The longest jittered delay after *attempt* attempts (1 or more)."""
        # The exponent is bounded, for `2.0 ** 5000` overflows.
        return min(self.cap_s, self.base_s * 2.0 ** min(max(attempt - 1, 0), 60))


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Write the fault down as the request's result."""

    #: `attempts` or `budget`.
    reason: str


def decide(fault: Fault, attempt: int, elapsed_s: float, policy: RetryPolicy, rng: Dice) -> Retry | GiveUp:
    """What to do about *fault*, which *attempt* brought, *elapsed_s* after the first attempt began.

    *attempt* counts from 1. The delay is below `policy.back_off_s(attempt)`, or that much above what
    `Retry-After` asked for, and never reaches past the budget.
    """
    if attempt >= policy.attempts_for(fault.kind):
        return GiveUp("attempts")
    left_s = policy.budget_s - elapsed_s
    if left_s <= 0:
        return GiveUp("budget")
    jitter_s = rng.random() * policy.back_off_s(attempt)
    asked_s = _asked_s(fault, policy)
    if asked_s > left_s:
        # Coming back before the upstream wants it would only be refused again.
        return GiveUp("budget")
    # The upstream's wish is a floor; the jitter on top spreads those that were told the same time.
    return Retry(min(asked_s + jitter_s, left_s))


def _asked_s(fault: Fault, policy: RetryPolicy) -> float:
    asked_s = fault.retry_after_s
    if asked_s is None or math.isnan(asked_s) or asked_s <= 0:
        return 0.0
    return min(asked_s, policy.retry_after_cap_s)
