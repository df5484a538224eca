"""Floor 6. The host: every Batch of a server, from its creation to its end, for many tenants at once."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from batchyard.clock import Clock, SystemClock
from batchyard.errors import BatchNotFound, InvalidTransition
from batchyard.events import EventBus
from batchyard.service.hosting.files import Files
from batchyard.service.hosting.journey import Journey, own_input
from batchyard.service.hosting.keys import Keys
from batchyard.service.hosting.shelf import Limits, Shelf
from batchyard.service.hosting.slots import Served
from batchyard.service.lifecycle import TERMINAL, Action, Status, step
from batchyard.stores.protocol import BatchRecord
from batchyard.types import Usage

T = TypeVar("T")

_SWEEP_S = 30.0
#: What ids of Batches begin with, by dialect.
_PREFIXES = {"openai": "batch_", "anthropic": "msgbatch_"}


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a tenant asks for."""

    #: Where the requests lie until the Batch has its own name for them; None where they cannot be found.
    source: Path | None
    input_file_id: str
    endpoint: str
    #: As the tenant wrote it, such as `24h`, and in seconds.
    completion_window: str
    window_s: float
    metadata: Mapping[str, str] | None = None
    output_expires_s: float | None = None
    dialect: str = "openai"
    #: Whether requests may name different models; one that is not served then fails alone.
    several_models: bool = False
    #: How many requests there are, where that is known.
    total: int | None = None

    def settings(self) -> dict[str, Any]:
        """What the store keeps of it."""
        return {
            "input_file_id": self.input_file_id,
            "endpoint": self.endpoint,
            "completion_window": self.completion_window,
            "metadata": self.metadata,
            "output_expires_s": self.output_expires_s,
            "several_models": self.several_models,
            "total": self.total,
        }


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What became of the requests of a Batch so far; those that never ran are in neither count."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)


class Host:
    """Keeps every Batch of a state folder moving while the server runs.

    Args:
        folder: where everything is kept; one host at a time.
        models: what Batches and live requests may ask for; their engines are started by `open`.

    Raises:
        StoreError: the folder cannot be used, or another process works on it.
    """

    def __init__(
        self,
        folder: Path,
        models: Sequence[Served],
        *,
        limits: Limits | None = None,
        clock: Clock | None = None,
        events: EventBus | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.limits = limits or Limits()
        self._shelf = Shelf(folder, models, self.limits, self.clock, events or EventBus())
        self._journeys: dict[str, tuple[Journey, asyncio.Task[None]]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False

    def __repr__(self) -> str:
        moving = len(self._journeys)
        return f"<Host {self._shelf.folder.path} [{len(self.models)} models, {moving} batches moving]>"

    @property
    def models(self) -> Mapping[str, Served]:
        """The models by name."""
        return self._shelf.models

    @property
    def files(self) -> Files:
        """The files of all tenants; call it through `kept`."""
        return self._shelf.files

    @property
    def keys(self) -> Keys:
        """The keys of all tenants; call it through `kept`."""
        return self._shelf.keys

    async def kept(self, call: Callable[[], T]) -> T:
        """Run *call* in the one thread that may touch the store."""
        return await asyncio.get_running_loop().run_in_executor(self._shelf.keeper, call)

    # --- the life of the host ---------------------------------------------------------------------

    async def open(self) -> None:
        """Start the engines, then take up every Batch that has not ended. Safe to call twice.

        Raises:
            EngineError: an engine cannot be used.
        """
        if self._sweeper is not None:
            return
        started: list[Served] = []
        try:
            for served in self.models.values():
                await served.engine.start()
                started.append(served)
        except BaseException:
            for served in started:
                await served.engine.close()
            self._shelf.close()
            raise
        batches = await self.kept(self._shelf.store.batches)
        await self.kept(lambda: self.files.tidy(()))
        for batch in batches:
            if Status(batch.status) not in TERMINAL | {Status.PAUSED}:
                self._set_out(batch.id)
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Stop dispatching, keep everything that is finished, end the engines. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for journey, _ in self._journeys.values():
            journey.stop()
        tasks = [task for _, task in self._journeys.values()]
        if self._sweeper is not None:
            tasks.append(self._sweeper)
        await asyncio.gather(*tasks, return_exceptions=True)
        for served in self.models.values():
            await served.engine.close()
        self._shelf.close()

    async def _sweep(self) -> None:
        while True:
            await self.clock.sleep(_SWEEP_S)
            await self.kept(self.files.sweep)
            now = self.clock.wall()
            for batch in await self.kept(self._shelf.store.batches):
                late = batch.deadline_at is not None and batch.deadline_at <= now
                if late and Status(batch.status) is Status.PAUSED:
                    # Its window closes all the same: on its way again, each open request gets its line.
                    await self._act(batch.tenant, batch.id, Action.RESUME, batch.dialect)

    def _set_out(self, batch_id: str) -> None:
        if self._closing or batch_id in self._journeys:
            return
        journey = Journey(self._shelf, batch_id)
        task = asyncio.create_task(journey.run(), name=f"batch {batch_id}")
        self._journeys[batch_id] = (journey, task)
        task.add_done_callback(lambda _: self._arrived(batch_id, journey))

    def _arrived(self, batch_id: str, journey: Journey) -> None:
        found = self._journeys.get(batch_id)
        if found is not None and found[0] is journey:
            del self._journeys[batch_id]

    # --- create ---------------------------------------------------------------------------------

    async def create(
        self, tenant: str, wanted: NewBatch, *, idempotency_key: str | None = None
    ) -> BatchRecord:
        """A new Batch; its input is checked in the background.

        With an *idempotency_key* that the tenant has used before, the Batch that it made, whatever is
        *wanted* now.

        Raises:
            StorageFull: there is no room to remember it.
        """
        name = uuid.uuid4().hex
        if idempotency_key is not None:
            name = hashlib.sha256(f"{tenant}\0{idempotency_key}".encode()).hexdigest()
        batch_id = f"{_PREFIXES[wanted.dialect]}{name[:24]}"
        now = self.clock.wall()
        target = self._shelf.input_of(batch_id)
        record = BatchRecord(
            batch_id,
            Status.VALIDATING,
            now,
            str(target),
            wanted.settings(),
            deadline_at=now + wanted.window_s,
            tenant=tenant,
            dialect=wanted.dialect,
        )

        def remember() -> BatchRecord:
            if idempotency_key is not None:
                with suppress(BatchNotFound):
                    return self._shelf.store.get(batch_id)
            own_input(wanted.source, target)
            self._shelf.store.create(record)
            return record

        made = await self.kept(remember)
        if made is record:
            self._shelf.tell(record)
            self._set_out(batch_id)
        return made

    # --- query ----------------------------------------------------------------------------------

    async def get(self, tenant: str, batch_id: str, dialect: str = "openai") -> BatchRecord:
        """The Batch of *tenant* with this id.

        Raises:
            BatchNotFound: there is none; another tenant's is none either, nor is one of another dialect.
        """
        batch = await self.kept(lambda: self._shelf.store.get(batch_id))
        if (batch.tenant, batch.dialect) != (tenant, dialect):
            raise BatchNotFound(f"There is no Batch {batch_id!r}.")
        return batch

    async def page(
        self,
        tenant: str,
        limit: int,
        *,
        dialect: str = "openai",
        after: BatchRecord | None = None,
        statuses: Sequence[str] = (),
    ) -> list[BatchRecord]:
        """Up to *limit* Batches that come after *after*, newest first."""
        page = partial(self._shelf.store.page, tenant, dialect, limit, after=after, statuses=statuses)
        return await self.kept(page)

    async def counts(self, batch: BatchRecord) -> BatchCounts:
        """What became of its requests so far."""
        journey = self._journeys.get(batch.id)
        progress = None if journey is None else journey[0].progress
        if progress is not None and Status(batch.status) not in TERMINAL:
            kinds = progress.failed_by_kind
            never_ran = kinds.get("batch_cancelled", 0) + kinds.get("batch_expired", 0)
            return BatchCounts(batch.total, progress.succeeded, progress.failed - never_ran, progress.usage)
        found = await self.kept(lambda: self._shelf.store.counts(batch.id))
        return BatchCounts(batch.total, found.succeeded, found.failed - batch.never_ran, found.usage)

    def note(self, batch_id: str) -> str | None:
        """Why a Batch does not move, in words; None while it does."""
        found = self._journeys.get(batch_id)
        if found is None:
            return None
        journey = found[0]
        return journey.note if journey.worker is None else journey.worker.note

    # --- act ------------------------------------------------------------------------------------

    async def cancel(self, tenant: str, batch_id: str, dialect: str = "openai") -> BatchRecord:
        """Stop a Batch: what runs is cancelled, what is finished is kept, the rest gets its line.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it has ended.
        """
        return await self._act(tenant, batch_id, Action.CANCEL, dialect)

    async def pause(self, tenant: str, batch_id: str) -> BatchRecord:
        """Dispatch nothing more of a Batch until it is resumed; its window goes on.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it is not in progress.
        """
        return await self._act(tenant, batch_id, Action.PAUSE)

    async def resume(self, tenant: str, batch_id: str) -> BatchRecord:
        """Go on with a paused Batch.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it is not paused.
        """
        return await self._act(tenant, batch_id, Action.RESUME)

    async def delete(self, tenant: str, batch_id: str, dialect: str = "openai") -> None:
        """Forget a Batch that has ended, its result files included.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it has not ended.
        """
        batch = await self.get(tenant, batch_id, dialect)
        if Status(batch.status) not in TERMINAL:
            raise InvalidTransition(f"Batch {batch_id} has not ended. Cancel it first.")

        def forget() -> None:
            self._shelf.store.delete(batch_id)
            for file_id in (batch.output_file_id, batch.error_file_id):
                record = None if file_id is None else self.files.get(tenant, file_id)
                if record is not None:
                    self.files.delete(record)

        await self.kept(forget)

    async def _act(self, tenant: str, batch_id: str, action: Action, dialect: str = "openai") -> BatchRecord:
        for _ in range(10):
            batch = await self.get(tenant, batch_id, dialect)
            status = Status(batch.status)
            target = step(status, action)
            if target is status:
                return batch
            changes: dict[str, Any] = {}
            if action is Action.CANCEL:
                changes["cancelling_at"] = self.clock.wall()
            moved = await self.kept(partial(self._shelf.store.move, batch_id, status, target, **changes))
            if moved:
                batch = await self.get(tenant, batch_id, dialect)
                self._shelf.tell(batch)
                await self._follow(batch_id)
                return batch
        raise InvalidTransition(f"Batch {batch_id} keeps changing. Try again.")

    async def _follow(self, batch_id: str) -> None:
        """Make its journey heed a new status, whether one is under way or not."""
        found = self._journeys.get(batch_id)
        if found is None:
            self._set_out(batch_id)
            return
        journey, task = found
        journey.nudge()

        def set_out_again(_: asyncio.Task[None]) -> None:
            # It may have been about to end, as for a pause, when the status changed again.
            asyncio.get_running_loop().call_soon(self._go_on, batch_id)

        task.add_done_callback(set_out_again)

    def _go_on(self, batch_id: str) -> None:
        if not self._closing:
            self._set_out(batch_id)
