"""Floor 6. All journeys of a server process, and the watch that keeps them true to the store.

The watch looks several times a second: whether the keys that Batches were made with still allow them, and,
where other processes share the database, what they have changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from batchyard.errors import InvalidTransition, StoreError
from batchyard.service.hosting.journey import Journey
from batchyard.service.hosting.keys import may_use
from batchyard.service.hosting.shelf import Shelf
from batchyard.service.lifecycle import TERMINAL, Action, Status, step
from batchyard.stores.protocol import BatchRecord, KeyRecord

#: A withdrawn permission stops dispatches within this time and that of two queries.
WATCH_S = 0.4
_ENDED = sorted(TERMINAL)


class Journeys:
    """Every Batch that moves, by id."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._under_way: dict[str, tuple[Journey, asyncio.Task[None]]] = {}
        #: Revisions of Batches as the watch last saw them; other processes change them too.
        self._seen: dict[str, int] = {}
        self._closing = False

    def __repr__(self) -> str:
        return f"<Journeys [{len(self._under_way)} under way]>"

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Journey]:
        return iter([journey for journey, _ in self._under_way.values()])

    def of(self, batch_id: str) -> Journey | None:
        """The journey of a Batch, if it is under way here."""
        found = self._under_way.get(batch_id)
        return None if found is None else found[0]

    def set_out(self, batch_id: str) -> None:
        """Let a Batch move, if it does not already."""
        if self._closing or batch_id in self._under_way:
            return
        journey = Journey(self._shelf, batch_id)
        task = asyncio.create_task(journey.run(), name=f"batch {batch_id}")
        self._under_way[batch_id] = (journey, task)
        task.add_done_callback(lambda _: self._arrived(batch_id, journey))

    def _arrived(self, batch_id: str, journey: Journey) -> None:
        if self.of(batch_id) is journey:
            del self._under_way[batch_id]

    async def follow(self, batch_id: str) -> None:
        """Make a journey heed what was changed about its Batch, whether one is under way or not."""
        found = self._under_way.get(batch_id)
        if found is None:
            self.set_out(batch_id)
            return
        journey, task = found

        def set_out_again(_: asyncio.Task[None]) -> None:
            # It may have been about to end, as for a pause, when the status changed again.
            asyncio.get_running_loop().call_soon(self.set_out, batch_id)

        task.add_done_callback(set_out_again)
        await journey.heed()

    async def close(self) -> None:
        """Stop dispatching; everything that is finished is kept."""
        self._closing = True
        for journey in self:
            journey.stop()
        await asyncio.gather(*(task for _, task in self._under_way.values()), return_exceptions=True)

    # --- the watch ------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await self._shelf.clock.sleep(WATCH_S)
            # While the store is gone nothing is dispatched for long either: leases lapse.
            with suppress(StoreError):
                if self._shelf.shared:
                    await self._look_at_others()
                await self._look_at_keys()

    async def _look_at_others(self) -> None:
        moving = await self._shelf.kept(lambda: self._shelf.store.moving(_ENDED))
        seen, self._seen = self._seen, {batch_id: revision for batch_id, _, revision in moving}
        for batch_id, status, revision in moving:
            if seen.get(batch_id) != revision and self.of(batch_id) is not None:
                await self.follow(batch_id)
            elif Status(status) is not Status.PAUSED:
                self.set_out(batch_id)

    async def _look_at_keys(self) -> None:
        journeys = [one for one in self if one.batch is not None and one.batch.key_id is not None]
        ids = {one.batch.key_id for one in journeys if one.batch is not None and one.batch.key_id}
        standing = await self._shelf.kept(partial(self._shelf.keys.standing, ids))
        for journey in journeys:
            assert journey.batch is not None
            journey.key = standing.get(journey.batch.key_id or "")
            because = withdrawn(journey.batch, journey.key)
            if because is not None and Status(journey.batch.status) is Status.IN_PROGRESS:
                await self.hold(journey.batch, because)

    async def hold(self, batch: BatchRecord, because: str) -> None:
        """Pause a Batch that nobody asked to pause, and tell its tenant why."""
        shelf = self._shelf

        def move() -> bool:
            status = Status(batch.status)
            target = step(status, Action.PAUSE)
            deliveries = shelf.webhooks.deliveries_for(batch.tenant, batch.id, target)
            return shelf.store.move(batch.id, status, target, deliveries=deliveries, held_because=because)

        with suppress(InvalidTransition):
            if await shelf.kept(move):
                await self.follow(batch.id)


def withdrawn(batch: BatchRecord, key: KeyRecord | None) -> str | None:
    """Why the key that a Batch was made with does not allow it any more; None while it does."""
    if batch.key_id is None:
        return None
    if key is None or key.revoked_at is not None:
        return (
            f"The key {batch.key_id} that this batch was made with was revoked. Resume it with another key."
        )
    if batch.model is not None and not may_use(key, batch.model):
        return (
            f"The key {batch.key_id} that this batch was made with may not use {batch.model!r} any more. "
            "Resume it with another key."
        )
    return None
