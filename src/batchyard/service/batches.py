"""Floor 6. The service of Batches: create, look at, work on, finish. The only door to a store."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from batchyard.clock import Clock, SystemClock
from batchyard.engines.protocol import Engine
from batchyard.errors import InputChanged, InvalidInput, InvalidTransition
from batchyard.events import Event, EventBus
from batchyard.service.intake.registration import IntakeRules, register
from batchyard.service.join import Joined, Order, join_committed, join_partial
from batchyard.service.lifecycle import TERMINAL, Action, Status, step
from batchyard.service.state_folder import StateFolder
from batchyard.service.worker import Stop, Worker, WorkPlan
from batchyard.stores.protocol import BatchRecord, ChunkRecord, Counts
from batchyard.stores.sql import SqlStore


class BatchService:
    """Batches of one state folder. One process holds it at a time; close it, or use `with`.

    With *fresh*, whatever the folder held is forgotten first, results included that were not joined.

    Raises:
        StoreError: the folder cannot be used, or another process works on it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fresh: bool = False,
        clock: Clock | None = None,
        events: EventBus | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.events = events or EventBus()
        self.folder = StateFolder(folder)
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="batchyard-keeper")
        try:
            if fresh:
                self.folder.clear()
            self._store = SqlStore(self.folder.database)
        except BaseException:
            self.folder.close()
            raise

    def __repr__(self) -> str:
        return f"<BatchService {self.folder.path}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- create ---------------------------------------------------------------------------------

    def create(
        self,
        source: Path,
        rules: IntakeRules,
        settings: Mapping[str, Any],
        *,
        deadline_at: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> BatchRecord:
        """Check *source*, request JSONL, and register it as a new Batch, ready to be worked on.

        Raises:
            InvalidInput: the input was refused; the Batch is kept as `failed`, nothing ran.
        """
        batch_id = f"batch_{uuid.uuid4().hex[:24]}"
        now = self.clock.wall()
        self._store.create(
            BatchRecord(batch_id, Status.VALIDATING, now, str(source), settings, deadline_at=deadline_at)
        )
        try:
            found = register(source, rules, on_progress=on_progress)
        except InvalidInput:
            self._move(batch_id, Action.REFUSE, ended_at=self.clock.wall())
            raise
        self._store.register(
            batch_id,
            Status.VALIDATING,
            step(Status.VALIDATING, Action.ACCEPT),
            (
                ChunkRecord(
                    batch_id, one.no, one.offset, one.length, one.first_index, one.first_line, one.count
                )
                for one in found.chunks
            ),
            input_bytes=found.size_bytes,
            input_mtime_ns=found.mtime_ns,
            input_sha256=found.sha256,
            total=found.total,
            in_progress_at=self.clock.wall(),
        )
        self._tell(batch_id)
        return self.get(batch_id)

    # --- query ----------------------------------------------------------------------------------

    def get(self, batch_id: str) -> BatchRecord:
        """The Batch with this id.

        Raises:
            BatchNotFound: there is none.
        """
        return self._store.get(batch_id)

    def latest(self) -> BatchRecord | None:
        """The newest Batch that was accepted, if any."""
        usable = (
            one for one in self._store.batches() if one.status not in {Status.FAILED, Status.VALIDATING}
        )
        return next(usable, None)

    def counts(self, batch_id: str) -> Counts:
        """What is finished of a Batch."""
        return self._store.counts(batch_id)

    def kept(self, batch_id: str) -> int:
        """How many requests have a result that a resumed run keeps, whether the store knows it yet or not."""
        done = {chunk.no for chunk in self._store.done_chunks(batch_id)}
        counts = self._store.done_counts(batch_id)
        segments = self.folder.segments(batch_id)
        salvageable = sum(len(segments.salvage(no)) for no in segments.numbers() - done)
        return counts.succeeded + counts.failed + salvageable

    # --- work -----------------------------------------------------------------------------------

    async def work(
        self,
        batch_id: str,
        engine: Engine,
        plan: WorkPlan,
        *,
        on_worker: Callable[[Worker], None] | None = None,
    ) -> Stop | None:
        """Work on a Batch until every request has a result (None) or it must stop (why).

        The engine must have been started. A Batch that was paused is resumed.

        Raises:
            InputChanged: the input is no longer what was registered.
            InvalidTransition: the Batch has ended.
        """
        batch = self.get(batch_id)
        if Status(batch.status) is Status.FINALIZING:
            return None
        if Status(batch.status) is Status.PAUSED:
            self._move(batch_id, Action.RESUME)
        elif Status(batch.status) is not Status.IN_PROGRESS:
            raise InvalidTransition(f"A Batch with status '{batch.status}' cannot be worked on.")
        handle = _open_unchanged(batch)
        try:
            # The folder's lock is ours, so whoever held a lease before is gone.
            self._store.release(batch_id)
            before = self._store.done_counts(batch_id)
            worker = Worker(
                self._store,
                self._keeper,
                self.folder.segments(batch_id),
                engine,
                plan,
                batch_id=batch_id,
                total=batch.total,
                input_handle=handle,
                owner=f"worker-{os.getpid()}",
                clock=self.clock,
                events=self.events,
            )
            worker.continue_from(before)
            if on_worker is not None:
                on_worker(worker)
            stop = await worker.run()
        finally:
            os.close(handle)
        if stop is None:
            self._move(batch_id, Action.FINALIZE, finalizing_at=self.clock.wall())
        elif stop.reason == "canary":
            self._move(batch_id, Action.PAUSE)
        return stop

    # --- retrieve -------------------------------------------------------------------------------

    def finish(self, batch_id: str, output: Path, errors: Path, order: Order = Order.INPUT) -> Joined:
        """Join the results of a Batch whose every request has one, and complete it.

        May be repeated after a crash: until the Batch is `completed`, the segments stay.

        Raises:
            StorageFull: there is no room for the files; nothing is lost.
        """
        segments = self.folder.segments(batch_id)
        joined = join_committed(self._store.done_chunks(batch_id), segments, output, errors, order)
        self._move(
            batch_id,
            Action.COMPLETE,
            ended_at=self.clock.wall(),
            output_path=str(joined.output) if joined.output else None,
            error_path=str(joined.errors) if joined.errors else None,
        )
        self.folder.drop_segments(batch_id)
        return joined

    def partial(self, batch_id: str, output: Path, errors: Path) -> Joined:
        """Write what is finished so far, in input order. Changes nothing in the Batch."""
        segments = self.folder.segments(batch_id)
        return join_partial(segments.numbers(), segments, output, errors)

    def close(self) -> None:
        """Let go of the folder. Safe to call twice."""
        self._keeper.shutdown()
        self._store.close()
        self.folder.close()

    def _move(self, batch_id: str, action: Action, **changes: Any) -> None:
        status = Status(self._store.get(batch_id).status)
        if not self._store.move(batch_id, status, step(status, action), **changes):
            raise InvalidTransition(
                f"Batch {batch_id} changed while it was asked to {action.value}. Try again."
            )
        self._tell(batch_id)

    def _tell(self, batch_id: str) -> None:
        if self.events.listened:
            batch = self.get(batch_id)
            fields = {"id": batch_id, "status": str(batch.status), "total": batch.total}
            self.events.emit(Event("batch.updated", self.clock.wall(), fields))


def ended(batch: BatchRecord) -> bool:
    """Whether a Batch is in a terminal state."""
    return Status(batch.status) in TERMINAL


def _open_unchanged(batch: BatchRecord) -> int:
    """Open the input of *batch* for reading, after making sure that it is still the same.

    Same size and modification time are taken as proof; otherwise the content is hashed again.
    """
    path = Path(batch.input_path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise InputChanged(
            f"The input {path} of this run is gone. Put it back, or start over with --restart."
        ) from error
    found = os.fstat(handle)
    if (found.st_size, found.st_mtime_ns) == (batch.input_bytes, batch.input_mtime_ns):
        return handle
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest == batch.input_sha256:
        return handle
    os.close(handle)
    raise InputChanged(
        f"The content of {path} has changed since this run was started. "
        "Put the old content back, or start over with --restart."
    )
