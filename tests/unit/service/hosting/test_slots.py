"""The gate before a shared engine: never more inside than slots, the most urgent first, nothing leaks."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from batchyard.service.hosting.slots import NOW, Slots
from batchyard.testing.virtual_loop import VirtualTimeLoop


async def test_live_work_goes_before_every_batch_and_the_earliest_window_before_the_others():
    slots = Slots(1)
    order = []
    release = asyncio.Event()

    async def one(name, urgency):
        await slots.acquire(urgency)
        order.append(name)
        await release.wait()
        slots.release()

    async with asyncio.TaskGroup() as group:
        group.create_task(one("first", (0.0, 5000.0)))
        await asyncio.sleep(0)
        for name, urgency in (
            ("tomorrow", (0.0, 9000.0)),
            ("today", (0.0, 3000.0)),
            ("preferred", (-1.0, 9500.0)),
            ("live", NOW),
            ("live too", NOW),
        ):
            group.create_task(one(name, urgency))
        await asyncio.sleep(0)
        assert slots.waiting == 5
        release.set()
    assert order == ["first", "live", "live too", "preferred", "today", "tomorrow"]
    assert slots.waiting == 0


callers = st.lists(
    st.tuples(
        st.floats(0, 5), st.floats(0, 3), st.floats(0, 6), st.sampled_from([NOW, (0.0, 1.0), (0.0, 2.0)])
    ),
    max_size=30,
)


@settings(deadline=None)
@given(st.integers(1, 4), callers)
def test_slots_are_never_overdrawn_and_never_lost_whoever_gives_up_when(count, callers):
    inside = most = 0

    async def caller(slots, at_s, takes_s, patience_s, urgency):
        nonlocal inside, most
        await asyncio.sleep(at_s)
        try:
            async with asyncio.timeout(patience_s):
                await slots.acquire(urgency)
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(takes_s)
                finally:
                    inside -= 1
                    slots.release()
        except TimeoutError:
            pass

    async def main():
        slots = Slots(count)
        await asyncio.gather(*(caller(slots, *one) for one in callers))
        assert inside == 0
        assert slots.waiting == 0
        # Every slot is there again.
        async with asyncio.timeout(1):
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(caller(slots, 0.0, 0.5, 1.0, NOW))

    VirtualTimeLoop.run(main())
    assert most <= count
