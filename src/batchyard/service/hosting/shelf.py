"""Floor 6. What all Batches of a server share: folder, store and its thread, files, keys, models, limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from batchyard.clock import Clock
from batchyard.events import Event, EventBus
from batchyard.service.hosting.files import Files
from batchyard.service.hosting.keys import Keys
from batchyard.service.hosting.slots import Served
from batchyard.service.state_folder import StateFolder
from batchyard.stores.files import FileTable
from batchyard.stores.keys import KeyTable
from batchyard.stores.protocol import BatchRecord
from batchyard.stores.sql import SqlStore


@dataclass(frozen=True, slots=True)
class Limits:
    """What one Batch or file may be; the defaults are those of the OpenAI Batch API."""

    max_requests: int = 50_000
    max_batch_file_bytes: int = 209_715_200
    max_file_bytes: int = 536_870_912
    #: Input and result files are deleted after so many seconds, unless their owner says otherwise.
    batch_file_expires_s: float = 30 * 86_400
    output_expires_s: float = 30 * 86_400


class Shelf:
    """Opens the state folder of a server; one process holds it at a time.

    Raises:
        StoreError: the folder cannot be used, or another process works on it.
    """

    def __init__(
        self, folder: Path, models: Iterable[Served], limits: Limits, clock: Clock, events: EventBus
    ) -> None:
        self.clock = clock
        self.events = events
        self.limits = limits
        self.models: Mapping[str, Served] = {one.name: one for one in models}
        self.folder = StateFolder(folder)
        #: The one thread that touches the store.
        self.keeper = ThreadPoolExecutor(1, thread_name_prefix="batchyard-keeper")
        try:
            self.store = SqlStore(self.folder.database)
            self.files = Files(FileTable(self.store.database), self.folder.files, clock)
            self.keys = Keys(KeyTable(self.store.database), clock)
        except BaseException:
            self.folder.close()
            raise

    def input_of(self, batch_id: str) -> Path:
        """Where the requests of a Batch lie while it is worked on."""
        return self.folder.path / f"requests.{batch_id}.jsonl"

    def forget_work(self, batch_id: str) -> None:
        """A Batch has ended: its segments and its name for its input are of no use any more."""
        self.folder.drop_segments(batch_id)
        self.input_of(batch_id).unlink(missing_ok=True)

    def tell(self, batch: BatchRecord) -> None:
        """Let listeners know where a Batch stands."""
        if self.events.listened:
            fields = {"id": batch.id, "status": str(batch.status), "total": batch.total}
            self.events.emit(Event("batch.updated", self.clock.wall(), fields))

    def close(self) -> None:
        """Let go of the folder. Safe to call twice."""
        self.keeper.shutdown()
        self.store.close()
        self.folder.close()
