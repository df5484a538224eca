"""The engine against a real HTTP server that misbehaves in every way we know."""

import asyncio
import gzip
import json
import socket

import pytest

from batchyard.engines.openai import OpenAIEngine
from batchyard.engines.openai.transport import _proxy_for
from batchyard.errors import EngineError, UsageError
from batchyard.testing.upstream import Upstream
from batchyard.types import Answer, Endpoint, Fault, FaultKind, Request


def ask(marker="none", **more):
    body = {"model": "m", "messages": [{"role": "user", "content": f"Hello marker:{marker} there"}], **more}
    return Request(marker, Endpoint.CHAT, json.dumps(body).encode(), "m")


class Started:
    """An upstream and a started engine."""

    def __init__(self, rules=None, *, upstream=None, **options):
        self.upstream = upstream or Upstream(rules=rules or {})
        self.options = options

    async def __aenter__(self):
        await self.upstream.start()
        self.engine = OpenAIEngine(self.upstream.url, **self.options)
        await self.engine.start()
        return self

    async def __aexit__(self, *_):
        await self.engine.close()
        await self.upstream.close()

    async def outcome(self, request):
        (outcome,) = await self.engine.dispatch([request])
        return outcome


@pytest.mark.parametrize(
    ("rule", "kind", "words"),
    [
        ("500", FaultKind.SERVER_ERROR, "answered 500"),
        ("503@3", FaultKind.SERVER_ERROR, "answered 503"),
        ("429@3", FaultKind.RATE_LIMITED, "limits the rate"),
        ("408", FaultKind.TIMEOUT, "answered 408"),
        ("hang", FaultKind.TIMEOUT, "within 0.2 s"),
        ("drop", FaultKind.DISCONNECTED, "broke before"),
        ("torn", FaultKind.DISCONNECTED, "broke before"),
        ("garbage", FaultKind.INVALID_ANSWER, "not what the API promises"),
        ("html", FaultKind.INVALID_ANSWER, "web page"),
        ("error200", FaultKind.SERVER_ERROR, "out of memory"),
    ],
)
async def test_each_misbehaviour_is_one_fault_and_the_next_request_succeeds(rule, kind, words):
    async with Started({"bad": f"{rule}x1"}, timeout_s=0.2 if rule == "hang" else 30) as it:
        fault = await it.outcome(ask("bad"))
        assert isinstance(fault, Fault), fault
        assert fault.kind is kind
        assert words in fault.message
        assert fault.retry_after_s == (3.0 if "@" in rule else None)
        assert (await it.outcome(ask("bad"))).succeeded
        assert it.upstream.calls_by_marker["bad"] == 2


async def test_a_slow_trickle_is_an_answer():
    async with Started({"slow": "trickle"}) as it:
        assert (await it.outcome(ask("slow"))).succeeded


async def test_one_late_call_does_not_end_those_that_came_after_it():
    async with Started({"late": "hang", "held": "hold"}, timeout_s=0.3) as it:
        late = asyncio.create_task(it.outcome(ask("late")))
        await it.upstream.until(lambda: it.upstream.calls == 1)
        assert (await it.outcome(ask())).succeeded
        assert (await late).kind is FaultKind.TIMEOUT
        held = asyncio.create_task(it.outcome(ask("held")))
        await it.upstream.until(lambda: it.upstream.calls_by_marker["held"] == 1)
        it.upstream.release()
        assert (await held).succeeded


async def test_a_timeout_and_a_cancel_at_once_are_a_cancel():
    async with Started({"late": "hang"}, timeout_s=0.05) as it:
        task = asyncio.create_task(it.outcome(ask("late")))
        await it.upstream.until(lambda: it.upstream.calls == 1)
        watch = it.engine._watch
        watch.end_all(Fault(FaultKind.TIMEOUT, "Late."))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert watch.running == 0


async def test_the_body_passes_through_untouched():
    request = Request("raw", Endpoint.CHAT, b'{ "messages" : [{"role":"user","content":"a  b"}],  "n":1.0 }')
    async with Started() as it:
        assert (await it.outcome(request)).succeeded
        assert it.upstream.last_body == request.body
        assert it.upstream.last_headers[b"content-type"] == b"application/json"
        assert b"authorization" not in it.upstream.last_headers


async def test_a_model_that_is_set_replaces_the_one_in_the_body():
    async with Started(model="bigger") as it:
        outcome = await it.outcome(ask())
        assert json.loads(it.upstream.last_body)["model"] == "bigger"
        assert json.loads(outcome.body)["model"] == "bigger"
        bad = await it.outcome(Request("bad", Endpoint.CHAT, b"[1]"))
        assert bad.status_code == 400


async def test_a_set_model_that_the_upstream_lacks_ends_the_engine_and_names_what_there_is():
    async with Started(upstream=Upstream(models=("small", "large"), strict_models=True), model="huge") as it:
        with pytest.raises(EngineError, match=r"no model 'huge'\. It serves: small, large\."):
            await it.outcome(ask())


async def test_a_model_that_only_a_request_names_is_its_own_fault():
    async with Started(upstream=Upstream(models=("small",), strict_models=True)) as it:
        assert (await it.outcome(ask())).status_code == 404
        assert (await it.outcome(ask(model="small"))).succeeded


async def test_tls_to_a_server_without_it_is_told_at_the_start():
    async with Upstream() as url:
        engine = OpenAIEngine(url.replace("http:", "https:"))
        with pytest.raises(EngineError, match="Cannot reach https://"):
            await engine.start()


async def test_a_name_that_does_not_exist_is_told_at_the_start():
    engine = OpenAIEngine("http://nowhere.invalid:8000/v1")
    with pytest.raises(EngineError, match="the host name is not known"):
        await engine.start()


async def test_a_body_of_several_megabytes_goes_through():
    async with Started() as it:
        outcome = await it.outcome(ask(padding="x" * 5_000_000))
        assert outcome.succeeded
        assert len(it.upstream.last_body) > 5_000_000


async def test_an_answer_above_the_cap_is_refused():
    async with Started(max_answer_bytes=500) as it:
        request = Request("long", Endpoint.CHAT, ask().body.replace(b"there", b"there " * 500))
        fault = await it.outcome(request)
        assert fault.kind is FaultKind.INVALID_ANSWER
        assert "larger than 500 bytes" in fault.message
        chunks = [
            chunk
            async for chunk in it.engine.stream(
                Request("s", Endpoint.EMBEDDINGS, b'{"input":"a","dimensions":900}')
            )
        ]
        assert "larger than" in chunks[-1].message


async def test_the_key_is_sent_and_never_shown():
    async with Started(upstream=Upstream(api_key="sk-secret"), api_key="sk-secret") as it:
        assert (await it.outcome(ask())).succeeded
        assert "sk-secret" not in repr(it.engine)
        assert it.upstream.last_headers[b"authorization"] == b"Bearer sk-secret"


async def test_a_refused_key_is_told_at_the_start():
    async with Upstream(api_key="right") as url:
        engine = OpenAIEngine(url, api_key="wrong", api_key_env="MY_KEY")
        with pytest.raises(EngineError, match=r"MY_KEY.*Incorrect API key") as caught:
            await engine.start()
        assert "wrong" not in str(caught.value)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_an_absent_server_is_told_at_the_start():
    engine = OpenAIEngine(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        EngineError, match=r"Cannot reach http://127\.0\.0\.1:\d+/v1: connection refused\. Is the server"
    ):
        await engine.start()


async def test_a_server_that_goes_away_is_unreachable_and_comes_back():
    upstream = Upstream()
    async with Started(upstream=upstream) as it:
        assert (await it.outcome(ask())).succeeded
        await upstream.close()
        fault = await it.outcome(ask())
        if fault.kind is FaultKind.DISCONNECTED:
            # The connection kept from the call before broke under this one; the next has to connect.
            fault = await it.outcome(ask())
        assert fault.kind is FaultKind.UNREACHABLE
        assert "connection refused" in fault.message
        await upstream.start()
        assert (await it.outcome(ask())).succeeded


@pytest.mark.parametrize("url", ["", "localhost:8000", "http://h/v1?x=1"])
def test_a_base_url_that_is_none_is_refused_at_once(url):
    with pytest.raises(UsageError):
        OpenAIEngine(url)


async def test_a_cancelled_call_closes_its_connection():
    async with Started({"slow": "hold"}) as it:
        task = asyncio.create_task(it.outcome(ask("slow")))
        await it.upstream.until(lambda: it.upstream.calls == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await it.upstream.until(lambda: it.upstream.abandoned == 1)


async def test_connections_are_used_again():
    async with Started() as it:
        for _ in range(5):
            assert (await it.outcome(ask())).succeeded
        assert it.upstream.connections == 1


async def test_closing_ends_the_calls_in_flight_with_a_fault():
    async with Started({"slow": "hang"}) as it:
        tasks = [asyncio.create_task(it.outcome(ask("slow"))) for _ in range(3)]
        await it.upstream.until(lambda: it.upstream.calls == 3)
        await it.engine.close()
        for fault in await asyncio.gather(*tasks):
            assert fault.kind is FaultKind.DISCONNECTED
            assert "closed" in fault.message


async def test_several_requests_in_one_dispatch_keep_their_places():
    async with Started({"bad": "500"}) as it:
        outcomes = await it.engine.dispatch([ask("a"), ask("bad"), ask("c")])
        assert [isinstance(outcome, Answer) for outcome in outcomes] == [True, False, True]


async def test_the_end_of_the_engine_leaves_no_call_of_its_dispatch_behind():
    async with Started(upstream=Upstream(rules={"slow": "hang", "key": "401"})) as it:
        with pytest.raises(EngineError, match="API key"):
            await it.engine.dispatch([ask("slow"), ask("key")])
        assert it.engine._watch.running == 0


async def test_a_stream_asks_for_one_and_ends_at_done():
    async with Started() as it:
        chunks = [json.loads(chunk) async for chunk in it.engine.stream(ask())]
        assert json.loads(it.upstream.last_body)["stream"] is True
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert (await it.outcome(ask())).succeeded
        assert it.upstream.connections == 1


@pytest.mark.parametrize(
    ("rule", "words"),
    [("torn", "broke"), ("drop", "broke"), ("500", "500"), ("html", "web page"), ("hang", "within 0.2 s")],
)
async def test_a_stream_that_fails_says_so_at_its_end(rule, words):
    async with Started({"bad": rule}, timeout_s=0.2 if rule == "hang" else 30) as it:
        chunks = [chunk async for chunk in it.engine.stream(ask("bad"))]
        assert words in chunks[-1].message


async def test_a_stream_in_small_pieces_is_whole():
    async with Started({"slow": "trickle"}) as it:
        pieces = [
            json.loads(chunk)["choices"][0]["delta"].get("content", "")
            async for chunk in it.engine.stream(ask("slow"))
        ]
        assert "".join(pieces) == "Hello marker:slow there"


async def test_leaving_a_stream_early_closes_its_connection():
    async with Started({"slow": "trickle"}) as it:
        stream = it.engine.stream(ask("slow"))
        await anext(stream)
        await stream.aclose()
        await it.upstream.until(lambda: it.upstream.abandoned == 1)
        assert it.engine._watch.running == 0


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://api.example.com/v1", "http://proxy:3128"),
        ("https://api.example.com/v1", None),
        ("http://inside.example.org/v1", None),
        ("http://localhost:8000/v1", None),
        ("http://127.0.0.1:8000/v1", None),
        ("http://[::1]:8000/v1", None),
    ],
)
def test_the_proxy_of_the_environment_is_used_but_not_for_this_machine(monkeypatch, url, proxy):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    assert _proxy_for(url) == proxy


@pytest.mark.parametrize(("size", "succeeds"), [(1_000, True), (1_000_000, False)])
async def test_a_compressed_answer_is_unpacked_up_to_the_cap(size, succeeds):
    body = gzip.compress(b'{"choices":["%b"]}' % (b"x" * size))
    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    engine = OpenAIEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", max_answer_bytes=100_000)
    async with server:
        if succeeds:
            await engine.start()
            (outcome,) = await engine.dispatch([ask()])
            await engine.close()
            assert outcome.succeeded, outcome
        else:
            # The list of models is held to the same cap.
            with pytest.raises(EngineError, match="larger than 100,000 bytes"):
                await engine.start()
