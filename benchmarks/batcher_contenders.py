"""The batchers that `bench_batcher.py` compares, each behind one `ask`; measures one of them in one process.

    python batcher_contenders.py overhead NAME CALLERS CALLS WAIT_MS LOOP
    python batcher_contenders.py memory NAME ITEMS
    python batcher_contenders.py poisson NAME LOAD ARRIVALS WAIT_MS virtual|real

Prints one line of JSON. Runs in the peers' own environment, with Batchyard's `src` on the path; a peer that
is not installed there ends with status 3.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import queue
import random
import sys
import threading
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
os.environ.setdefault("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "0")

MAX_BATCH = 64
#: The queueing model of the latency tables: a dispatch of n takes 5 ms + 0.2 ms·n, at most 32 ride.
FIXED_S, EACH_S, POISSON_BATCH = 0.005, 0.0002, 32


async def echo(items):
    """The batch function of the overhead measurements: costs nothing."""
    return list(items)


# -- the floors ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def bare_future(_function, _max_batch, _wait_s):
    loop = asyncio.get_running_loop()

    def ask(item):
        future = loop.create_future()
        loop.call_soon(future.set_result, item)
        return future

    yield ask


# -- ourselves -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def batchyard(function, max_batch, wait_s):
    from batchyard import Batcher

    async with Batcher(function, max_items=max_batch, max_wait_s=wait_s) as batcher:
        yield batcher


@contextlib.asynccontextmanager
async def batchyard_everything(function, max_batch, wait_s):
    """Tiers, a token budget and deadlines, all in use by every call."""
    from batchyard import Batcher

    async with Batcher(
        function,
        max_items=max_batch,
        max_wait_s=wait_s,
        cost=_one,
        max_cost=float(max_batch),
    ) as batcher:
        yield functools.partial(batcher, tier="flex", deadline_s=60.0)


def _one(_):
    return 1


# -- peers -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def aiodataloader(function, max_batch, _wait_s):
    from aiodataloader import DataLoader

    yield DataLoader(function, max_batch_size=max_batch, cache=False).load


@contextlib.asynccontextmanager
async def batched(function, max_batch, wait_s):
    from batched.aio import dynamically

    yield dynamically(function, batch_size=max_batch, timeout_ms=max(wait_s * 1000, 0.01))


@contextlib.asynccontextmanager
async def async_batcher(function, max_batch, wait_s):
    from async_batcher.batcher import AsyncBatcher

    class Ours(AsyncBatcher):
        async def process_batch(self, batch):
            return await function(batch)

    batcher = Ours(max_batch_size=max_batch, max_queue_time=wait_s)
    yield batcher.process
    await batcher.stop(force=True)


@contextlib.asynccontextmanager
async def batchlet(function, max_batch, wait_s):
    from batchlet import AsyncBatcher, BatchPolicy

    async with AsyncBatcher(
        function,
        policy=BatchPolicy(max_items=max_batch),
        max_wait_ms=wait_s * 1000,
        max_pending_items=10_000_000,
    ) as batcher:
        yield batcher.submit


@contextlib.asynccontextmanager
async def aioautobatch(function, max_batch, wait_s):
    from aioautobatch import autobatch

    async def of_tuples(items: list[tuple[int]]) -> list[int]:
        return await function([item for (item,) in items])

    wrapped = autobatch(
        of_tuples, start_delay=wait_s, batch_size=max_batch, max_delay=wait_s, max_concurrent_batches=1
    )

    async def ask(item):
        return await (await wrapped(item))

    yield ask


@contextlib.asynccontextmanager
async def bentoml(function, max_batch, _wait_s):
    from bentoml._internal.marshal.dispatcher import CorkDispatcher

    dispatcher = CorkDispatcher(
        max_latency_in_ms=10_000_000, max_batch_size=max_batch, fallback=lambda: None, get_batch_size=_one
    )
    ask = dispatcher(function)
    # Its optimiser has to see traffic before it batches.
    for number in range(20):
        await ask(number)
    for size in (2, 2, 3, 3, 4, 8):
        await asyncio.gather(*(ask(number) for number in range(size)))
    yield ask
    dispatcher.shutdown()


@contextlib.asynccontextmanager
async def ray_serve(function, max_batch, wait_s):
    from types import SimpleNamespace

    from ray import serve

    # It asks its replica how many requests may be under way; there is none outside of a Ray cluster.
    settings = SimpleNamespace(max_ongoing_requests=1 << 40)
    replica = SimpleNamespace(app_name="", deployment="", replica_id=None, _deployment_config=settings)
    serve.get_replica_context = lambda: replica

    async def batch(items):
        return await function(items)

    yield serve.batch(max_batch_size=max_batch, batch_wait_timeout_s=wait_s, max_concurrent_batches=1)(batch)


@contextlib.asynccontextmanager
async def litserve_loop(_function, max_batch, wait_s):
    """LitServe's batching loop in a thread, without its HTTP server and its processes."""
    import litserve
    from litserve.callbacks import CallbackRunner
    from litserve.loops.simple_loops import BatchedLoop

    loop = asyncio.get_running_loop()
    waiting = {}
    inbox = queue.Queue()

    class Api(litserve.LitAPI):
        def setup(self, device):
            pass

        def decode_request(self, request):
            return request

        def predict(self, x):
            return list(x)

        def encode_response(self, output):
            return output

    api = Api(max_batch_size=max_batch, batch_timeout=wait_s, enable_async=False)
    api.request_timeout = 600
    api.pre_setup(None)

    class Transport:
        def send(self, item, consumer_id):  # noqa: ARG002 - its interface
            uid, (value, *_) = item
            loop.call_soon_threadsafe(waiting.pop(uid).set_result, value)

    worker = threading.Thread(
        target=BatchedLoop().run_batched_loop, args=(api, inbox, Transport(), CallbackRunner()), daemon=True
    )
    worker.start()
    numbers = iter(range(1 << 60))

    def ask(item):
        uid = next(numbers)
        future = waiting[uid] = loop.create_future()
        inbox.put((0, uid, time.monotonic(), item))
        return future

    yield ask
    inbox.put((None, None, None, None))


CONTENDERS = {
    "bare asyncio future": bare_future,
    "batchyard": batchyard,
    "batchyard, tiers + budget + deadlines": batchyard_everything,
    "aiodataloader": aiodataloader,
    "batchlet": batchlet,
    "bentoml CorkDispatcher": bentoml,
    "async-batcher": async_batcher,
    "batched": batched,
    "aioautobatch": aioautobatch,
    "ray @serve.batch": ray_serve,
    "litserve BatchedLoop": litserve_loop,
}


# -- measurements ----------------------------------------------------------------------------------


async def overhead(name, callers, calls, wait_s):
    """CPU and wall microseconds a call, a closed loop of *callers*."""
    each = max(1, calls // callers)

    async with CONTENDERS[name](echo, MAX_BATCH, wait_s) as ask:

        async def caller(number, times):
            for _ in range(times):
                assert await ask(number) == number

        await asyncio.gather(*(caller(number, 2) for number in range(callers)))
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(caller(number, each) for number in range(callers)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    count = each * callers
    return {"cpu_us": cpu / count * 1e6, "wall_us": wall / count * 1e6}


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def memory(name, count):
    """Bytes that one more queued item takes, without the caller's own task."""
    release = asyncio.Event()

    async def stuck(items):
        await release.wait()
        return list(items)

    async with CONTENDERS[name](stuck, MAX_BATCH, 0.0) as ask:
        held = [_started(ask(0)) for _ in range(1000)]
        await asyncio.sleep(0)
        held = [None] * count
        item = object()
        gc.collect()
        gc.disable()
        before = _resident()
        for number in range(count):
            held[number] = _started(ask(item))
        taken = _resident() - before
        print(json.dumps({"bytes": taken / count}), flush=True)
        os._exit(0)


def _started(awaitable):
    """A coroutine is advanced to its first wait, as its task would have done."""
    if asyncio.iscoroutine(awaitable):
        awaitable.send(None)
    return awaitable


async def poisson(name, load, arrivals, wait_s):
    """Latency under Poisson arrivals at *load* (share of capacity), one server, service 5 ms + 0.2 ms·n."""
    loop = asyncio.get_running_loop()
    busy = asyncio.Lock()
    sizes = []

    async def service(items):
        # Some peers do not limit themselves to one dispatch at a time; the server does.
        async with busy:
            sizes.append(len(items))
            await asyncio.sleep(FIXED_S + EACH_S * len(items))
        return list(items)

    rate = load * POISSON_BATCH / (FIXED_S + EACH_S * POISSON_BATCH)
    draw = random.Random(20261201)
    latencies = []
    async with CONTENDERS[name](service, POISSON_BATCH, wait_s) as ask:
        sizes.clear()

        async def one(number, at):
            await ask(number)
            latencies.append(loop.time() - at)

        tasks = []
        at = loop.time()
        for number in range(arrivals):
            at += draw.expovariate(rate)
            if (delay := at - loop.time()) > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.ensure_future(one(number, loop.time())))
        await asyncio.gather(*tasks)
    # A queue that grows through the run has no mean: compare its two halves.
    half = len(latencies) // 2
    early, late = sum(latencies[:half]) / half, sum(latencies[half:]) / (len(latencies) - half)
    ordered = sorted(latencies)
    return {
        "mean_ms": sum(ordered) / len(ordered) * 1e3,
        "p50_ms": ordered[len(ordered) // 2] * 1e3,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
        "batch": sum(sizes) / len(sizes),
        "diverges": late > 1.6 * early and late > 0.1,
    }


def on_virtual_time(main):
    """Run *main* where every clock that a peer may read is the jumping loop's."""
    from batchyard.testing.virtual_loop import VirtualTimeLoop

    loop = VirtualTimeLoop()
    time.time = time.monotonic = time.perf_counter = loop.time
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


def run(main, loop):
    if loop == "virtual":
        return on_virtual_time(main)
    if loop == "uvloop":
        import uvloop

        return uvloop.run(main)
    return asyncio.run(main)


def main():
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    kind, name, *rest = sys.argv[1:]
    try:
        if kind == "overhead":
            callers, calls, wait_ms, loop = int(rest[0]), int(rest[1]), float(rest[2]), rest[3]
            result = run(overhead(name, callers, calls, wait_ms / 1000), loop)
        elif kind == "memory":
            result = run(memory(name, int(rest[0])), "asyncio")
        else:
            load, arrivals, wait_ms, loop = float(rest[0]), int(rest[1]), float(rest[2]), rest[3]
            result = run(poisson(name, load, arrivals, wait_ms / 1000), loop)
    except ImportError as missing:
        print(json.dumps({"missing": str(missing)}), flush=True)
        os._exit(3)
    print(json.dumps(result), flush=True)
    # Some peers leave threads and pollers that would not let the process end.
    os._exit(0)


if __name__ == "__main__":
    main()
