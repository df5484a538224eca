"""Floor 6. One engine shared by many: never more in flight than its slots, urgent work first.

Knows nothing of Batches or callers; whoever dispatches says how urgent it is.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from json import dumps

from batchyard.engines.protocol import Engine
from batchyard.types import Answer, Capabilities, Outcome, Request

#: Urgency of a caller who waits; anything larger is a deadline in Unix seconds.
NOW = 0.0


class Slots:
    """A counting gate that lets the most urgent in first, and equals in order of arrival."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return sum(not future.done() for _, _, future in self._waiting)

    @asynccontextmanager
    async def hold(self, urgency: float) -> AsyncIterator[None]:
        """Wait for a slot and keep it for the block."""
        if self._free > 0 and not self._waiting:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (urgency, next(self._order), turn))
            self._let_in()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    # The slot came in the same moment: pass it on.
                    self._give_back()
                raise
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
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

    def __post_init__(self) -> None:
        self.slots = Slots(self.concurrency)

    def at(self, urgency: float) -> SharedEngine:
        """The engine as a caller of this urgency sees it."""
        return SharedEngine(self, urgency)


class SharedEngine:
    """An `Engine` whose every call waits for its turn. Starting and closing it is its owner's business."""

    def __init__(self, served: Served, urgency: float) -> None:
        self._served = served
        self._urgency = urgency
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
        async with self._served.slots.hold(self._urgency):
            return await self._served.engine.dispatch(requests)

    async def stream(self, request: Request) -> AsyncIterator[bytes]:
        async with (
            self._served.slots.hold(self._urgency),
            aclosing(self._served.engine.stream(request)) as chunks,  # type: ignore[type-var]  # generators
        ):
            async for chunk in chunks:
                yield chunk

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        return await self._served.engine.count_tokens(requests)


class RoutedEngine:
    """All served models as one `Engine`: each request goes to the one that it names."""

    def __init__(self, models: Mapping[str, Served], urgency: float) -> None:
        self.name = "routed"
        self.model: str | None = None
        self._models = models
        self._urgency = urgency

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
        if request.endpoint not in served.engine.capabilities.endpoints:
            message = f"The model {request.model!r} does not answer {request.endpoint.value}."
            return _refused(400, message, "unsupported_endpoint")
        (outcome,) = await served.at(self._urgency).dispatch([request])
        return outcome

    async def stream(self, request: Request) -> AsyncIterator[bytes]:
        async for chunk in self._models[request.model or ""].at(self._urgency).stream(request):
            yield chunk

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        return [None] * len(requests)


def _refused(status: int, message: str, code: str) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": "model", "code": code}
    return Answer(status, dumps({"error": error}).encode())
