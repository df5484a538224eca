"""Floor 6. One Batch on its way through a server: validate, work, join, and over again until it has ended.

Whatever stops a step, a crash included, the next journey goes on from what the store says. Where several
processes share a database each has a journey for the same Batch: chunks are worked on by all of them, and
what must be done once is done by the one that holds the Batch. All calls of the store are made in the
keeper's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from batchyard.errors import (
    BatchyardError,
    InputChanged,
    InvalidInput,
    InvalidTransition,
    StoreError,
)
from batchyard.scheduling.canary import CanaryPolicy
from batchyard.scheduling.order import OrderName
from batchyard.scheduling.scheduler import Demand
from batchyard.service.hosting.admission import check_input, tokens_of
from batchyard.service.hosting.amendments import amending
from batchyard.service.hosting.keys import may_use
from batchyard.service.hosting.served import RoutedEngine, SharedEngine
from batchyard.service.hosting.shelf import Shelf
from batchyard.service.input_file import InputFile
from batchyard.service.intake.spans import Registration
from batchyard.service.join import Joined, Order, SegmentsDamaged, join_committed
from batchyard.service.lifecycle import TERMINAL, Action, Status, step
from batchyard.service.work_plan import ORDER_WINDOW, Progress, Stop, WorkPlan
from batchyard.service.worker import Worker
from batchyard.stores.blobs import BlobNotFound
from batchyard.stores.protocol import BatchRecord, ChunkRecord, FileRecord, KeyRecord, NoRoom, Room

_log = logging.getLogger("batchyard.service")

CANCELLED = ("batch_cancelled", "This request was not run, because the batch was cancelled before.")
#: Pauses between attempts at a Batch that cannot be worked on for now, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
#: How long another process may take before it is looked at again what it has done.
_OTHERS_S = 1.0
#: Requests at hand at once where several processes share a database.
_SHARED_WINDOW = 1_000
_OTHERS = Stop("others", "Another server process works on the rest.")


class Journey:
    """The way of one Batch to its end, or to a pause.

    Args:
        shelf: what all Batches of the server share.
    """

    def __init__(self, shelf: Shelf, batch_id: str) -> None:
        self._shelf = shelf
        self.id = batch_id
        #: As it was when last looked at.
        self.batch: BatchRecord | None = None
        #: The key that it was made with, as last looked at.
        self.key: KeyRecord | None = None
        #: While its requests are dispatched.
        self.worker: Worker | None = None
        #: What the last worker had counted, for as long as no other one counts on.
        self.progress: Progress | None = None
        #: Why it does not move, in words; None while it does.
        self.note: str | None = None
        self._engine: SharedEngine | RoutedEngine | None = None
        self._telling: asyncio.Task[None] | None = None
        self._stopping = False
        self._nudge = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Journey {self.id} [{'working' if self.worker else self.note or 'between steps'}]>"

    @property
    def demand(self) -> Demand | None:
        """What it asks of the scheduler, once it has dispatched something."""
        return None if self._engine is None else self._engine.demand

    async def heed(self) -> None:
        """Something about it was changed from outside: act on it now."""
        self._nudge.set()
        worker = self.worker
        if worker is None:
            return
        before, batch = self.batch, await self._get()
        withdrawn = await self._shelf.kept(lambda: self._shelf.store.withdrawn(self.id))
        if worker is not self.worker or before is None:
            return
        self.batch = batch
        status = Status(batch.status)
        if status is Status.CANCELLING and worker.closed_with is None:
            worker.close(*CANCELLED)
        elif status is Status.PAUSED:
            worker.stop("paused", "Paused.")
        elif batch.model != before.model:
            worker.stop("amended", "Another model is asked from now on.")
        else:
            if (change := amending(batch.amendments[len(before.amendments) :])) is not None:
                worker.amend(change)
            worker.withdraw(withdrawn)
            worker.expire_at(batch.deadline_at)
            assert self._engine is not None
            demand = self._engine.demand
            demand.deadline, demand.priority = _deadline(batch), batch.priority
            self._engine.changed()

    def stop(self) -> None:
        """The server stops: keep what is finished and end."""
        self._stopping = True
        self._nudge.set()
        if self.worker is not None:
            self.worker.stop("interrupted", "The server is stopping.")

    async def run(self) -> None:
        """Go on until the Batch has ended, is paused, or the server stops."""
        pause_s = _FIRST_PAUSE_S
        while not self._stopping:
            self._nudge.clear()
            try:
                batch = self.batch = await self._get()
                status = Status(batch.status)
                if status in TERMINAL or status is Status.PAUSED:
                    return
                stop = await self._step(batch, status)
            except InvalidTransition:
                # Its status was changed meanwhile: look again.
                continue
            except BatchyardError as error:
                stop = Stop("failed", str(error))
            except Exception:  # noqa: BLE001
                # A bug of ours must not strand a Batch: it is tried again, and the log has the whole.
                _log.exception("Batch %s stumbled", self.id)
                stop = Stop(
                    "fault", "The server met a fault of its own, which is in its log. It tries again."
                )
            if stop is None or stop.reason in {"interrupted", "paused", "amended", "canary"}:
                pause_s, self.note = _FIRST_PAUSE_S, None
                continue
            wait_s = _OTHERS_S if stop is _OTHERS or stop.reason == "no_room" else pause_s
            if stop is _OTHERS:
                pause_s, self.note = _FIRST_PAUSE_S, None
            else:
                self.note = stop.message
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._nudge.wait(), wait_s)

    async def _step(self, batch: BatchRecord, status: Status) -> Stop | None:
        if status is Status.VALIDATING or (status is Status.CANCELLING and not batch.total):
            async with self._holding() as held:
                return await self._validate(await self._get()) if held else _OTHERS
        if status is Status.FINALIZING:
            async with self._holding() as held:
                return await self._finish(await self._get()) if held else _OTHERS
        if batch.settings.get("canary") and not batch.canary_passed and status is Status.IN_PROGRESS:
            # The first requests are counted in one place.
            async with self._holding() as held:
                stop = await self._work(await self._get()) if held else _OTHERS
        else:
            stop = await self._work(batch)
        if stop is not None:
            return stop
        if await self._shelf.kept(lambda: self._shelf.store.remaining(self.id)):
            return _OTHERS
        batch = await self._get()
        if Status(batch.status) is Status.CANCELLING:
            async with self._holding() as held:
                return await self._finish(batch) if held else _OTHERS
        await self._move(batch, Action.FINALIZE, finalizing_at=self._shelf.clock.wall())
        return None

    @asynccontextmanager
    async def _holding(self) -> AsyncIterator[bool]:
        """Hold the Batch for the block, if no other process does; whether it is held."""
        shelf = self._shelf

        def hold() -> bool:
            return shelf.store.hold(self.id, shelf.owner, shelf.clock.wall(), shelf.lease_s)

        async def keep_holding() -> None:
            while True:
                await shelf.clock.sleep(shelf.lease_s / 3)
                with suppress(StoreError):
                    await shelf.kept(hold)

        if not await shelf.kept(hold):
            yield False
            return
        keeping = asyncio.create_task(keep_holding())
        try:
            yield True
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            with suppress(StoreError):
                await shelf.kept(lambda: shelf.store.let_go(self.id, shelf.owner))

    # --- validate -------------------------------------------------------------------------------

    async def _validate(self, batch: BatchRecord) -> Stop | None:
        """Register the requests; one cancelled meanwhile needs them too, to give each its line."""
        shelf = self._shelf
        status = Status(batch.status)
        key = await self._look_at_key(batch)
        try:
            found, model = await asyncio.to_thread(self._check, batch, key)
        except InvalidInput as refused:
            if status is Status.CANCELLING:
                await self._end(batch, Action.COMPLETE)
            else:
                await self._end(batch, Action.REFUSE, errors=[asdict(error) for error in refused.errors])
            await asyncio.to_thread(shelf.forget_work, batch)
            return None
        chunks = [
            ChunkRecord(self.id, one.no, one.offset, one.length, one.first_index, one.first_line, one.count)
            for one in found.chunks
        ]
        changes: dict[str, Any] = {
            "input_bytes": found.size_bytes,
            "input_mtime_ns": found.mtime_ns,
            "input_sha256": found.sha256,
            "total": found.total,
            "model": model,
            "enqueued_tokens": tokens_of(found),
        }
        target, room = status, None
        if status is Status.VALIDATING:
            target = step(status, Action.ACCEPT)
            changes["in_progress_at"] = shelf.clock.wall()
            if key is not None and (key.max_batches or key.max_enqueued_tokens):
                most = (key.max_batches, key.max_enqueued_tokens)
                room = Room(batch.tenant, sorted(TERMINAL), batch.created_at, *most)
        try:
            await shelf.kept(
                partial(shelf.store.register, self.id, status, target, chunks, room=room, **changes)
            )
        except NoRoom:
            message = "It waits until batches before it have ended: as much as its key allows is enqueued."
            return Stop("no_room", message)
        shelf.tell(await self._get())
        return None

    def _check(self, batch: BatchRecord, key: KeyRecord | None) -> tuple[Registration, str | None]:
        try:
            source = self._shelf.input_of(batch)
        except BlobNotFound:
            source = None
        return check_input(self._shelf, source, batch.settings, key)

    async def _look_at_key(self, batch: BatchRecord) -> KeyRecord | None:
        if batch.key_id is not None:
            found = await self._shelf.kept(lambda: self._shelf.keys.standing([batch.key_id or ""]))
            self.key = found.get(batch.key_id)
        return self.key

    # --- work -----------------------------------------------------------------------------------

    async def _work(self, batch: BatchRecord) -> Stop | None:
        """Dispatch what can be claimed and has no result yet; None when there is no more of that."""
        shelf = self._shelf
        self.batch = batch
        await self._look_at_key(batch)
        counts = await shelf.kept(lambda: shelf.store.done_counts(self.id))
        left = batch.total - counts.succeeded - counts.failed - counts.never_ran
        demand = Demand(batch.tenant, False, _deadline(batch), batch.priority, max(left, 1))
        if batch.model is None:
            self._engine = RoutedEngine(shelf.models, demand, self._may_use)
            concurrency = sum(one.concurrency for one in shelf.models.values())
        elif (served := shelf.models.get(batch.model)) is not None:
            self._engine, concurrency = served.at(demand), served.concurrency
        else:
            message = f"The model {batch.model!r} is not served any more. Serve it again to go on."
            return Stop("no_model", message)
        source = await asyncio.to_thread(self._open_input, batch)
        try:
            withdrawn = await shelf.kept(lambda: shelf.store.withdrawn(self.id))
            canary = batch.settings.get("canary")
            if batch.canary_passed or not canary:
                policy = None
            else:
                policy = CanaryPolicy(canary["max_failed_share"], canary["first"])
            plan = WorkPlan(
                concurrency=concurrency,
                canary=policy,
                on_canary_passed=self._canary_passed,
                deadline_at=batch.deadline_at,
                lease_s=shelf.lease_s,
                beat_s=1.0 if shelf.shared else shelf.lease_s / 3,
                amend=amending(batch.amendments),
                withdrawn=withdrawn,
                order=OrderName(batch.settings.get("work_order", "auto")),
                # Where others share the work, none of them takes all of it at once.
                order_window=_SHARED_WINDOW if shelf.shared else ORDER_WINDOW,
                dedupe=batch.settings.get("dedupe"),
            )
            worker = Worker(
                shelf.store,
                shelf.keeper,
                shelf.segments(self.id),
                self._engine,
                plan,
                batch_id=self.id,
                total=batch.total,
                source=source,
                owner=shelf.owner,
                clock=shelf.clock,
                events=shelf.events,
            )
            worker.continue_from(counts)
            now = await self._get()
            if now.revision != batch.revision and Status(now.status) is not Status.CANCELLING:
                # Changed since it was looked at: begin again with what it is now.
                return Stop("amended", "It was changed.")
            if Status(now.status) is Status.CANCELLING:
                worker.close(*CANCELLED)
            self.worker = worker
            self.progress = worker.progress
            if self._stopping:
                return Stop("interrupted", "The server is stopping.")
            stop = await worker.run()
        finally:
            self.worker = None
            source.close()
        if stop is not None and stop.reason == "canary":
            await self._move(await self._get(), Action.PAUSE, held_because=stop.message)
        return stop

    def _open_input(self, batch: BatchRecord) -> InputFile:
        try:
            return InputFile(batch, self._shelf.input_of(batch))
        except BlobNotFound as error:
            raise InputChanged("The input of this batch is gone. Nothing more can be run.") from error

    def _canary_passed(self) -> None:
        self._telling = asyncio.create_task(self._shelf.kept(lambda: self._shelf.store.pass_canary(self.id)))

    def _may_use(self, model: str) -> bool:
        return self.key is None or may_use(self.key, model)

    # --- finish ---------------------------------------------------------------------------------

    async def _finish(self, batch: BatchRecord) -> Stop | None:
        """Join the results into files of the tenant, and end the Batch."""
        shelf = self._shelf
        status = Status(batch.status)
        if status not in {Status.FINALIZING, Status.CANCELLING}:
            return None
        chunks = await shelf.kept(lambda: shelf.store.done_chunks(self.id))
        ids = {kind: _file_id(self.id, kind) for kind in ("output", "errors")}
        try:
            joined = await asyncio.to_thread(self._join, chunks, ids)
        except SegmentsDamaged as damage:
            numbers, target = damage.numbers, step(status, Action.REOPEN)
            await shelf.kept(lambda: shelf.store.reopen(self.id, status, target, numbers))
            return None
        now = shelf.clock.wall()
        expires_s = batch.settings.get("output_expires_s") or shelf.limits.output_expires_s
        written = [
            FileRecord(
                ids[kind],
                batch.tenant,
                "batch_output",
                f"{self.id}_{name}.jsonl",
                size,
                now,
                now + expires_s,
            )
            for kind, name, size in (
                ("output", "output", joined.output_bytes),
                ("errors", "error", joined.error_bytes),
            )
            if size
        ]

        def enter() -> None:
            shelf.files.add_written(written)
            shelf.store.place(self.id, joined.chunks)

        await shelf.kept(enter)
        expired = joined.expired and status is not Status.CANCELLING
        await self._end(
            batch,
            Action.EXPIRE if expired else Action.COMPLETE,
            output_file_id=ids["output"] if joined.output_lines else None,
            error_file_id=ids["errors"] if joined.error_lines else None,
        )
        await asyncio.to_thread(shelf.forget_work, batch)
        return None

    def _join(self, chunks: list[ChunkRecord], ids: dict[str, str]) -> Joined:
        shelf = self._shelf
        # Whoever was frozen while it joined must not write into the same files.
        paths = {kind: shelf.blobs.spool / f"{shelf.owner}.{file_id}" for kind, file_id in ids.items()}
        joined = join_committed(
            chunks, shelf.segments(self.id), paths["output"], paths["errors"], Order.INPUT, mark=self.id
        )
        for kind, path in (("output", joined.output), ("errors", joined.errors)):
            if path is not None:
                shelf.blobs.put_file(shelf.files.blob(ids[kind]), path)
        return joined

    # --- the store ------------------------------------------------------------------------------

    async def _get(self) -> BatchRecord:
        return await self._shelf.kept(lambda: self._shelf.store.get(self.id))

    async def _end(self, batch: BatchRecord, action: Action, **changes: Any) -> None:
        await self._move(batch, action, ended_at=self._shelf.clock.wall(), **changes)

    async def _move(self, batch: BatchRecord, action: Action, **changes: Any) -> None:
        shelf = self._shelf
        status = Status(batch.status)
        target = step(status, action)

        def move() -> bool:
            deliveries = shelf.webhooks.deliveries_for(batch.tenant, self.id, target)
            return shelf.store.move(self.id, status, target, deliveries=deliveries, **changes)

        if not await shelf.kept(move):
            raise InvalidTransition(f"Batch {self.id} changed while it was asked to {action.value}.")
        shelf.tell(await self._get())


def _deadline(batch: BatchRecord) -> float:
    return batch.deadline_at or batch.created_at


def _file_id(batch_id: str, kind: str) -> str:
    """The id of a result file: the same after a crash, so that no attempt leaves a second one."""
    return f"file-{hashlib.sha256(f'{batch_id} {kind}'.encode()).hexdigest()[:24]}"
