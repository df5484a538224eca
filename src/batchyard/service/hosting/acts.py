"""Floor 6. What may be done to a Batch after it was made: each act is stored first and heeded then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from batchyard.errors import InvalidTransition
from batchyard.service.hosting.amendments import Amendment
from batchyard.service.hosting.journeys import Journeys
from batchyard.service.hosting.reader import Reader
from batchyard.service.hosting.shelf import Shelf
from batchyard.service.lifecycle import TERMINAL, Action, Status, step
from batchyard.stores.protocol import BatchRecord


@dataclass(frozen=True, slots=True)
class Update:
    """Changes to a Batch; what is None stays."""

    priority: int | None = None
    #: As the tenant wrote it, and in seconds from the creation of the Batch.
    completion_window: str | None = None
    window_s: float | None = None
    #: Replaces what was there.
    metadata: Mapping[str, str] | None = None


class Acts:
    """Acts on the Batches of one server."""

    def __init__(self, shelf: Shelf, journeys: Journeys, reader: Reader) -> None:
        self._shelf = shelf
        self._journeys = journeys
        self._reader = reader

    async def cancel(self, tenant: str, batch_id: str, dialect: str = "openai") -> BatchRecord:
        """Stop a Batch: what runs is cancelled, what is finished is kept, the rest gets its line.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it has ended.
        """
        return await self._act(
            tenant, batch_id, Action.CANCEL, dialect, lambda _: {"cancelling_at": self._shelf.clock.wall()}
        )

    async def pause(self, tenant: str, batch_id: str) -> BatchRecord:
        """Dispatch nothing more of a Batch until it is resumed; its window goes on.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it is not in progress.
        """
        return await self._act(tenant, batch_id, Action.PAUSE)

    async def resume(self, tenant: str, batch_id: str, key_id: str | None = None) -> BatchRecord:
        """Go on with a paused Batch, as one of the key *key_id*, whatever held it before.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it is not paused.
        """

        def changes(batch: BatchRecord) -> dict[str, Any]:
            found: dict[str, Any] = {"held_because": None}
            if batch.held_because is not None and batch.settings.get("canary"):
                found["canary_passed"] = 1
            if key_id is not None:
                found["key_id"] = key_id
            return found

        return await self._act(tenant, batch_id, Action.RESUME, "openai", changes)

    async def let_expire(self, batch: BatchRecord) -> None:
        """The window of a paused Batch has closed: on its way again, each open request gets its line."""
        await self._act(batch.tenant, batch.id, Action.RESUME, batch.dialect)

    async def update(self, tenant: str, batch_id: str, wanted: Update) -> BatchRecord:
        """Change the priority, the window or the metadata of a Batch.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it has ended, and more than its metadata is to change.
        """

        def changes(batch: BatchRecord) -> dict[str, Any]:
            found: dict[str, Any] = {}
            settings = dict(batch.settings)
            if wanted.priority is not None:
                found["priority"] = wanted.priority
            if wanted.window_s is not None:
                found["deadline_at"] = batch.created_at + wanted.window_s
                settings["completion_window"] = wanted.completion_window
            if found and Status(batch.status) in TERMINAL:
                raise InvalidTransition(f"Batch {batch_id} has ended; only its metadata can change.")
            if wanted.metadata is not None:
                settings["metadata"] = dict(wanted.metadata)
            if settings != dict(batch.settings):
                found["settings"] = settings
            return found

        return await self._change(tenant, batch_id, changes)

    async def amend(self, tenant: str, batch_id: str, amendment: Amendment) -> BatchRecord:
        """Change the requests of a Batch that have not run yet; the change is recorded.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it is past running.
        """
        counts = await self._reader.counts(await self._reader.get(tenant, batch_id))
        left = counts.total - counts.completed - counts.failed - counts.never_ran

        def changes(batch: BatchRecord) -> dict[str, Any]:
            if Status(batch.status) not in {Status.VALIDATING, Status.IN_PROGRESS, Status.PAUSED}:
                raise InvalidTransition(
                    f"Cannot amend a batch with status '{batch.status}': nothing of it is still to run."
                )
            record = {
                "at": int(self._shelf.clock.wall()),
                "change": amendment.record(),
                "requests_left": left,
            }
            found: dict[str, Any] = {"amendments": [*batch.amendments, record]}
            if amendment.model is not None and batch.model is not None:
                found["model"] = amendment.model
            return found

        return await self._change(tenant, batch_id, changes)

    async def withdraw(self, tenant: str, batch_id: str, places: Collection[tuple[int, int]]) -> BatchRecord:
        """Cancel single requests, by chunk number and place; those that have their results keep them.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it has ended.
        """
        batch = await self._reader.get(tenant, batch_id)
        if Status(batch.status) in TERMINAL:
            raise InvalidTransition(f"Batch {batch_id} has ended: none of its requests can be cancelled.")
        if places:
            await self._shelf.kept(lambda: self._shelf.store.withdraw(batch_id, sorted(places)))
            await self._heed(batch_id)
        return await self._reader.get(tenant, batch_id)

    async def delete(self, tenant: str, batch_id: str, dialect: str = "openai") -> None:
        """Forget a Batch that has ended, its result files included.

        Raises:
            BatchNotFound: there is none.
            InvalidTransition: it has not ended.
        """
        batch = await self._reader.get(tenant, batch_id, dialect)
        if Status(batch.status) not in TERMINAL:
            raise InvalidTransition(f"Batch {batch_id} has not ended. Cancel it first.")

        def forget() -> None:
            self._shelf.store.delete(batch_id)
            for file_id in (batch.output_file_id, batch.error_file_id):
                record = None if file_id is None else self._shelf.files.get(tenant, file_id)
                if record is not None:
                    self._shelf.files.delete(record)

        await self._shelf.kept(forget)

    async def _act(
        self,
        tenant: str,
        batch_id: str,
        action: Action,
        dialect: str = "openai",
        changes: Callable[[BatchRecord], dict[str, Any]] = lambda _: {},
    ) -> BatchRecord:
        for _ in range(10):
            batch = await self._reader.get(tenant, batch_id, dialect)
            status = Status(batch.status)
            target = step(status, action)
            if target is status:
                return batch
            if await self._moved(batch, target, changes(batch)):
                return await self._heeded(batch)
        raise InvalidTransition(f"Batch {batch_id} keeps changing. Try again.")

    async def _change(
        self, tenant: str, batch_id: str, changes: Callable[[BatchRecord], dict[str, Any]]
    ) -> BatchRecord:
        for _ in range(10):
            batch = await self._reader.get(tenant, batch_id)
            wanted = changes(batch)
            if not wanted:
                return batch
            if await self._moved(batch, Status(batch.status), {**wanted}, same_revision=True):
                return await self._heeded(batch)
        raise InvalidTransition(f"Batch {batch_id} keeps changing. Try again.")

    async def _moved(
        self, batch: BatchRecord, target: Status, changes: dict[str, Any], *, same_revision: bool = False
    ) -> bool:
        revision = batch.revision if same_revision else None
        move = partial(
            self._shelf.store.move, batch.id, batch.status, target, expected_revision=revision, **changes
        )
        return await self._shelf.kept(move)

    async def _heeded(self, before: BatchRecord) -> BatchRecord:
        batch = await self._reader.get(before.tenant, before.id, before.dialect)
        self._shelf.tell(batch)
        await self._heed(batch.id)
        return batch

    async def _heed(self, batch_id: str) -> None:
        await self._journeys.follow(batch_id)
