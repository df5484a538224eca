"""The stand-in upstream speaks HTTP that real clients understand."""

import asyncio
import json
import signal
import sys
import urllib.request

import openai
import pytest

from batchyard.testing.upstream import BEHAVIOURS, Rule, Upstream


async def exchange(upstream, raw, answers):
    """The bodies of so many *answers* that come back for *raw* on one connection."""
    reader, writer = await asyncio.open_connection(upstream.host, upstream.port)
    writer.write(raw)
    bodies = []
    for _ in range(answers):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
        bodies.append(await reader.readexactly(length))
    writer.close()
    await writer.wait_closed()
    return bodies


def post(body, path="/v1/chat/completions"):
    return f"POST {path} HTTP/1.1\r\nHost: x\r\ncontent-LENGTH: {len(body)}\r\n\r\n{body}".encode()


CHAT = '{"model":"m","messages":[{"role":"user","content":"hello marker:row-1"}]}'


async def test_the_openai_sdk_gets_its_answers_and_streams():
    async with Upstream(api_key="sk-1") as url:
        async with openai.AsyncOpenAI(base_url=url, api_key="sk-1", max_retries=0) as client:
            messages = [{"role": "user", "content": "one two"}]
            chat = await client.chat.completions.create(model="m", messages=messages)
            assert chat.choices[0].message.content == "one two"
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == "one two"
            response = await client.responses.create(model="m", input="one two")
            assert response.output_text == "one two"
            vectors = await client.embeddings.create(model="m", input=["a", "b"])
            assert len(vectors.data) == 2
            assert [model.id async for model in client.models.list()] == ["echo"]
        async with openai.AsyncOpenAI(base_url=url, api_key="sk-2", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_several_requests_on_one_connection_are_answered_in_order():
    upstream = Upstream(latency_s=0.001)
    async with upstream:
        bodies = [CHAT.replace("hello", f"hello-{number}") for number in range(5)]
        answers = await exchange(upstream, b"".join(map(post, bodies)), 5)
    assert [f"hello-{number}".encode() in answer for number, answer in enumerate(answers)] == [True] * 5
    assert upstream.calls_by_marker["row-1"] == 5


async def test_a_request_in_single_bytes_is_one_request():
    upstream = Upstream()
    async with upstream:
        reader, writer = await asyncio.open_connection(upstream.host, upstream.port)
        for byte in post(CHAT):
            writer.write(bytes([byte]))
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()
    assert upstream.calls == 1


@pytest.mark.parametrize("what", [*BEHAVIOURS, "500", "429@7"])
def test_rules_are_read(what):
    assert Rule.parse(f"{what}x3").times == 3
    assert Rule.parse(what).retry_after == ("7" if "@" in what else None)


@pytest.mark.parametrize("what", ["", "explode", "50", "hangx", "5000"])
def test_a_rule_that_is_none_is_refused(what):
    with pytest.raises(ValueError, match="is no rule"):
        Rule.parse(what)


async def test_it_runs_as_a_process_and_tells_its_counts():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batchyard.testing.upstream", "--latency", "1ms", "--rule", "row-1=500x1"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        url = json.loads(await process.stdout.readline())["url"]
        statuses = []
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            for _ in range(2):
                try:
                    await client.chat.completions.create(**json.loads(CHAT))
                    statuses.append(200)
                except openai.InternalServerError:
                    statuses.append(500)
        assert statuses == [500, 200]
        stats = await asyncio.to_thread(_read, url.removesuffix("/v1") + "/stats")
        assert stats == {"calls": 2, "abandoned": 0, "by_marker": {"row-1": 2}}
    finally:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


def _read(url):
    with urllib.request.urlopen(url) as reply:
        return json.load(reply)
