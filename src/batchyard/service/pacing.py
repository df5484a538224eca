"""Floor 6. When a worker may dispatch: retries that wait, holds that an upstream asked for, the breaker.

Asks the pure decisions of `scheduling` and keeps the one timer that wakes the worker. Knows no store and
no engine.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from enum import Enum, auto

from batchyard.scheduling.breaker import Breaker, BreakerPolicy
from batchyard.scheduling.retry import Retry, RetryPolicy, decide
from batchyard.service.chunk_run import WorkItem
from batchyard.types import Fault, FaultKind


class Verdict(Enum):
    """What becomes of a request that met a fault."""

    AT_ONCE = auto()  # nothing was sent: back to the front of the queue
    LATER = auto()  # it waits here; `due` brings it back
    GIVE_UP = auto()  # the fault is its result
    STOP = auto()  # the upstream has been gone for too long: the run stops, nothing is lost


class Pacing:
    """Waiting, in one place.

    Args:
        wake: called when a wait is over and lanes should look again.
    """

    def __init__(
        self, retry: RetryPolicy, breaker: BreakerPolicy, rng: random.Random, wake: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._retry = retry
        self._breaker = Breaker(breaker)
        self._rng = rng
        self._wake = wake
        self._later: list[tuple[float, int, WorkItem]] = []
        self._order = itertools.count()
        self._hold_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        #: What is waited for, in words; None while work goes on.
        self.note: str | None = None

    def __repr__(self) -> str:
        return f"<Pacing [{self.waiting} waiting to retry, {self._breaker}]>"

    @property
    def waiting(self) -> int:
        """Requests that wait for their next attempt."""
        return len(self._later)

    def may_dispatch(self) -> bool:
        """Whether one dispatch may go out now; when not, `wake` is called once it is worth asking again."""
        now = self._loop.time()
        if now >= self._hold_until and self._breaker.may_dispatch(now):
            return True
        self._wake_at(max(self._hold_until, self._breaker.next_try_at(now)))
        return False

    def answered(self) -> None:
        """The upstream was reached, whatever it said."""
        if self._breaker.troubled:
            self._breaker.reached()
            self.note = None
            self._wake()

    def faulted(self, item: WorkItem, fault: Fault) -> Verdict:
        """Decide what becomes of *item*, and take it in where it has to wait."""
        now = self._loop.time()
        if fault.kind is FaultKind.UNREACHABLE:
            # Nothing was sent, so the request keeps its attempts; the breaker decides when to try again.
            self._breaker.unreachable(now)
            if self._breaker.gives_up(now):
                return Verdict.STOP
            self.note = fault.message
            self._wake_at(self._breaker.next_try_at(now))
            return Verdict.AT_ONCE
        self.answered()
        if item.first_tried_at is None:
            item.first_tried_at = now
        item.attempts += 1
        decision = decide(fault, item.attempts, now - item.first_tried_at, self._retry, self._rng)
        if not isinstance(decision, Retry):
            return Verdict.GIVE_UP
        due = now + decision.delay_s
        heapq.heappush(self._later, (due, next(self._order), item))
        if fault.kind is FaultKind.RATE_LIMITED and fault.retry_after_s:
            # The upstream named a time for everybody, not for this request only.
            self._hold_until = max(self._hold_until, due)
            self.note = f"{fault.message} Waiting {decision.delay_s:,.0f} s, as it asks."
        self._wake_at(due)
        return Verdict.LATER

    def due(self) -> list[WorkItem]:
        """Requests whose next attempt is due, taken out."""
        now = self._loop.time()
        found = []
        while self._later and self._later[0][0] <= now:
            found.append(heapq.heappop(self._later)[2])
        return found

    def later(self) -> list[WorkItem]:
        """Every waiting request."""
        return [item for _, _, item in self._later]

    def drain(self) -> list[WorkItem]:
        """Every waiting request, taken out."""
        found = [item for _, _, item in self._later]
        self._later.clear()
        return found

    def close(self) -> None:
        """Wake nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            if self._timer_due <= when:
                return
            self._timer.cancel()
        self._timer_due = when
        self._timer = self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        if now >= self._hold_until and not self._breaker.troubled:
            self.note = None
        self._wake()
        if self._later:
            self._wake_at(max(self._later[0][0], now))
