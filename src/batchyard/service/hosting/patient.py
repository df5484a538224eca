"""Floor 6. An engine as a live request sees it: faults that may pass are tried again, for a short while.

Whoever asks waits, so the attempts are few and the time is short; what takes longer is for the client, which
is told when to come back. A Batch has its own, longer patience: `service.pacing`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from batchyard.scheduling.retry import Retry, RetryPolicy, decide
from batchyard.service.hosting.served import SharedEngine
from batchyard.types import Fault, FaultKind, Outcome, Request

#: Three attempts within ten seconds, two where the request itself may be to blame.
LIVE_RETRY = RetryPolicy(
    max_attempts=3,
    max_suspect_attempts=2,
    max_rate_limited_attempts=3,
    budget_s=10.0,
    base_s=0.25,
    cap_s=2.0,
)


class PatientEngine:
    """Answers one request at a time, again where that may help.

    Args:
        policy: how often, and for how long.
    """

    def __init__(
        self, engine: SharedEngine, policy: RetryPolicy = LIVE_RETRY, rng: random.Random | None = None
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._clock = engine.clock
        self._rng = rng or random.Random()
        self._began = self._clock.monotonic()
        self._attempts = 0

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        while (held := self._held()) is None:
            outcomes = await self._engine.dispatch(requests)
            fault = next((one for one in outcomes if isinstance(one, Fault)), None)
            if fault is None:
                return outcomes
            delay_s = self._delay_s(fault)
            if delay_s is None:
                return outcomes
            await self._clock.sleep(delay_s)
        return [held] * len(requests)

    async def stream(self, request: Request) -> AsyncGenerator[bytes | Outcome]:
        """A stream is begun again only as long as nothing of it was passed on."""
        while (held := self._held()) is None:
            delay_s = None
            async with aclosing(self._engine.stream(request)) as chunks:  # type: ignore[type-var]  # a generator
                begun = False
                async for chunk in chunks:
                    if isinstance(chunk, Fault) and not begun:
                        delay_s = self._delay_s(chunk)
                        if delay_s is not None:
                            break
                    begun = True
                    yield chunk
            if delay_s is None:
                return
            await self._clock.sleep(delay_s)
        yield held

    def _held(self) -> Fault | None:
        """The fault to give at once where the upstream is known to refuse for longer than anybody waits."""
        wait_s = self._engine.held_s()
        if wait_s <= self._policy.budget_s:
            return None
        message = f"The upstream has reached its rate limit. Try again in {wait_s:,.0f} s."
        return Fault(FaultKind.RATE_LIMITED, message, 429, retry_after_s=wait_s)

    def _delay_s(self, fault: Fault) -> float | None:
        self._attempts += 1
        elapsed_s = self._clock.monotonic() - self._began
        decision = decide(fault, self._attempts, elapsed_s, self._policy, self._rng)
        return decision.delay_s if isinstance(decision, Retry) else None
