"""The engine `onnx` as a caller meets it, on a tiny model of its own: no download, a real child process."""

import asyncio
import base64
import json
import os
import signal
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest
from onnx_tiny import HIDDEN, VOCABULARY, WORDS, reference, tiny_weights, write_tiny_model

from batchyard.engines.child import RestartPolicy
from batchyard.engines.onnx import OnnxEngine
from batchyard.engines.onnx.child import _Pool, _Task, _Text
from batchyard.errors import EngineError, ModelError
from batchyard.events import EventBus
from batchyard.types import Answer, Endpoint, Fault, FaultKind, Request

TEXT = "the captain and the storm"


def ask(given, **more):
    body = json.dumps({"model": "tiny", "input": given, **more}).encode()
    return Request("one", Endpoint.EMBEDDINGS, body)


def body_of(outcome):
    assert isinstance(outcome, Answer), outcome
    assert outcome.status_code == 200, outcome.body
    return json.loads(outcome.body)


def floats_of(outcome):
    return [np.array(one["embedding"], dtype=np.float32) for one in body_of(outcome)["data"]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHYARD_CACHE", str(tmp_path / "cache"))
    write_tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


@asynccontextmanager
async def running(folder, **options):
    engine = OnnxEngine(str(folder), **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def in_flight(engine, jobs):
    while f"[{jobs} jobs running" not in repr(engine):
        await asyncio.sleep(0)


async def test_each_form_of_input_is_embedded_in_the_shape_of_the_openai_api(folder):
    ids = [2, 4, 8, 3]
    async with running(folder) as engine:
        outcomes = await engine.dispatch(
            [ask("ship storm"), ask(["ship storm", "bread"]), ask(ids), ask([ids, [2, 3]])]
        )
        assert engine.batch_invariant
    weights = tiny_weights()
    ship = [2, 4 + WORDS.index("ship"), 4 + WORDS.index("storm"), 3]
    bread = [2, 4 + WORDS.index("bread"), 3]
    wanted = [[ship], [ship, bread], [ids], [ids, [2, 3]]]
    for outcome, inputs in zip(outcomes, wanted, strict=True):
        body = body_of(outcome)
        assert (body["object"], body["model"]) == ("list", "tiny")
        assert [(one["object"], one["index"]) for one in body["data"]] == [
            ("embedding", place) for place in range(len(inputs))
        ]
        tokens = sum(map(len, inputs))
        assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert outcome.usage.input_tokens == tokens
        assert "truncated" not in body
        for vector, text in zip(floats_of(outcome), inputs, strict=True):
            np.testing.assert_allclose(vector, reference(weights, text), atol=2e-6)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
async def test_floats_base64_and_every_company_give_the_same_bits(folder, precision):
    texts = [" ".join(WORDS[start : start + 1 + start % 9]) for start in range(25)]
    async with running(folder, precision=precision, workers=2, pack_tokens=40) as engine:
        alone = [floats_of((await engine.dispatch([ask(text)]))[0])[0] for text in texts]
        together = await engine.dispatch([ask(text) for text in texts])
        (array,) = await engine.dispatch([ask(texts, encoding_format="base64")])
    decoded = [
        np.frombuffer(base64.b64decode(one["embedding"]), dtype=np.float32) for one in body_of(array)["data"]
    ]
    for one, outcome, other in zip(alone, together, decoded, strict=True):
        assert one.tobytes() == floats_of(outcome)[0].tobytes() == other.tobytes()
        assert abs(float(one @ one) - 1) < 1e-6


@pytest.mark.parametrize(
    ("given", "param", "wanted"),
    [
        ([], "input", "empty list"),
        ("", "input", '"input" 0 is empty'),
        (["ship", ""], "input", '"input" 1 is empty'),
        (["ship", 5], "input", "mixes token ids with texts"),
        ([[2, 3], 5], "input", "mixes token ids with texts"),
        ({"text": "ship"}, "input", "not an embedding request"),
        (None, "input", "not an embedding request"),
        ([1.5], "input", "not an embedding request"),
        ([VOCABULARY], "input", f"outside of 0 to {VOCABULARY - 1}"),
        ([[-1]], "input", "outside of 0 to"),
        ([2**70], "input", "outside of 0 to"),
        (["ship"] * 2049, "input", "2,049 texts; one request may have 2,048"),
    ],
)
async def test_bad_input_is_refused_alone_with_the_openai_envelope(folder, given, param, wanted):
    async with running(folder) as engine:
        bad, good = await engine.dispatch([ask(given), ask("ship")])
    assert bad.status_code == 400
    error = json.loads(bad.body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    assert wanted in error["message"]
    assert good.succeeded


async def test_dimensions_only_where_the_model_was_trained_for_them(folder, tmp_path):
    async with running(folder) as engine:
        whole, same, short = await engine.dispatch(
            [ask("ship"), ask("ship", dimensions=HIDDEN), ask("ship", dimensions=16)]
        )
    assert body_of(whole)["data"] == body_of(same)["data"]
    assert json.loads(short.body)["error"]["param"] == "dimensions"
    assert "no vectors of 16 dimensions, only of 32" in json.loads(short.body)["error"]["message"]
    write_tiny_model(tmp_path / "nested", matryoshka_dimensions=[16])
    async with running(tmp_path / "nested") as engine:
        short, long = await engine.dispatch([ask("ship", dimensions=16), ask("ship")])
    cut = floats_of(long)[0][:16]
    np.testing.assert_allclose(floats_of(short)[0], cut / np.linalg.norm(cut), rtol=1e-6)


async def test_a_text_that_is_too_long_is_cut_and_named(folder):
    events = EventBus()
    told = []
    events.subscribe(told.append)
    long = "ship " * 200
    async with running(folder, events=events) as engine:
        (outcome,) = await engine.dispatch([ask(["bread", long, "ship " * 62])])
        assert await engine.count_tokens([ask(["bread", long]), ask([[2, 3], [4]]), ask("")]) == [
            205,
            3,
            None,
        ]
    body = body_of(outcome)
    assert body["truncated"] == [1]
    assert body["usage"]["prompt_tokens"] == 3 + 64 + 64
    first, cut, whole = floats_of(outcome)
    assert np.array_equal(cut, whole)
    assert not np.array_equal(first, cut)
    (event,) = [event for event in told if event.name == "request.truncated"]
    assert "1 of 3 texts were longer than the model's 64 tokens" in event.fields["message"]


async def test_texts_may_be_as_long_as_the_model_has_positions(folder):
    async with running(folder, max_input_tokens=1000) as engine:
        (outcome,) = await engine.dispatch([ask("ship " * 200)])
    assert body_of(outcome)["usage"]["prompt_tokens"] == 96


async def test_dispatches_in_flight_share_packs_and_each_gets_its_own_answers(folder):
    texts = [" ".join(WORDS[start : start + 1 + start % 7]) for start in range(30)]
    async with running(folder, pack_tokens=64) as engine:
        answers = await asyncio.gather(
            *(engine.dispatch([ask(text), ask(texts)]) for text in texts), engine.count_tokens([ask(TEXT)])
        )
    assert answers.pop() == [7]
    whole = floats_of(answers[0][1])
    for place, (one, every) in enumerate(answers):
        assert np.array_equal(floats_of(one)[0], whole[place])
        assert np.array_equal(floats_of(every), whole)


async def test_another_endpoint_is_refused(folder):
    async with running(folder) as engine:
        (outcome,) = await engine.dispatch([Request("one", Endpoint.CHAT, b"{}")])
        chunks = [chunk async for chunk in engine.stream(ask("ship"))]
    assert outcome.status_code == 400
    assert "does not answer /v1/chat/completions" in json.loads(outcome.body)["error"]["message"]
    assert "does not stream" in json.loads(chunks[0].body)["error"]["message"]


async def test_a_killed_child_fails_what_was_in_flight_and_comes_back(folder):
    events = EventBus()
    restarted = asyncio.Event()
    events.subscribe(lambda event: restarted.set() if event.name == "engine.restarted" else None)
    async with running(folder, events=events, restart=RestartPolicy(base_s=0.0)) as engine:
        first = engine.pid
        os.kill(first, signal.SIGSTOP)
        call = asyncio.create_task(engine.dispatch([ask("ship"), ask("bread")]))
        await in_flight(engine, 2)
        os.kill(first, signal.SIGKILL)
        outcomes = await call
        assert [type(one) for one in outcomes] == [Fault, Fault]
        assert {one.kind for one in outcomes} == {FaultKind.ENGINE_DIED}
        # A call that comes while the next child starts waits for it.
        (again,) = await engine.dispatch([ask("ship")])
        assert again.succeeded
        await restarted.wait()
        assert engine.pid != first


async def test_a_child_that_keeps_dying_is_given_up(folder):
    async with running(folder, restart=RestartPolicy(max_deaths=0)) as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        call = asyncio.create_task(engine.dispatch([ask("ship")]))
        await in_flight(engine, 1)
        os.kill(engine.pid, signal.SIGKILL)
        assert (await call)[0].kind is FaultKind.ENGINE_DIED
        with pytest.raises(EngineError, match=r"was killed by signal 9 \(SIGKILL\); it died 1 times"):
            await engine.dispatch([ask("ship")])


async def test_a_cancelled_call_leaves_the_others_alone(folder):
    async with running(folder, workers=1, pack_tokens=1) as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        unwanted = asyncio.create_task(engine.dispatch([ask([TEXT] * 2048)]))
        wanted = asyncio.create_task(engine.dispatch([ask("ship")]))
        await in_flight(engine, 2)
        unwanted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unwanted
        assert "[1 jobs running" in repr(engine)
        os.kill(engine.pid, signal.SIGCONT)
        (outcome,) = await wanted
        assert outcome.succeeded


def test_what_was_dropped_is_never_drawn():
    pool = _Pool(max_tokens=20, max_items=None)
    kept, dropped = (_Task(number, np.empty((2, 4), np.float32), 2, [], []) for number in (1, 2))
    for task in (dropped, kept):
        pool.add([_Text(np.zeros(5, dtype=np.int64), task, place) for place in (0, 1)])
    pool.drop(dropped)
    drawn = pool.draw()
    assert [(text.task, text.place) for text in drawn] == [(kept, 0), (kept, 1)]


def test_a_pool_of_single_texts_waits_for_the_next():
    pool = _Pool(max_tokens=100, max_items=1)
    task = _Task(1, np.empty((3, 4), np.float32), 3, [], [])
    drawn = []
    thread = threading.Thread(target=lambda: drawn.extend(pool.draw() for _ in range(3)))
    thread.start()
    pool.add([_Text(np.zeros(length, dtype=np.int64), task, length) for length in (5, 5, 2)])
    thread.join()
    assert [[text.place for text in pack] for pack in drawn] == [[5], [5], [2]]


async def test_damaged_weights_are_told_in_one_sentence(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors are cut short: .* Fetch them again\.$"):
        await OnnxEngine(str(folder)).start()


async def test_a_damaged_tokenizer_a_file_and_a_missing_folder_are_told(folder, tmp_path):
    with pytest.raises(ModelError, match="is no folder of an embedding model"):
        await OnnxEngine(str(folder / "config.json")).start()
    with pytest.raises(ModelError, match="no file"):
        await OnnxEngine(str(tmp_path / "nowhere")).start()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer in .* is missing or damaged"):
        await OnnxEngine(str(folder)).start()


async def test_a_closed_engine_says_so(folder):
    async with running(folder) as engine:
        await engine.start()
    await engine.close()
    with pytest.raises(EngineError, match="is closed"):
        await engine.dispatch([ask("ship")])
