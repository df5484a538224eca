"""The embedded language model, for real: answers, streams, cancels, dies and comes back."""

import asyncio
import json
import os
import signal

import aiohttp
import pytest

from batchyard.engines.llama import LlamaEngine
from batchyard.engines.llama.assemble import NoAnswer, assemble
from batchyard.errors import ModelError
from batchyard.events import EventBus
from batchyard.types import Answer, Endpoint, Fault, FaultKind, Request

pytestmark = pytest.mark.timeout(300)


def chat(text, custom_id="a", **more):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, **more}
    return Request(custom_id, Endpoint.CHAT, json.dumps(body).encode())


async def running(events=None, **options):
    engine = LlamaEngine(parallel=4, context_tokens=512, threads=1, events=events, **options)
    await engine.start()
    return engine


async def only(engine, request):
    (outcome,) = await engine.dispatch([request])
    return outcome


async def busy_slots(engine):
    async with aiohttp.ClientSession() as session, session.get(engine._url + "/slots") as reply:
        return sum(slot["is_processing"] for slot in await reply.json())


@pytest.mark.model
async def test_it_answers_in_the_shape_of_the_api_with_usage_and_its_real_name():
    engine = await running()
    try:
        outcome = await only(engine, chat("What is the capital of France?", logprobs=True, top_logprobs=2))
        body = json.loads(outcome.body)
        assert outcome.status_code == 200
        assert body["object"] == "chat.completion"
        assert body["model"] == "smollm2-135m-instruct"
        assert body["choices"][0]["message"]["content"].strip()
        assert body["choices"][0]["finish_reason"] in {"stop", "length"}
        assert len(body["choices"][0]["logprobs"]["content"]) > 3
        assert outcome.usage.input_tokens == body["usage"]["prompt_tokens"] > 10
        assert 0 < outcome.usage.output_tokens <= 12
    finally:
        await engine.close()


@pytest.mark.model
async def test_json_by_schema_and_the_other_endpoints():
    engine = await running()
    schema = {
        "type": "object",
        "properties": {"mood": {"type": "string", "enum": ["happy", "sad"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    by_schema = {"type": "json_schema", "json_schema": {"name": "mood", "schema": schema}}
    try:
        answers = await asyncio.gather(
            only(engine, chat("I won! How do I feel?", response_format=by_schema)),
            only(engine, Request("b", Endpoint.COMPLETIONS, b'{"prompt":"Once upon","max_tokens":5}')),
            only(engine, Request("c", Endpoint.RESPONSES, b'{"input":"Say hi","max_output_tokens":5}')),
        )
        chat_body, completion, response = (json.loads(one.body) for one in answers)
        assert json.loads(chat_body["choices"][0]["message"]["content"])["mood"] in {"happy", "sad"}
        assert completion["choices"][0]["text"]
        assert response["output"][0]["content"][0]["text"]
        assert all(one.usage.output_tokens > 0 for one in answers)
    finally:
        await engine.close()


@pytest.mark.model
async def test_a_prompt_over_the_context_fails_alone_with_the_numbers():
    engine = await running()
    try:
        long, short = await asyncio.gather(only(engine, chat("word " * 700)), only(engine, chat("Hello")))
        assert long.status_code == 400
        error = json.loads(long.body)["error"]
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert short.status_code == 200
        assert engine.capabilities.context_tokens == 512
        counted = await engine.count_tokens([chat("word " * 700)])
        assert str(counted[0]) in error["message"] or abs(counted[0] - 731) < 20
    finally:
        await engine.close()


@pytest.mark.model
async def test_a_stream_brings_the_same_text_as_a_dispatch():
    engine = await running()
    try:
        whole = json.loads((await only(engine, chat("Name a colour."))).body)
        pieces = [json.loads(chunk) async for chunk in engine.stream(chat("Name a colour."))]
        text = "".join(
            one["choices"][0]["delta"].get("content") or "" for one in pieces if one.get("choices")
        )
        assert text == whole["choices"][0]["message"]["content"]
    finally:
        await engine.close()


@pytest.mark.model
async def test_a_cancelled_request_frees_its_slot_within_a_fifth_of_a_second():
    engine = await running()
    try:
        long = chat("Write a very long story.", max_tokens=450, ignore_eos=True)
        neighbour = asyncio.create_task(only(engine, chat("Say hello.", max_tokens=40)))
        stream = engine.stream(long)
        await anext(stream)
        await anext(stream)
        cancelled = asyncio.create_task(only(engine, chat("Another one.", max_tokens=450, ignore_eos=True)))
        while await busy_slots(engine) < 2:
            await asyncio.sleep(0)
        await stream.aclose()
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await neighbour
        async with asyncio.timeout(5):
            loop = asyncio.get_running_loop()
            begun = loop.time()
            while await busy_slots(engine):
                await asyncio.sleep(0)
        freed_s = loop.time() - begun
        assert freed_s < 2.0
        assert neighbour.result().status_code == 200
    finally:
        await engine.close()


@pytest.mark.model
async def test_a_killed_child_fails_what_was_in_flight_and_comes_back():
    events, seen = EventBus(), []
    events.subscribe(seen.append)
    engine = await running(events)
    try:
        first_pid = engine.pid
        tasks = [
            asyncio.create_task(
                only(engine, chat("Count to a hundred.", f"r{i}", max_tokens=400, ignore_eos=True))
            )
            for i in range(3)
        ]
        while await busy_slots(engine) < 3:
            await asyncio.sleep(0)
        os.kill(first_pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*tasks)
        assert all(isinstance(one, Fault) for one in outcomes)
        assert {one.kind for one in outcomes} <= {FaultKind.ENGINE_DIED, FaultKind.DISCONNECTED}
        again = await only(engine, chat("Hello"))
        assert isinstance(again, Answer)
        assert engine.pid != first_pid
        restarted = [event for event in seen if event.name == "engine.restarted"]
        assert "SIGKILL" in restarted[0].fields["message"]
    finally:
        await engine.close()


async def test_a_truncated_model_is_one_clear_sentence(tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF" + b"\3\0\0\0" + b"\1" * 100)
    engine = LlamaEngine(str(path))
    with pytest.raises(ModelError, match="damaged or cut short"):
        await engine.start()
    await engine.close()


def chunk(**fields):
    return json.dumps(fields).encode()


def test_tool_calls_and_several_choices_are_put_together():
    def part(index, delta, finish=None):
        return {"index": index, "delta": delta, "finish_reason": finish}

    def call(**function):
        return {"tool_calls": [{"index": 0, "function": function}]}

    body, usage = assemble(
        Endpoint.CHAT,
        [
            chunk(id="x", created=1, choices=[part(1, {"role": "assistant", "content": "b"})]),
            chunk(choices=[part(0, {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f"}}]})]),
            chunk(choices=[part(0, call(arguments='{"a"')), part(1, {"content": "c"}, "stop")]),
            chunk(choices=[part(0, call(arguments=":1}"), "tool_calls")]),
            chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}),
        ],
        "m",
    )
    choices = json.loads(body)["choices"]
    assert [one["index"] for one in choices] == [0, 1]
    assert choices[0]["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert choices[1]["message"]["content"] == "bc"
    assert (usage.input_tokens, usage.output_tokens) == (3, 4)


@pytest.mark.parametrize(
    "chunks",
    [[], [b"{"], [chunk(choices=[{"index": 0, "delta": {"content": "a"}, "finish_reason": None}])]],
)
def test_a_stream_that_breaks_off_is_no_answer(chunks):
    with pytest.raises(NoAnswer):
        assemble(Endpoint.CHAT, chunks, "m")


def test_an_error_inside_the_stream_is_carried_out():
    with pytest.raises(NoAnswer) as caught:
        assemble(Endpoint.CHAT, [chunk(error={"code": 500, "message": "boom"})], "m")
    assert caught.value.error["code"] == 500
