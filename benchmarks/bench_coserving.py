"""Chat and bulk on one engine: what does bulk cost chat, and how much of what is left does it get?

    python benchmarks/bench_coserving.py [--seconds 20]

An engine with 16 slots whose service time grows with how many it serves at once (10 ms + 0.5 ms each); chat
arrives as in the Azure 2023 conversation trace (gamma gaps, shape 0.84) at 30, 60 and 90 % of what the slots
carry, from one tenant; bulk of another always has more waiting. All on a virtual clock, through the same gate
and scheduler that a server uses, so that only decisions are measured. Beside it: the same load with no
scheduler (whoever comes first is served first), and chat alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable

from batchyard.scheduling.scheduler import Demand
from batchyard.scheduling.windows import BulkWindow, EngineWindow
from batchyard.service.hosting.gate import Gate
from batchyard.testing.virtual_loop import VirtualTimeLoop

SLOTS = 16
BASE_S, EACH_S = 0.010, 0.0005
#: What the slots carry when all are busy, in requests a second.
CAPACITY = SLOTS / (BASE_S + EACH_S * SLOTS)
LANES = 64


class LoopClock:
    """The loop's own time."""

    def wall(self) -> float:
        return asyncio.get_running_loop().time()


class First:
    """No scheduler: as many slots, first come, first served."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SLOTS)

    async def enter(self, _demand: Demand, _cost: float) -> None:
        await self._slots.acquire()

    def leave(self, _ticket: None) -> None:
        self._slots.release()


def scheduled() -> Gate:
    return Gate(EngineWindow(SLOTS), BulkWindow(), LoopClock())  # type: ignore[arg-type]  # asked for wall time only


def run(
    make: Callable[[], Gate | First], load: float, seconds: float, *, bulk: bool
) -> tuple[list[float], int]:
    """Latencies of chat in ms, and how many bulk requests were done."""
    took: list[float] = []
    done = 0

    async def main() -> None:
        nonlocal done
        gate = make()
        loop = asyncio.get_running_loop()
        chance = random.Random(5)
        running = 0

        async def serve(demand: Demand) -> None:
            nonlocal running
            ticket = await gate.enter(demand, 1.0)
            running += 1
            await asyncio.sleep(BASE_S + EACH_S * running)
            running -= 1
            gate.leave(ticket)  # type: ignore[arg-type]

        async def chat() -> None:
            begun = loop.time()
            await serve(Demand("chat", interactive=True))
            took.append((loop.time() - begun) * 1e3)

        async def lane(demand: Demand) -> None:
            nonlocal done
            while True:
                await serve(demand)
                done += 1

        everything = Demand("bulk", interactive=False, deadline=loop.time() + 86_400, remaining=10**9)
        lanes = [asyncio.create_task(lane(everything)) for _ in range(LANES if bulk else 0)]
        calls = []
        rate, shape = load * CAPACITY, 0.84
        ends = loop.time() + seconds
        while loop.time() < ends:
            await asyncio.sleep(chance.gammavariate(shape, 1 / (shape * rate)))
            calls.append(asyncio.create_task(chat()))
        await asyncio.gather(*calls)
        for one in lanes:
            one.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)

    VirtualTimeLoop.run(main())
    return sorted(took), done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    print(
        f"{SLOTS} slots, {CAPACITY:,.0f} requests/s when all are busy; {options.seconds:g} s of virtual time\n"
    )
    print(
        f"{'chat load':>10}{'':14}{'chat p50 ms':>13}{'p99 ms':>9}{'of alone':>10}{'bulk/s':>9}{'of what is left':>17}"
    )
    for load in (0.3, 0.6, 0.9):
        alone, _ = run(scheduled, load, options.seconds, bulk=False)
        rows = {"alone": (alone, 0)}
        for name, make in (("scheduled", scheduled), ("no scheduler", First)):
            rows[name] = run(make, load, options.seconds, bulk=True)
        left = (1 - load) * CAPACITY
        for name, (took, done) in rows.items():
            p99 = took[int(len(took) * 0.99)]
            ratio = p99 / alone[int(len(alone) * 0.99)]
            rate = done / options.seconds
            print(
                f"{load:10.0%}  {name:12}{took[len(took) // 2]:13.1f}{p99:9.1f}{ratio:10.2f}"
                f"{rate:9,.0f}{rate / left:17.0%}"
            )


if __name__ == "__main__":
    main()
