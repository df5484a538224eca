"""Floor 8. The endpoints that answer at once: chat/completions, completions, embeddings, responses.

A live request takes the next free slot of its model, ahead of every Batch. When its client is gone, the
engine stops computing it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from batchyard.api.access import Caller
from batchyard.api.bodies import read_as
from batchyard.api.errors import ApiError, envelope
from batchyard.api.openai.models import served_to
from batchyard.api.openai.shapes import LIVE_BODIES
from batchyard.api.operations import Operation
from batchyard.api.reading import read_body
from batchyard.errors import EngineError
from batchyard.scheduling.scheduler import Demand
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.keys import Scope
from batchyard.service.hosting.patient import PatientEngine
from batchyard.service.hosting.served import Served
from batchyard.types import Answer, Endpoint, Fault, FaultKind, Outcome, Request

_MAX_BODY = 64 << 20
#: Live requests that may wait for one model; more are told to come back.
_MOST_WAITING = 4_096
#: How long an answer may take before anybody looks whether its client is still there.
_WATCH_AFTER_S = 0.05
#: The status of a dispatch that brought no answer. 503 and 504 are tried again by the SDKs.
_STATUS = {
    FaultKind.RATE_LIMITED: 429,
    FaultKind.TIMEOUT: 504,
    FaultKind.INVALID_ANSWER: 502,
    FaultKind.SERVER_ERROR: 502,
}


class LiveApi:
    """Requests that are answered while their client waits."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def operations(self) -> list[Operation]:
        """What it answers to."""
        return [
            Operation(
                "POST",
                endpoint.value,
                self.answer,
                f"Answer {endpoint.value.removeprefix('/v1/')} now",
                (Scope.LIVE,),
                body=body,
                also=() if endpoint is Endpoint.EMBEDDINGS else ("text/event-stream",),
            )
            for endpoint, body in LIVE_BODIES.items()
        ]

    async def answer(self, http: HttpRequest, caller: Caller) -> Response:
        """One request, streamed where it asks for that."""
        endpoint = Endpoint(http.url.path)
        raw = await read_body(http, _MAX_BODY)
        asked = read_as(raw, LIVE_BODIES[endpoint])
        served = served_to(caller, self._host, asked.model)
        if endpoint not in served.engine.capabilities.endpoints:
            message = f"The model {served.name!r} does not answer {endpoint.value}."
            raise ApiError(400, message, code="unsupported_endpoint", param="model")
        check_room(served)
        demand = demand_of(http, caller, self._host, asked.service_tier)
        request = Request(http.state.request_id, endpoint, raw, served.name)
        engine = PatientEngine(served.at(demand), self._host.live_retry)
        if asked.stream:
            if not served.engine.capabilities.streams or endpoint is Endpoint.EMBEDDINGS:
                message = f"The model {served.name!r} does not stream {endpoint.value}."
                raise ApiError(400, message, code="unsupported_value", param="stream")
            return await _streamed(engine, request)
        return _as_response(await answer_while_there(http.receive, engine, request))


def demand_of(http: HttpRequest, caller: Caller, host: Host, service_tier: str | None) -> Demand:
    """What a live request asks of the scheduler: its tier comes from a header, else from its body.

    Raises:
        ApiError: there is no such tier.
    """
    name = http.headers.get("x-batchyard-tier") or service_tier
    tier = host.tiers.named(name)
    if tier is None:
        known = ", ".join(repr(one) for one in host.tiers.names)
        message = f"There is no tier {name!r:.100}. Use one of: {known}; or leave it out."
        raise ApiError(400, message, code="invalid_value", param="service_tier")
    return Demand(caller.tenant, tier.interactive, tier.deadline(host.clock.wall()))


def check_room(served: Served) -> None:
    """Make sure that one more may wait for a model.

    Raises:
        ApiError: too many do already.
    """
    if served.gate.waiting >= _MOST_WAITING:
        message = f"{_MOST_WAITING:,} requests wait for the model {served.name!r} already. Try again later."
        raise ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"retry-after": "2"})


async def answer_while_there(receive: Receive, engine: PatientEngine, request: Request) -> Outcome:
    """The outcome of *request*; cancelled when its client hangs up."""
    watch = _Watch(receive)
    try:
        (outcome,) = await engine.dispatch([request])
    except asyncio.CancelledError:
        if not watch.hung_up:
            raise
        # Nobody reads this answer.
        raise ApiError(499, "The client has hung up.", code="client_closed_request") from None
    except EngineError as error:
        raise _engine_is_down(error) from error
    finally:
        watch.end()
    return outcome


class _Watch:
    """Cancels the current task when its client hangs up; begins a moment later, as most answers are fast."""

    def __init__(self, receive: Receive) -> None:
        answering = asyncio.current_task()
        assert answering is not None
        self.hung_up = False
        self._receive = receive
        self._answering = answering
        self._watching: asyncio.Task[None] | None = None
        self._timer = answering.get_loop().call_later(_WATCH_AFTER_S, self._begin)

    def _begin(self) -> None:
        self._watching = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.hung_up = True
        self._answering.cancel()

    def end(self) -> None:
        """Watch no longer."""
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self.hung_up:
            self._answering.uncancel()


def _as_response(outcome: Outcome) -> Response:
    if isinstance(outcome, Answer):
        return Response(outcome.body, outcome.status_code, media_type="application/json")
    raise as_error(outcome)


def as_error(fault: Fault) -> ApiError:
    """A dispatch that brought no answer, as the client is told of it."""
    status = _STATUS.get(fault.kind, 503)
    headers = {}
    if fault.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(fault.retry_after_s)))
    elif status == 503:
        headers["retry-after"] = "2"
    kind = "rate_limit_error" if status == 429 else "server_error"
    return ApiError(status, fault.message, kind=kind, code=fault.kind.value, headers=headers)


def _engine_is_down(error: EngineError) -> ApiError:
    return ApiError(
        503, str(error), kind="server_error", code="engine_unavailable", headers={"retry-after": "5"}
    )


async def _streamed(engine: PatientEngine, request: Request) -> Response:
    """Server-sent events. An error that comes before the first token is an HTTP error."""
    chunks = engine.stream(request)
    first = await first_chunk(chunks)
    if isinstance(first, Answer):
        return _as_response(first)
    return StreamingResponse(
        _events(first, chunks, request.endpoint),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def first_chunk(chunks: AsyncIterator[bytes | Outcome]) -> bytes | Answer:
    """The first chunk of a streamed answer, or the answer that says why there is none.

    Raises:
        ApiError: the engine cannot be used, failed, or gave nothing.
    """
    try:
        first = await anext(chunks, None)
    except EngineError as error:
        raise _engine_is_down(error) from error
    if first is None:
        raise ApiError(502, "The engine gave no answer.", kind="server_error", code="invalid_answer")
    if isinstance(first, bytes):
        return first
    await chunks.aclose()  # type: ignore[attr-defined]  # generators, all of them
    if isinstance(first, Fault):
        raise as_error(first)
    return first


async def _events(
    first: bytes, chunks: AsyncIterator[bytes | Outcome], endpoint: Endpoint
) -> AsyncIterator[bytes]:
    async with aclosing(chunks):  # type: ignore[type-var]  # generators, all of them
        yield _event(first, endpoint)
        try:
            async for chunk in chunks:
                if not isinstance(chunk, bytes):
                    # It broke in the middle: a stream that just ended would look whole.
                    yield _event(last_words(chunk), endpoint)
                    return
                yield _event(chunk, endpoint)
        except EngineError as error:
            yield _event(envelope(str(error), "server_error", code="engine_unavailable"), endpoint)
            return
    if endpoint is not Endpoint.RESPONSES:
        yield b"data: [DONE]\n\n"


class _Typed(msgspec.Struct):
    type: str = ""


_type_of = msgspec.json.Decoder(_Typed)


def _event(chunk: bytes, endpoint: Endpoint) -> bytes:
    if endpoint is Endpoint.RESPONSES:
        try:
            name = _type_of.decode(chunk).type
        except msgspec.MsgspecError:
            name = ""
        if name:
            return b"event: %b\ndata: %b\n\n" % (name.encode(), chunk)
    return b"data: %b\n\n" % chunk


def last_words(outcome: Outcome) -> bytes:
    """The error envelope that ends a stream that did not come to its end."""
    if isinstance(outcome, Answer) or outcome.body:
        return outcome.body
    return envelope(outcome.message, "server_error", code=outcome.kind.value)
