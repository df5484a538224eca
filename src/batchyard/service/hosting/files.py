"""Floor 6. Files of tenants: uploaded, written by Batches, read, deleted, expired.

The content of a file is a blob under its id; it is there, whole and durable, before the database knows of
it. What a crash leaves without a record is removed at the next start.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from batchyard.clock import Clock
from batchyard.stores.blobs import Blobs
from batchyard.stores.disk import as_store_error
from batchyard.stores.files import FileTable
from batchyard.stores.protocol import FileRecord


@dataclass(slots=True)
class Incoming:
    """Content on its way in, in a local file of its own until it is whole."""

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

    def end(self) -> None:
        """The content is whole.

        Raises:
            StorageFull: there is no room for it.
        """
        try:
            self.handle.close()
        except OSError as error:
            raise as_store_error(error, self.path) from error

    def discard(self) -> None:
        """Forget it. Safe to call twice, and after it was kept."""
        # On a full disk, what was buffered has no room either.
        with suppress(OSError):
            self.handle.close()
        self.path.unlink(missing_ok=True)


class Files:
    """The files of one server."""

    def __init__(self, table: FileTable, blobs: Blobs, clock: Clock) -> None:
        self._table = table
        self._blobs = blobs
        self._clock = clock

    @staticmethod
    def blob(file_id: str) -> str:
        """What the content of a file is called among the blobs."""
        return f"files/{file_id}"

    def path(self, file_id: str) -> Path:
        """A local file with the content.

        Raises:
            BlobNotFound: it is gone.
        """
        return self._blobs.local(self.blob(file_id))

    def begin(self, prefix: str = "file-") -> Incoming:
        """A place for new content."""
        new_id = f"{prefix}{uuid.uuid4().hex[:24]}"
        part = self._blobs.spool / f"{new_id}.part"
        try:
            return Incoming(new_id, part, part.open("wb", buffering=1 << 18))
        except OSError as error:
            raise as_store_error(error, part) from error

    def keep(
        self, incoming: Incoming, tenant: str, *, purpose: str, filename: str, expires_s: float | None
    ) -> FileRecord:
        """Make *incoming* durable, then known.

        Raises:
            StorageFull: there is no room for it.
        """
        self.store(incoming)
        return self.enter(incoming, tenant, purpose=purpose, filename=filename, expires_s=expires_s)

    def store(self, incoming: Incoming) -> None:
        """Make *incoming* durable. Touches no database, so it may run in any thread.

        Raises:
            StorageFull: there is no room for it.
        """
        incoming.end()
        self._blobs.put_file(self.blob(incoming.id), incoming.path)

    def enter(
        self, incoming: Incoming, tenant: str, *, purpose: str, filename: str, expires_s: float | None
    ) -> FileRecord:
        """Make content known that has been made durable."""
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
        self._blobs.delete(self.blob(record.id))

    def sweep(self) -> None:
        """Delete files whose time is over."""
        for record in self._table.expired(self._clock.wall()):
            self.delete(record)

    def tidy(self) -> None:
        """Remove content that no record speaks of, left by a crash; only while nobody else works here."""
        known = self._table.known()
        for name in list(self._blobs.names("files/")):
            if name.removeprefix("files/") not in known:
                self._blobs.delete(name)
