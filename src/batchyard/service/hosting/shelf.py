"""Floor 6. What all Batches of a server share: store and its thread, blobs, files, keys, models, limits."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from batchyard.clock import Clock
from batchyard.events import Event, EventBus
from batchyard.service.hosting.files import Files
from batchyard.service.hosting.keys import Keys
from batchyard.service.hosting.served import Served
from batchyard.service.hosting.uploads import Uploads
from batchyard.service.hosting.webhooks import Webhooks
from batchyard.service.lifecycle import TERMINAL
from batchyard.service.state_folder import StateFolder
from batchyard.stores.blobs import Blobs, LocalBlobs
from batchyard.stores.files import FileTable
from batchyard.stores.keys import KeyTable
from batchyard.stores.protocol import BatchRecord
from batchyard.stores.segments import SegmentFolder
from batchyard.stores.sql import SqlStore
from batchyard.stores.uploads import UploadTable
from batchyard.stores.webhooks import WebhookTable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one Batch or file may be; the defaults are those of the OpenAI APIs."""

    max_requests: int = 50_000
    max_batch_file_bytes: int = 209_715_200
    max_file_bytes: int = 536_870_912
    max_upload_bytes: int = 8 << 30
    #: Input and result files are deleted after so many seconds, unless their owner says otherwise.
    batch_file_expires_s: float = 30 * 86_400
    output_expires_s: float = 30 * 86_400


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server keeps everything.

    By default one folder holds it all, for one process. With a *database* (the URL of a PostgreSQL one)
    several processes share the work; they need the same folder, or a place for *blobs* that all reach.
    """

    folder: Path
    database: str | None = None
    blobs: Callable[[Path], Blobs] | None = None
    #: For how long what a process holds is its own without a sign of life.
    lease_s: float = 15.0


class Shelf:
    """Opens the place of a server.

    Raises:
        StoreError: it cannot be used, or another process works on it alone.
    """

    def __init__(
        self, place: Place, models: Iterable[Served], limits: Limits, clock: Clock, events: EventBus
    ) -> None:
        self.clock = clock
        self.events = events
        self.limits = limits
        self.lease_s = place.lease_s
        self.models: Mapping[str, Served] = {one.name: one for one in models}
        #: Whether other processes work on the same Batches.
        self.shared = place.database is not None
        #: This process, as leases name it.
        self.owner = f"{socket.gethostname()[:24]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.folder = StateFolder(place.folder, shared=self.shared)
        #: The one thread that touches the store.
        self.keeper = ThreadPoolExecutor(1, thread_name_prefix="batchyard-keeper")
        try:
            self.remote = None if place.blobs is None else place.blobs(place.folder)
            self.blobs: Blobs = self.remote or LocalBlobs(place.folder)
            self.store = SqlStore(place.database or self.folder.database)
            database = self.store.database
            self.files = Files(FileTable(database), self.blobs, clock)
            self.uploads = Uploads(UploadTable(database), self.files, self.blobs, clock)
            self.webhooks = Webhooks(WebhookTable(database), clock)
            self.keys = Keys(KeyTable(database), clock)
            if not self.shared:
                self._tidy()
        except BaseException:
            self.folder.close()
            raise

    def _tidy(self) -> None:
        """Remove what a crash left behind: content that no record speaks of."""
        moving = {batch_id for batch_id, _, _ in self.store.moving(sorted(TERMINAL))}
        self.files.tidy()
        self.uploads.tidy()
        for name in list(self.blobs.names("inputs/")):
            if name.removeprefix("inputs/") not in moving:
                self.blobs.delete(name)
        for path in self.blobs.spool.iterdir():
            path.unlink(missing_ok=True)
        self.store.let_go_all()

    async def kept(self, call: Callable[[], T]) -> T:
        """Run *call* in the one thread that may touch the store."""
        return await asyncio.get_running_loop().run_in_executor(self.keeper, call)

    def input_of(self, batch: BatchRecord) -> Path:
        """The requests of a Batch as a local file.

        Raises:
            BlobNotFound: they are gone.
        """
        # Batches made before there were blobs have the path of a file.
        path = Path(batch.input_path)
        return path if path.is_absolute() else self.blobs.local(batch.input_path)

    def segments(self, batch_id: str) -> SegmentFolder:
        """The segments of a Batch."""
        return self.folder.segments(batch_id, self.remote)

    def forget_work(self, batch: BatchRecord) -> None:
        """A Batch has ended: its segments and its name for its input are of no use any more."""
        self.segments(batch.id).drop()
        path = Path(batch.input_path)
        if path.is_absolute():
            path.unlink(missing_ok=True)
        else:
            self.blobs.delete(batch.input_path)

    def tell(self, batch: BatchRecord) -> None:
        """Let listeners know where a Batch stands."""
        if self.events.listened:
            fields = {"id": batch.id, "status": str(batch.status), "total": batch.total}
            self.events.emit(Event("batch.updated", self.clock.wall(), fields))

    def close(self) -> None:
        """Let go of everything. Safe to call twice."""
        self.keeper.shutdown()
        self.store.close()
        self.folder.close()


def input_name(batch_id: str) -> str:
    """What the requests of a Batch are called among the blobs."""
    return f"inputs/{batch_id}"
