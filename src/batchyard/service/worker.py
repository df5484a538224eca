"""Floor 6. The worker: leases chunks, keeps the engine's window full, writes each result at once.

A feeder claims chunks and fills a short queue; N lanes take from it, dispatch, and settle what comes
back; a keeper makes results durable in groups and commits finished chunks; a heart beats. There is no
task and no timer per request. What a fault means is decided in `scheduling`, not here.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from batchyard.clock import Clock
from batchyard.engines.protocol import Engine
from batchyard.errors import BatchyardError, EngineError, InputChanged, StorageFull
from batchyard.events import Event, EventBus
from batchyard.scheduling.canary import Canary
from batchyard.scheduling.order import Sharing
from batchyard.service.at_hand import AtHand, is_deterministic, make_order
from batchyard.service.chunk_run import ChunkRun, WorkItem
from batchyard.service.input_file import InputFile
from batchyard.service.lines import NEVER_RAN, LineWriter
from batchyard.service.pacing import Pacing, Verdict
from batchyard.service.work_plan import Progress, Stop, WorkPlan
from batchyard.stores.protocol import ChunkProgress, ChunkRecord, Counts, Store
from batchyard.stores.segments import SegmentFolder
from batchyard.types import Answer, Capabilities, Fault, Outcome, Request, Usage

T = TypeVar("T")

#: Bytes of input that are at hand at once where the order matters.
_AT_HAND_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Closing:
    """From now on requests get this line instead of a dispatch."""

    code: str
    message: str


_WITHDRAWN = _Closing("request_cancelled", "This request was cancelled before it had an answer.")


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
        self._queue = self._at_hand(engine.capabilities, plan)
        self._parked: deque[asyncio.Future[None]] = deque()
        self._runs: dict[int, ChunkRun] = {}
        self._finished: list[ChunkRun] = []
        self._dirty: set[ChunkRun] = set()
        #: Lanes that wait for the engine, with what for: the only tasks that a close may cancel.
        self._dispatching: dict[asyncio.Task[None], list[WorkItem]] = {}
        self._withdrawn = set(plan.withdrawn)
        self._changes = [] if plan.amend is None else [plan.amend]
        self._expiry: asyncio.TimerHandle | None = None
        #: Until when the leases held last, on the loop's clock, as far as is known.
        self._leased_until = 0.0
        self._closing: _Closing | None = None
        self._exhausted = False

    def __repr__(self) -> str:
        return (
            f"<Worker {self._owner} [{self.progress.running} running, {len(self._queue)} queued, "
            f"{self.waiting_retry} waiting to retry, {len(self._runs)} chunks held]>"
        )

    @staticmethod
    def _at_hand(engine: Capabilities, plan: WorkPlan) -> AtHand:
        may_share = {True: lambda _: True, None: is_deterministic, False: None}[plan.dedupe]
        return AtHand(make_order(plan.order, engine), None if plan.canary else may_share)

    @property
    def sharing(self) -> Sharing | None:
        """How much of the prompts could come from a cache of prefixes, where that decides the order."""
        return self._queue.sharing

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
        self._late = asyncio.Event()
        work = [self._lane(no) for no in range(self._plan.concurrency)]
        tasks = [asyncio.create_task(one) for one in (*work, self._feed(), self._keep(), self._beat())]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        self.expire_at(self._plan.deadline_at)
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
        self._queue.again(self._pacing.drain())
        self._queue.hurry()
        self._wake_all()

    def withdraw(self, places: Iterable[tuple[int, int]]) -> None:
        """Cancel single requests, by chunk number and place; one that runs is stopped if it runs alone."""
        self._withdrawn.update(places)
        for lane, items in self._dispatching.items():
            if all(map(self._is_withdrawn, items)):
                lane.cancel()
        self._wake_all()

    def amend(self, change: Callable[[Request], Request]) -> None:
        """Change the requests that have not run as *change* says."""
        self._changes.append(change)
        self._queue.part_twins()
        for item in (*self._queue, *self._pacing.later()):
            item.request = change(item.request)

    def expire_at(self, deadline_at: float | None) -> None:
        """Move the end of the window to *deadline_at*, Unix seconds."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if deadline_at is not None:
            left_s = max(deadline_at - self._clock.wall(), 0.0)
            self._expiry = self._loop.call_later(left_s, self._expire)

    def running(self) -> dict[tuple[int, int], int]:
        """What is with the engine now, by chunk number and place, with the number of this attempt."""
        every = (item for items in self._dispatching.values() for item in items)
        return {(item.run.chunk.no, item.place): item.attempts + 1 for item in every}

    def held(self) -> dict[int, Counts]:
        """What is finished of the chunks held, by number."""
        return {no: run.counts() for no, run in self._runs.items()}

    def failures(self) -> dict[int, dict[str, Sequence[Any]]]:
        """What failed of the chunks held, by number: kind to how often, a message and a `custom_id`."""
        return {no: dict(run.failures) for no, run in self._runs.items()}

    def _is_withdrawn(self, item: WorkItem) -> bool:
        return (item.run.chunk.no, item.place) in self._withdrawn

    @property
    def closed_with(self) -> str | None:
        """The code of the lines that unfinished requests get since `close`; None while it works."""
        return None if self._closing is None else self._closing.code

    def continue_from(self, done: Counts) -> None:
        """Start the figures from what earlier runs committed."""
        self._add_finished(done)

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

    def _expire(self) -> None:
        if not self._over.done() and self._closing is None:
            message = "This request could not be executed before the completion window expired."
            self.close("batch_expired", message)

    # --- feeding: claim chunks ahead of need ----------------------------------------------------

    async def _feed(self) -> None:
        while True:
            await self._hungry.wait()
            self._hungry.clear()
            known = len(self._changes)
            began = self._loop.time()
            runs = await self._in_keeper(self._claim)
            if not self._runs:
                # Leases held before are prolonged by the beat alone.
                self._leased_until = began + self._plan.lease_s
            if not runs:
                self._exhausted = True
                self._check_over()
                return
            for run in runs:
                self._runs[run.chunk.no] = run
                self._add_finished(run.counts())
                for item in run.items:
                    for change in self._changes[known:]:
                        # It came while the chunk was read.
                        item.request = change(item.request)
                if not run.remaining:
                    self._chunk_finished(run)
                for item, answer in self._queue.add(run.items):
                    self._answered_by_another(item, answer)
                run.items = []
            if len(self._queue) < self._low_water:
                self._hungry.set()
            self._wake_all()

    def _claim(self) -> list[ChunkRun]:
        claimed: list[ChunkRecord] = []
        wanted, count = 2 * self._low_water, 0
        if self._queue.reorders:
            wanted = max(wanted, self._plan.order_window)
        while count < wanted and len(claimed) < 16 and sum(one.length for one in claimed) < _AT_HAND_BYTES:
            more = self._store.claim(self._batch_id, self._owner, 2, self._clock.wall(), self._plan.lease_s)
            if not more:
                break
            claimed += more
            count += sum(chunk.count for chunk in more)
        changes = tuple(self._changes)
        runs = [ChunkRun.load(chunk, self._source, self._folder, changes) for chunk in claimed]
        if runs:
            self._folder.sync()
        return runs

    def _add_finished(self, done: Counts) -> None:
        """Count what was finished before this worker."""
        progress, usage = self.progress, done.usage
        progress.succeeded += done.succeeded
        progress.failed += done.failed
        progress.never_ran += done.never_ran
        if done.failed:
            progress.failed_by_kind["earlier"] = progress.failed_by_kind.get("earlier", 0) + done.failed
        progress.usage_input += usage.input_tokens
        progress.usage_output += usage.output_tokens
        progress.usage_cached += usage.cached_tokens

    # --- lanes: take, dispatch, settle ----------------------------------------------------------

    async def _lane(self, no: int) -> None:
        lane = asyncio.current_task()
        assert lane is not None
        while True:
            items = self._take(no)
            if not items:
                parked: asyncio.Future[None] = self._loop.create_future()
                self._parked.append(parked)
                await parked
                continue
            if (closing := self._closed_with()) is not None:
                self._settle_closed(items, closing)
                continue
            self.progress.running += len(items)
            self._dispatching[lane] = items
            try:
                outcomes = await self._engine.dispatch([item.request for item in items])
            except asyncio.CancelledError:
                closing = self._closed_with()
                if closing is None and all(map(self._is_withdrawn, items)) and not self._over.done():
                    closing = _WITHDRAWN
                if closing is None:
                    raise
                if self._canary is not None:
                    self._canary.put_back(len(items))
                self._settle_closed(items, closing)
                continue
            finally:
                del self._dispatching[lane]
                self.progress.running -= len(items)
            self._settle(items, outcomes)
            # One turn of the loop, in which `_write` runs: what is dispatched next finds these results safe.
            await asyncio.sleep(0)

    def _closed_with(self) -> _Closing | None:
        return self._closing

    def _take(self, lane: int) -> list[WorkItem]:
        items = self._take_from(self._queue, lane) if self._queue else []
        if len(self._queue) < self._low_water and not self._exhausted:
            self._hungry.set()
        return items

    def _take_from(self, queue: AtHand, lane: int) -> list[WorkItem]:
        if self._closing is not None:
            return queue.take(lane, self._max_batch)
        if not self._pacing.may_dispatch() or not self._leases_hold():
            return []
        canary = None if self._canary is None or self._canary.decided else self._canary
        count = self._max_batch if canary is None else min(self._max_batch, canary.may_start or 0)
        items: list[WorkItem] = []
        while count and not items and (items := queue.take(lane, count)) and self._withdrawn:
            self._settle_closed(list(filter(self._is_withdrawn, items)), _WITHDRAWN)
            items = [item for item in items if not self._is_withdrawn(item)]
        if self._canary is not None:
            self._canary.start(len(items))
        return items

    def _leases_hold(self) -> bool:
        """Whether what is queued is surely still ours; a process that was frozen asks the store first."""
        if self._loop.time() < self._leased_until:
            return True
        self._late.set()
        return False

    def _settle(self, items: Sequence[WorkItem], outcomes: Sequence[Outcome]) -> None:
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Answer):
                self._pacing.answered()
                twins = self._queue.answered(item, outcome)
                self._answered(item, outcome, outcome.usage)
                for twin in twins:
                    self._answered_by_another(twin, outcome)
            else:
                self._faulted(item, outcome)

    def _answered_by_another(self, item: WorkItem, answer: Answer) -> None:
        if self._is_withdrawn(item):
            self._settle_closed([item], _WITHDRAWN)
        else:
            # What the answer cost is counted once.
            self._answered(item, answer, Usage())
            self.progress.deduped += 1

    def _answered(self, item: WorkItem, answer: Answer, usage: Usage) -> None:
        line = self._lines.answered(item.request, answer)
        self._record(item, None if answer.succeeded else f"HTTP {answer.status_code}", usage, line)

    def _settle_closed(self, items: Sequence[WorkItem], closing: _Closing) -> None:
        for item in items:
            line = self._lines.not_answered(item.request, closing.code, closing.message)
            self._record(item, closing.code, Usage(), line)

    def _record(self, item: WorkItem, failure: str | None, usage: Usage, line: bytes) -> None:
        run, progress = item.run, self.progress
        self._queue.unanswered(item)
        if self._queue.done(item):
            self._wake_all()
        if run.lost:
            return
        if run.finish(item, failure, usage, line):
            # Answers that arrive together are written together, before the loop waits again.
            self._loop.call_soon(self._write, run)
        if failure is None:
            progress.succeeded += 1
        else:
            if failure in NEVER_RAN:
                progress.never_ran += 1
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
        if self._canary is not None and not self._canary.decided and failure not in NEVER_RAN:
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
                f"More than {share} of the first {canary.first} requests failed. The rest was not run.",
            )
        elif canary.decided:
            if self._plan.on_canary_passed is not None:
                self._plan.on_canary_passed()
            self._wake_all()

    def _faulted(self, item: WorkItem, fault: Fault) -> None:
        if self._canary is not None:
            self._canary.put_back()
        verdict = self._pacing.faulted(item, fault)
        if verdict is Verdict.GIVE_UP:
            if self._canary is not None:
                self._canary.start(1)
            item.gave_up = True
            line = self._lines.gave_up(item.request, fault, item.attempts)
            kind = fault.kind.value if fault.status_code is None else f"HTTP {fault.status_code}"
            self._record(item, kind, Usage(), line)
        elif verdict is Verdict.LATER:
            self.progress.retries += 1
        else:
            self._queue.again([item])
            if verdict is Verdict.STOP:
                self.stop("unreachable", f"{fault.message} Nothing is lost: resume when it is back.")

    def _on_wake(self) -> None:
        self._queue.again(self._pacing.due())
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
        dirty = {run for run in self._dirty if not run.lost}
        finished = [run for run in self._finished if not run.lost]
        for run in dirty:
            run.write()
        self._dirty, self._finished = set(), []
        if finished:
            await self._publish(finished)
        fenced = await self._in_keeper(lambda: self._sync_and_commit(dirty, finished))
        for run in finished:
            if not run.lost:
                del self._runs[run.chunk.no]
                run.segment.close()
        for no in fenced:
            self._events.emit(Event("chunk.lost", self._clock.wall(), {"chunk": no}))
        if self._events.listened and finished:
            self._events.emit(Event("chunk.finished", self._clock.wall(), {"chunks": len(finished)}))

    async def _publish(self, runs: Sequence[ChunkRun]) -> None:
        """Let other machines see these segments, where they do not lie in a folder that all share."""
        if self._folder.published:
            for run in runs:
                await asyncio.to_thread(self._folder.publish, run.segment.path)

    def _sync_and_commit(self, dirty: set[ChunkRun], finished: list[ChunkRun]) -> list[int]:
        for run in dirty:
            if not run.lost:
                run.segment.sync()
        if not finished:
            return []
        return self._store.commit(self._batch_id, [run.progress() for run in finished], self._clock.wall())

    async def _beat(self) -> None:
        while True:
            await self._next_beat()
            await self._publish([run for run in self._runs.values() if run.grown()])
            held = [run.progress() for run in self._runs.values() if run.remaining]
            began = self._loop.time()
            for no in await self._in_keeper(partial(self._renew, held)):
                run = self._runs.pop(no, None)
                if run is not None:
                    run.lost = True
                    # In the keeper's thread, which may just be about to sync it.
                    self._keeper.submit(run.segment.close)
                    self._events.emit(Event("chunk.lost", self._clock.wall(), {"chunk": no}))
                    # What the others left or lost may be ours to claim.
                    self._hungry.set()
            self._leased_until = began + self._plan.lease_s
            self._wake_all()
            self._check_over()

    async def _next_beat(self) -> None:
        self._late.clear()
        late = asyncio.create_task(self._late.wait())
        sleep = asyncio.create_task(self._clock.sleep(self._plan.beat_s))
        try:
            await asyncio.wait({late, sleep}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (late, sleep):
                task.cancel()

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
