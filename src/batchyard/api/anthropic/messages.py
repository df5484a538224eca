"""Floor 8. `POST /v1/messages`: one message, whole or streamed, answered by any model that chats.

Errors wear Anthropic's envelope here, and the request's id its header.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from batchyard.api.access import Caller
from batchyard.api.anthropic.envelope import error_event, in_words
from batchyard.api.anthropic.shapes import AnthropicError, CountBody, MessageBody, TokenCount
from batchyard.api.anthropic.translate import StreamTranslator, to_chat, to_message
from batchyard.api.bodies import parse_object
from batchyard.api.errors import ApiError, json_response
from batchyard.api.openai.live import (
    answer_while_there,
    as_error,
    check_room,
    demand_of,
    first_chunk,
    last_words,
)
from batchyard.api.openai.models import served_to
from batchyard.api.operations import Operation
from batchyard.api.reading import read_body
from batchyard.errors import EngineError
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.keys import Scope
from batchyard.service.hosting.patient import PatientEngine
from batchyard.service.hosting.served import Served
from batchyard.types import Answer, Endpoint, Outcome, Request

_MAX_BODY = 32 << 20


class MessagesApi:
    """Messages, translated to chat completions."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def operations(self) -> list[Operation]:
        """What it answers to."""
        stream = ("text/event-stream",)
        live = (Scope.LIVE,)
        return [
            Operation(
                "POST",
                "/v1/messages",
                self.answer,
                "Answer a message now",
                live,
                body=MessageBody,
                also=stream,
                wrap=in_words,
                error=AnthropicError,
            ),
            Operation(
                "POST",
                "/v1/messages/count_tokens",
                self.count,
                "Count the tokens of a message",
                live,
                body=CountBody,
                gives=TokenCount,
                wrap=in_words,
                error=AnthropicError,
            ),
        ]

    async def count(self, http: HttpRequest, caller: Caller) -> Response:
        """How many input tokens a message has, as the model counts them."""
        params = parse_object(await read_body(http, _MAX_BODY))
        chat = to_chat({"max_tokens": 1} | params)
        served = self._served(caller, chat["model"])
        request = Request(http.state.request_id, Endpoint.CHAT, msgspec.json.encode(chat), served.name)
        (tokens,) = await served.engine.count_tokens([request])
        if tokens is None:
            raise ApiError(400, f"model: {served.name!r} cannot tell how it counts tokens")
        return json_response(TokenCount(tokens))

    async def answer(self, http: HttpRequest, caller: Caller) -> Response:
        """One message."""
        params = parse_object(await read_body(http, _MAX_BODY))
        chat = to_chat(params)
        served = self._served(caller, chat["model"])
        check_room(served)
        message_id = http.state.request_id.replace("req_", "msg_", 1)
        body = msgspec.json.encode(chat)
        request = Request(http.state.request_id, Endpoint.CHAT, body, served.name)
        engine = PatientEngine(served.at(demand_of(http, caller, self._host, None)), self._host.live_retry)
        if chat.get("stream"):
            if not served.engine.capabilities.streams:
                raise ApiError(400, f"stream: the model {served.name!r} does not stream")
            chunks = engine.stream(request)
            first = await first_chunk(chunks)
            if isinstance(first, Answer):
                raise _from_openai(first.status_code, first.body)
            return StreamingResponse(
                _events(first, chunks, StreamTranslator(message_id, served.name)),
                media_type="text/event-stream",
                headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            )
        outcome = await answer_while_there(http.receive, engine, request)
        if not isinstance(outcome, Answer):
            raise as_error(outcome)
        if not outcome.succeeded:
            raise _from_openai(outcome.status_code, outcome.body)
        message = to_message(msgspec.json.decode(outcome.body), message_id, served.name)
        return Response(msgspec.json.encode(message), media_type="application/json")

    def _served(self, caller: Caller, name: str) -> Served:
        served = served_to(caller, self._host, name)
        if Endpoint.CHAT not in served.engine.capabilities.endpoints:
            raise ApiError(400, f"model: {name!r} does not chat")
        return served


async def _events(
    first: bytes, chunks: AsyncIterator[bytes | Outcome], translator: StreamTranslator
) -> AsyncIterator[bytes]:
    async with aclosing(chunks):  # type: ignore[type-var]  # generators, all of them
        try:
            for event in translator.feed(msgspec.json.decode(first)):
                yield _event(event)
            async for chunk in chunks:
                found = msgspec.json.decode(chunk if isinstance(chunk, bytes) else last_words(chunk))
                if "error" in found:
                    yield _event(error_event(found["error"].get("message") or "", "api_error"))
                    return
                for event in translator.feed(found):
                    yield _event(event)
        except EngineError as error:
            yield _event(error_event(str(error), "overloaded_error"))
            return
    for event in translator.finish():
        yield _event(event)
    await asyncio.sleep(0)


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _from_openai(status: int, body: bytes) -> ApiError:
    """What an engine answered to a chat completion at fault."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        message = "The model refused the request."
    return ApiError(status, message)
