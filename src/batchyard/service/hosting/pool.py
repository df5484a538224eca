"""Floor 6. Several engines behind one model, as one engine: each call goes to the least busy one.

An engine that cannot be reached, or that died, is left alone for a while, and the call goes to another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from batchyard.clock import Clock
from batchyard.engines.protocol import Engine
from batchyard.errors import EngineError
from batchyard.types import Capabilities, Fault, FaultKind, Outcome, Request

#: How long an engine that failed whole is left alone.
_REST_S = 5.0
_NOT_SENT = frozenset({FaultKind.UNREACHABLE, FaultKind.ENGINE_DIED})


@dataclass(slots=True, eq=False)
class _Member:
    engine: Engine
    #: Dispatches that it takes at once.
    room: int
    busy: int = 0
    rests_until: float = 0.0


class EnginePool:
    """Engines that serve the same model.

    Args:
        members: each engine with how many dispatches it takes at once.
    """

    def __init__(self, members: Sequence[tuple[Engine, int]], clock: Clock) -> None:
        self._members = [_Member(engine, room) for engine, room in members]
        self._clock = clock
        names = list(dict.fromkeys(engine.name for engine, _ in members))
        self.name = " + ".join(names)
        self.model = members[0][0].model

    def __repr__(self) -> str:
        return f"<EnginePool [{', '.join(f'{one.busy} of {one.room}' for one in self._members)}]>"

    @property
    def capabilities(self) -> Capabilities:
        """What every member can do."""
        every = [one.engine.capabilities for one in self._members]
        return replace(
            every[0],
            endpoints=frozenset.intersection(*(one.endpoints for one in every)),
            max_batch=min(one.max_batch for one in every),
            slots=sum(one.room for one in self._members),
            padded=any(one.padded for one in every),
            streams=all(one.streams for one in every),
            cancels=all(one.cancels for one in every),
        )

    async def start(self) -> None:
        """Start every engine; those that cannot be used now rest, as long as one can.

        Raises:
            EngineError: none of them can be used.
        """
        found = await asyncio.gather(*(one.engine.start() for one in self._members), return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        for error in errors:
            if not isinstance(error, EngineError) or len(errors) == len(self._members):
                await self.close()
                raise error
        for member, outcome in zip(list(self._members), found, strict=True):
            if isinstance(outcome, EngineError):
                await member.engine.close()
                self._members.remove(member)

    async def close(self) -> None:
        """End every engine."""
        for one in self._members:
            await one.engine.close()

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        tried: set[_Member] = set()
        while True:
            member = self._least_busy(tried)
            tried.add(member)
            member.busy += 1
            try:
                outcomes = await member.engine.dispatch(requests)
            except EngineError:
                member.rests_until = self._clock.monotonic() + _REST_S
                if len(tried) == len(self._members):
                    raise
                continue
            finally:
                member.busy -= 1
            if not all(isinstance(one, Fault) and one.kind in _NOT_SENT for one in outcomes):
                return outcomes
            member.rests_until = self._clock.monotonic() + _REST_S
            if len(tried) == len(self._members):
                return outcomes

    async def stream(self, request: Request) -> AsyncGenerator[bytes]:
        """A stream stays with the engine that it began on."""
        member = self._least_busy(set())
        member.busy += 1
        try:
            async with aclosing(member.engine.stream(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        finally:
            member.busy -= 1

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        return await self._members[0].engine.count_tokens(requests)

    def _least_busy(self, tried: set[_Member]) -> _Member:
        now = self._clock.monotonic()
        left = [one for one in self._members if one not in tried]
        awake = [one for one in left if one.rests_until <= now]
        return min(awake or left, key=lambda one: (one.busy / one.room, one.busy))
