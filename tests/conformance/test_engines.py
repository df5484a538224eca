"""One suite for all engines: whatever computes, the floors above see the same behaviour."""

import asyncio
import base64
import json
import struct
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from engine_cases import CASES, HELD_CASES, each
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from batchyard.errors import EngineError
from batchyard.types import Answer, Endpoint, Fault, Request

#: One loop for the module, so that engines which take seconds to start can serve several tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")

SHAPES = {
    Endpoint.CHAT: ChatCompletion,
    Endpoint.COMPLETIONS: Completion,
    Endpoint.EMBEDDINGS: CreateEmbeddingResponse,
    Endpoint.RESPONSES: Response,
}
PHRASE = "The quick brown fox jumps over the lazy dog. "
#: JSON text, quotes, control characters, separators that split lines, beyond the first plane.
AWKWARD = (
    'A "quoted" \\ word,\ttab,\nline, \u2028 separator, \u0085 next line, ünï, 漢字, 🦊 and {"json": [1]}'
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared():
    """Gives the running engine of a case, started once, for tests that leave it running."""
    started = {}
    async with AsyncExitStack() as stack:

        async def running(case):
            if case.name not in started:
                started[case.name] = await stack.enter_async_context(case.start())
            return started[case.name]

        yield running


def ask(endpoint, text=PHRASE, *, index=0, max_tokens=8, **more):
    """A request for *text*."""
    match endpoint:
        case Endpoint.CHAT:
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": max_tokens,
                "temperature": 0,
            }
        case Endpoint.COMPLETIONS:
            body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0}
        case Endpoint.RESPONSES:
            body = {"input": text, "max_output_tokens": max(max_tokens, 16), "temperature": 0}
        case Endpoint.EMBEDDINGS:
            body = {"input": text}
    raw = json.dumps({**body, **more}, ensure_ascii=False).encode()
    return Request(f"request-{index}", endpoint, raw, None, index)


def slow(case, index=0):
    """A request that stays in flight for long, or until it is released."""
    if Endpoint.CHAT in case.endpoints:
        return ask(Endpoint.CHAT, "marker:slow Count from one to five hundred.", index=index, max_tokens=500)
    return ask(Endpoint.EMBEDDINGS, [PHRASE * 30] * 24, index=index)


def any_endpoint(case):
    return Endpoint.CHAT if Endpoint.CHAT in case.endpoints else Endpoint.EMBEDDINGS


def text_of(endpoint, body):
    value = json.loads(body)
    match endpoint:
        case Endpoint.CHAT:
            return value["choices"][0]["message"]["content"]
        case Endpoint.COMPLETIONS:
            return value["choices"][0]["text"]
        case _:
            return value["output"][0]["content"][0]["text"]


async def answer_to(engine, request):
    (outcome,) = await engine.dispatch([request])
    assert isinstance(outcome, Answer), outcome
    return outcome


# --- life -------------------------------------------------------------------------------------------


@each(CASES)
async def test_it_is_what_its_case_declares(case, shared):
    running = await shared(case)
    able = running.engine.capabilities
    assert running.engine.name == case.name
    assert case.endpoints <= able.endpoints
    assert able.streams is case.streams
    assert able.max_batch >= 1
    assert able.slots is None or able.slots >= 1


@each(CASES)
async def test_it_starts_twice_and_closes_twice(case):
    async with case.start() as running:
        await running.engine.start()
        assert (await answer_to(running.engine, ask(any_endpoint(case)))).succeeded
        await running.engine.close()
        await running.engine.close()
        with pytest.raises(EngineError):
            await running.engine.dispatch([ask(any_endpoint(case))])


@each(CASES)
async def test_its_repr_names_it(case, shared):
    running = await shared(case)
    assert case.name in repr(running.engine).lower()


# --- answers ----------------------------------------------------------------------------------------


@each(CASES, endpoints=True)
async def test_an_answer_has_the_shape_that_the_openai_sdk_reads(case, endpoint, shared):
    running = await shared(case)
    outcome = await answer_to(running.engine, ask(endpoint))
    assert outcome.succeeded, outcome
    SHAPES[endpoint].model_validate_json(outcome.body, strict=False)
    usage = json.loads(outcome.body)["usage"]
    counted = usage.get("prompt_tokens", usage.get("input_tokens"))
    assert outcome.usage.input_tokens == counted > 0
    if endpoint is not Endpoint.EMBEDDINGS:
        assert outcome.usage.output_tokens == usage.get("completion_tokens", usage.get("output_tokens")) > 0


@each(CASES, endpoints=True)
async def test_outcomes_line_up_with_their_requests(case, endpoint, shared):
    running = await shared(case)
    count = min(running.engine.capabilities.max_batch, 12)
    sizes = [7, 1, 4, 10, 2, 9, 3, 12, 6, 11, 5, 8][:count]
    requests = [ask(endpoint, PHRASE * size, index=index) for index, size in enumerate(sizes)]
    outcomes = await running.engine.dispatch(requests)
    assert len(outcomes) == count
    assert [outcome for outcome in outcomes if not isinstance(outcome, Answer)] == []
    tokens = [outcome.usage.input_tokens for outcome in outcomes]
    assert [sorted(sizes).index(size) for size in sizes] == [sorted(tokens).index(one) for one in tokens]


@each(CASES)
async def test_many_dispatches_at_once_each_get_their_own_answer(case, shared):
    endpoint = any_endpoint(case)
    running = await shared(case)
    sizes = [1 + number % 8 for number in range(32)]
    requests = [ask(endpoint, PHRASE * size, index=index) for index, size in enumerate(sizes)]
    outcomes = await asyncio.gather(*(answer_to(running.engine, request) for request in requests))
    expected = {}
    for size, outcome in zip(sizes, outcomes, strict=True):
        assert outcome.succeeded
        assert expected.setdefault(size, outcome.usage.input_tokens) == outcome.usage.input_tokens
    assert len(set(expected.values())) == 8


@each(CASES, endpoints=True)
async def test_awkward_text_gives_whole_json_in_utf8(case, endpoint, shared):
    running = await shared(case)
    outcome = await answer_to(running.engine, ask(endpoint, AWKWARD))
    assert outcome.succeeded
    assert isinstance(json.loads(outcome.body.decode("utf-8")), dict)


@each([case for case in CASES if Endpoint.EMBEDDINGS in case.endpoints])
async def test_embeddings_come_one_for_each_text_in_either_encoding(case, shared):
    running = await shared(case)
    plain = await answer_to(running.engine, ask(Endpoint.EMBEDDINGS, ["one", "two", "three"]))
    coded = await answer_to(
        running.engine, ask(Endpoint.EMBEDDINGS, ["one", "two", "three"], encoding_format="base64")
    )
    vectors = [entry["embedding"] for entry in json.loads(plain.body)["data"]]
    assert [entry["index"] for entry in json.loads(plain.body)["data"]] == [0, 1, 2]
    assert len({len(vector) for vector in vectors}) == 1
    for vector, entry in zip(vectors, json.loads(coded.body)["data"], strict=True):
        raw = base64.b64decode(entry["embedding"])
        assert struct.unpack(f"<{len(vector)}f", raw) == pytest.approx(vector, abs=1e-6)


@each(CASES)
async def test_tokens_are_counted_or_left_open(case, shared):
    endpoint = any_endpoint(case)
    running = await shared(case)
    counts = await running.engine.count_tokens([ask(endpoint, PHRASE), ask(endpoint, PHRASE * 3)])
    if case.counts_tokens:
        assert 0 < counts[0] < counts[1]
        answered = await answer_to(running.engine, ask(endpoint, PHRASE))
        assert counts[0] == answered.usage.input_tokens
    else:
        assert counts == [None, None]


# --- what the request did wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b'{"messages": 5, "input": 5, "prompt": {}}', b'{"messages"', b""]
)
@each(CASES, endpoints=True)
async def test_a_malformed_body_is_answered_with_the_error_envelope(case, endpoint, body, shared):
    running = await shared(case)
    outcome = await answer_to(running.engine, Request("bad", endpoint, body))
    assert 400 <= outcome.status_code < 500
    error = json.loads(outcome.body)["error"]
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert {"param", "code"} <= error.keys()
    assert (await answer_to(running.engine, ask(endpoint))).succeeded


@each(CASES)
async def test_a_malformed_request_leaves_its_company_alone(case, shared):
    endpoint = any_endpoint(case)
    running = await shared(case)
    requests = [ask(endpoint), Request("bad", endpoint, b"{}"), ask(endpoint)]
    if running.engine.capabilities.max_batch >= 3:
        outcomes = await running.engine.dispatch(requests)
    else:
        outcomes = await asyncio.gather(*(answer_to(running.engine, request) for request in requests))
    assert [outcome.succeeded for outcome in outcomes] == [True, False, True]


# --- cancelling and closing -------------------------------------------------------------------------


@each(HELD_CASES)
async def test_a_cancelled_dispatch_leaves_its_neighbours_alone(case):
    async with case.start() as running:
        engine = running.engine
        left = asyncio.create_task(engine.dispatch([slow(case, 1)]))
        doomed = asyncio.create_task(engine.dispatch([slow(case, 2)]))
        right = asyncio.create_task(engine.dispatch([ask(any_endpoint(case), index=3)]))
        await running.in_flight(3)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        running.release()
        for task in (left, right):
            (outcome,) = await task
            assert isinstance(outcome, Answer), outcome
            assert outcome.succeeded


@each(HELD_CASES)
async def test_closing_ends_everything_in_flight(case):
    async with case.start() as running:
        tasks = [asyncio.create_task(running.engine.dispatch([slow(case, index)])) for index in range(4)]
        await running.in_flight(4)
        await running.engine.close()
        running.release()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, (list, EngineError)), outcome
            if isinstance(outcome, list):
                assert isinstance(outcome[0], (Answer, Fault))


# --- streams ----------------------------------------------------------------------------------------


def piece_of(endpoint, chunk):
    value = json.loads(chunk)
    if endpoint is Endpoint.RESPONSES:
        return value["delta"] if value["type"] == "response.output_text.delta" else ""
    if not value["choices"]:
        return ""
    choice = value["choices"][0]
    return (choice["delta"].get("content") if endpoint is Endpoint.CHAT else choice["text"]) or ""


@each(CASES, streams=True, endpoints=True)
async def test_the_chunks_of_a_stream_join_to_the_answer(case, endpoint, shared):
    running = await shared(case)
    request = ask(endpoint, AWKWARD, max_tokens=16)
    whole = text_of(endpoint, (await answer_to(running.engine, request)).body)
    chunks = [chunk async for chunk in running.engine.stream(request)]
    assert all(isinstance(chunk, bytes) for chunk in chunks)
    assert "".join(piece_of(endpoint, chunk) for chunk in chunks) == whole


@each(CASES, streams=True, endpoints=True)
async def test_a_stream_that_cannot_be_ends_with_what_refuses_it(case, endpoint, shared):
    running = await shared(case)
    chunks = [chunk async for chunk in running.engine.stream(Request("bad", endpoint, b"{}"))]
    assert not chunks[-1].succeeded
    assert isinstance(json.loads(chunks[-1].body)["error"]["message"], str)


@each(CASES, streams=True)
async def test_a_stream_left_early_leaves_the_engine_usable(case, shared):
    endpoint = Endpoint.CHAT
    running = await shared(case)
    stream = running.engine.stream(ask(endpoint, PHRASE * 4, max_tokens=64))
    await anext(stream)
    await stream.aclose()
    assert (await answer_to(running.engine, ask(endpoint))).succeeded
