"""The embedding engine with its real model: right vectors, the same bits in every company, back after a kill."""

import asyncio
import base64
import json
import os
import random
import signal

import numpy as np
import pytest

from batchyard.engines.models import resolve
from batchyard.engines.onnx import OnnxEngine
from batchyard.engines.onnx.encoder import Encoder
from batchyard.errors import ModelError
from batchyard.events import EventBus
from batchyard.types import Answer, Endpoint, Fault, FaultKind, Request

WORDS = [
    "the",
    "batch",
    "waits",
    "for",
    "no",
    "one",
    "but",
    "the",
    "engine",
    "is",
    "free",
    "when",
    "a",
    "request",
    "of",
    "any",
    "length",
    "comes",
    "along",
]


def texts(count, seed=0):
    dice = random.Random(seed)
    return [
        " ".join(dice.choices(WORDS, k=dice.choice([1, 2, 3, 5, 8, 13, 30, 60, 120]))) for _ in range(count)
    ]


def ask(given, custom_id="a", **more):
    return Request(custom_id, Endpoint.EMBEDDINGS, json.dumps({"input": given, **more}).encode())


def vectors(outcome):
    assert isinstance(outcome, Answer), outcome
    assert outcome.status_code == 200, outcome.body
    return [np.array(one["embedding"], dtype=np.float32) for one in json.loads(outcome.body)["data"]]


@pytest.fixture
async def engine():
    made = OnnxEngine()
    await made.start()
    yield made
    await made.close()


@pytest.mark.model
async def test_vectors_have_unit_length_and_near_texts_are_near(engine):
    assert engine.batch_invariant
    (outcome,) = await engine.dispatch(
        [ask(["A cat sleeps.", "A kitten is asleep.", "Shares fell sharply."])]
    )
    cat, kitten, shares = vectors(outcome)
    assert np.allclose([np.linalg.norm(one) for one in (cat, kitten, shares)], 1, atol=1e-6)
    assert cat @ kitten > 0.6 > cat @ shares
    body = json.loads(outcome.body)
    assert body["model"] == "minilm-l6-v2"
    assert body["usage"]["prompt_tokens"] == outcome.usage.input_tokens > 10


@pytest.mark.model
async def test_a_known_vector_of_the_reference_implementation(engine):
    """sentence-transformers on the same weights: the first five numbers for this text."""
    (outcome,) = await engine.dispatch([ask("This is an example sentence")])
    expected = [0.0676569, 0.0634959, 0.0487131, 0.0793050, 0.0374480]
    assert np.allclose(vectors(outcome)[0][:5], expected, atol=2e-5)


@pytest.mark.model
async def test_base64_carries_the_same_bits(engine):
    plain, coded = await engine.dispatch([ask("Hello"), ask("Hello", encoding_format="base64")])
    data = json.loads(coded.body)["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(data), dtype=np.float32), vectors(plain)[0])


@pytest.mark.model
async def test_token_ids_and_lists_are_taken(engine):
    by_text, by_ids, several = await engine.dispatch(
        [ask("hello"), ask([101, 7592, 102]), ask([[101, 7592, 102], [101, 102]])]
    )
    assert np.array_equal(vectors(by_text)[0], vectors(by_ids)[0])
    assert len(vectors(several)) == 2
    (unknown,) = await engine.dispatch([ask([101, 99_999_999])])
    assert unknown.status_code == 400


@pytest.mark.model
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_text_has_the_same_bits_alone_and_in_200_companies(precision):
    folder = resolve("minilm-l6-v2").path
    from batchyard.engines.models.cache import cache_folder

    dice = np.random.default_rng(7)
    for threads in (1, 2):
        encoder = Encoder(folder, precision, cache_folder() / "graphs", threads=threads)
        lengths = [3, 7, 12, 20, 33, 50, 64]
        pool = {length: dice.integers(1000, 20_000, length) for length in lengths}
        alone = {length: encoder.run([ids])[0] for length, ids in pool.items()}
        for _ in range(200):
            company = sorted(dice.choice(lengths, size=dice.integers(1, 7), replace=False))
            together = encoder.run([pool[length] for length in company])
            for length, vector in zip(company, together, strict=True):
                assert np.array_equal(vector, alone[length])


@pytest.mark.model
def test_int8_stays_near_fp32_and_finds_the_same_neighbours():
    from batchyard.engines.models.cache import cache_folder

    folder = resolve("minilm-l6-v2").path
    dice = np.random.default_rng(3)
    ids = [dice.integers(1000, 25_000, length) for length in (5, 9, 17, 31, 48)]
    exact, near = (
        np.concatenate([Encoder(folder, precision, cache_folder() / "graphs").run([one]) for one in ids])
        for precision in ("fp32", "int8")
    )
    assert (exact * near).sum(axis=1).min() >= 0.985
    assert np.array_equal((exact @ exact.T).argmax(axis=1), (near @ exact.T).argmax(axis=1))


@pytest.mark.model
async def test_many_dispatches_at_once_keep_their_places(engine):
    given = texts(60)
    outcomes = await asyncio.gather(*(engine.dispatch([ask(one, f"r{i}")]) for i, one in enumerate(given)))
    (whole,) = await engine.dispatch([ask(given)])
    for (outcome,), expected in zip(outcomes, vectors(whole), strict=True):
        assert np.array_equal(vectors(outcome)[0], expected)


@pytest.mark.model
async def test_a_text_over_the_limit_is_cut_and_told(engine):
    events = EventBus()
    seen = []
    events.subscribe(seen.append)
    engine._events = events
    (outcome,) = await engine.dispatch([ask(["short", "word " * 900])])
    assert json.loads(outcome.body)["truncated"] == [1]
    assert outcome.usage.input_tokens == 256 + 3
    assert [event.name for event in seen] == ["request.truncated"]
    assert await engine.count_tokens([ask("word " * 900)]) == [902]


@pytest.mark.model
async def test_a_killed_child_fails_what_was_in_flight_and_comes_back(engine):
    pid = engine.pid
    waiting = asyncio.create_task(engine.dispatch([ask(texts(400), "big")]))
    while not engine._waiting:
        await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    (outcome,) = await waiting
    assert isinstance(outcome, Fault)
    assert outcome.kind is FaultKind.ENGINE_DIED
    (again,) = await engine.dispatch([ask("hello")])
    assert len(vectors(again)) == 1
    assert engine.pid != pid


@pytest.mark.model
async def test_a_cancelled_dispatch_leaves_its_neighbours_alone(engine):
    neighbour = asyncio.create_task(engine.dispatch([ask(texts(40, 1))]))
    doomed = asyncio.create_task(engine.dispatch([ask(texts(400, 2))]))
    while len(engine._waiting) < 2:
        await asyncio.sleep(0)
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    (outcome,) = await neighbour
    assert len(vectors(outcome)) == 40
    assert not engine._waiting


@pytest.mark.model
async def test_damaged_weights_are_one_clear_sentence(tmp_path):
    source = resolve("minilm-l6-v2").path
    for path in source.rglob("*"):
        if path.is_file() and path.name != ".lock":
            target = tmp_path / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            target.write_bytes(data[: len(data) // 2] if path.suffix == ".safetensors" else data)
    made = OnnxEngine(str(tmp_path))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        await made.start()
    await made.close()
