"""Floor 2. Whether and when a request that met a fault is tried again.

Pure: the generator of chance comes as an argument. Exponential back-off with full jitter: a uniform
draw between nothing and the doubled cap, which spreads a crowd of retries best (AWS Architecture Blog,
"Exponential Backoff And Jitter"). A 4xx never comes here: it is an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from batchyard.types import Fault, FaultKind


class Chance(Protocol):
    """Where jitter comes from; `random.Random` is one."""

    def uniform(self, a: float, b: float, /) -> float:
        """A number between *a* and *b*."""
        ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of trying again; all of them hold at once."""

    #: Attempts in all, the first one included.
    max_attempts: int = 6
    #: No retry starts later than this after the first attempt.
    budget_s: float = 1800.0
    base_s: float = 0.5
    cap_s: float = 60.0
    #: The most that a `Retry-After` may ask for; what asks for more is not waited for.
    max_retry_after_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after this many seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Try no more."""

    #: `attempts`, `budget` or `retry_after`.
    reason: str


#: A rate limit is no sign of trouble with the request: it may be met often before it is met for good.
_EXTRA_ATTEMPTS = {FaultKind.RATE_LIMITED: 4}


def decide(fault: Fault, attempts: int, elapsed_s: float, policy: RetryPolicy, rng: Chance) -> Retry | GiveUp:
    """What to do after *attempts* attempts, *elapsed_s* seconds after the first began."""
    if attempts >= policy.max_attempts + _EXTRA_ATTEMPTS.get(fault.kind, 0):
        return GiveUp("attempts")
    ceiling_s = min(policy.cap_s, policy.base_s * 2 ** min(attempts - 1, 32))
    delay_s = rng.uniform(0.0, ceiling_s)
    if fault.retry_after_s is not None:
        if fault.retry_after_s > policy.max_retry_after_s:
            return GiveUp("retry_after")
        # Jitter after the time asked for, or everybody comes back at the same instant.
        delay_s = fault.retry_after_s + rng.uniform(0.0, min(ceiling_s, fault.retry_after_s * 0.1 + 0.05))
    if elapsed_s + delay_s > policy.budget_s:
        return GiveUp("budget")
    return Retry(delay_s)
