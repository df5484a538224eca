"""Floor 6. Files of tenants: uploaded, written by Batches, read, deleted, expired.

The content of a file lies in the state folder under its id; it is there, whole and durable, before the
database knows of it. What a crash leaves without a record is removed at the next start.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from batchyard.clock import Clock
from batchyard.stores.files import FileTable
from batchyard.stores.protocol import FileRecord
from batchyard.stores.segments import as_store_error, sync_folder


@dataclass(slots=True)
class Incoming:
    """A file on its way in, under a name of its own until it is whole."""

    id: str
    path: Path
    handle: BinaryIO
    size: int = 0

    def write(self, data: bytes) -> None:
        """Take more of the content.

        Raises:
            StorageFull: there is no room for it.
        """
        try:
            self.handle.write(data)
        except OSError as error:
            raise as_store_error(error, self.path) from error
        self.size += len(data)

    def discard(self) -> None:
        """Forget it. Safe to call twice, and after it was kept."""
        self.handle.close()
        self.path.unlink(missing_ok=True)


class Files:
    """The files of one server."""

    def __init__(self, table: FileTable, folder: Path, clock: Clock) -> None:
        self._table = table
        self._folder = folder
        self._clock = clock

    def path(self, file_id: str) -> Path:
        """Where the content of a file lies."""
        return self._folder / file_id

    def begin(self) -> Incoming:
        """A place for a new file."""
        file_id = f"file-{uuid.uuid4().hex[:24]}"
        part = self._folder / f".{file_id}.part"
        try:
            return Incoming(file_id, part, part.open("wb", buffering=1 << 16))
        except OSError as error:
            raise as_store_error(error, part) from error

    def keep(
        self, incoming: Incoming, tenant: str, *, purpose: str, filename: str, expires_s: float | None
    ) -> FileRecord:
        """Make *incoming* durable, then known.

        Raises:
            StorageFull: there is no room for it.
        """
        now = self._clock.wall()
        record = FileRecord(
            incoming.id,
            tenant,
            purpose,
            filename,
            incoming.size,
            now,
            None if expires_s is None else now + expires_s,
        )
        try:
            incoming.handle.flush()
            os.fsync(incoming.handle.fileno())
            incoming.handle.close()
            incoming.path.replace(self.path(incoming.id))
            sync_folder(self._folder)
        except OSError as error:
            raise as_store_error(error, incoming.path) from error
        self._table.add([record])
        return record

    def add_written(self, records: Iterable[FileRecord]) -> None:
        """Make files known that lie in their places already, whole and durable."""
        self._table.add(list(records))

    def get(self, tenant: str, file_id: str) -> FileRecord | None:
        """The file of *tenant* with this id; None where there is none, or its time is over."""
        record = self._table.get(tenant, file_id)
        if record is None or (record.expires_at is not None and record.expires_at <= self._clock.wall()):
            return None
        return record

    def page(
        self,
        tenant: str,
        limit: int,
        *,
        after: FileRecord | None = None,
        purpose: str | None = None,
        oldest_first: bool = False,
    ) -> list[FileRecord]:
        """Up to *limit* files that come after *after*, expired ones left out."""
        found = self._table.page(tenant, limit, after=after, purpose=purpose, oldest_first=oldest_first)
        now = self._clock.wall()
        return [one for one in found if one.expires_at is None or one.expires_at > now]

    def delete(self, record: FileRecord) -> None:
        """Forget a file, then remove its content; whoever reads it now reads it to its end."""
        self._table.remove(record.id)
        self.path(record.id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete files whose time is over."""
        for record in self._table.expired(self._clock.wall()):
            self.delete(record)

    def tidy(self, kept: Iterable[str]) -> None:
        """At start: remove content that no record and none of *kept* speaks of, left by a crash."""
        known = {*self._table.known(), *kept}
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)
