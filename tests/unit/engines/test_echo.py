"""The engine echo is deterministic, scripted, and counts its calls over processes."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.clock import ManualClock
from batchyard.engines.echo import EchoEngine, EchoFault, Latency
from batchyard.errors import EngineError, UsageError
from batchyard.types import Answer, Endpoint, Fault, FaultKind, Request


def ask(custom_id="row-1", text="one two three", **more):
    body = {"messages": [{"role": "user", "content": text}], **more}
    return Request(custom_id, Endpoint.CHAT, json.dumps(body).encode())


async def outcome_of(engine, request):
    (outcome,) = await engine.dispatch([request])
    return outcome


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("500", FaultKind.SERVER_ERROR),
        ("429", FaultKind.RATE_LIMITED),
        ("timeout", FaultKind.TIMEOUT),
        ("disconnect", FaultKind.DISCONNECTED),
        ("unreachable", FaultKind.UNREACHABLE),
        ("invalid", FaultKind.INVALID_ANSWER),
        ("died", FaultKind.ENGINE_DIED),
    ],
)
async def test_a_pattern_fails_the_first_attempts_only(what, kind):
    engine = EchoEngine.from_spec(f"fail=row-7*:{what}@2sx2")
    for _ in range(2):
        fault = await outcome_of(engine, ask("row-77"))
        assert isinstance(fault, Fault)
        assert (fault.kind, fault.retry_after_s) == (
            kind,
            2.0 if what in ("500", "429") else fault.retry_after_s,
        )
    assert (await outcome_of(engine, ask("row-77"))).succeeded
    assert (await outcome_of(engine, ask("row-8"))).succeeded


async def test_a_400_is_an_answer_for_ever():
    engine = EchoEngine(faults=[EchoFault("400", pattern="row-1")])
    for _ in range(3):
        answer = await outcome_of(engine, ask())
        assert isinstance(answer, Answer)
        assert answer.status_code == 400


async def test_a_share_fails_the_same_requests_whatever_the_order_and_the_batches():
    requests = [ask(f"row-{number}") for number in range(2000)]
    spec = "fail=10%:500,seed=3,max_batch=2000"
    at_once = await EchoEngine.from_spec(spec).dispatch(requests)
    failed = {
        one.custom_id for one, outcome in zip(requests, at_once, strict=True) if isinstance(outcome, Fault)
    }
    assert 140 < len(failed) < 260
    engine = EchoEngine.from_spec(spec)
    for request in reversed(requests):
        outcome = await outcome_of(engine, request)
        assert isinstance(outcome, Fault) == (request.custom_id in failed)
    other = await EchoEngine.from_spec("fail=10%:500,seed=4").dispatch(requests)
    assert {one.custom_id for one, x in zip(requests, other, strict=True) if isinstance(x, Fault)} != failed


async def test_latency_is_the_clocks_and_grows_with_the_longest_answer():
    clock = ManualClock()
    engine = EchoEngine(0.5, tokens_per_s=2.0, clock=clock)
    task = asyncio.create_task(engine.dispatch([ask(), ask(text="a b c d")]))
    await asyncio.sleep(0)
    assert clock.next_wake_s == 2.5
    clock.advance(2.5)
    assert [outcome.usage.output_tokens for outcome in await task] == [3, 4]


@pytest.mark.parametrize("latency", [Latency("uniform", 1.0, 2.0), Latency("exponential", 1.0)])
async def test_drawn_latencies_repeat_with_their_seed(latency):
    async def wakes(seed):
        clock = ManualClock()
        engine = EchoEngine(latency, seed=seed, clock=clock)
        tasks = []
        found = []
        for number in range(20):
            tasks = [asyncio.create_task(engine.dispatch([ask(f"row-{number}")]))]
            await asyncio.sleep(0)
            found.append(clock.next_wake_s - clock.monotonic())
            clock.advance(found[-1])
            await asyncio.gather(*tasks)
        return found

    first = await wakes(1)
    assert first == pytest.approx(await wakes(1))
    assert first != pytest.approx(await wakes(2))
    assert len({round(one, 6) for one in first}) > 15
    if latency.shape == "uniform":
        assert all(1.0 <= one <= 2.0 for one in first)


async def test_the_limit_of_tokens_cuts_the_echo():
    answer = await outcome_of(EchoEngine(), ask(max_tokens=2))
    choice = json.loads(answer.body)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one two", "length")
    assert answer.usage.output_tokens == 2


async def test_a_prompt_beyond_the_context_fails_alone_with_the_numbers():
    engine = EchoEngine(context_tokens=3)
    long, short = await engine.dispatch([ask(text="a b c d"), ask()])
    assert short.succeeded
    assert "4 tokens" in json.loads(long.body)["error"]["message"]
    assert json.loads(long.body)["error"]["code"] == "context_length_exceeded"


async def test_the_log_counts_calls_over_several_engines(tmp_path):
    log = tmp_path / "calls.log"
    for _ in range(2):
        engine = EchoEngine(log_path=log)
        await engine.start()
        await engine.dispatch([ask("row-1"), ask("row-2\nx")])
        await engine.close()
    assert log.read_text().splitlines() == ["row-1", "row-2\\nx"] * 2


async def test_a_log_that_cannot_be_written_is_said_at_the_start(tmp_path):
    with pytest.raises(EngineError, match="No such file"):
        await EchoEngine(log_path=tmp_path / "absent" / "calls.log").start()


async def test_a_stream_of_a_request_that_fails_is_its_outcome():
    engine = EchoEngine.from_spec("fail=row-1:timeout,fail=row-2:400")
    for custom_id in ("row-1", "row-2"):
        chunks = [chunk async for chunk in engine.stream(ask(custom_id))]
        assert chunks == await engine.dispatch([ask(custom_id)])


@pytest.mark.parametrize(
    "spec",
    [
        "latency",
        "latency=",
        "latency=soon",
        "latency=5h",
        "fail=500",
        "fail=:500",
        "fail=2%:302",
        "fail=2%:explode",
        "fail=x%:500",
        "fail=nan%:500",
        "seed=-1",
        "max_batch=0",
        "colour=red",
        "tokens_per_s=0",
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_with_an_example(spec):
    with pytest.raises(UsageError, match="An example"):
        EchoEngine.from_spec(spec)


def test_a_spec_says_everything(tmp_path):
    spec = "latency=10ms..20ms,fail=2%:500,fail=row-7:429@1sx3,seed=9,max_batch=4,slots=2,context_tokens=99,tokens_per_s=50"
    engine = EchoEngine.from_spec(f"{spec},log={tmp_path}/x")
    assert (engine.capabilities.max_batch, engine.capabilities.slots) == (4, 2)
    assert engine.capabilities.context_tokens == 99
    assert EchoEngine.from_spec("").capabilities.max_batch == 64


@given(st.text(max_size=200))
async def test_any_text_comes_back_as_it_went(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]})
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return
    answer = await outcome_of(EchoEngine(), Request("x", Endpoint.CHAT, body.encode()))
    assert json.loads(answer.body)["choices"][0]["message"]["content"] == text
    assert answer.body.isascii()
