"""Floor 6. The service of Batches: create, look at, work on, finish. The only door to a store."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from batchyard.clock import Clock, SystemClock
from batchyard.engines.protocol import Engine
from batchyard.errors import InvalidInput, InvalidTransition, StoreError
from batchyard.events import Event, EventBus
from batchyard.service.input_file import InputFile
from batchyard.service.intake.registration import IntakeRules, register
from batchyard.service.join import Joined, Order, SegmentsDamaged, join_committed, join_partial
from batchyard.service.lifecycle import TERMINAL, Action, Status, step
from batchyard.service.state_folder import StateFolder
from batchyard.service.work_plan import Stop, WorkPlan
from batchyard.service.worker import Worker
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
            self._check_whole()
        except BaseException:
            self.folder.close()
            raise

    def __repr__(self) -> str:
        return f"<BatchService {self.folder.path}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_whole(self) -> None:
        if not self._store.batches() and self.folder.holds_results():
            self._store.close()
            raise StoreError(
                f"{self.folder.path} holds answers of a run whose database is lost, so they cannot be told "
                "apart. Put state.db back, move the folder away, or start over with --restart."
            )

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
        """What is finished of a Batch; what never ran counts as failed here, as its line is an error."""
        found = self._store.counts(batch_id)
        return Counts(found.succeeded, found.failed + found.never_ran, found.usage)

    def finished(self, batch_id: str) -> Counts:
        """What a resumed run keeps: committed chunks and what can be salvaged of the others."""
        done = {chunk.no for chunk in self._store.done_chunks(batch_id)}
        counts = self._store.done_counts(batch_id)
        succeeded, failed, usage = counts.succeeded, counts.failed + counts.never_ran, counts.usage
        segments = self.folder.segments(batch_id)
        for no in segments.numbers() - done:
            for record in segments.salvage(no):
                succeeded += record.succeeded
                failed += not record.succeeded
                usage += record.usage
        return Counts(succeeded, failed, usage)

    def check_input(self, batch_id: str) -> None:
        """Make sure that the input is still there and the same.

        Raises:
            InputChanged: it is not.
        """
        InputFile(self.get(batch_id)).close()

    def wrote(self, path: Path) -> bool:
        """Whether *path* is a file that a run of this folder wrote, so that it may be replaced."""
        name = str(path.resolve())
        return any(name in {batch.output_path, batch.error_path} for batch in self._store.batches())

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
        source = InputFile(batch)
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
                source=source,
                owner=f"worker-{os.getpid()}",
                clock=self.clock,
                events=self.events,
            )
            worker.continue_from(before)
            if on_worker is not None:
                on_worker(worker)
            stop = await worker.run()
        finally:
            source.close()
        if stop is None:
            self._move(batch_id, Action.FINALIZE, finalizing_at=self.clock.wall())
        elif stop.reason == "canary":
            self._move(batch_id, Action.PAUSE)
        return stop

    # --- retrieve -------------------------------------------------------------------------------

    def finish(self, batch_id: str, output: Path, errors: Path, order: Order = Order.INPUT) -> Joined | None:
        """Join the results of a Batch whose every request has one, and complete it.

        May be repeated after a crash: until the Batch is `completed`, the segments stay. None where
        results were found damaged on the disk: those requests are open again, and the Batch wants work.

        Raises:
            StorageFull: there is no room for the files; nothing is lost.
        """
        # Said before they are written: after a crash in between they are known to be ours.
        names: dict[str, Any] = {
            "output_path": str(output.resolve()),
            "error_path": str(errors.resolve()),
        }
        self._store.move(batch_id, Status.FINALIZING, Status.FINALIZING, **names)
        segments = self.folder.segments(batch_id)
        chunks = self._store.done_chunks(batch_id)
        try:
            joined = join_committed(chunks, segments, output, errors, order, mark=batch_id)
        except SegmentsDamaged as damage:
            target = step(Status.FINALIZING, Action.REOPEN)
            self._store.reopen(batch_id, Status.FINALIZING, target, damage.numbers)
            self._tell(batch_id)
            return None
        if joined.errors is None and self.wrote(errors) and self._is_of_an_earlier_batch(batch_id, errors):
            errors.unlink(missing_ok=True)
        self._move(
            batch_id,
            Action.COMPLETE,
            ended_at=self.clock.wall(),
            output_path=names["output_path"] if joined.output else None,
            error_path=names["error_path"] if joined.errors else None,
        )
        self._forget_all_but(batch_id)
        return joined

    def partial(self, batch_id: str) -> Joined:
        """Write what is finished so far into the state folder, in input order. Changes nothing else."""
        segments = self.folder.segments(batch_id)
        return join_partial(segments.numbers(), segments, *self.folder.partial)

    def remove_if_empty(self) -> bool:
        """Close, and remove the folder, if no Batch in it was ever accepted. Whether it was so."""
        if self.latest() is not None:
            return False
        self._keeper.shutdown()
        self._store.close()
        self.folder.remove()
        self.folder.close()
        return True

    def _is_of_an_earlier_batch(self, batch_id: str, path: Path) -> bool:
        name = str(path.resolve())
        return any(one.error_path == name for one in self._store.batches() if one.id != batch_id)

    def _forget_all_but(self, batch_id: str) -> None:
        """The Batch is complete: what it replaced, its segments and partial files are of no use any more."""
        kept_input = self.get(batch_id).input_path
        for one in self._store.batches():
            self.folder.drop_segments(one.id)
            if one.id != batch_id:
                self._store.delete(one.id)
        for path in self.folder.path.glob("requests.*"):
            if str(path.resolve()) != str(Path(kept_input).resolve()):
                path.unlink(missing_ok=True)
        for path in self.folder.partial:
            path.unlink(missing_ok=True)

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
