"""Floor 6. One engine shared by many: never more in flight than its slots, urgent work first.

Knows nothing of Batches or callers; whoever dispatches says how urgent it is.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from json import dumps
from math import inf

from batchyard.engines.protocol import Engine
from batchyard.types import Answer, Capabilities, Outcome, Request

#: How urgent a call is: the smaller goes first. For a Batch: minus its priority, then its deadline in Unix
#: seconds.
Urgency = tuple[float, float]
#: Urgency of a caller who waits, ahead of every Batch.
NOW: Urgency = (-inf, 0.0)


class Slots:
    """A counting gate that lets the most urgent in first, and equals in order of arrival."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[Urgency, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return sum(not future.done() for _, _, future in self._waiting)

    async def acquire(self, urgency: Urgency) -> None:
        """Wait for a slot; give it back with `release`."""
        if self._free > 0 and not self._waiting:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (urgency, next(self._order), turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # The slot came in the same moment: pass it on.
                self.release()
            raise

    def release(self) -> None:
        """Give a slot back."""
        self._free += 1
        self._let_in()

    def _let_in(self) -> None:
        while self._free > 0 and self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._free -= 1
                turn.set_result(None)


@dataclass(slots=True)
class Served:
    """A model that the server offers: its name, the engine behind it, and the gate before that."""

    name: str
    engine: Engine
    concurrency: int
    created_at: float
    slots: Slots = field(init=False)
    #: Requests that were answered so far, and how long slots were busy with them, in seconds.
    answered: int = 0
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.slots = Slots(self.concurrency)

    @property
    def per_s(self) -> float | None:
        """Requests a second with every slot busy, going by those answered so far; None before any."""
        return self.concurrency * self.answered / self.busy_s if self.busy_s > 0 else None

    def at(self, urgency: Urgency) -> SharedEngine:
        """The engine as a caller of this urgency sees it."""
        return SharedEngine(self, urgency)


class SharedEngine:
    """An `Engine` whose every call waits for its turn. Starting and closing it is its owner's business."""

    def __init__(self, served: Served, urgency: Urgency) -> None:
        self._served = served
        #: May be changed while calls wait; it counts for later ones.
        self.urgency = urgency
        self.name = served.engine.name
        self.model = served.engine.model

    @property
    def capabilities(self) -> Capabilities:
        return self._served.engine.capabilities

    async def start(self) -> None:
        """Started by its owner."""

    async def close(self) -> None:
        """Closed by its owner."""

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        served = self._served
        await served.slots.acquire(self.urgency)
        try:
            began = time.perf_counter()
            outcomes = await served.engine.dispatch(requests)
            served.busy_s += time.perf_counter() - began
            served.answered += len(requests)
            return outcomes
        finally:
            served.slots.release()

    async def stream(self, request: Request) -> AsyncIterator[bytes]:
        await self._served.slots.acquire(self.urgency)
        try:
            async with aclosing(self._served.engine.stream(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        finally:
            self._served.slots.release()

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        return await self._served.engine.count_tokens(requests)


class RoutedEngine:
    """All served models as one `Engine`: each request goes to the one that it names.

    Args:
        permitted: whether a model may be used now; a request for one that may not fails alone.
    """

    def __init__(
        self,
        models: Mapping[str, Served],
        urgency: Urgency,
        permitted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.name = "routed"
        self.model: str | None = None
        self._models = models
        self.urgency = urgency
        self._permitted = permitted

    @property
    def capabilities(self) -> Capabilities:
        every = [one.engine.capabilities for one in self._models.values()]
        endpoints = frozenset().union(*(one.endpoints for one in every))
        return Capabilities(endpoints, several_models=True)

    async def start(self) -> None:
        """Started by their owner."""

    async def close(self) -> None:
        """Closed by their owner."""

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        return list(await asyncio.gather(*map(self._answer, requests)))

    async def _answer(self, request: Request) -> Outcome:
        served = self._models.get(request.model or "")
        if served is None:
            known = ", ".join(sorted(self._models))
            message = f"The model {request.model!r} does not exist here. Use one of: {known}."
            return _refused(404, message, "model_not_found")
        if not self._permitted(served.name):
            message = f"The key that this batch was made with may not use the model {served.name!r}."
            return _refused(403, message, "model_not_allowed")
        if request.endpoint not in served.engine.capabilities.endpoints:
            message = f"The model {request.model!r} does not answer {request.endpoint.value}."
            return _refused(400, message, "unsupported_endpoint")
        (outcome,) = await served.at(self.urgency).dispatch([request])
        return outcome

    async def stream(self, request: Request) -> AsyncIterator[bytes]:
        async for chunk in self._models[request.model or ""].at(self.urgency).stream(request):
            yield chunk

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        return [None] * len(requests)


def _refused(status: int, message: str, code: str) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": "model", "code": code}
    return Answer(status, dumps({"error": error}).encode())
