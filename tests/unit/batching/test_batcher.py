"""What a batcher promises, one test a promise; peers break most of them."""

import asyncio

import pytest
from batcher_doubles import Gate, double

from batchyard import (
    AnswerTimeout,
    Batcher,
    DeadlineExceeded,
    DispatchFailed,
    ItemTooLarge,
    Threshold,
)
from batchyard.testing.virtual_loop import VirtualTimeLoop


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


async def test_a_padded_batch_takes_those_nearest_in_cost_to_the_first():
    gate = Gate()
    async with Batcher(gate, max_items=3, cost=int, max_cost=1000, padded=True) as batcher:
        calls = [batcher.submit(1)]
        await gate.called()
        calls += [batcher.submit(cost) for cost in (100, 7, 101, 8, 99, 9)]
        gate.open()
        await asyncio.gather(*calls)
    assert [set(batch) for batch in gate.batches] == [{1}, {100, 101, 99}, {7, 8, 9}]
    assert batcher.stats.padding_share < 0.02


def test_padding_that_takes_longer_than_another_dispatch_is_not_computed():
    async def f(costs):
        await asyncio.sleep(0.005 + 0.001 * max(costs) * len(costs))
        return costs

    async def main(costs):
        async with Batcher(f, max_items=8, cost=int, padded=True) as batcher:
            # Learn the curve from mixed batches first.
            for size in (1, 2, 3, 4, 5, 6, 7, 8):
                await batcher.map([size * 3] * size)
            before = batcher.stats.dispatches
            await batcher.map(costs)
            return batcher.stats.dispatches - before

    # Beside 100, a 1 wastes 99 ms to save 5; two more of 100 waste nothing; 96 wastes 4 ms to save 5.
    assert VirtualTimeLoop.run(main([100, 1, 100, 1])) == 2
    assert VirtualTimeLoop.run(main([100, 96])) == 1


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
