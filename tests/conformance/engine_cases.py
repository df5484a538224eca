"""The engines that the conformance suite runs on, each with what it declares and how to start it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

from batchyard.clock import ManualClock
from batchyard.engines.echo import EchoEngine
from batchyard.engines.openai import OpenAIEngine
from batchyard.testing.upstream import Upstream
from batchyard.types import Endpoint


@dataclass
class Running:
    """A started engine, and the means to keep its calls in flight without waiting on time."""

    engine: Any
    #: Return once so many calls are in flight.
    in_flight: Callable[[int], Any]
    #: Let what is kept in flight finish.
    release: Callable[[], None]


@dataclass
class Case:
    """What a test needs to know before it starts the engine."""

    name: str
    start: Callable[[], AbstractAsyncContextManager[Running]]
    endpoints: frozenset[Endpoint]
    streams: bool
    counts_tokens: bool
    model: bool = False


async def turns(count: int = 50) -> None:
    """Let every other task run for a while."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def _echo(clock: ManualClock | None = None) -> AsyncIterator[Running]:
    engine = EchoEngine(1.0 if clock else 0.0, clock=clock)
    await engine.start()

    async def in_flight(_count: int) -> None:
        await turns()

    def release() -> None:
        if clock is not None:
            clock.advance(1.0)

    try:
        yield Running(engine, in_flight, release)
    finally:
        await engine.close()


def _held_echo() -> AbstractAsyncContextManager[Running]:
    return _echo(ManualClock())


@asynccontextmanager
async def _openai() -> AsyncIterator[Running]:
    upstream = Upstream(rules={"slow": "hold"})
    async with upstream as url:
        engine = OpenAIEngine(url)
        await engine.start()

        async def in_flight(count: int) -> None:
            await upstream.until(lambda: upstream.calls >= count)

        try:
            yield Running(engine, in_flight, upstream.release)
        finally:
            await engine.close()


def _native(module: str, name: str) -> Callable[[], AbstractAsyncContextManager[Running]]:
    @asynccontextmanager
    async def start() -> AsyncIterator[Running]:
        engine = getattr(import_module(module), name)()
        await engine.start()

        async def in_flight(_count: int) -> None:
            await turns()

        try:
            yield Running(engine, in_flight, lambda: None)
        finally:
            await engine.close()

    return start


GENERATION = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS})
EVERYTHING = frozenset(Endpoint)

ECHO = Case("echo", _echo, EVERYTHING, streams=True, counts_tokens=True)
HELD_ECHO = Case("echo", _held_echo, EVERYTHING, streams=True, counts_tokens=True)
OPENAI = Case("openai", _openai, EVERYTHING, streams=True, counts_tokens=False)
LLAMA = Case(
    "llama",
    _native("batchyard.engines.llama", "LlamaEngine"),
    GENERATION,
    streams=True,
    counts_tokens=True,
    model=True,
)
ONNX = Case(
    "onnx",
    _native("batchyard.engines.onnx", "OnnxEngine"),
    frozenset({Endpoint.EMBEDDINGS}),
    streams=False,
    counts_tokens=True,
    model=True,
)
CASES = [ECHO, OPENAI, LLAMA, ONNX]
#: The same engines, `echo` with calls that end only when told to.
HELD_CASES = [HELD_ECHO, OPENAI, LLAMA, ONNX]


def each(cases: list[Case], *, streams: bool = False, endpoints: bool = False) -> Any:
    """Parametrise a test over *cases*, or over the pairs of a case and each endpoint that it serves."""
    chosen = []
    for case in cases:
        marks = [pytest.mark.model] if case.model else []
        if streams and not case.streams:
            continue
        if not endpoints:
            chosen.append(pytest.param(case, marks=marks, id=case.name))
            continue
        for endpoint in sorted(case.endpoints):
            if streams and endpoint is Endpoint.EMBEDDINGS:
                continue
            name = f"{case.name}-{endpoint.name.lower()}"
            chosen.append(pytest.param(case, endpoint, marks=marks, id=name))
    return pytest.mark.parametrize("case, endpoint" if endpoints else "case", chosen)
