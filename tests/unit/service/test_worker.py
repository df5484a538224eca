"""The worker: what becomes of requests when upstreams fail, time runs out, or another worker takes over."""

import asyncio
import json
import random

import pytest

from batchyard.engines.echo import EchoEngine
from batchyard.engines.openai import OpenAIEngine
from batchyard.errors import EngineError, InputChanged, InvalidTransition, StoreError
from batchyard.events import EventBus
from batchyard.scheduling.breaker import BreakerPolicy
from batchyard.scheduling.canary import CanaryPolicy
from batchyard.scheduling.retry import RetryPolicy
from batchyard.service.batches import BatchService
from batchyard.service.intake.registration import IntakeRules
from batchyard.service.join import Order
from batchyard.service.work_plan import WorkPlan
from batchyard.testing.upstream import Upstream
from batchyard.types import Endpoint

RULES = IntakeRules(frozenset(Endpoint), allow_missing_model=True, chunk_requests=7)
EAGER = RetryPolicy(base_s=0.001, cap_s=0.002)


class Place:
    """A folder with an input, a service on it, and what came out."""

    def __init__(self, tmp_path, count=30, text="marker:{id}"):
        self.events = EventBus()
        self.source = tmp_path / "in.jsonl"
        self.output, self.errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
        self.ids = [f"r{i}" for i in range(count)]
        with self.source.open("w") as file:
            for one in self.ids:
                body = {"messages": [{"role": "user", "content": text.format(id=one)}]}
                line = {"custom_id": one, "method": "POST", "url": Endpoint.CHAT, "body": body}
                file.write(json.dumps(line) + "\n")
        self.service = BatchService(tmp_path / "state", events=self.events)
        self.batch = self.service.create(self.source, RULES, {})

    async def work(self, engine, on_worker=None, **plan):
        plan = {"concurrency": 4, "retry": EAGER, "sync_every_s": 0.0, **plan}
        await engine.start()
        try:
            return await self.service.work(self.batch.id, engine, WorkPlan(**plan), on_worker=on_worker)
        finally:
            await engine.close()

    def finish(self, order=Order.INPUT):
        self.service.finish(self.batch.id, self.output, self.errors, order)
        return self.lines(self.output), self.lines(self.errors)

    @staticmethod
    def lines(path):
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.service.close()


def kept(place):
    counts = place.service.finished(place.batch.id)
    return counts.succeeded + counts.failed


def ids(lines):
    return [line["custom_id"] for line in lines]


async def test_every_request_stands_once_in_one_of_the_files_in_input_order(place):
    assert await place.work(EchoEngine.from_spec("fail=r1?:400,max_batch=3")) is None
    output, errors = place.finish()
    assert ids(output) == [one for one in place.ids if not (len(one) == 3 and one[1] == "1")]
    assert ids(errors) == [f"r1{i}" for i in range(10)]
    assert place.service.get(place.batch.id).status == "completed"
    counts = place.service.counts(place.batch.id)
    assert (counts.succeeded, counts.failed) == (20, 10)
    assert not place.service.folder.segments(place.batch.id).folder.exists()


async def test_completion_order_holds_every_line_too(place):
    await place.work(EchoEngine.from_spec("latency=0ms..3ms,max_batch=1"))
    output, _ = place.finish(Order.COMPLETION)
    assert sorted(ids(output)) == sorted(place.ids)


async def test_a_passing_fault_is_retried_and_a_lasting_one_fails_alone(place):
    async with Upstream(rules={"r3": "500x2", "r5": "500", "r7": "torn", "r8": "html", "r9": "429x1"}) as url:
        assert await place.work(OpenAIEngine(url)) is None
    output, errors = place.finish()
    assert ids(errors) == ["r5", "r7", "r8"]
    assert ids(output) == [one for one in place.ids if one not in {"r5", "r7", "r8"}]
    by_id = {line["custom_id"]: line for line in errors}
    assert by_id["r5"]["response"]["status_code"] == 500
    assert by_id["r5"]["error"] is None
    assert by_id["r7"]["response"] is None
    assert "Gave up after" in by_id["r7"]["error"]["message"]
    assert by_id["r8"]["error"]["code"] == "invalid_answer"


async def test_attempts_are_limited_for_each_request(place):
    upstream = Upstream(rules={"r5": "500"})
    async with upstream as url:
        await place.work(OpenAIEngine(url), retry=RetryPolicy(max_attempts=3, base_s=0, cap_s=0))
    assert upstream.calls_by_marker["r5"] == 3
    assert upstream.calls_by_marker["r6"] == 1


async def test_a_hanging_upstream_times_out_alone(place):
    async with Upstream(rules={"r2": "hang"}) as url:
        engine = OpenAIEngine(url, timeout_s=0.2)
        assert await place.work(engine, retry=RetryPolicy(max_attempts=1)) is None
    _, errors = place.finish()
    assert [line["error"]["code"] for line in errors] == ["request_timeout"]


async def test_an_upstream_that_goes_away_stops_the_run_and_costs_no_attempt(place):
    upstream = Upstream()
    url = await upstream.__aenter__()
    engine = OpenAIEngine(url)
    await engine.start()
    await upstream.close()
    plan = WorkPlan(
        concurrency=4,
        breaker=BreakerPolicy(threshold=2, probe_after_s=0.01, probe_cap_s=0.02, patience_s=0.1),
    )
    stop = await place.service.work(place.batch.id, engine, plan)
    await engine.close()
    assert stop.reason == "unreachable"
    assert "Nothing is lost" in stop.message
    assert place.service.counts(place.batch.id).failed == 0
    assert await place.work(EchoEngine()) is None
    output, errors = place.finish()
    assert (ids(output), errors) == (place.ids, [])


async def test_an_upstream_that_comes_back_is_found_by_a_probe(place):
    engine = EchoEngine.from_spec("fail=*:unreachablex3,max_batch=1")
    plan = {"breaker": BreakerPolicy(threshold=1, probe_after_s=0.001, probe_cap_s=0.001)}
    assert await place.work(engine, concurrency=2, **plan) is None
    output, errors = place.finish()
    assert (ids(output), errors) == (place.ids, [])


async def test_at_the_deadline_what_is_unfinished_gets_an_expired_line(place):
    upstream = Upstream(rules={"r4": "hold"})
    async with upstream as url:
        engine = OpenAIEngine(url)

        def expire_when_held(worker):
            async def wait():
                await upstream.until(lambda: upstream.calls_by_marker["r4"] == 1)
                worker.close("batch_expired", "Too late.")

            place.waiting = asyncio.create_task(wait())

        assert await place.work(engine, on_worker=expire_when_held, concurrency=1) is None
        await place.waiting
    output, errors = place.finish()
    assert ids(output) == ["r0", "r1", "r2", "r3"]
    assert ids(errors) == place.ids[4:]
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert upstream.calls_by_marker["r5"] == 0


async def test_a_deadline_that_has_passed_runs_nothing(place, tmp_path):
    log = tmp_path / "calls"
    engine = EchoEngine.from_spec(f"log={log},latency=50ms,max_batch=1")
    assert await place.work(engine, deadline_at=1.0) is None
    _, errors = place.finish()
    assert ids(errors) == place.ids
    assert len(log.read_text().splitlines()) <= 4


async def test_the_canary_holds_the_rest_and_a_second_run_goes_on(place):
    canary = CanaryPolicy(0.25, first=8)
    stop = await place.work(EchoEngine.from_spec("fail=r[0-3]:400,max_batch=2"), canary=canary)
    assert stop.reason == "canary"
    assert "More than 25% of the first 8 requests failed" in stop.message
    assert place.service.get(place.batch.id).status == "paused"
    assert kept(place) <= 8
    assert await place.work(EchoEngine()) is None
    output, errors = place.finish()
    assert sorted(ids(output) + ids(errors)) == sorted(place.ids)
    assert len(errors) >= 3


async def test_a_canary_that_sings_lets_everything_run(place):
    engine = EchoEngine.from_spec("fail=r2:500x2,fail=r3:400,max_batch=2")
    assert await place.work(engine, canary=CanaryPolicy(0.5, first=8)) is None
    output, errors = place.finish()
    assert ids(errors) == ["r3"]
    assert len(output) == 29


async def test_an_engine_that_cannot_go_on_stops_the_run_with_its_words(place):
    class Broken(EchoEngine):
        async def dispatch(self, requests):
            if any(one.custom_id == "r9" for one in requests):
                raise EngineError("The model fell over.")
            return await super().dispatch(requests)

    stop = await place.work(Broken(max_batch=1))
    assert (stop.reason, stop.message) == ("engine_failed", "The model fell over.")
    assert await place.work(EchoEngine()) is None
    output, _ = place.finish()
    assert ids(output) == place.ids


async def test_an_interrupted_run_resumes_with_what_was_finished(place):
    stops = []

    def stop_after_ten(worker):
        def listen(event):
            if event.name == "request.finished":
                stops.append(event.fields["custom_id"])
                if len(stops) == 10:
                    worker.stop("interrupted", "Interrupted.")

        place.events.subscribe(listen)

    stop = await place.work(EchoEngine(max_batch=1), on_worker=stop_after_ten)
    assert stop.reason == "interrupted"
    assert kept(place) == len(stops)
    partial = place.service.partial(place.batch.id)
    assert partial.output_lines == len(stops)
    again = []
    place.events.subscribe(
        lambda event: again.append(event.fields["custom_id"]) if event.name == "request.finished" else None
    )
    assert await place.work(EchoEngine(max_batch=1)) is None
    output, _ = place.finish()
    assert ids(output) == place.ids
    assert not set(stops[:10]) & set(again[:20])


def alike(place, log):
    """A Batch whose requests are alike but for their `custom_id`, at temperature 0; the calls it takes."""
    place.source.write_text(
        "".join(
            json.dumps(
                {
                    "custom_id": one,
                    "method": "POST",
                    "url": Endpoint.CHAT,
                    "body": {"messages": [{"role": "user", "content": "same"}], "temperature": 0},
                }
            )
            + "\n"
            for one in place.ids
        )
    )
    place.batch = place.service.create(place.source, RULES, {})
    return lambda: len(log.read_text().splitlines())


@pytest.mark.parametrize(("dedupe", "wanted"), [(None, 1), (True, 1), (False, 30)])
async def test_requests_alike_are_asked_once_and_each_has_its_line(place, tmp_path, dedupe, wanted):
    calls = alike(place, tmp_path / "log")
    workers = []
    assert (
        await place.work(
            EchoEngine.from_spec(f"max_batch=1,log={tmp_path / 'log'}"),
            on_worker=workers.append,
            dedupe=dedupe,
        )
        is None
    )
    output, errors = place.finish()
    assert (ids(output), errors, calls()) == (place.ids, [], wanted)
    assert len({json.dumps(one["response"]["body"]["choices"]) for one in output}) == 1
    assert workers[0].progress.deduped == len(place.ids) - wanted
    # What it cost is counted once for each call.
    usage = place.service.counts(place.batch.id).usage
    assert usage.output_tokens == wanted * output[0]["response"]["body"]["usage"]["completion_tokens"]


async def test_one_alike_that_fails_brings_the_others_no_answer(place, tmp_path):
    calls = alike(place, tmp_path / "log")
    engine = EchoEngine.from_spec(f"max_batch=1,fail=r0:500,log={tmp_path / 'log'}")
    assert await place.work(engine, retry=RetryPolicy(max_attempts=2, base_s=0, cap_s=0)) is None
    output, errors = place.finish()
    assert (ids(errors), ids(output)) == (["r0"], place.ids[1:])
    assert calls() == 3


async def test_requests_alike_that_are_cancelled_or_expire_get_their_own_line(place, tmp_path):
    alike(place, tmp_path / "log")
    withdrawn = frozenset({(0, 0), (0, 3), (1, 2)})
    assert await place.work(EchoEngine(max_batch=1), withdrawn=withdrawn) is None
    output, errors = place.finish()
    assert ids(errors) == ["r0", "r3", "r9"]
    assert {line["error"]["code"] for line in errors} == {"request_cancelled"}
    assert len(output) == len(place.ids) - 3


async def test_at_the_deadline_those_who_wait_for_one_alike_expire_with_it(place, tmp_path):
    alike(place, tmp_path / "log")
    assert (
        await place.work(EchoEngine.from_spec("latency=3600s"), deadline_at=place.service.clock.wall())
        is None
    )
    output, errors = place.finish()
    assert (output, ids(errors)) == ([], place.ids)


async def test_any_number_of_cancelled_requests_is_passed_over(tmp_path):
    place = Place(tmp_path, count=3000)
    withdrawn = frozenset((no // 7, no % 7) for no in range(2999))
    assert await place.work(EchoEngine(max_batch=1), withdrawn=withdrawn) is None
    output, errors = place.finish()
    assert (ids(output), len(errors)) == (["r2999"], 2999)
    place.service.close()


async def test_a_worker_whose_lease_is_lost_commits_nothing_of_that_chunk(tmp_path):
    place = Place(tmp_path, count=14)
    upstream = Upstream(rules={"r0": "hold"})
    async with upstream as url:

        def steal(worker):
            async def wait():
                await upstream.until(lambda: upstream.calls_by_marker["r0"] == 1)
                store = place.service._store
                far = place.service.clock.wall() + 1e6
                thief = await worker._in_keeper(lambda: store.claim(place.batch.id, "thief", 1, far, 9e9))
                assert [chunk.no for chunk in thief] == [0]
                upstream.release()

            place.waiting = asyncio.create_task(wait())

        lost = []
        place.events.subscribe(lambda event: lost.append(event) if event.name == "chunk.lost" else None)
        await place.work(OpenAIEngine(url), on_worker=steal)
        await place.waiting
    assert [event.fields["chunk"] for event in lost] == [0]
    assert place.service._store.remaining(place.batch.id) == 1
    place.service.close()


@pytest.mark.parametrize("damage", ["bit", "newline", "empty", "gone"])
async def test_committed_results_that_are_damaged_are_run_again(place, damage):
    assert await place.work(EchoEngine.from_spec("fail=r1?:400")) is None
    path = sorted(place.service.folder.segments(place.batch.id).folder.glob("*.seg"))[1]
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        if damage == "bit":
            data[len(data) // 2] ^= 1
        elif damage == "newline":
            data[data.index(b"\n")] = ord("x")
        else:
            data.clear()
        path.write_bytes(data)
    assert place.service.finish(place.batch.id, place.output, place.errors) is None
    assert not place.output.exists()
    assert place.service.get(place.batch.id).status == "in_progress"
    again = []
    place.events.subscribe(lambda event: again.append(event) if event.name == "request.finished" else None)
    assert await place.work(EchoEngine.from_spec("fail=r1?:400")) is None
    output, errors = place.finish()
    assert sorted(ids(output) + ids(errors)) == sorted(place.ids)
    # Chunks of 7: whole records of the damaged one are kept.
    assert len(again) == {"bit": 1, "newline": 2, "empty": 7, "gone": 7}[damage]


async def test_an_input_edited_in_place_during_the_run_stops_it_before_anything_altered_is_sent(tmp_path):
    place = Place(tmp_path, count=2000)
    sent = []

    class Watching(EchoEngine):
        async def dispatch(self, requests):
            sent.extend(one.body for one in requests)
            if len(sent) == 1:
                text = place.source.read_text()
                place.source.write_text(text.replace("marker:r1999", "marker:XXXXX"))
            return await super().dispatch(requests)

    stop = await place.work(Watching(max_batch=1), concurrency=1)
    assert stop.reason == "input_changed"
    assert not any(b"XXXXX" in body for body in sent)
    place.service.close()


async def test_a_changed_input_is_refused(place):
    place.source.write_text(place.source.read_text().replace("r0", "x0"))
    with pytest.raises(InputChanged, match="has changed"):
        await place.work(EchoEngine())
    place.source.unlink()
    with pytest.raises(InputChanged, match="is gone"):
        await place.work(EchoEngine())


async def test_a_touched_input_of_the_same_content_is_fine(place):
    place.source.write_text(place.source.read_text())
    assert await place.work(EchoEngine()) is None


async def test_an_ended_batch_is_not_worked_on(place):
    await place.work(EchoEngine())
    place.finish()
    with pytest.raises(InvalidTransition, match="completed"):
        await place.work(EchoEngine())


def test_one_process_works_on_a_folder_at_a_time(place, tmp_path):
    with pytest.raises(StoreError, match="Another batchyard process"):
        BatchService(tmp_path / "state")


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="no state folder of Batchyard"):
        BatchService(tmp_path / "mine")
    assert [one.name for one in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_fails_nothing_is_lost_and_nothing_stands_twice(tmp_path, seed):
    """Invariant 1, over scripts of faults and interruptions drawn at random."""
    dice = random.Random(seed)
    place = Place(tmp_path, count=60)
    for _ in range(3):
        left = dice.randrange(3, 25)

        def stop_later(worker, left=left):
            seen = []

            def listen(event):
                seen.append(event)
                if len(seen) == left:
                    worker.stop("interrupted", "")

            place.events.subscribe(listen)

        spec = f"seed={seed},fail=5%:500,fail=5%:timeout,fail=8%:429x1,fail=4%:404,max_batch={dice.randint(1, 5)}"
        stop = await place.work(EchoEngine.from_spec(spec), on_worker=stop_later)
        assert stop is None or stop.reason == "interrupted"
        if stop is None:
            break
    else:
        assert await place.work(EchoEngine()) is None
    output, errors = place.finish()
    assert sorted(ids(output) + ids(errors)) == sorted(place.ids)
    place.service.close()
