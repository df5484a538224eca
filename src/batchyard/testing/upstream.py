"""Floor 9. A stand-in for an OpenAI-compatible server, over real HTTP, that misbehaves on demand.

Use it in a test, in the same loop::

    async with Upstream(rules={"row-7": "500", "row-8": "429@1sx2"}) as url:
        engine = OpenAIEngine(url)

or as a process, which prints one JSON line with its URL::

    python -m batchyard.testing.upstream --port 0 --latency 20ms --rule row-7=hang

A request falls under the rule `row-7` when its body holds the text `marker:row-7`. Calls are counted by
marker, so a test can ask how often the upstream really saw a request.

It writes HTTP/1.1 by hand on an `asyncio.Protocol`: as little work as possible for each request, because
it shares the machine with what is being measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

from batchyard.engines.echo_answers import answer, chunks, error_body
from batchyard.types import Endpoint, Request

_MARKER = re.compile(rb"marker:([A-Za-z0-9_.-]+)")
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]*)"')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_RULE = re.compile(r"([a-z]+?[0-9]{3}|[a-z]+?|[0-9]{3})(?:@(.+?))?(?:x([0-9]+))?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)?")
_ROUTES = {endpoint.value.encode(): endpoint for endpoint in Endpoint}
_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    404: b"Not Found",
    429: b"Too Many Requests",
}
_HTML = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
_SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"x-request-id: req-%d\r\n\r\n"
)

#: What a rule may say instead of an HTTP status.
BEHAVIOURS: Mapping[str, str] = {
    "hang": "never answers",
    "hold": "answers once `release` is called",
    "drop": "closes the connection without a byte",
    "torn": "closes the connection in the middle of the answer",
    "garbage": "answers 200 with half a JSON object",
    "html": "answers 200 with a web page",
    "error200": "answers 200 with an error inside",
    "trickle": "sends the answer in small pieces",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """What to do with the requests of one marker."""

    #: An HTTP status, or one of `BEHAVIOURS`.
    what: str
    #: Sent as `Retry-After`.
    retry_after: str | None = None
    #: Only for the first so many calls; None means for ever.
    times: int | None = None

    @classmethod
    def parse(cls, text: str) -> Rule:
        """From words such as `500`, `hang`, `429@2` (with Retry-After) or `dropx3` (three times)."""
        match = _RULE.fullmatch(text)
        if match is None or not (match[1] in BEHAVIOURS or match[1].isdecimal()):
            raise ValueError(
                f"{text!r} is no rule. A rule is an HTTP status or one of {', '.join(BEHAVIOURS)}."
            )
        return cls(match[1], match[2], None if match[3] is None else int(match[3]))


@dataclass(slots=True, eq=False)
class Upstream:
    """The stand-in. An async context manager that gives its base URL, ending in `/v1`."""

    rules: Mapping[str, str] = field(default_factory=dict)
    latency_s: float = 0.0
    #: When set, calls without this key are answered 401.
    api_key: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    models: tuple[str, ...] = ("echo",)
    #: Answer 404 to any other model.
    strict_models: bool = False
    #: Model calls that arrived whole, refused ones included.
    calls: int = 0
    #: The same by marker.
    calls_by_marker: Counter[str] = field(default_factory=Counter)
    #: Clients that went away before their answer was sent.
    abandoned: int = 0
    #: Head and body of the newest model call, as they came.
    last_head: bytes = b""
    last_body: bytes = b""
    _rules: dict[str, Rule] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _connections: set[_Connection] = field(default_factory=set)
    _held: list[Callable[[], None]] = field(default_factory=list)
    _waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The base URL, ending in `/v1`."""
        return f"http://{self.host}:{self.port}/v1"

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    @property
    def last_headers(self) -> dict[bytes, bytes]:
        """Headers of the newest model call, with names in lower case."""
        return _headers(self.last_head)

    async def __aenter__(self) -> str:
        await self.start()
        return self.url

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen; `port` then holds the real one."""
        self._rules = {marker: Rule.parse(text) for marker, text in self.rules.items()}
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self, loop), self.host, self.port, backlog=4096
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.cut()
            await self.until(lambda: not self._connections)
            self._server = None

    def release(self) -> None:
        """Answer what the rule `hold` kept."""
        held, self._held = self._held, []
        for go_on in held:
            go_on()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once *condition* holds, such as `lambda: upstream.calls == 3`; checked at each change."""
        if not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((condition, waiter))
            await waiter

    def changed(self) -> None:
        """Wake whoever waits in `until`."""
        for entry in list(self._waiters):
            condition, waiter = entry
            if waiter.done() or condition():
                self._waiters.remove(entry)
                if not waiter.done():
                    waiter.set_result(None)

    def rule_for(self, body: bytes) -> Rule | None:
        """Count a call and find the rule it falls under."""
        self.calls += 1
        match = _MARKER.search(body)
        rule = None
        if match is not None:
            marker = match[1].decode()
            self.calls_by_marker[marker] += 1
            rule = self._rules.get(marker)
            if rule is not None and rule.times is not None and self.calls_by_marker[marker] > rule.times:
                rule = None
        if self._waiters:
            self.changed()
        return rule

    def stats(self) -> bytes:
        """The counts as JSON; also at `GET /stats`."""
        counts = {"calls": self.calls, "abandoned": self.abandoned, "by_marker": dict(self.calls_by_marker)}
        return json.dumps(counts).encode()


class _Connection(asyncio.Protocol):
    """One client. Requests are answered one after the other."""

    def __init__(self, upstream: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        self._upstream = upstream
        self._loop = loop
        self._buffer = b""
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport fits the type but does not inherit from it.
        self._transport = cast("asyncio.Transport", transport)
        self._upstream._connections.add(self)  # noqa: SLF001 - one unit with its server

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        if self._timer is not None:
            self._timer.cancel()
        if self._busy:
            self._upstream.abandoned += 1
        self._upstream._connections.discard(self)  # noqa: SLF001 - one unit with its server
        self._upstream.changed()

    def cut(self) -> None:
        """Close without another byte."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while self._buffer and not self._busy and self._take():
            pass

    def _take(self) -> bool:
        """Answer the first request in the buffer, if it is whole."""
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if not buffer[:1].isalpha():
                # No HTTP, such as the beginning of TLS.
                self.cut()
            return False
        head = buffer[:end]
        length = _LENGTH.search(head)
        stop = end + 4 + (int(length[1]) if length is not None else 0)
        if len(buffer) < stop:
            return False
        self._buffer = buffer[stop:]
        self._busy = True
        self._route(head, buffer[end + 4 : stop])
        return True

    def _route(self, head: bytes, body: bytes) -> None:
        upstream = self._upstream
        method, path, _ = head.split(b" ", 2)
        if method == b"GET" and path == b"/stats":
            self._answer(200, upstream.stats())
            return
        if upstream.api_key is not None:
            wanted = b"Bearer " + upstream.api_key.encode()
            if _headers(head).get(b"authorization") != wanted:
                self._answer(401, error_body("Incorrect API key provided.", code="invalid_api_key"))
                return
        if method == b"GET" and path == b"/v1/models":
            models = [
                {"id": name, "object": "model", "created": 0, "owned_by": "test"} for name in upstream.models
            ]
            self._answer(200, json.dumps({"object": "list", "data": models}).encode())
            return
        endpoint = _ROUTES.get(path)
        if endpoint is None or method != b"POST":
            self._answer(404, error_body(f"There is nothing at {path.decode(errors='replace')}."))
            return
        upstream.last_head, upstream.last_body = head, body
        rule = upstream.rule_for(body)
        if upstream.latency_s:
            self._timer = self._loop.call_later(upstream.latency_s, self._respond, endpoint, body, rule)
        else:
            self._respond(endpoint, body, rule)

    def _respond(self, endpoint: Endpoint, body: bytes, rule: Rule | None) -> None:
        match None if rule is None else rule.what:
            case None | "trickle" | "torn":
                self._respond_well(endpoint, body, rule)
            case "hang":
                pass
            case "hold":
                self._upstream._held.append(lambda: self._respond_well(endpoint, body, None))  # noqa: SLF001 - one unit
            case "drop":
                self.cut()
            case "garbage":
                self._answer(200, b'{"id":"chatcmpl-1","choices":[{"mess')
            case "html":
                self._answer(200, _HTML, b"text/html")
            case "error200":
                self._answer(200, error_body("The model ran out of memory.", kind="server_error"))
            case status:
                assert rule is not None
                wait = b"" if rule.retry_after is None else b"Retry-After: %b\r\n" % rule.retry_after.encode()
                self._answer(int(status or 500), error_body(f"Told to answer {status}."), more=wait)

    def _respond_well(self, endpoint: Endpoint, body: bytes, rule: Rule | None) -> None:
        what = None if rule is None else rule.what
        found = _MODEL.search(body)
        model = None if found is None else found[1].decode()
        if self._upstream.strict_models and model not in self._upstream.models:
            self._answer(404, error_body(f"The model `{model}` does not exist.", code="model_not_found"))
            return
        request = Request("", endpoint, body, model, self._upstream.calls)
        if _STREAM.search(body) is not None:
            self._stream(request, what)
            return
        reply = answer(request)
        if what is None:
            self._answer(reply.status_code, reply.body)
            return
        whole = _head(reply.status_code, len(reply.body), self._upstream.calls) + reply.body
        if what == "torn":
            self._transport.write(whole[: -len(reply.body) // 2])
            self._transport.close()
        else:
            self._trickle([whole[at : at + 40] for at in range(0, len(whole), 40)])

    def _stream(self, request: Request, what: str | None) -> None:
        events = [b"data: %b\n\n" % chunk for chunk in chunks(request)]
        if events[0].startswith(b'data: {"error"'):
            self._answer(400, events[0][6:-2])
            return
        pieces = [_SSE_HEAD % self._upstream.calls]
        if request.endpoint is not Endpoint.RESPONSES:
            events.append(b"data: [DONE]\n\n")
        pieces += [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
        if what == "torn":
            self._transport.write(b"".join(pieces[: 1 + len(pieces) // 2]))
            self._transport.close()
        elif what == "trickle":
            self._trickle([*pieces, b"0\r\n\r\n"])
        else:
            self._send(b"".join(pieces) + b"0\r\n\r\n")

    def _trickle(self, pieces: list[bytes]) -> None:
        """One piece each millisecond."""
        if self._transport.is_closing():
            return
        self._transport.write(pieces[0])
        if len(pieces) == 1:
            self._send(b"")
        else:
            self._timer = self._loop.call_later(0.001, self._trickle, pieces[1:])

    def _answer(self, status: int, body: bytes, kind: bytes = b"application/json", more: bytes = b"") -> None:
        self._send(_head(status, len(body), self._upstream.calls, kind, more) + body)

    def _send(self, data: bytes) -> None:
        """Send the end of an answer, and turn to the next request."""
        if self._transport.is_closing():
            return
        if data:
            self._transport.write(data)
        self._busy = False
        self._timer = None
        if self._buffer:
            self._loop.call_soon(self.data_received, b"")


def _headers(head: bytes) -> dict[bytes, bytes]:
    pairs = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.lower(): value.strip() for name, _, value in pairs}


def _head(
    status: int, length: int, number: int, kind: bytes = b"application/json", more: bytes = b""
) -> bytes:
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nx-request-id: req-%d\r\n%b\r\n" % (
        status,
        _REASONS.get(status, b"Status"),
        kind,
        length,
        number,
        more,
    )


def _duration_s(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 20ms or 1.5s")
    return float(match[1]) * (0.001 if match[2] == "ms" else 1.0)


async def _serve(upstream: Upstream) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with upstream as url:
        print(json.dumps({"url": url}), flush=True)
        await stop.wait()


def main(arguments: list[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m batchyard.testing.upstream", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--latency", type=_duration_s, default=0.0, help="of each answer, such as 20ms")
    parser.add_argument("--api-key", help="answer 401 to calls without this key")
    parser.add_argument("--rule", action="append", default=[], metavar="MARKER=RULE", help="may be repeated")
    given = parser.parse_args(arguments)
    rules = dict(rule.split("=", 1) for rule in given.rule)
    upstream = Upstream(rules, given.latency, given.api_key, given.host, given.port)
    try:
        import uvloop  # noqa: PLC0415 - faster where it is installed
    except ImportError:
        asyncio.run(_serve(upstream))
    else:
        uvloop.run(_serve(upstream))


if __name__ == "__main__":
    main()
