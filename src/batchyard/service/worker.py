"""Floor 6. The worker: leases chunks, keeps the engine's window full, writes each result at once.

A feeder claims chunks and fills a short queue; N lanes take from it, dispatch, and settle what comes
back; a keeper makes results durable in groups and commits finished chunks; a heart beats. There is no
task and no timer per request. What a fault means is decided in `scheduling`, not here.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from batchyard.clock import Clock
from batchyard.engines.protocol import Engine
from batchyard.errors import BatchyardError, EngineError, InputChanged, StorageFull
from batchyard.events import Event, EventBus
from batchyard.scheduling.breaker import BreakerPolicy
from batchyard.scheduling.canary import Canary, CanaryPolicy
from batchyard.scheduling.retry import RetryPolicy
from batchyard.service.chunk_run import ChunkRun, WorkItem
from batchyard.service.input_file import InputFile
from batchyard.service.lines import LineWriter
from batchyard.service.pacing import Pacing, Verdict
from batchyard.stores.protocol import ChunkProgress, ChunkRecord, Counts, Store
from batchyard.stores.segments import SegmentFolder
from batchyard.types import Answer, Fault, Outcome, Usage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """How a Batch is worked on; none of it changes what the results are."""

    #: Dispatches in flight at once.
    concurrency: int
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    canary: CanaryPolicy | None = None
    #: Unix seconds; what is unfinished then becomes a `batch_expired` line.
    deadline_at: float | None = None
    lease_s: float = 30.0
    #: Results reach the disk within this time; they are with the kernel at once.
    sync_every_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a worker ended before every request had a result. Everything finished is kept."""

    #: `interrupted`, `storage_full`, `canary`, `unreachable`, `input_changed`, `engine_failed` or
    #: `store_failed`.
    reason: str
    #: One full sentence for the user.
    message: str


@dataclass(slots=True)
class Progress:
    """Live figures of a worker; read by whoever draws them, written by the worker only."""

    succeeded: int = 0
    failed: int = 0
    failed_by_kind: dict[str, int] = field(default_factory=dict)
    usage_input: int = 0
    usage_output: int = 0
    usage_cached: int = 0
    running: int = 0
    retries: int = 0

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(self.usage_input, self.usage_output, self.usage_cached)


@dataclass(frozen=True, slots=True)
class _Closing:
    """From now on requests get this line instead of a dispatch."""

    code: str
    message: str


class Worker:
    """Works on one Batch until every request has a result or it must stop.

    Args:
        keeper: one thread, the only one that touches the store and syncs segments.
    """

    def __init__(
        self,
        store: Store,
        keeper: Executor,
        folder: SegmentFolder,
        engine: Engine,
        plan: WorkPlan,
        *,
        batch_id: str,
        total: int,
        source: InputFile,
        owner: str,
        clock: Clock,
        events: EventBus,
        rng: random.Random | None = None,
    ) -> None:
        self.progress = Progress()
        self._store = store
        self._keeper = keeper
        self._folder = folder
        self._engine = engine
        self._plan = plan
        self._batch_id = batch_id
        self._source = source
        self._owner = owner
        self._clock = clock
        self._events = events
        self._pacing = Pacing(plan.retry, plan.breaker, rng or random.Random(), self._on_wake)
        self._lines = LineWriter(batch_id)
        self._canary = Canary(plan.canary, total) if plan.canary else None
        self._max_batch = engine.capabilities.max_batch
        self._low_water = 2 * plan.concurrency * self._max_batch
        self._queue: deque[WorkItem] = deque()
        self._parked: deque[asyncio.Future[None]] = deque()
        self._runs: dict[int, ChunkRun] = {}
        self._finished: list[ChunkRun] = []
        self._dirty: set[ChunkRun] = set()
        #: Lanes that wait for the engine: the only tasks that a close may cancel.
        self._dispatching: set[asyncio.Task[None]] = set()
        self._closing: _Closing | None = None
        self._exhausted = False

    def __repr__(self) -> str:
        return (
            f"<Worker {self._owner} [{self.progress.running} running, {len(self._queue)} queued, "
            f"{self.waiting_retry} waiting to retry, {len(self._runs)} chunks held]>"
        )

    @property
    def waiting_retry(self) -> int:
        """Requests that wait for their next attempt."""
        return self._pacing.waiting

    @property
    def note(self) -> str | None:
        """What the worker waits for, in words; None while it works."""
        return self._pacing.note

    # --- the life of a worker -------------------------------------------------------------------

    async def run(self) -> Stop | None:
        """Work; returns None when every request has a durable, committed result, else why it stopped."""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[Stop | None] = self._loop.create_future()
        self._hungry = asyncio.Event()
        self._hungry.set()
        self._unsaved = asyncio.Event()
        work = [self._lane() for _ in range(self._plan.concurrency)]
        tasks = [asyncio.create_task(one) for one in (*work, self._feed(), self._keep(), self._beat())]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        self._schedule_deadline()
        try:
            return await self._finish(tasks, await self._over)
        except BaseException:
            await _cancel(tasks)
            raise

    def stop(self, reason: str, message: str) -> None:
        """Stop dispatching, cancel what runs, keep every finished answer."""
        if not self._over.done():
            self._over.set_result(Stop(reason, message))

    def close(self, code: str, message: str) -> None:
        """Dispatch nothing more; give every unfinished request a line with this error and end."""
        self._closing = _Closing(code, message)
        for lane in self._dispatching:
            lane.cancel()
        self._queue.extend(self._pacing.drain())
        self._wake_all()

    @property
    def closed_with(self) -> str | None:
        """The code of the lines that unfinished requests get since `close`; None while it works."""
        return None if self._closing is None else self._closing.code

    def continue_from(self, done: Counts) -> None:
        """Start the figures from what earlier runs committed."""
        self._add_finished(done.succeeded, done.failed, done.usage)

    async def _finish(self, tasks: list[asyncio.Task[None]], stop: Stop | None) -> Stop | None:
        await _cancel(tasks)
        self._pacing.close()
        try:
            await self._save()
            await self._in_keeper(self._let_go)
        except BatchyardError as error:
            stop = stop or _stop_for(error)
        finally:
            for run in self._runs.values():
                run.segment.close()
        return stop

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None or self._over.done():
            return
        if isinstance(error, BatchyardError):
            self._over.set_result(_stop_for(error))
        else:
            self._over.set_exception(error)

    def _check_over(self) -> None:
        if self._exhausted and not self._runs and not self._over.done():
            self._over.set_result(None)

    def _schedule_deadline(self) -> None:
        if self._plan.deadline_at is not None:
            left_s = max(self._plan.deadline_at - self._clock.wall(), 0.0)
            self._loop.call_later(left_s, self._expire)

    def _expire(self) -> None:
        if not self._over.done() and self._closing is None:
            message = "This request could not be executed before the completion window expired."
            self.close("batch_expired", message)

    # --- feeding: claim chunks ahead of need ----------------------------------------------------

    async def _feed(self) -> None:
        while True:
            await self._hungry.wait()
            self._hungry.clear()
            runs = await self._in_keeper(self._claim)
            if not runs:
                self._exhausted = True
                self._check_over()
                return
            for run in runs:
                self._runs[run.chunk.no] = run
                self._add_finished(run.succeeded, run.failed, run.progress().usage)
                self._queue.extend(run.items)
                run.items = []
                if not run.remaining:
                    self._chunk_finished(run)
            if len(self._queue) < self._low_water:
                self._hungry.set()
            self._wake_all()

    def _claim(self) -> list[ChunkRun]:
        claimed: list[ChunkRecord] = []
        wanted, count = 2 * self._low_water, 0
        while count < wanted and len(claimed) < 16:
            more = self._store.claim(self._batch_id, self._owner, 2, self._clock.wall(), self._plan.lease_s)
            if not more:
                break
            claimed += more
            count += sum(chunk.count for chunk in more)
        runs = [ChunkRun.load(chunk, self._source, self._folder) for chunk in claimed]
        if runs:
            self._folder.sync()
        return runs

    def _add_finished(self, succeeded: int, failed: int, usage: Usage) -> None:
        """Count what was finished before this worker."""
        progress = self.progress
        progress.succeeded += succeeded
        progress.failed += failed
        if failed:
            progress.failed_by_kind["earlier"] = progress.failed_by_kind.get("earlier", 0) + failed
        progress.usage_input += usage.input_tokens
        progress.usage_output += usage.output_tokens
        progress.usage_cached += usage.cached_tokens

    # --- lanes: take, dispatch, settle ----------------------------------------------------------

    async def _lane(self) -> None:
        lane = asyncio.current_task()
        assert lane is not None
        while True:
            items = self._take()
            if not items:
                parked: asyncio.Future[None] = self._loop.create_future()
                self._parked.append(parked)
                await parked
                continue
            if (closing := self._closed_with()) is not None:
                self._settle_closed(items, closing)
                continue
            self.progress.running += len(items)
            self._dispatching.add(lane)
            try:
                outcomes = await self._engine.dispatch([item.request for item in items])
            except asyncio.CancelledError:
                if (closing := self._closed_with()) is None:
                    raise
                self._settle_closed(items, closing)
                continue
            finally:
                self._dispatching.discard(lane)
                self.progress.running -= len(items)
            self._settle(items, outcomes)
            # One turn of the loop, in which `_write` runs: what is dispatched next finds these results safe.
            await asyncio.sleep(0)

    def _closed_with(self) -> _Closing | None:
        return self._closing

    def _take(self) -> list[WorkItem]:
        queue = self._queue
        if len(queue) < self._low_water and not self._exhausted:
            self._hungry.set()
        if not queue:
            return []
        count = min(self._max_batch, len(queue))
        if self._closing is None:
            if not self._pacing.may_dispatch():
                return []
            if self._canary is not None and not self._canary.decided:
                count = min(count, self._canary.may_start or 0)
                self._canary.start(count)
        items = []
        while count and queue:
            item = queue.popleft()
            if item.run.lost:
                continue
            items.append(item)
            count -= 1
        return items

    def _settle(self, items: Sequence[WorkItem], outcomes: Sequence[Outcome]) -> None:
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Answer):
                self._pacing.answered()
                line = self._lines.answered(item.request, outcome)
                kind = None if outcome.succeeded else f"HTTP {outcome.status_code}"
                self._record(item, kind, outcome.usage, line)
            else:
                self._faulted(item, outcome)

    def _settle_closed(self, items: Sequence[WorkItem], closing: _Closing) -> None:
        for item in items:
            line = self._lines.not_answered(item.request, closing.code, closing.message)
            self._record(item, closing.code, Usage(), line)

    def _record(self, item: WorkItem, failure: str | None, usage: Usage, line: bytes) -> None:
        run, progress = item.run, self.progress
        if run.lost:
            return
        if run.finish(item, succeeded=failure is None, usage=usage, line=line):
            # Answers that arrive together are written together, before the loop waits again.
            self._loop.call_soon(self._write, run)
        if failure is None:
            progress.succeeded += 1
        else:
            progress.failed += 1
            progress.failed_by_kind[failure] = progress.failed_by_kind.get(failure, 0) + 1
        progress.usage_input += usage.input_tokens
        progress.usage_output += usage.output_tokens
        progress.usage_cached += usage.cached_tokens
        self._dirty.add(run)
        if not self._unsaved.is_set():
            self._unsaved.set()
        if not run.remaining:
            self._chunk_finished(run)
        if self._events.listened:
            fields = {"custom_id": item.request.custom_id, "failure": failure, "line": line}
            self._events.emit(Event("request.finished", self._clock.wall(), fields))
        if self._canary is not None and not self._canary.decided:
            self._canary.finish(succeeded=failure is None)
            self._judge_canary(self._canary)

    def _write(self, run: ChunkRun) -> None:
        if run.lost:
            return
        try:
            run.write()
        except BatchyardError as error:
            if not self._over.done():
                self._over.set_result(_stop_for(error))

    def _judge_canary(self, canary: Canary) -> None:
        if canary.tripped:
            share = f"{canary.policy.max_failed_share * 100:.3g}%"
            self.stop(
                "canary",
                f"More than {share} of the first {canary.first} requests failed, and --fail-over allows no "
                "more. The rest was not run.",
            )
        elif canary.decided:
            self._wake_all()

    def _faulted(self, item: WorkItem, fault: Fault) -> None:
        if self._canary is not None:
            self._canary.put_back()
        verdict = self._pacing.faulted(item, fault)
        if verdict is Verdict.GIVE_UP:
            if self._canary is not None:
                self._canary.start(1)
            line = self._lines.gave_up(item.request, fault, item.attempts)
            kind = fault.kind.value if fault.status_code is None else f"HTTP {fault.status_code}"
            self._record(item, kind, Usage(), line)
        elif verdict is Verdict.LATER:
            self.progress.retries += 1
        else:
            self._queue.appendleft(item)
            if verdict is Verdict.STOP:
                self.stop("unreachable", f"{fault.message} Nothing is lost: resume when it is back.")

    def _on_wake(self) -> None:
        self._queue.extendleft(self._pacing.due())
        self._wake_all()

    def _wake_all(self) -> None:
        while self._parked:
            parked = self._parked.popleft()
            if not parked.done():
                parked.set_result(None)

    # --- keeping: sync, commit, renew -----------------------------------------------------------

    def _chunk_finished(self, run: ChunkRun) -> None:
        self._finished.append(run)
        self._unsaved.set()

    async def _keep(self) -> None:
        while True:
            await self._unsaved.wait()
            await self._clock.sleep(self._plan.sync_every_s)
            self._unsaved.clear()
            await self._save()
            self._check_over()

    async def _save(self) -> None:
        for run in self._dirty:
            run.write()
        dirty, finished = self._dirty, self._finished
        self._dirty, self._finished = set(), []
        fenced = await self._in_keeper(lambda: self._sync_and_commit(dirty, finished))
        for run in finished:
            del self._runs[run.chunk.no]
            run.segment.close()
        for no in fenced:
            self._events.emit(Event("chunk.lost", self._clock.wall(), {"chunk": no}))
        if self._events.listened and finished:
            self._events.emit(Event("chunk.finished", self._clock.wall(), {"chunks": len(finished)}))

    def _sync_and_commit(self, dirty: set[ChunkRun], finished: list[ChunkRun]) -> list[int]:
        for run in dirty:
            run.segment.sync()
        if not finished:
            return []
        return self._store.commit(self._batch_id, [run.progress() for run in finished], self._clock.wall())

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(self._plan.lease_s / 3)
            held = [run.progress() for run in self._runs.values() if run.remaining]
            for no in await self._in_keeper(partial(self._renew, held)):
                run = self._runs.pop(no, None)
                if run is not None:
                    run.lost = True
                    run.segment.close()
                    self._events.emit(Event("chunk.lost", self._clock.wall(), {"chunk": no}))

    def _let_go(self) -> None:
        """Note how far the chunks still held have come, then open them for whoever works next."""
        self._renew([run.progress() for run in self._runs.values()])
        self._store.release(self._batch_id, self._owner)

    def _renew(self, held: Sequence[ChunkProgress]) -> list[int]:
        now = self._clock.wall()
        return self._store.renew(self._batch_id, self._owner, held, now, self._plan.lease_s)

    async def _in_keeper(self, call: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._keeper, call)


def _stop_for(error: BatchyardError) -> Stop:
    match error:
        case StorageFull():
            return Stop("storage_full", str(error))
        case EngineError():
            return Stop("engine_failed", str(error))
        case InputChanged():
            return Stop("input_changed", str(error))
        case _:
            return Stop("store_failed", str(error))


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
