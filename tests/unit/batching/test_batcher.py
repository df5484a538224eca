"""What a batcher promises, one test a promise; peers break most of them."""

import asyncio
import gc
import os
import threading
from collections import Counter

import pytest

from batchyard import (
    AnswerTimeout,
    Batcher,
    BatcherClosed,
    DeadlineExceeded,
    DispatchFailed,
    EventBus,
    ItemTooLarge,
    QueueFull,
    Threshold,
    UsageError,
    WrongLoop,
    batched,
)
from batchyard.testing.virtual_loop import VirtualTimeLoop


class Gate:
    """A batch function that tells when it is called and returns when it is let."""

    def __init__(self):
        self.batches = []
        self._open = asyncio.Event()
        self._called = asyncio.Event()

    async def __call__(self, items):
        self.batches.append(list(items))
        self._called.set()
        await self._open.wait()
        return [("answer", item) for item in items]

    async def called(self):
        await self._called.wait()
        self._called.clear()

    def open(self):
        self._open.set()


async def double(items):
    return [2 * item for item in items]


async def settle():
    for _ in range(6):
        await asyncio.sleep(0)


async def test_calls_of_one_tick_ride_together_and_answers_find_their_callers():
    sizes = []

    async def f(items):
        sizes.append(len(items))
        return [item + 1 for item in items]

    async with Batcher(f) as batcher:
        assert await asyncio.gather(*(batcher(i) for i in range(10))) == list(range(1, 11))
    assert sizes == [10]


async def test_a_batch_grows_while_the_function_is_busy():
    """Late binding: nothing is closed before a slot is free."""
    gate = Gate()
    async with Batcher(gate, max_items=100) as batcher:
        calls = [batcher.submit(0)]
        await gate.called()
        for i in range(1, 40):
            calls.append(batcher.submit(i))
            await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*calls)
    assert [len(batch) for batch in gate.batches] == [1, 39]


async def test_a_cancelled_item_is_never_executed_and_its_neighbours_are_untouched():
    gate = Gate()
    async with Batcher(gate) as batcher:
        first = batcher.submit("first")
        await gate.called()
        neighbours = [batcher.submit(i) for i in range(3)]
        cancelled = batcher.submit("cancelled")
        after = batcher.submit("after")
        cancelled.cancel()
        gate.open()
        assert await asyncio.gather(first, *neighbours, after)
        assert batcher.stats.cancelled == 1
    assert gate.batches == [["first"], [0, 1, 2, "after"]]
    assert cancelled.cancelled()


async def test_cancelling_an_item_that_runs_lets_its_neighbours_have_their_answers():
    gate = Gate()
    async with Batcher(gate) as batcher:
        calls = [batcher.submit(i) for i in range(3)]
        await gate.called()
        calls[1].cancel()
        gate.open()
        assert await calls[0] == ("answer", 0)
        assert await calls[2] == ("answer", 2)
        with pytest.raises(asyncio.CancelledError):
            await calls[1]


async def test_one_poison_item_fails_alone_by_halving():
    calls = []

    async def f(items):
        calls.append(list(items))
        if 13 in items:
            raise ValueError("unlucky")
        return items

    async with Batcher(f, on_error="isolate") as batcher:
        answers = await asyncio.gather(*(batcher(i) for i in range(16)), return_exceptions=True)
        assert isinstance(answers[13], ValueError)
        assert [one for i, one in enumerate(answers) if i != 13] == [i for i in range(16) if i != 13]
        assert batcher.stats.failed == 1
    # Halving needs two calls a level: 1 + 2·log2(16).
    assert len(calls) <= 9


async def test_on_error_all_fails_the_dispatch_as_it_is():
    async def f(items):
        raise ValueError("no")

    async with Batcher(f, on_error="all") as batcher:
        answers = await asyncio.gather(*(batcher(i) for i in range(4)), return_exceptions=True)
        assert all(isinstance(one, ValueError) for one in answers)
        assert batcher.stats.dispatches == 1
        assert batcher.stats.retries == 0


async def test_a_function_may_return_an_exception_for_an_item():
    async def f(items):
        return [KeyError(item) if item == 1 else item for item in items]

    async with Batcher(f) as batcher:
        zero, one, two = await asyncio.gather(*map(batcher, range(3)), return_exceptions=True)
    assert (zero, two) == (0, 2)
    assert isinstance(one, KeyError)


@pytest.mark.parametrize("answer", [[1], [1, 2, 3, 4], None, 7])
async def test_an_answer_of_the_wrong_length_is_a_clear_error_for_all(answer):
    async def f(items):
        return answer

    async with Batcher(f, on_error="all") as batcher:
        answers = await asyncio.gather(*map(batcher, range(3)), return_exceptions=True)
    assert all(isinstance(one, DispatchFailed) for one in answers)
    assert "one result for each item" in str(answers[0])


async def test_a_cost_function_that_raises_fails_that_item_only():
    async with Batcher(double, max_cost=100, cost=lambda item: 1 / (item - 1)) as batcher:
        zero, one, two = await asyncio.gather(*(batcher(i) for i in (3, 1, 2)), return_exceptions=True)
    assert (zero, two) == (6, 4)
    assert isinstance(one, ZeroDivisionError)


async def test_an_oversize_item_fails_alone_and_the_loop_lives_on():
    async with Batcher(double, max_cost=10, cost=lambda item: item) as batcher:
        small, large, after = await asyncio.gather(*(batcher(i) for i in (3, 11, 4)), return_exceptions=True)
        assert (small, after) == (6, 8)
        assert isinstance(large, ItemTooLarge)
        cancelled = batcher.submit(5000)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert await batcher(1) == 2


async def test_budgets_hold_for_every_dispatch_ragged_and_padded():
    for padded in (False, True):
        batches = []

        async def f(items, batches=batches):
            batches.append(list(items))
            return items

        async with Batcher(f, max_items=7, max_cost=20, cost=lambda item: item, padded=padded) as batcher:
            await batcher.map([1 + i * 7 % 13 for i in range(60)])
        for batch in batches:
            assert len(batch) <= 7
            assert (max(batch) * len(batch) if padded else sum(batch)) <= 20
        assert sum(map(len, batches)) == 60


async def test_large_items_do_not_starve_behind_small_ones():
    order = []

    async def f(items):
        order.extend(items)
        return items

    async with Batcher(f, max_cost=10, cost=lambda item: item, lookahead=8) as batcher:
        calls = [batcher.submit(3)]
        calls += [batcher.submit(9)]
        for _ in range(200):
            calls.append(batcher.submit(1))
        await asyncio.gather(*calls)
    assert order.index(9) < 120


async def test_only_like_rides_with_like():
    batches = []

    async def f(items):
        batches.append(items)
        return items

    async with Batcher(f, key=lambda item: item % 3) as batcher:
        await batcher.map(range(30))
    assert all(len({item % 3 for item in batch}) == 1 for batch in batches)
    assert sum(map(len, batches)) == 30


async def test_dispatches_are_filled_up_to_the_sizes_that_the_function_takes():
    sizes = []

    async def f(items):
        sizes.append(len(items))
        return items

    async with Batcher(f, allowed_sizes=[1, 4, 8]) as batcher:
        assert await batcher.map(range(6)) == list(range(6))
    assert set(sizes) <= {1, 4, 8}


def test_a_fixed_wait_counts_from_the_oldest_arrival():
    async def main():
        loop = asyncio.get_running_loop()
        at = []

        async def f(items):
            at.append((round(loop.time(), 6), len(items)))
            return items

        async with Batcher(f, max_wait_s=1.0) as batcher:
            calls = [batcher.submit(0)]
            await asyncio.sleep(0.6)
            calls.append(batcher.submit(1))
            await asyncio.gather(*calls)
        return at

    assert VirtualTimeLoop.run(main()) == [(1.0, 2)]


def test_threshold_goes_at_its_count_or_when_the_oldest_has_waited():
    async def main():
        loop = asyncio.get_running_loop()
        at = []

        async def f(items):
            at.append((round(loop.time(), 6), len(items)))
            return items

        async with Batcher(f, policy=Threshold(3), max_wait_s=5.0) as batcher:
            await asyncio.gather(*(batcher(i) for i in range(3)))
            await batcher(9)
        return at

    assert VirtualTimeLoop.run(main()) == [(0.0, 3), (5.0, 1)]


def test_tcp_ack_goes_when_the_waits_add_up_to_the_cost():
    from batchyard import TcpAck

    async def main():
        loop = asyncio.get_running_loop()
        at = []

        async def f(items):
            at.append((round(loop.time(), 6), len(items)))
            return items

        async with Batcher(f, policy=TcpAck(cost_s=1.0)) as batcher:
            calls = [batcher.submit(0)]
            await asyncio.sleep(0.5)
            calls.append(batcher.submit(1))
            await asyncio.gather(*calls)
        return at

    # Waits of t and t - 0.5 add up to 1 at t = 0.75.
    assert VirtualTimeLoop.run(main()) == [(0.75, 2)]


def test_the_deadline_policy_holds_as_long_as_the_deadline_allows():
    async def main():
        loop = asyncio.get_running_loop()
        at = []

        async def f(items):
            at.append(loop.time())
            await asyncio.sleep(0.1 + 0.01 * len(items))
            return items

        async with Batcher(f, policy="deadline") as batcher:
            for n in (1, 4, 2, 8, 3, 6):
                await batcher.map(range(n))
            begun = loop.time()
            await batcher(0, deadline_s=10.0)
            return at[-1] - begun, loop.time() - begun

    held_s, took_s = VirtualTimeLoop.run(main())
    assert held_s > 5
    assert took_s <= 10.0


def test_the_curve_is_learnt_and_adaptive_keeps_its_goal():
    async def main():
        sizes = []

        async def f(items):
            sizes.append(len(items))
            await asyncio.sleep(0.010 + 0.001 * len(items))
            return items

        async with Batcher(f, max_items=512, policy="adaptive", goal_s=0.1) as batcher:
            for n in (1, 3, 9, 20, 5, 30, 12):
                await batcher.map(range(n))
            curve = batcher.curve
            del sizes[:]
            await batcher.map(range(400))
        return curve, max(sizes)

    curve, largest = VirtualTimeLoop.run(main())
    assert curve.known
    assert abs(curve.fixed_s - 0.010) < 0.002
    assert abs(curve.predict_s(100) - 0.110) < 0.01
    # Twice a full dispatch must fit the goal: 2·(10 + n) ms ≤ 100 ms.
    assert largest <= 42


def test_a_deadline_that_passed_in_the_queue_is_told_and_not_computed():
    async def main():
        seen = []

        async def f(items):
            seen.extend(items)
            await asyncio.sleep(10)
            return items

        async with Batcher(f) as batcher:
            first = batcher.submit("first")
            await asyncio.sleep(1)
            late = batcher.submit("late", deadline_s=2)
            fine = batcher.submit("fine", deadline_s=60)
            with pytest.raises(DeadlineExceeded):
                await late
            assert await asyncio.gather(first, fine) == ["first", "fine"]
            assert batcher.stats.expired == 1
        return seen

    assert VirtualTimeLoop.run(main()) == ["first", "fine"]


def test_a_caller_may_give_up_wherever_its_item_is():
    async def main():
        async def f(items):
            await asyncio.sleep(10)
            return items

        async with Batcher(f) as batcher:
            running = batcher.submit(0, timeout_s=3)
            await asyncio.sleep(1)
            queued = batcher.submit(1, timeout_s=1)
            loop = asyncio.get_running_loop()
            for call, at in ((queued, 2.0), (running, 3.0)):
                with pytest.raises(AnswerTimeout):
                    await call
                assert loop.time() == pytest.approx(at)
            assert await batcher(2) == 2

    VirtualTimeLoop.run(main())


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
