"""Floor 3. The engine that calls an OpenAI-compatible upstream.

One dispatch is one POST. The body passes through untouched unless a model is set.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec

from batchyard.clock import Clock, SystemClock
from batchyard.engines.openai.address import read_base_url, without_password
from batchyard.engines.openai.limits import limits_seen
from batchyard.engines.openai.reading import ends_stream, read_outcome, unauthorized
from batchyard.engines.openai.sse import EventTooLarge, SseParser
from batchyard.engines.openai.transport import (
    AiohttpTransport,
    Broken,
    Garbled,
    Pieces,
    TooLarge,
    Transport,
    Unreachable,
)
from batchyard.engines.openai.watch import CallEnded, CallWatch
from batchyard.errors import EngineError
from batchyard.types import Answer, Capabilities, Endpoint, Fault, FaultKind, Outcome, PrefixCache, Request

_PATHS = {endpoint: endpoint.value.removeprefix("/v1") for endpoint in Endpoint}
_STREAMED = frozenset(Endpoint) - {Endpoint.EMBEDDINGS}
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_read_models = msgspec.json.Decoder(_Models).decode
#: After its last event a stream has this long to end by itself.
_END_S = 0.1
_NO_HEADERS: Mapping[str, str] = {}
#: What of a call can go wrong on the way.
_ON_THE_WAY = (Unreachable, Broken, Garbled, TooLarge)


class OpenAIEngine:
    """Any OpenAI-compatible server.

    Args:
        base_url: with or without `/v1`.
        api_key: sent as a bearer token; never shown.
        model: replaces the model that a request names.
        timeout_s: for one call; for a stream, between two pieces.
        max_connections: 0 means as many as there are dispatches.
        headers: sent with every call.
        api_key_env: the variable that messages about the key name.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
        max_connections: int = 0,
        max_answer_bytes: int = 64 * 1024 * 1024,
        headers: Mapping[str, str] | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        clock: Clock | None = None,
    ) -> None:
        self.name = "openai"
        self.model = model
        self._base_url = read_base_url(base_url)
        self._shown_url = without_password(self._base_url)
        self._raw_model = None if model is None else msgspec.Raw(msgspec.json.encode(model))
        self._headers = {"Content-Type": "application/json", "User-Agent": "batchyard", **(headers or {})}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._api_key_env = api_key_env
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._max_answer_bytes = max_answer_bytes
        self._clock: Clock = clock or SystemClock()
        self._transport: Transport | None = None
        self._watch = CallWatch(timeout_s)
        #: Names of models that the upstream lists, for messages.
        self._served: list[str] = []
        self._capabilities = Capabilities(
            endpoints=frozenset(Endpoint),
            max_batch=1,
            streams=True,
            cancels=True,
            several_models=True,
            prefix_cache=PrefixCache.ENGINE,
        )

    def __repr__(self) -> str:
        return f"<OpenAIEngine {self._shown_url} [{self._watch.running} calls running]>"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def start(self) -> None:
        if self._transport is not None:
            return
        self._watch = CallWatch(self._timeout_s)
        self._transport = AiohttpTransport(
            self._base_url,
            self._headers,
            connect_timeout_s=self._connect_timeout_s,
            max_connections=self._max_connections,
            max_answer_bytes=self._max_answer_bytes,
        )
        try:
            await self._check_upstream(self._transport)
        except BaseException:
            await self.close()
            raise

    async def _check_upstream(self, transport: Transport) -> None:
        """Say at once what no request could survive. Servers without a list of models are let pass."""
        try:
            async with asyncio.timeout(self._connect_timeout_s + 20):
                status, headers, body = await transport.call("GET", "/models", None)
        except Unreachable as error:
            raise EngineError(
                f"Cannot reach {self._shown_url}: {error}. Is the server running, and is the base URL right?"
            ) from error
        except TimeoutError as error:
            raise EngineError(
                f"{self._shown_url} takes connections but does not answer. Is the base URL right?"
            ) from error
        except _ON_THE_WAY as error:
            raise EngineError(
                f"{self._shown_url} does not answer as an HTTP server should: {error}. Is the base URL right?"
            ) from error
        if status == 401:
            raise EngineError(unauthorized(body, self._api_key_env))
        if 300 <= status < 400 and headers.get("Location"):
            where = headers["Location"].removesuffix("/models")
            raise EngineError(f"{self._shown_url} redirects to {where}. Use that as the base URL.")
        if status == 200:
            self._served = _model_names(body)

    async def check(self) -> None:
        """Whether the upstream answers.

        Raises:
            EngineError: it does not.
        """
        await self._check_upstream(self._usable())

    async def dispatch(self, requests: Sequence[Request]) -> list[Outcome]:
        if len(requests) == 1:
            return [await self._answer(requests[0])]
        tasks = [asyncio.create_task(self._answer(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except EngineError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _answer(self, request: Request) -> Outcome:
        transport = self._usable()
        body = request.body
        if self._raw_model is not None and request.model != self.model:
            try:
                body = _with_fields(body, {"model": self._raw_model})
            except (msgspec.MsgspecError, RecursionError) as error:
                return _malformed(error)
        try:
            with self._watch:
                status, headers, answer = await transport.call("POST", _PATHS[request.endpoint], body)
        except _ON_THE_WAY as error:
            return self._fault(error)
        except CallEnded as error:
            return error.fault
        return self._outcome(request.endpoint, status, headers, answer)

    async def stream(self, request: Request) -> AsyncGenerator[bytes | Outcome]:
        """Yield chunks; whatever goes wrong arrives last, as the `Fault` or the refusing `Answer`."""
        transport = self._usable()
        fields: dict[str, msgspec.Raw] = {}
        if request.endpoint in _STREAMED:
            fields["stream"] = msgspec.Raw(b"true")
        if self._raw_model is not None and request.model != self.model:
            fields["model"] = self._raw_model
        try:
            body = _with_fields(request.body, fields) if fields else request.body
        except (msgspec.MsgspecError, RecursionError) as error:
            yield _malformed(error)
            return
        try:
            async with (
                aclosing(transport.stream(_PATHS[request.endpoint], body)) as pieces,
                aclosing(self._chunks(request.endpoint, pieces)) as chunks,
            ):
                async for chunk in chunks:
                    yield chunk
        except _ON_THE_WAY as error:
            yield self._fault(error)
        except CallEnded as error:
            yield error.fault

    async def _chunks(self, endpoint: Endpoint, pieces: Pieces) -> AsyncGenerator[bytes | Outcome]:
        parser = SseParser(self._max_answer_bytes)
        plain = bytearray()
        status, headers = 0, _NO_HEADERS
        last = b""
        while True:
            try:
                with self._watch:
                    status, headers, piece = await anext(pieces)
            except StopAsyncIteration:
                break
            if status != 200 or not headers.get("Content-Type", "").startswith("text/event-stream"):
                plain += piece
                if len(plain) > self._max_answer_bytes:
                    raise TooLarge(f"larger than {self._max_answer_bytes:,} bytes")
                continue
            try:
                events = parser.feed(piece)
            except EventTooLarge as error:
                raise TooLarge(str(error)) from error
            for event in events:
                if event == b"[DONE]":
                    await _read_to_end(pieces)
                    return
                if event.startswith((b'{"error"', b'{ "error"')):
                    # An error in a stream that began well, or a 200 with nothing but an error inside.
                    yield self._outcome(endpoint, 200, headers, event)
                    return
                last = event
                yield event
        if last:
            if not ends_stream(endpoint, last):
                raise Broken("the stream ended before its last chunk")
            return
        if status == 200 and not plain:
            raise Broken("the stream held no event")
        outcome = self._outcome(endpoint, status, headers, bytes(plain))
        yield outcome.body if isinstance(outcome, Answer) and outcome.succeeded else outcome

    def _outcome(self, endpoint: Endpoint, status: int, headers: Mapping[str, str], body: bytes) -> Outcome:
        outcome = read_outcome(
            endpoint, status, headers, body, wall_s=self._clock.wall(), api_key_env=self._api_key_env
        )
        if status == 404 and self.model is not None and b"model" in body:
            # The model was set for all requests, so none of them can succeed.
            served = f" It serves: {', '.join(self._served)}." if self._served else ""
            raise EngineError(f"{self._shown_url} has no model {self.model!r}.{served}")
        limits = limits_seen(headers, self._clock.wall())
        return outcome if limits is None else replace(outcome, limits=limits)

    async def count_tokens(self, requests: Sequence[Request]) -> list[int | None]:
        return [None] * len(requests)

    async def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            self._watch.end_all(Fault(FaultKind.DISCONNECTED, "The engine was closed during the call."))
            await transport.close()

    def _usable(self) -> Transport:
        if self._transport is None:
            raise EngineError(f"The engine for {self._shown_url} is not started, or closed.")
        return self._transport

    def _fault(self, error: Exception) -> Fault:
        match error:
            case Unreachable():
                return Fault(FaultKind.UNREACHABLE, f"Cannot reach {self._shown_url}: {error}.")
            case Broken():
                message = f"The connection to {self._shown_url} broke before the answer was whole: {error}."
                return Fault(FaultKind.DISCONNECTED, message)
            case _:
                message = f"The answer of {self._shown_url} is unusable: {error}."
                return Fault(FaultKind.INVALID_ANSWER, message)


def _with_fields(body: bytes, fields: Mapping[str, msgspec.Raw]) -> bytes:
    return msgspec.json.encode({**_read_fields(body), **fields})


def _model_names(body: bytes) -> list[str]:
    """The first names in a list of models; none where it is no such list."""
    try:
        return [model.id for model in _read_models(body).data[:10]]
    except (msgspec.MsgspecError, RecursionError):
        return []


def _malformed(error: Exception) -> Answer:
    message = f"The body is not a JSON object: {error}."
    inner = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return Answer(400, msgspec.json.encode({"error": inner}))


async def _read_to_end(pieces: Pieces) -> None:
    """Let the reply end, so that its connection can be used again; it has a moment for it."""
    with contextlib.suppress(TimeoutError, *_ON_THE_WAY):
        async with asyncio.timeout(_END_S):
            async for _ in pieces:
                pass
