"""What a decision costs: microseconds a request (submit, grant, complete) with so many waiting.

    python benchmarks/bench_scheduler.py [--most 1000000]

A hundred tenants, 64 slots; once with each waiting request a demand of its own (live work), once with a
thousand demands that share them (Batches).
"""

from __future__ import annotations

import argparse
import random
import time

from batchyard.scheduling.scheduler import Demand, Scheduler, Ticket
from batchyard.scheduling.windows import BulkWindow, EngineWindow


def cost_us(waiting: int, demands: int) -> float:
    chance = random.Random(1)
    scheduler = Scheduler(EngineWindow(64), BulkWindow())
    made = [
        Demand(f"tenant-{chance.randrange(100)}", interactive=False, deadline=chance.uniform(1e5, 1e6))
        for _ in range(demands)
    ]
    tickets = [Ticket(made[n % demands], cost=100.0) for n in range(waiting)]
    now, done = 0.0, 0
    begun = time.perf_counter()
    for ticket in tickets:
        scheduler.submit(ticket, now)
    running = scheduler.schedule(now)
    while running:
        now += 0.01 / 64  # each takes 10 ms
        scheduler.complete(running.pop(), now, tokens_out=50.0)
        done += 1
        running += scheduler.schedule(now)
    assert done == waiting
    return (time.perf_counter() - begun) / waiting * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--most", type=int, default=1_000_000)
    options = parser.parse_args()
    print(f"{'waiting':>10}{'each its own demand':>22}{'in 1,000 demands':>19}")
    waiting = 1_000
    while waiting <= options.most:
        print(
            f"{waiting:10,}{cost_us(waiting, waiting):19.1f} us{cost_us(waiting, min(1_000, waiting)):16.1f} us"
        )
        waiting *= 10


if __name__ == "__main__":
    main()
