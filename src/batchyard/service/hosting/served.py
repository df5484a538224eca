"""Floor 6. What a server serves: models, each with its engine and the gate before that.

One engine is shared by many: a caller sees it as an engine of its own that is sometimes slow to answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from json import dumps

from batchyard.clock import Clock, SystemClock
from batchyard.engines.protocol import Engine
from batchyard.scheduling.rate_limits import RateLimits
from batchyard.scheduling.scheduler import Demand, Policy
from batchyard.scheduling.windows import BulkWindow, EngineWindow
from batchyard.service.hosting.gate import Gate
from batchyard.service.hosting.pool import EnginePool
from batchyard.types import Answer, Capabilities, Fault, FaultKind, Outcome, Request

#: Bytes of a body that are taken for a token.
_BYTES_A_TOKEN = 4
#: Faults by which an engine says that it is asked too much.
_TOO_MUCH = frozenset({429, 503})


@dataclass(slots=True)
class Served:
    """A model that the server offers: its name, the engine behind it, and the gate before that."""

    name: str
    engine: Engine
    concurrency: int
    created_at: float
    #: Whether `concurrency` is the most that the engine may take rather than what it surely takes.
    adaptive: bool = False
    #: Slots that are kept free for interactive requests; by default as many as their arrivals ask for.
    reserve: int | None = None
    #: The longest that an interactive request should wait and run, in seconds.
    ceiling_s: float | None = None
    clock: Clock = field(default_factory=SystemClock)
    policy: Policy | None = None
    #: What the upstream allows, where it is known.
    rate: RateLimits = field(default_factory=RateLimits)
    gate: Gate = field(init=False)
    #: Requests that were answered so far, and how long slots were busy with them, in seconds.
    answered: int = 0
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        engine = EngineWindow(self.concurrency, adaptive=self.adaptive)
        bulk = BulkWindow(reserve=self.reserve, ceiling_s=self.ceiling_s)
        self.gate = Gate(engine, bulk, self.clock, self.policy, self.rate)

    @property
    def pool(self) -> EnginePool | None:
        """The engine, where it is several; those keep their limits themselves."""
        return self.engine if isinstance(self.engine, EnginePool) else None

    def told(self, outcome: Outcome) -> bool:
        """Note what an outcome says about the engine; whether it says that it is asked too much."""
        now = self.clock.wall()
        if outcome.limits is not None and self.pool is None:
            self.rate.seen(now, outcome.limits)
        if isinstance(outcome, Answer) or not _is_too_much(outcome):
            return False
        if outcome.retry_after_s and self.pool is None:
            self.rate.hold(now + outcome.retry_after_s, outcome.message)
        return True

    @property
    def per_s(self) -> float | None:
        """Requests a second with every slot busy, going by those answered so far; None before any."""
        return self.concurrency * self.answered / self.busy_s if self.busy_s > 0 else None

    def at(self, demand: Demand) -> SharedEngine:
        """The engine as whoever makes this demand sees it."""
        return SharedEngine(self, demand)


class SharedEngine:
    """An `Engine` whose every call waits for its turn. Starting and closing it is its owner's business."""

    def __init__(self, served: Served, demand: Demand) -> None:
        self._served = served
        self.demand = demand
        self.name = served.engine.name
        self.model = served.engine.model

    @property
    def capabilities(self) -> Capabilities:
        return self._served.engine.capabilities

    async def start(self) -> None:
        """Started by its owner."""

    async def close(self) -> None:
        """Closed by its owner."""

    @property
    def clock(self) -> Clock:
        """The clock of the gate."""
        return self._served.clock

    def held_s(self) -> float:
        """Seconds until the upstream wants calls again."""
        return self._served.rate.held_s(self._served.clock.wall())

    def changed(self) -> None:
        """The demand has another deadline or priority."""
        self._served.gate.changed(self.demand)

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        served, demand = self._served, self.demand
        ticket = await served.gate.enter(demand, sum(len(one.body) for one in requests) / _BYTES_A_TOKEN)
        tokens, limited = 0.0, False
        try:
            began = time.perf_counter()
            pool = served.pool
            if pool is not None and demand.interactive:
                outcomes = await pool.hedged_dispatch(requests)
            else:
                outcomes = await served.engine.dispatch(requests)
            served.busy_s += time.perf_counter() - began
            served.answered += len(requests)
            for one in outcomes:
                if isinstance(one, Answer):
                    tokens += one.usage.output_tokens
                    demand.remaining -= 1
                limited = served.told(one) or limited
            return outcomes
        finally:
            served.gate.leave(ticket, tokens_out=tokens, limited=limited)

    async def stream(self, request: Request) -> AsyncIterator[bytes | Outcome]:
        served = self._served
        ticket = await served.gate.enter(self.demand, len(request.body) / _BYTES_A_TOKEN)
        chunks_out, limited = 0, False
        try:
            async with aclosing(served.engine.stream(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if not isinstance(chunk, bytes):
                        limited = served.told(chunk)
                    chunks_out += 1
                    yield chunk
        finally:
            # A chunk is about a token.
            served.gate.leave(ticket, tokens_out=chunks_out, limited=limited)

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        return await self._served.engine.count_tokens(requests)


def _is_too_much(fault: Fault) -> bool:
    return fault.kind is FaultKind.RATE_LIMITED or fault.status_code in _TOO_MUCH


class RoutedEngine:
    """All served models as one `Engine`: each request goes to the one that it names.

    Args:
        permitted: whether a model may be used now; a request for one that may not fails alone.
    """

    def __init__(
        self,
        models: Mapping[str, Served],
        demand: Demand,
        permitted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.name = "routed"
        self.model: str | None = None
        self._models = models
        #: As it was asked; each model gets one of its own like it.
        self.demand = demand
        self._permitted = permitted
        self._engines: dict[str, SharedEngine] = {}

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
        (outcome,) = await self._engine(served).dispatch([request])
        return outcome

    def _engine(self, served: Served) -> SharedEngine:
        engine = self._engines.get(served.name)
        if engine is None:
            engine = self._engines[served.name] = served.at(like(self.demand))
        return engine

    def changed(self) -> None:
        """The demand has another deadline or priority."""
        for engine in self._engines.values():
            engine.demand.deadline = self.demand.deadline
            engine.demand.priority = self.demand.priority
            engine.changed()

    async def stream(self, request: Request) -> AsyncIterator[bytes | Outcome]:
        async for chunk in self._engine(self._models[request.model or ""]).stream(request):
            yield chunk

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        return [None] * len(requests)


def like(demand: Demand) -> Demand:
    """Another demand of the same kind."""
    return Demand(
        demand.tenant, demand.interactive, demand.deadline, demand.priority, max(demand.remaining, 1)
    )


def _refused(status: int, message: str, code: str) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": "model", "code": code}
    return Answer(status, dumps({"error": error}).encode())
