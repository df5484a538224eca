"""The gate before a shared engine: never more inside than slots, and nothing leaks, whoever gives up when."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from batchyard.scheduling.scheduler import Demand
from batchyard.scheduling.windows import BulkWindow, EngineWindow
from batchyard.service.hosting.gate import Gate
from batchyard.testing.virtual_loop import VirtualTimeLoop


class LoopClock:
    """The loop's own time, which jumps in these tests."""

    def wall(self):
        return asyncio.get_running_loop().time()


def gate(slots):
    return Gate(EngineWindow(slots), BulkWindow(reserve=0), LoopClock())


async def test_live_work_goes_before_every_batch_and_the_earliest_window_before_the_others():
    one = gate(1)
    order = []
    release = asyncio.Event()

    async def come(name, demand):
        ticket = await one.enter(demand, 1.0)
        order.append(name)
        await release.wait()
        one.leave(ticket)

    async with asyncio.TaskGroup() as group:
        group.create_task(come("first", Demand("t", False, deadline=5e12)))
        await asyncio.sleep(0)
        for name, demand in (
            ("tomorrow", Demand("t", False, deadline=9e12)),
            ("today", Demand("t", False, deadline=3e12)),
            ("preferred", Demand("t", False, deadline=9.5e12, priority=1)),
            ("live", Demand("t", True)),
            ("live too", Demand("t", True)),
        ):
            group.create_task(come(name, demand))
        await asyncio.sleep(0)
        assert one.waiting == 5
        release.set()
    assert order == ["first", "live", "live too", "preferred", "today", "tomorrow"]
    assert one.waiting == 0


callers = st.lists(
    st.tuples(st.floats(0, 5), st.floats(0, 3), st.floats(0, 6), st.booleans(), st.integers(0, 2)),
    max_size=30,
)


@settings(deadline=None)
@given(st.integers(1, 4), callers)
def test_slots_are_never_overdrawn_and_never_lost_whoever_gives_up_when(count, callers):
    inside = most = 0

    async def caller(one, come):
        nonlocal inside, most
        at_s, takes_s, patience_s, interactive, tenant = come
        await asyncio.sleep(at_s)
        try:
            async with asyncio.timeout(patience_s):
                ticket = await one.enter(Demand(str(tenant), interactive), 1.0)
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(takes_s)
                finally:
                    inside -= 1
                    one.leave(ticket)
        except TimeoutError:
            pass

    async def main():
        one = gate(count)
        await asyncio.gather(*(caller(one, each) for each in callers))
        assert inside == 0
        assert one.waiting == 0
        # Every slot is there again.
        async with asyncio.timeout(1):
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(caller(one, (0.0, 0.5, 1.0, True, 0)))

    VirtualTimeLoop.run(main())
    assert most <= count
