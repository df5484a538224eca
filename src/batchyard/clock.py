"""Floor 0. Time, injected: durations on the monotonic clock, wall time only at the edges.

`SystemClock` is the real one. `ManualClock` jumps: tests and the simulator move hours in
microseconds.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """What every shell asks for time."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean anything."""
        ...

    def wall(self) -> float:
        """Unix seconds, for timestamps that people and databases see."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Return after *duration_s* seconds of this clock."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class ManualClock:
    """A clock that moves only when told to.

    `advance` moves time and wakes the sleepers whose time has come, in order of their deadline.
    """

    def __init__(self, start_s: float = 0.0, *, wall_start_s: float = 1_700_000_000.0) -> None:
        self._now = start_s
        self._wall_offset = wall_start_s - start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def __repr__(self) -> str:
        return f"<ManualClock at {self._now:.6g} s, {len(self._sleepers)} sleeping>"

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    async def sleep(self, duration_s: float) -> None:
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + duration_s, next(self._order), future))
        await future

    @property
    def next_wake_s(self) -> float | None:
        """When the next sleeper wakes, or None when nobody sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    def advance(self, duration_s: float) -> None:
        """Move time by *duration_s* seconds and wake whoever is due."""
        target = self._now + duration_s
        while (wake := self.next_wake_s) is not None and wake <= target:
            self._now, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
        self._now = target
