"""Floor 1, asyncio shell. The slots of a batcher, and the one bell between them and the queue.

A runner task for each slot draws only when it is free, so that a batch grows until somebody can compute
it. Idle runners are parked on one future each; only an arrival that changes something rings the first
of them, who rings the next if work is left.

Knows nothing of threads, of decorators, or of how the queue is kept.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from batchyard.batching.function import BatchFunction, Future, fail
from batchyard.batching.options import Options
from batchyard.batching.room import Dispatch, WaitingRoom
from batchyard.batching.stats import BatcherStats
from batchyard.errors import BatcherClosed
from batchyard.events import Event

#: Stands in for a bell while no runner is parked but one more may be started.
_HIRE = object()

#: Every dispatcher alive, for a forked child to start them afresh.
_everyone: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


class Dispatcher(WaitingRoom):
    """The state behind one or more `Batcher` handles."""

    __slots__ = (
        "__weakref__",
        "_context",
        "_owner",
        "_owner_ref",
        "_parked",
        "_runners",
        "function",
    )

    def __init__(self, function: Callable[[list[Any]], Any], options: Options) -> None:
        self._parked: list[Future] = []
        self._runners: set[asyncio.Task[None]] = set()
        super().__init__(options)
        self.function = BatchFunction(
            function,
            where=options.executor,
            threads=options.max_parallel,
            limits=options.limits,
            isolate=options.on_error == "isolate",
            name=options.name,
            tally=self.tally,
        )
        self._owner_ref: weakref.ref[object] | None = None
        self._owner: object = None
        # Runners see the variables of the batcher's birth, never those of one caller among many.
        self._context = contextvars.copy_context()
        _everyone.add(self)

    def belongs_to(self, owner: object) -> None:
        """Hold *owner*, whose method the function is, while there is work, and only then.

        So a batcher neither loses work nor keeps a model alive.
        """
        self._owner_ref = weakref.ref(owner)

    def _bind_slots(self) -> None:
        self._parked = []
        self._runners = set()
        self._bell = _HIRE

    def after_fork(self) -> None:
        """In a forked child: what waits and runs is the parent's, and so are the threads."""
        self._loop = None
        self._bell = None
        self._forget()
        self.function.forget_threads()

    def _ring(self) -> None:
        """Wake one runner; it rings the next if work is left."""
        bell = self._bell
        self._bell = None
        if self._owner_ref is not None:
            self._owner = self._owner_ref()
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        if bell is _HIRE:
            assert self._loop is not None
            task = self._loop.create_task(self._runner(), context=self._context)
            # A batcher dropped while idle takes its parked runner with it; that is no lost work to warn of.
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio's own way
            self._runners.add(task)
        elif not bell.done():
            bell.set_result(None)

    def _next_bell(self) -> None:
        """Name who is woken next: a parked runner, or one to be hired."""
        if self._bell is None:
            if self._parked:
                self._bell = self._parked.pop()
            elif len(self._runners) < self.options.max_parallel:
                self._bell = _HIRE

    async def _runner(self) -> None:
        """One slot: draw when free, run, hand out, park when nothing waits."""
        me = asyncio.current_task()
        assert me is not None
        loop = me.get_loop()
        try:
            while True:
                batch = self._take()
                if batch is not None:
                    await self._run(batch)
                    if self.in_queue():
                        # Two turns of the loop: those just answered may have more for the next batch, and so
                        # may those whose timers or sockets came due in the same moment; they start a task in
                        # the first turn and submit in the second.
                        await asyncio.sleep(0)
                        await asyncio.sleep(0)
                        continue
                if self._closing and not self.in_queue():
                    return
                bell = loop.create_future()
                if self._bell is None or self._bell is _HIRE:
                    self._bell = bell
                else:
                    self._parked.append(bell)
                self._settle()
                await bell
        except GeneratorExit:
            # Collected with a batcher that nobody holds any more; the loop may be gone.
            raise
        except asyncio.CancelledError:
            self._abandon(None)
            raise
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._runners.discard(me)
            if self._loop is loop and not loop.is_closed():
                self._next_bell()
                self._settle()

    def _abandon(self, error: BaseException | None) -> None:
        """Leave nobody waiting when a runner ends out of turn: its loop is being torn down, or worse."""
        for future in self._clear_queue():
            if error is None:
                self.tally.cancelled += 1
                future.cancel()
            else:
                self.tally.failed += 1
                fail(future, error)

    def _settle(self) -> None:
        """When nothing waits and nothing runs: let go of the owner, tell those who drain."""
        if self.tally.running == 0 and not self.in_queue():
            self._owner = None
            self._wake_drainers()

    def _wake_drainers(self) -> None:
        if self._drainers and self.tally.running == 0 and not self.in_queue():
            for future in self._drainers:
                if not future.done():
                    future.set_result(None)
            self._drainers = []

    def _take(self) -> Dispatch | None:
        """Draw the next batch, or None when nothing waits or the policy holds."""
        batch = self.draw_next()
        if batch is not None:
            self._next_bell()
            if self._bell is not None and self.in_queue():
                if self.options.holds:
                    self._consider_all()
                else:
                    self._ring()
        return batch

    async def _run(self, batch: Dispatch) -> None:
        """Call the function on *batch* and decide every one of its futures."""
        tally = self.tally
        function = self.function
        futures, items = batch.futures, batch.items
        n = len(items)
        started = self._now()
        wait_s = started - min(batch.ats)
        tally.running += n
        bus = self.options.events
        if bus is not None and bus.listened:
            self._emit("dispatch.started", items=n, cost=batch.cost, reason=batch.reason, wait_max_s=wait_s)
        if self.options.limits.sizes:
            items = function.padded(items, batch.filler)
        failed = False
        took_s = 0.0
        try:
            answer = await function.invoke(items)
            took_s = self._now() - started
            function.deliver(futures, answer)
            self.fit.observe(len(items), batch.cost if self.options.cost is not None else 0.0, took_s)
        except asyncio.CancelledError as error:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                for future in futures:
                    future.cancel()
                tally.running -= n
                tally.cancelled += n
                raise
            failed = True
            function.fail_all(futures, error)
        except Exception as error:  # noqa: BLE001 - the function's error goes to its callers
            failed = True
            await function.settle_failure(futures, batch.items, error)
        except GeneratorExit:
            raise
        except BaseException as error:
            function.fail_all(futures, error)
            raise
        finally:
            took_s = took_s or self._now() - started
            tally.dispatches += 1
            tally.dispatched += n
            tally.reasons[batch.reason] += 1
            tally.busy_s += took_s
            tally.wait_sum_s += n * started - sum(batch.ats)
            tally.wait_max_s = max(tally.wait_max_s, wait_s)
            tally.largest_batch = max(tally.largest_batch, n)
            tally.cost += batch.cost
            tally.padding_cost += batch.padding_cost
            tally.padding_items += len(items) - n
        if self._learns:
            try:
                self.options.policy.observe(n, took_s, wait_s + took_s, full=batch.reason == "full")
            except Exception as error:  # noqa: BLE001 - a policy's fault must not stop the queue
                self._report(f"The policy {self.options.policy!r} raised in observe().", error)
        if bus is not None and bus.listened:
            self._emit(
                "dispatch.finished",
                items=n,
                cost=batch.cost,
                reason=batch.reason,
                wait_max_s=wait_s,
                took_s=took_s,
                failed=failed,
            )

    def _emit(self, name: str, **fields: Any) -> None:
        bus = self.options.events
        assert bus is not None
        fields |= {"batcher": self.options.name, "policy": self.options.policy.name}
        try:
            bus.emit(Event(name, time.time(), fields))
        except Exception as error:  # noqa: BLE001 - reported; a listener's fault must not stop the queue
            self._report(f"A listener to {name} raised.", error)

    # -- ends --------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Return once nothing waits and nothing runs; no policy holds until then."""
        if self._loop is None:
            return
        while self.in_queue() or self.tally.running:
            done = asyncio.get_running_loop().create_future()
            self._drainers.append(done)
            if self._bell is not None and self.in_queue():
                self._ring()
            await done

    async def close(self, *, drain: bool = True) -> None:
        """Take no more items; answer what waits, or fail it; then end the runners."""
        self._closing = True
        self._plain = False
        if not drain:
            for future in self._clear_queue():
                self.tally.failed += 1
                future.set_exception(
                    BatcherClosed(f"{self.options.name} was closed before this item was dispatched.")
                )
        await self.drain()
        for timer in (self._alarm, self._hold):
            if timer is not None:
                timer.cancel()
        self._alarm = self._hold = None
        self._alarm_at = math.inf
        bells = [bell for bell in (*self._parked, self._bell) if isinstance(bell, asyncio.Future)]
        self._parked = []
        self._bell = None
        for bell in bells:
            if not bell.done():
                bell.set_result(None)
        if self._runners:
            await asyncio.wait(self._runners)
        self.function.close()

    @property
    def closed(self) -> bool:
        """Whether it takes no more items."""
        return self._closing

    def stats(self) -> BatcherStats:
        """The counts as they stand."""
        waiting, dead = self.waiting()
        return self.tally.snapshot(self.options.policy.name, waiting, dead)


def _start_afresh() -> None:
    for dispatcher in list(_everyone):
        dispatcher.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
