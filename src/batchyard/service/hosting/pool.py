"""Floor 6. Several engines behind one model, as one engine; `scheduling.upstreams` says which takes a call.

A call that was surely not sent, or refused as too much, goes on to the next one at once. Any other that
failed is for whoever asked to try again: it may have been computed, and its attempts are counted there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

from batchyard.clock import Clock
from batchyard.engines.protocol import Checked, Engine
from batchyard.errors import EngineError
from batchyard.scheduling.upstreams import Result, Upstreams, UpstreamState
from batchyard.types import Answer, Capabilities, Endpoint, Fault, FaultKind, Outcome, Request

#: How often ejected upstreams are asked whether they are well again.
_CHECK_S = 2.0
_CHECK_PATIENCE_S = 10.0
_NOT_SENT = frozenset({FaultKind.UNREACHABLE, FaultKind.ENGINE_DIED})
_TOO_MUCH = frozenset({429, 503})
#: So much of a body says how its prompt begins.
_PREFIX = 8_192


class EnginePool:
    """Engines that serve the same model.

    Args:
        members: each engine with how many dispatches it takes at once.
        hedge_after_s: how long an interactive call is out before a second engine is asked too; None for
            never. The first that answers wins, the other is cancelled.
    """

    def __init__(
        self, members: Sequence[tuple[Engine, int]], clock: Clock, *, hedge_after_s: float | None = None
    ) -> None:
        self.engines = [engine for engine, _ in members]
        self.upstreams = Upstreams([room for _, room in members])
        self.hedge_after_s = hedge_after_s
        #: Calls that a second engine was asked for too, and those of them that it answered first.
        self.hedged = self.hedges_won = 0
        self._clock = clock
        self._started: set[int] = set()
        self._checking: asyncio.Task[None] | None = None
        self.name = " + ".join(dict.fromkeys(engine.name for engine in self.engines))
        self.model = self.engines[0].model

    def __repr__(self) -> str:
        return repr(self.upstreams).replace("Upstreams", "EnginePool", 1)

    @property
    def capabilities(self) -> Capabilities:
        """What every member can do."""
        every = [one.capabilities for one in self.engines]
        return replace(
            every[0],
            endpoints=frozenset.intersection(*(one.endpoints for one in every)),
            max_batch=min(one.max_batch for one in every),
            slots=sum(one.room for one in self.upstreams.all),
            padded=any(one.padded for one in every),
            streams=all(one.streams for one in every),
            cancels=all(one.cancels for one in every),
        )

    async def start(self) -> None:
        """Start every engine; one that cannot be used now is tried again while the others work.

        Raises:
            EngineError: none of them can be used.
        """
        found = await asyncio.gather(*(one.start() for one in self.engines), return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        for error in errors:
            if not isinstance(error, EngineError) or len(errors) == len(self.engines):
                await self.close()
                raise error
        now = self._clock.monotonic()
        for no, outcome in enumerate(found):
            if isinstance(outcome, EngineError):
                self.upstreams.found(no, now, well=False, why=str(outcome))
            else:
                self._started.add(no)
        self._checking = asyncio.create_task(self._check())

    async def close(self) -> None:
        """End every engine."""
        checking, self._checking = self._checking, None
        if checking is not None:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)
        for one in self.engines:
            await one.close()

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        tried: set[int] = set()
        return await self._dispatch(requests, tried)

    async def hedged_dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        """Like `dispatch`, and a second engine is asked where the first takes longer than `hedge_after_s`."""
        after_s = self.hedge_after_s
        if after_s is None or len(self.engines) < 2:
            return await self.dispatch(requests)
        tried: set[int] = set()
        calls = [asyncio.create_task(self._dispatch(requests, tried))]
        try:
            done, _ = await asyncio.wait(calls, timeout=after_s)
            if not done and len(tried) < len(self.engines):
                self.hedged += 1
                calls.append(asyncio.create_task(self._dispatch(requests, tried)))
            return await self._first_good(calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _first_good(self, calls: list[asyncio.Task[list[Outcome]]]) -> list[Outcome]:
        """What the first call gave that brought answers; what the last gave where none did."""
        waiting = set(calls)
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                well = call.exception() is None and all(isinstance(one, Answer) for one in call.result())
                if well or not waiting:
                    self.hedges_won += call is not calls[0] and well
                    return call.result()

    async def _dispatch(self, requests: Sequence[Request], tried: set[int]) -> list[Outcome]:
        prefix = _prefix_of(requests[0])
        while True:
            no = self._next(tried, prefix)
            result, wait_s, why = Result.CANCELLED, None, ""
            try:
                outcomes = await self.engines[no].dispatch(requests)
                result, wait_s, why = _worst(outcomes)
                self._heed_limits(no, outcomes)
            except EngineError as error:
                result, why = Result.GONE, str(error)
                if len(tried) == len(self.engines):
                    raise
                continue
            finally:
                self.upstreams.ended(no, result, self._clock.monotonic(), wait_s=wait_s, why=why)
            if not self._goes_on(result, tried):
                return outcomes

    async def stream(self, request: Request) -> AsyncGenerator[bytes | Outcome]:
        """A stream stays with the engine that sent its first chunk."""
        tried: set[int] = set()
        prefix = _prefix_of(request)
        while True:
            no = self._next(tried, prefix)
            result, wait_s, why = Result.CANCELLED, None, ""
            begun = False
            try:
                async with aclosing(self.engines[no].stream(request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        if not isinstance(chunk, bytes):
                            result, wait_s, why = _worst([chunk])
                            self._heed_limits(no, [chunk])
                            if not begun and self._goes_on(result, tried):
                                break
                        begun = True
                        yield chunk
                    else:
                        result = Result.ANSWERED if result is Result.CANCELLED else result
                        return
            except EngineError as error:
                result, why = Result.GONE, str(error)
                if begun or len(tried) == len(self.engines):
                    raise
            finally:
                self.upstreams.ended(no, result, self._clock.monotonic(), wait_s=wait_s, why=why)

    def _goes_on(self, result: Result, tried: set[int]) -> bool:
        """Whether another upstream is asked at once. Several refusals in a row are not each other's fault."""
        if result is Result.LIMITED:
            return self.upstreams.has_room(self._clock.monotonic(), tried)
        return result is Result.GONE and len(tried) < len(self.engines)

    def _heed_limits(self, no: int, outcomes: Sequence[Outcome]) -> None:
        """Leave an upstream alone that has said that nothing is left of its rate limit."""
        now = self._clock.monotonic()
        for seen in (one.limits for one in outcomes if one.limits is not None):
            for left, reset_s in (
                (seen.requests_left, seen.requests_reset_s),
                (seen.tokens_left, seen.tokens_reset_s),
            ):
                if left == 0 and reset_s is not None:
                    self.upstreams.hold(no, now + reset_s)

    def _next(self, tried: set[int], prefix: bytes) -> int:
        no = self.upstreams.choose(self._clock.monotonic(), tried, prefix)
        assert no is not None
        tried.add(no)
        self.upstreams.sent(no, prefix)
        return no

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        well = [no for no in self._started if self.upstreams.all[no].state is UpstreamState.HEALTHY]
        return await self.engines[min(well, default=0)].count_tokens(requests)

    # --- health -----------------------------------------------------------------------------------

    async def _check(self) -> None:
        while True:
            await self._clock.sleep(_CHECK_S)
            ill = [no for no, one in enumerate(self.upstreams.all) if one.state is UpstreamState.EJECTED]
            await asyncio.gather(*map(self._look_at, ill))

    async def _look_at(self, no: int) -> None:
        engine = self.engines[no]
        try:
            async with asyncio.timeout(_CHECK_PATIENCE_S):
                if no not in self._started:
                    await engine.start()
                    self._started.add(no)
                elif isinstance(engine, Checked):
                    await engine.check()
                else:
                    # Its rest ends by itself.
                    return
        except (EngineError, TimeoutError) as error:
            self.upstreams.found(no, self._clock.monotonic(), well=False, why=str(error))
            if no not in self._started:
                with suppress(EngineError):
                    await engine.close()
        else:
            self.upstreams.found(no, self._clock.monotonic(), well=True)


def _prefix_of(request: Request) -> bytes:
    """How the prompt begins, where a cache of prefixes would help."""
    return b"" if request.endpoint is Endpoint.EMBEDDINGS else request.body[:_PREFIX]


def _worst(outcomes: Sequence[Outcome]) -> tuple[Result, float | None, str]:
    """What a dispatch says about its upstream: the worst that all of its faults have in common."""
    faults = [one for one in outcomes if isinstance(one, Fault)]
    if len(faults) < len(outcomes):
        return Result.ANSWERED, None, ""
    fault = faults[0]
    if all(one.kind in _NOT_SENT for one in faults):
        return Result.GONE, None, fault.message
    limited = fault.kind is FaultKind.RATE_LIMITED or (fault.status_code in _TOO_MUCH and fault.retry_after_s)
    return (Result.LIMITED if limited else Result.BAD), fault.retry_after_s, fault.message
