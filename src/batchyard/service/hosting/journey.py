"""Floor 6. One Batch on its way through a server: validate, work, join, and over again until it has ended.

Whatever stops a step, a crash included, the next journey goes on from what the store says. All calls of
the store are made in the keeper's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from batchyard.engines.protocol import Engine
from batchyard.errors import (
    BatchyardError,
    InputChanged,
    InvalidInput,
    InvalidTransition,
    LineError,
    UsageError,
)
from batchyard.service.hosting.shelf import Shelf
from batchyard.service.hosting.slots import RoutedEngine
from batchyard.service.input_file import InputFile
from batchyard.service.intake.registration import IntakeRules, Registration, register
from batchyard.service.join import Joined, Order, SegmentsDamaged, join_committed
from batchyard.service.lifecycle import TERMINAL, Action, Status, step
from batchyard.service.worker import Progress, Stop, Worker, WorkPlan
from batchyard.stores.protocol import BatchRecord, ChunkRecord, FileRecord
from batchyard.stores.segments import as_store_error, sync_folder
from batchyard.types import Endpoint

T = TypeVar("T")

CANCELLED = ("batch_cancelled", "This request was not run, because the batch was cancelled before.")
#: Pauses between attempts at a Batch that cannot be worked on for now, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


class Journey:
    """The way of one Batch to its end, or to a pause.

    Args:
        shelf: what all Batches of the server share.
    """

    def __init__(self, shelf: Shelf, batch_id: str) -> None:
        self._shelf = shelf
        self.id = batch_id
        #: While its requests are dispatched.
        self.worker: Worker | None = None
        #: What the last worker had counted, for as long as no other one counts on.
        self.progress: Progress | None = None
        #: Why it does not move, in words; None while it does.
        self.note: str | None = None
        self._stopping = False
        self._nudge = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Journey {self.id} [{'working' if self.worker else self.note or 'between steps'}]>"

    def nudge(self) -> None:
        """Its status was changed from outside: look again now."""
        self._nudge.set()
        if self.worker is not None:
            asyncio.get_running_loop().create_task(self._heed(self.worker))

    async def _heed(self, worker: Worker) -> None:
        status = Status((await self._get()).status)
        if worker is not self.worker:
            return
        if status is Status.CANCELLING and worker.closed_with is None:
            worker.close(*CANCELLED)
        elif status is Status.PAUSED:
            worker.stop("paused", "Paused.")

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
            batch = await self._get()
            status = Status(batch.status)
            if status in TERMINAL or status is Status.PAUSED:
                return
            try:
                stop = await self._step(batch, status)
            except InvalidTransition:
                # Its status was changed meanwhile: look again.
                continue
            except BatchyardError as error:
                stop = Stop("failed", str(error))
            if stop is None or stop.reason in {"interrupted", "paused"}:
                pause_s, self.note = _FIRST_PAUSE_S, None
                continue
            self.note = stop.message
            with suppress(TimeoutError):
                await asyncio.wait_for(self._nudge.wait(), pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _step(self, batch: BatchRecord, status: Status) -> Stop | None:
        if status is Status.VALIDATING or (status is Status.CANCELLING and not batch.total):
            await self._validate(batch)
            return None
        if status is Status.FINALIZING:
            await self._finish(batch)
            return None
        stop = await self._work(batch)
        if stop is None:
            batch = await self._get()
            if Status(batch.status) is Status.CANCELLING:
                await self._finish(batch)
            else:
                await self._move(batch, Action.FINALIZE, finalizing_at=self._shelf.clock.wall())
        return stop

    # --- validate -------------------------------------------------------------------------------

    async def _validate(self, batch: BatchRecord) -> None:
        """Register the requests; one cancelled meanwhile needs them too, to give each its line."""
        shelf = self._shelf
        status = Status(batch.status)
        try:
            found, model = await asyncio.to_thread(self._register, batch)
        except InvalidInput as refused:
            if status is Status.CANCELLING:
                await self._move(batch, Action.COMPLETE, ended_at=shelf.clock.wall())
            else:
                errors = [asdict(error) for error in refused.errors]
                await self._move(batch, Action.REFUSE, ended_at=shelf.clock.wall(), errors=errors)
            await asyncio.to_thread(shelf.forget_work, self.id)
            return
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
        }
        target = status
        if status is Status.VALIDATING:
            target = step(status, Action.ACCEPT)
            changes["in_progress_at"] = shelf.clock.wall()
        await self._kept(partial(shelf.store.register, self.id, status, target, chunks, **changes))
        shelf.tell(await self._get())

    def _register(self, batch: BatchRecord) -> tuple[Registration, str | None]:
        settings = batch.settings
        source = Path(batch.input_path)
        if not source.exists():
            message = f"Cannot find file {settings['input_file_id']}, or you have no access to it."
            raise InvalidInput([LineError("invalid_request", message, None, "file_id")])
        endpoint = Endpoint(settings["endpoint"])
        rules = IntakeRules(
            endpoints=frozenset([endpoint]), several_models=settings["several_models"], same_endpoint=True
        )
        try:
            found = register(source, rules)
        except (UsageError, InputChanged) as error:
            raise InvalidInput([LineError("invalid_request", str(error))]) from error
        most = self._shelf.limits.max_requests if settings["total"] is None else settings["total"]
        if found.total > most:
            message = f"The input holds {found.total:,} requests; a batch takes {most:,}. Split it."
            raise InvalidInput([LineError("too_many_tasks", message)])
        if settings["several_models"]:
            return found, None
        (model,) = found.models
        served = self._shelf.models.get(model)
        line = found.chunks[0].first_line
        if served is None:
            known = ", ".join(sorted(self._shelf.models))
            message = f"The provided model {model!r} is not served here. Use one of: {known}."
            raise InvalidInput([LineError("model_not_found", message, line, "body.model")])
        if endpoint not in served.engine.capabilities.endpoints:
            message = f"The model {model!r} does not answer {endpoint.value}."
            raise InvalidInput([LineError("invalid_request", message, line, "url")])
        return found, served.name

    # --- work -----------------------------------------------------------------------------------

    async def _work(self, batch: BatchRecord) -> Stop | None:
        """Dispatch what has no result yet; None when every request has one."""
        shelf = self._shelf
        urgency = batch.deadline_at or batch.created_at
        engine: Engine
        if batch.model is None:
            engine = RoutedEngine(shelf.models, urgency)
            concurrency = sum(one.concurrency for one in shelf.models.values())
        elif (served := shelf.models.get(batch.model)) is not None:
            engine, concurrency = served.at(urgency), served.concurrency
        else:
            message = f"The model {batch.model!r} is not served any more. Serve it again to go on."
            return Stop("no_model", message)
        source = await asyncio.to_thread(InputFile, batch)
        try:
            # The folder's lock is ours, so whoever held a lease before is gone.
            await self._kept(lambda: shelf.store.release(self.id))
            done = await self._kept(lambda: shelf.store.done_counts(self.id))
            worker = Worker(
                shelf.store,
                shelf.keeper,
                shelf.folder.segments(self.id),
                engine,
                WorkPlan(concurrency=concurrency, deadline_at=batch.deadline_at),
                batch_id=self.id,
                total=batch.total,
                source=source,
                owner=f"worker-{os.getpid()}",
                clock=shelf.clock,
                events=shelf.events,
            )
            worker.continue_from(done)
            if Status((await self._get()).status) is Status.CANCELLING:
                worker.close(*CANCELLED)
            self.worker = worker
            self.progress = worker.progress
            if self._stopping:
                return Stop("interrupted", "The server is stopping.")
            return await worker.run()
        finally:
            self.worker = None
            source.close()

    # --- finish ---------------------------------------------------------------------------------

    async def _finish(self, batch: BatchRecord) -> None:
        """Join the results into files of the tenant, and end the Batch."""
        shelf = self._shelf
        chunks = await self._kept(lambda: shelf.store.done_chunks(self.id))
        output, errors = (_file_id(self.id, kind) for kind in ("output", "errors"))
        try:
            joined = await asyncio.to_thread(self._join, chunks, output, errors)
        except SegmentsDamaged as damage:
            numbers = damage.numbers
            await self._kept(lambda: shelf.store.reopen(self.id, numbers))
            await self._move(batch, Action.REOPEN)
            return
        now = shelf.clock.wall()
        expires_s = batch.settings.get("output_expires_s") or shelf.limits.output_expires_s
        written = [
            FileRecord(
                file_id,
                batch.tenant,
                "batch_output",
                f"{self.id}_{kind}.jsonl",
                path.stat().st_size,
                now,
                now + expires_s,
            )
            for file_id, kind, path in ((output, "output", joined.output), (errors, "error", joined.errors))
            if path is not None
        ]
        await self._kept(lambda: shelf.files.add_written(written))
        if Status(batch.status) is Status.CANCELLING or not joined.never_ran:
            action = Action.COMPLETE
        else:
            action = Action.EXPIRE
        await self._move(
            batch,
            action,
            ended_at=now,
            output_file_id=output if joined.output else None,
            error_file_id=errors if joined.errors else None,
            never_ran=joined.never_ran,
        )
        await asyncio.to_thread(shelf.forget_work, self.id)

    def _join(self, chunks: list[ChunkRecord], output: str, errors: str) -> Joined:
        files, segments = self._shelf.files, self._shelf.folder.segments(self.id)
        return join_committed(
            chunks, segments, files.path(output), files.path(errors), Order.INPUT, mark=self.id
        )

    # --- the store ------------------------------------------------------------------------------

    async def _get(self) -> BatchRecord:
        return await self._kept(lambda: self._shelf.store.get(self.id))

    async def _move(self, batch: BatchRecord, action: Action, **changes: Any) -> None:
        status = Status(batch.status)
        target = step(status, action)
        if not await self._kept(lambda: self._shelf.store.move(self.id, status, target, **changes)):
            raise InvalidTransition(f"Batch {self.id} changed while it was asked to {action.value}.")
        self._shelf.tell(await self._get())

    async def _kept(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._shelf.keeper, call)


def own_input(source: Path | None, target: Path) -> None:
    """Give a Batch its own name for its input, so that deleting the file does not take it away."""
    if source is None:
        return
    try:
        os.link(source, target)
        sync_folder(target.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise as_store_error(error, target) from error


def _file_id(batch_id: str, kind: str) -> str:
    """The id of a result file: the same after a crash, so that no attempt leaves a second one."""
    return f"file-{hashlib.sha256(f'{batch_id} {kind}'.encode()).hexdigest()[:24]}"
