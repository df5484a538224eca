"""Several engines behind one model: the least busy one answers, and one that is gone is passed over."""

import asyncio

import pytest

from batchyard.clock import ManualClock, SystemClock
from batchyard.engines.echo import EchoEngine
from batchyard.errors import EngineError
from batchyard.scheduling.upstreams import UpstreamState
from batchyard.service.hosting.pool import EnginePool
from batchyard.testing.virtual_loop import VirtualTimeLoop
from batchyard.types import Answer, Endpoint, Fault, FaultKind, Request


def request(n=0):
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
    return Request(f"r{n}", Endpoint.CHAT, body, "m", n)


class Broken(EchoEngine):
    """Does not start, or does not answer."""

    def __init__(self, *, starts):
        super().__init__()
        self.starts = starts

    async def start(self):
        if not self.starts:
            raise EngineError("no model here")

    async def dispatch(self, requests):
        raise EngineError("gone")


async def test_calls_go_where_there_is_most_room(tmp_path):
    logs = [tmp_path / "one", tmp_path / "two"]
    members = [(EchoEngine(0.01, log_path=log), room) for log, room in zip(logs, (1, 3), strict=True)]
    pool = EnginePool(members, ManualClock())
    await pool.start()
    await asyncio.gather(*(pool.dispatch([request(n)]) for n in range(8)))
    counts = [len(log.read_text().split()) for log in logs]
    assert counts == [2, 6]
    assert pool.capabilities.slots == 4


class Counting(EchoEngine):
    """How often it was asked."""

    calls = 0

    async def dispatch(self, requests):
        self.calls += 1
        return await super().dispatch(requests)


async def test_one_that_cannot_be_reached_is_passed_over_and_tried_again_later():
    clock = ManualClock()
    lost = Counting.from_spec("fail=*:unreachable")
    good = EchoEngine()
    pool = EnginePool([(lost, 4), (good, 4)], clock)
    for n in range(5):
        (outcome,) = await pool.dispatch([request(n)])
        assert isinstance(outcome, Answer)
    assert lost.calls == 1
    assert repr(pool) == "<EnginePool [0 of 4, ejected, 0 of 4]>"
    clock.advance(6)
    await pool.dispatch([request(9)])
    assert lost.calls == 2


async def test_when_all_are_gone_it_says_so():
    lost = [EchoEngine.from_spec("fail=*:unreachable") for _ in range(2)]
    (outcome,) = await EnginePool([(one, 1) for one in lost], ManualClock()).dispatch([request()])
    assert isinstance(outcome, Fault)
    broken = EnginePool([(Broken(starts=True), 1), (Broken(starts=True), 1)], ManualClock())
    with pytest.raises(EngineError, match="gone"):
        await broken.dispatch([request()])
    with pytest.raises(EngineError, match="no model here"):
        await EnginePool([(Broken(starts=False), 1)] * 2, ManualClock()).start()


async def test_one_that_does_not_start_is_left_out():
    pool = EnginePool([(Broken(starts=False), 4), (EchoEngine(), 2)], ManualClock())
    await pool.start()
    (outcome,) = await pool.dispatch([request()])
    assert isinstance(outcome, Answer)
    chunks = [chunk async for chunk in pool.stream(request())]
    assert chunks
    assert repr(pool) == "<EnginePool [0 of 4, ejected, 0 of 2]>"
    await pool.close()


def test_one_that_did_not_start_joins_once_it_does():
    async def main():
        late = Broken(starts=False)
        pool = EnginePool([(late, 4), (EchoEngine(), 2)], SystemClock())
        await pool.start()
        late.starts = True
        await asyncio.sleep(3)
        assert repr(pool) == "<EnginePool [0 of 4, half_open, 0 of 2]>"
        await pool.close()

    VirtualTimeLoop.run(main())


class Checkable(EchoEngine):
    """An upstream whose health can be asked for."""

    well = False

    async def dispatch(self, requests):
        return [Fault(FaultKind.UNREACHABLE, "gone")] if not self.well else await super().dispatch(requests)

    async def check(self):
        if not self.well:
            raise EngineError("still gone")


def test_a_health_check_brings_one_back_before_its_rest_is_over():
    async def main():
        ill = Checkable()
        pool = EnginePool([(ill, 4), (EchoEngine(), 2)], SystemClock())
        await pool.start()
        for _ in range(3):
            # Each check that fails makes its rest longer.
            await pool.dispatch([request()])
            await asyncio.sleep(30)
        ill.well = True
        await asyncio.sleep(2.5)
        assert pool.upstreams.all[0].state is UpstreamState.HALF_OPEN
        await pool.dispatch([request()])
        assert pool.upstreams.all[0].state is UpstreamState.HEALTHY
        await pool.close()

    VirtualTimeLoop.run(main())


def test_the_slow_one_is_hedged_and_the_first_answer_counts():
    async def main():
        slow, fast = EchoEngine(5.0), EchoEngine(0.1)
        pool = EnginePool([(slow, 4), (fast, 4)], SystemClock(), hedge_after_s=0.5)
        loop = asyncio.get_running_loop()
        began = loop.time()
        (outcome,) = await pool.hedged_dispatch([request()])
        assert isinstance(outcome, Answer)
        assert loop.time() - began == pytest.approx(0.6)
        assert (pool.hedged, pool.hedges_won) == (1, 1)
        assert repr(pool) == "<EnginePool [0 of 4, 0 of 4]>"
        # Whoever did not ask for it is not hedged.
        await pool.dispatch([request()])
        assert pool.hedged == 1

    VirtualTimeLoop.run(main())


def test_a_hedge_that_fails_leaves_the_first_its_time():
    async def main():
        slow, bad = EchoEngine(5.0), EchoEngine.from_spec("fail=*:500")
        pool = EnginePool([(slow, 4), (bad, 4)], SystemClock(), hedge_after_s=0.5)
        (outcome,) = await pool.hedged_dispatch([request()])
        assert isinstance(outcome, Answer)
        assert (pool.hedged, pool.hedges_won) == (1, 0)

    VirtualTimeLoop.run(main())
