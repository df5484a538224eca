"""More of what a batcher promises: order, limits, threads, loops, ends, and what it tells of itself."""

import asyncio
import gc
import os
import threading
from collections import Counter

import pytest
from batcher_doubles import Gate, double, settle

from batchyard import (
    Batcher,
    BatcherClosed,
    EventBus,
    QueueFull,
    UsageError,
    WrongLoop,
    batched,
)
from batchyard.testing.virtual_loop import VirtualTimeLoop


def test_tiers_go_first_without_starving_the_lower():
    async def main():
        order = []

        async def f(items):
            order.extend(items)
            await asyncio.sleep(1)
            return items

        async with Batcher(f, max_items=1, tiers={"chat": 0.0, "bulk": 5.0}) as batcher:
            calls = [batcher.submit("first")]
            await asyncio.sleep(0.1)
            calls += [batcher.submit(f"bulk{i}", tier="bulk") for i in range(2)]
            for i in range(12):
                calls.append(batcher.submit(f"chat{i}", tier="chat"))
                await asyncio.sleep(0.9)
            await asyncio.gather(*calls)
        return order

    order = VirtualTimeLoop.run(main())
    assert order.index("chat0") < order.index("bulk0")
    assert order.index("bulk0") < order.index("chat11")


async def test_priority_is_a_head_start_and_order_within_equals_is_arrival():
    gate = Gate()
    async with Batcher(gate, max_items=10) as batcher:
        calls = [batcher.submit("first")]
        await gate.called()
        calls += [batcher.submit(i) for i in range(3)]
        calls.append(batcher.submit("urgent", priority=5))
        gate.open()
        await asyncio.gather(*calls)
    assert gate.batches[1] == ["urgent", 0, 1, 2]


async def test_a_full_queue_blocks_rejects_or_drops_the_oldest():
    for overflow in ("reject", "drop_oldest", "block"):
        gate = Gate()
        async with Batcher(gate, max_queue=2, overflow=overflow, max_items=2) as batcher:
            first = batcher.submit("first")
            await gate.called()
            calls = [batcher.submit(i) for i in range(4)]
            await settle()
            gate.open()
            answers = await asyncio.gather(first, *calls, return_exceptions=True)
        refused = [i - 1 for i, one in enumerate(answers) if isinstance(one, QueueFull)]
        assert refused == {"reject": [2, 3], "drop_oldest": [0, 1], "block": []}[overflow]


async def test_several_dispatches_run_at_once_up_to_max_parallel():
    running = most = 0
    release = asyncio.Event()

    async def f(items):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            release.set()
        await release.wait()
        running -= 1
        return items

    async with Batcher(f, max_items=1, max_parallel=3) as batcher:
        assert await batcher.map(range(9)) == list(range(9))
    assert most == 3


async def test_a_plain_function_runs_in_a_thread_and_never_blocks_the_loop():
    loop_thread = threading.get_ident()
    seen = []
    let_go = threading.Event()

    def f(items):
        seen.append(threading.get_ident())
        assert let_go.wait(30)
        return items

    async with Batcher(f) as batcher:
        call = batcher.submit(1)
        while not seen:
            await asyncio.sleep(0)
        let_go.set()
        assert await call == 1
    assert seen != [loop_thread]
    async with Batcher(lambda items: [threading.get_ident()] * len(items), executor="inline") as batcher:
        assert await batcher(1) == loop_thread


async def test_map_and_stream_keep_order_or_bring_answers_as_they_come():
    async with Batcher(double, max_items=4) as batcher:
        assert await batcher.map(range(20)) == [2 * i for i in range(20)]
        assert [one async for one in batcher.stream(range(20))] == [2 * i for i in range(20)]
        found = {index: one async for index, one in batcher.stream(range(20), ordered=False)}
        assert found == {i: 2 * i for i in range(20)}


async def test_a_stream_reads_no_further_than_it_must():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield taken

    async with Batcher(double, max_items=4) as batcher:
        stream = batcher.stream(endless(), ahead=10)
        for _ in range(5):
            await anext(stream)
        await stream.aclose()
    assert taken <= 20


async def test_map_raises_the_first_error_and_cancels_the_rest():
    async def f(items):
        return [ValueError(item) if item == 3 else item for item in items]

    async with Batcher(f, max_items=2) as batcher:
        with pytest.raises(ValueError, match="3"):
            await batcher.map(range(100))
        await batcher.drain()
        assert batcher.stats.cancelled > 50


async def test_close_answers_what_waits_and_takes_no_more():
    batcher = Batcher(double)
    calls = [batcher.submit(i) for i in range(3)]
    await batcher.close()
    assert await asyncio.gather(*calls) == [0, 2, 4]
    with pytest.raises(BatcherClosed):
        await batcher(1)
    await batcher.close()


async def test_close_without_drain_fails_what_waits_and_finishes_what_runs():
    gate = Gate()
    batcher = Batcher(gate, max_items=1)
    running, waiting = batcher.submit(0), batcher.submit(1)
    await gate.called()
    closing = asyncio.create_task(batcher.close(drain=False))
    with pytest.raises(BatcherClosed):
        await waiting
    gate.open()
    assert await running == ("answer", 0)
    await closing


async def test_an_error_that_is_no_exception_reaches_every_caller_and_the_loop_lives():
    async def f(items):
        if "stop" in items:
            raise asyncio.CancelledError
        return items

    async with Batcher(f, on_error="all") as batcher:
        stopped = await asyncio.gather(batcher("stop"), batcher("b"), return_exceptions=True)
        assert all(isinstance(one, BaseException) for one in stopped)
        assert await batcher("fine") == "fine"


def test_an_idle_batcher_wakes_for_nothing():
    """On virtual time an idle loop with timers would jump for ever; here nothing is scheduled."""

    async def main():
        loop = asyncio.get_running_loop()
        async with Batcher(double, max_wait_s=0.5, policy="threshold") as batcher:
            await batcher(1)
            await batcher.drain()
            timers = [one for one in loop._scheduled if not one.cancelled()]
            return len(timers), len(loop._ready)

    timers, ready = VirtualTimeLoop.run(main())
    assert (timers, ready) == (0, 0)


async def test_cost_is_asked_once_for_each_item_however_long_the_queue():
    asked = Counter()

    def cost(item):
        asked[item] += 1
        return 1

    async with Batcher(double, max_items=16, max_cost=50, cost=cost) as batcher:
        await batcher.map(range(3000))
    assert set(asked.values()) == {1}


async def test_another_event_loop_is_refused_while_the_first_is_at_work():
    gate = Gate()
    batcher = Batcher(gate)
    call = batcher.submit(1)
    await gate.called()
    said = []

    def other():
        async def main():
            try:
                await batcher(2)
            except WrongLoop as error:
                said.append(str(error))

        asyncio.run(main())

    thread = threading.Thread(target=other)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0)
    thread.join()
    gate.open()
    await call
    await batcher.close()
    assert said


def test_threads_call_and_map_and_never_from_the_own_loop():
    async def main():
        async with Batcher(double) as batcher:
            loop = asyncio.get_running_loop()
            assert await batcher(1) == 2
            one, many = await asyncio.gather(
                loop.run_in_executor(None, batcher.call, 21),
                loop.run_in_executor(None, batcher.call_map, range(5)),
            )
            assert (one, many) == (42, [0, 2, 4, 6, 8])
            with pytest.raises(WrongLoop):
                batcher.call(1)

    asyncio.run(main())


def test_threads_without_any_loop_get_one():
    with Batcher(double) as batcher:
        results = []
        threads = [threading.Thread(target=lambda i=i: results.append(batcher.call(i))) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(results) == [2 * i for i in range(8)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_after_a_fork_the_child_is_told_or_served_but_never_hangs():
    with Batcher(double) as batcher:
        assert batcher.call(1) == 2
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                answer = str(batcher.call(2, timeout_s=20))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the parent wants to know
                answer = type(error).__name__
            os.write(writing, answer.encode())
            os._exit(0)
        os.close(writing)
        said = os.read(reading, 100).decode()
        os.close(reading)
        os.waitpid(child, 0)
        assert said in {"4", "WrongLoop", "BatcherClosed"}, said


async def test_repr_and_stats_tell_the_state_in_counts():
    gate = Gate()
    async with Batcher(gate, max_items=2, name="embed") as batcher:
        calls = [batcher.submit(i) for i in range(5)]
        await gate.called()
        calls[4].cancel()
        await settle()
        assert repr(batcher).startswith("<Batcher embed [2 waiting, 2 running | 0 completed")
        gate.open()
        await asyncio.gather(*calls, return_exceptions=True)
        stats = batcher.stats
        assert (stats.submitted, stats.completed, stats.cancelled) == (5, 4, 1)
        parts = (stats.waiting, stats.running, stats.completed, stats.failed, stats.cancelled)
        assert stats.submitted == sum(parts) + stats.expired + stats.dropped
        assert stats.mean_batch == 2.0


async def test_a_cancelled_item_is_counted_whoever_meets_it_first():
    gate = Gate()
    async with Batcher(gate, key=len, max_items=1) as batcher:
        calls = [batcher.submit("a")]
        await gate.called()
        batcher.submit("b").cancel()
        # The next arrival with its key, not a draw, is who finds it gone.
        calls.append(batcher.submit("c"))
        stats = batcher.stats
        assert (stats.submitted, stats.waiting, stats.running, stats.cancelled) == (3, 1, 1, 1)
        gate.open()
        await asyncio.gather(*calls)


async def test_counts_add_up_while_a_failed_dispatch_is_taken_apart():
    seen = []

    async def f(items):
        stats = batcher.stats
        seen.append(stats.submitted)
        if len(items) > 1 or items == ["poison"]:
            raise ValueError("no")
        return items

    async with Batcher(f, max_items=4) as batcher:
        await asyncio.gather(*map(batcher, ["a", "b", "poison", "d"]), return_exceptions=True)
    assert set(seen) == {4}


async def test_events_tell_each_dispatch():
    events, seen = EventBus(), []
    events.subscribe(lambda event: seen.append(event.name))
    async with Batcher(double, events=events) as batcher:
        await batcher.map(range(3))
    assert seen == ["dispatch.started", "dispatch.finished"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_items": 0},
        {"max_cost": 5},
        {"policy": "psychic"},
        {"policy": "adaptive"},
        {"max_wait_s": -1},
        {"max_parallel": 0},
        {"max_queue": 0},
        {"allowed_sizes": [0, 4]},
        {"on_error": "ignore"},
        {"overflow": "explode"},
    ],
)
def test_options_that_make_no_sense_are_refused_in_words(options):
    with pytest.raises(UsageError) as caught:
        Batcher(double, **options)
    assert len(str(caught.value)) > 20


async def test_decorated_functions_methods_and_options():
    sizes = []

    @batched(max_items=4)
    async def f(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return [item + 1 for item in items]

    class Model:
        def __init__(self, by):
            self.by = by

        @batched(max_items=8)
        async def scale(self, items: list[int]) -> list[int]:
            return [item * self.by for item in items]

    assert await asyncio.gather(*(f(i) for i in range(8))) == list(range(1, 9))
    assert sizes == [4, 4]
    two, three = Model(2), Model(3)
    assert await asyncio.gather(two.scale(5), three.scale(5)) == [10, 15]


async def test_a_batched_method_does_not_keep_its_object_alive():
    import weakref

    class Model:
        @batched
        async def same(self, items: list[int]) -> list[int]:
            return items

    model = Model()
    assert await model.same(1) == 1
    ghost = weakref.ref(model)
    del model
    for _ in range(3):
        await asyncio.sleep(0)
        gc.collect()
    assert ghost() is None


async def test_no_answer_is_lost_under_random_cancels():
    import random

    dice = random.Random(5)

    async def f(items):
        await asyncio.sleep(0)
        return items

    async with Batcher(f, max_items=7, max_parallel=2) as batcher:
        calls = []
        for i in range(2000):
            calls.append(batcher.submit(i))
            if dice.random() < 0.3:
                dice.choice(calls).cancel()
            if dice.random() < 0.1:
                await asyncio.sleep(0)
        answers = await asyncio.gather(*calls, return_exceptions=True)
    for i, answer in enumerate(answers):
        assert answer == i or isinstance(answer, asyncio.CancelledError)
