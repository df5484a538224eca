"""Floor 6. The host: every Batch of a server, from its creation to its end, for many tenants at once."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from batchyard.clock import Clock, SystemClock
from batchyard.errors import BatchNotFound, StoreError
from batchyard.events import EventBus
from batchyard.scheduling.retry import RetryPolicy
from batchyard.scheduling.tiers import Tiers
from batchyard.service.hosting.acts import Acts
from batchyard.service.hosting.admission import check_input
from batchyard.service.hosting.courier import Courier
from batchyard.service.hosting.files import Files, Incoming
from batchyard.service.hosting.journeys import Journeys
from batchyard.service.hosting.keys import Keys
from batchyard.service.hosting.patient import LIVE_RETRY
from batchyard.service.hosting.reader import BatchCounts, Reader
from batchyard.service.hosting.retried import write_retried
from batchyard.service.hosting.served import Served
from batchyard.service.hosting.shelf import Limits, Place, Shelf, input_name
from batchyard.service.hosting.uploads import Uploads
from batchyard.service.hosting.webhooks import Webhooks
from batchyard.service.intake.spans import Registration
from batchyard.service.lifecycle import TERMINAL, Status
from batchyard.stores.blobs import BlobNotFound
from batchyard.stores.protocol import BatchFilter, BatchRecord, Enqueued, KeyRecord

T = TypeVar("T")

_SWEEP_S = 30.0
#: What ids of Batches begin with, by dialect.
_PREFIXES = {"openai": "batch_", "anthropic": "msgbatch_"}
_ENDED = sorted(TERMINAL)


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a tenant asks for."""

    #: The file, or the content that the Batch takes for its own; None where there is no such file.
    source: str | Incoming | None
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
    priority: int = 0
    #: `first` so many requests run alone, and the rest only if at most `max_failed_share` of them fail.
    canary: Mapping[str, Any] | None = None
    #: The Batch whose failed requests these are.
    retry_of: str | None = None
    key_id: str | None = None
    #: In which order its requests are worked on, and whether those that are alike are asked once.
    work_order: str = "auto"
    dedupe: bool | None = None
    #: Of a file made for it alone: the SHA-256 of its content, which says what was asked better than its id.
    content: str | None = None

    def settings(self) -> dict[str, Any]:
        """What the store keeps of it."""
        order = {} if self.work_order == "auto" else {"work_order": self.work_order}
        dedupe = {} if self.dedupe is None else {"dedupe": self.dedupe}
        return {
            **order,
            **dedupe,
            "input_file_id": self.input_file_id,
            "endpoint": self.endpoint,
            "completion_window": self.completion_window,
            "metadata": self.metadata,
            "output_expires_s": self.output_expires_s,
            "several_models": self.several_models,
            "total": self.total,
            "canary": self.canary,
            "retry_of": self.retry_of,
        }


class IdempotencyConflict(Exception):  # noqa: N818 - names what failed
    """The idempotency key was used for another request before."""


class Host:
    """Keeps every Batch of a state folder moving while the server runs.

    Args:
        place: where everything is kept; a folder alone is for one host at a time.
        models: what Batches and live requests may ask for; their engines are started by `open`.
        private_webhooks: deliver webhooks to private addresses and over plain HTTP too.
        tiers: the latency classes that requests may name.
        live_retry: how long a live request is kept trying.

    Raises:
        StoreError: the place cannot be used, or another process works on it alone.
    """

    def __init__(
        self,
        place: Path | Place,
        models: Sequence[Served],
        *,
        limits: Limits | None = None,
        clock: Clock | None = None,
        events: EventBus | None = None,
        private_webhooks: bool = False,
        tiers: Tiers | None = None,
        live_retry: RetryPolicy = LIVE_RETRY,
    ) -> None:
        self.clock = clock or SystemClock()
        self.limits = limits or Limits()
        self.events = events or EventBus()
        self.tiers = tiers or Tiers()
        self.live_retry = live_retry
        where = Place(place) if isinstance(place, Path) else place
        self._shelf = Shelf(where, models, self.limits, self.clock, self.events)
        self._journeys = Journeys(self._shelf)
        #: Looks at Batches, and acts on them.
        self.reader = Reader(self._shelf, self._journeys)
        self.acts = Acts(self._shelf, self._journeys, self.reader)
        self.courier = Courier(self._shelf.webhooks, self.kept, self.clock, allow_private=private_webhooks)
        self._errands: list[asyncio.Task[None]] = []
        self._closing = False

    def __repr__(self) -> str:
        moving = len(self._journeys)
        return f"<Host {self._shelf.folder.path} [{len(self.models)} models, {moving} batches moving]>"

    @property
    def where(self) -> str:
        """Where everything is kept, in words that hold no password."""
        shelf = self._shelf
        named = [str(shelf.folder.path)]
        if shelf.shared:
            named.append(shelf.store.database.name)
        if shelf.remote is not None:
            named.append(repr(shelf.remote).strip("<>"))
        return ", ".join(named)

    @property
    def models(self) -> Mapping[str, Served]:
        """The models by name."""
        return self._shelf.models

    @property
    def files(self) -> Files:
        """The files of all tenants; call it through `kept`."""
        return self._shelf.files

    @property
    def uploads(self) -> Uploads:
        """The uploads of all tenants; call it through `kept`."""
        return self._shelf.uploads

    @property
    def webhooks(self) -> Webhooks:
        """The webhook endpoints of all tenants; call it through `kept`."""
        return self._shelf.webhooks

    @property
    def keys(self) -> Keys:
        """The keys of all tenants; call it through `kept`."""
        return self._shelf.keys

    async def kept(self, call: Callable[[], T]) -> T:
        """Run *call* in the one thread that may touch the store."""
        return await self._shelf.kept(call)

    # --- the life of the host ---------------------------------------------------------------------

    async def open(self) -> None:
        """Start the engines, then take up every Batch that has not ended. Safe to call twice.

        Raises:
            EngineError: an engine cannot be used.
        """
        if self._errands:
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
        for batch_id, status, _ in await self.kept(lambda: self._shelf.store.moving(_ENDED)):
            if Status(status) is not Status.PAUSED:
                self._journeys.set_out(batch_id)
        errands = (self._sweep(), self._journeys.watch(), self.courier.run())
        self._errands = [asyncio.create_task(one) for one in errands]

    async def close(self) -> None:
        """Stop dispatching, keep everything that is finished, end the engines. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        for task in self._errands:
            task.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)
        await self._journeys.close()
        for served in self.models.values():
            await served.engine.close()
        self._shelf.close()

    async def _sweep(self) -> None:
        while True:
            await self.clock.sleep(_SWEEP_S)
            # What cannot be done now is done at the next round.
            with suppress(StoreError):
                await self.kept(self.files.sweep)
                await self.kept(self.uploads.sweep)
                await asyncio.to_thread(self._shelf.blobs.sweep)
                await self._end_late_pauses()

    async def _end_late_pauses(self) -> None:
        for batch_id, status, _ in await self.kept(lambda: self._shelf.store.moving(_ENDED)):
            if Status(status) is Status.PAUSED:
                batch = await self.kept(partial(self._shelf.store.get, batch_id))
                if batch.deadline_at is not None and batch.deadline_at <= self.clock.wall():
                    await self.acts.let_expire(batch)

    # --- create ---------------------------------------------------------------------------------

    async def create(
        self, tenant: str, wanted: NewBatch, *, idempotency_key: str | None = None
    ) -> BatchRecord:
        """A new Batch; its input is checked in the background.

        With an *idempotency_key* that the tenant has used before, the Batch that it made.

        Raises:
            IdempotencyConflict: that Batch was made of something else.
            StorageFull: there is no room to remember it.
        """
        name = uuid.uuid4().hex
        if idempotency_key is not None:
            name = hashlib.sha256(f"{tenant}\0{idempotency_key}".encode(errors="surrogatepass")).hexdigest()
        batch_id = f"{_PREFIXES[wanted.dialect]}{name[:24]}"
        now = self.clock.wall()
        # Settings may change later; what was asked for is told by its digest.
        asked_for = {**wanted.settings(), "priority": wanted.priority}
        if wanted.content is not None:
            asked_for["input_file_id"] = wanted.content
        asked = hashlib.sha256(msgspec.json.encode(asked_for)).hexdigest()
        record = BatchRecord(
            batch_id,
            Status.VALIDATING,
            now,
            input_name(batch_id),
            {**wanted.settings(), "asked": asked},
            deadline_at=now + wanted.window_s,
            tenant=tenant,
            dialect=wanted.dialect,
            priority=wanted.priority,
            key_id=wanted.key_id,
        )

        def remember() -> BatchRecord:
            if idempotency_key is not None:
                with suppress(BatchNotFound):
                    return self._shelf.store.get(batch_id)
            self._take_input(wanted.source, record)
            return record if self._shelf.store.create(record) else self._shelf.store.get(batch_id)

        made = await self.kept(remember)
        if made.settings.get("asked") != asked:
            raise IdempotencyConflict
        if made is record:
            self._shelf.tell(record)
            self._journeys.set_out(batch_id)
        return made

    def _take_input(self, source: str | Incoming | None, record: BatchRecord) -> None:
        """Give a Batch its own name for its input, so that deleting the file does not take it away."""
        if isinstance(source, Incoming):
            source.end()
            self._shelf.blobs.put_file(record.input_path, source.path)
        elif source is not None:
            # Without its file it fails when it is validated, and says so.
            with suppress(BlobNotFound):
                self._shelf.blobs.copy(self.files.blob(source), record.input_path)

    async def retry(
        self, batch: BatchRecord, wanted: NewBatch, chosen: Callable[[str], bool]
    ) -> BatchRecord | None:
        """A new Batch of those requests of an ended one that failed in a *chosen* way (kind of failure).

        They are asked as they were asked last, amendments included. None where there are none.

        Raises:
            InvalidTransition: the Batch has not ended, or its input or results are deleted.
        """
        file = await self.retried_input(batch, chosen)
        if file is None:
            return None
        return await self.create(batch.tenant, replace(wanted, source=file, input_file_id=file))

    async def retried_input(self, batch: BatchRecord, chosen: Callable[[str], bool]) -> str | None:
        """The id of a new file with the requests of `retry`."""
        incoming = self.files.begin()
        try:
            count = await write_retried(self._shelf, self.reader, batch, incoming, chosen)
            if not count:
                return None
            await asyncio.to_thread(self.files.store, incoming)
            record = await self.kept(
                lambda: self.files.enter(
                    incoming,
                    batch.tenant,
                    purpose="batch",
                    filename=f"{batch.id}_retry.jsonl",
                    expires_s=self.limits.batch_file_expires_s,
                )
            )
        finally:
            incoming.discard()
        return record.id

    # --- query ----------------------------------------------------------------------------------

    async def get(self, tenant: str, batch_id: str, dialect: str = "openai") -> BatchRecord:
        """The Batch of *tenant* with this id.

        Raises:
            BatchNotFound: there is none; another tenant's is none either, nor is one of another dialect.
        """
        return await self.reader.get(tenant, batch_id, dialect)

    async def page(
        self,
        tenant: str,
        limit: int,
        *,
        dialect: str = "openai",
        after: BatchRecord | None = None,
        before: BatchRecord | None = None,
        wanted: BatchFilter | None = None,
    ) -> list[BatchRecord]:
        """Up to *limit* Batches, newest first: those after *after*, or those next before *before*."""
        page = partial(self._shelf.store.page, tenant, dialect, limit, after=after, before=before)
        return await self.kept(partial(page, wanted=wanted or BatchFilter()))

    async def counts(self, batch: BatchRecord) -> BatchCounts:
        """What became of its requests so far."""
        return await self.reader.counts(batch)

    async def look_ahead(
        self, tenant: str, wanted: NewBatch, content: Incoming | None, key: KeyRecord | None
    ) -> Registration:
        """What is in the input of a Batch that is not made yet: *content*, or the file that is *wanted*.

        Raises:
            InvalidInput: the Batch would be refused.
        """
        path = None if content is None else content.path
        if content is None:
            file = await self.kept(lambda: self.files.get(tenant, wanted.input_file_id))
            with suppress(BlobNotFound):
                path = None if file is None else await asyncio.to_thread(self.files.path, file.id)
        found, _ = await asyncio.to_thread(check_input, self._shelf, path, wanted.settings(), key)
        return found

    def jobs(self, model: str) -> list[tuple[float, float]]:
        """Deadline and requests left of every Batch that moves here and asks *model*, or any of several."""
        found = []
        for journey in self._journeys:
            batch, demand = journey.batch, journey.demand
            if batch is not None and batch.model in {None, model}:
                left = batch.total if demand is None else demand.remaining
                found.append((batch.deadline_at or inf, float(left)))
        return found

    async def enqueued(self, tenant: str, model: str | None = None) -> Enqueued:
        """What a tenant has in Batches that have not ended."""
        return await self.kept(lambda: self._shelf.store.enqueued(tenant, _ENDED, model))
