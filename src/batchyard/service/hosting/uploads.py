"""Floor 6. Files that come in parts, as the OpenAI Uploads API has them."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Sequence
from typing import IO, Any

from batchyard.clock import Clock
from batchyard.errors import UsageError
from batchyard.service.hosting.files import Files, Incoming
from batchyard.stores.blobs import Blobs
from batchyard.stores.protocol import FileRecord, PartRecord, UploadRecord
from batchyard.stores.uploads import UploadTable

#: An upload that is not complete by then is forgotten.
_EXPIRES_S = 3_600.0
#: One that has ended can be asked for this much longer.
_KNOWN_S = 86_400.0


class Uploads:
    """The uploads of one server."""

    def __init__(self, table: UploadTable, files: Files, blobs: Blobs, clock: Clock) -> None:
        self._table = table
        self._files = files
        self._blobs = blobs
        self._clock = clock

    def create(
        self, tenant: str, *, purpose: str, filename: str, size: int, file_expires_s: float | None
    ) -> UploadRecord:
        """A new upload of *size* bytes, to be sent within the hour."""
        now = self._clock.wall()
        upload_id = f"upload_{uuid.uuid4().hex[:24]}"
        record = UploadRecord(
            upload_id, tenant, "pending", purpose, filename, size, now, now + _EXPIRES_S, file_expires_s
        )
        self._table.add(record)
        return record

    def get(self, tenant: str, upload_id: str) -> UploadRecord | None:
        """The upload of *tenant* with this id, if there is one."""
        return self._table.get(tenant, upload_id)

    def is_pending(self, upload: UploadRecord) -> bool:
        """Whether it still takes parts."""
        return upload.status == "pending" and upload.expires_at > self._clock.wall()

    def begin_part(self) -> Incoming:
        """A place for the content of a part."""
        return self._files.begin("part_")

    def store_part(self, incoming: Incoming) -> None:
        """Make the content of a part durable. Touches no database."""
        incoming.end()
        self._blobs.put_file(_blob(incoming.id), incoming.path)

    def enter_part(self, upload: UploadRecord, incoming: Incoming) -> PartRecord | None:
        """Make a part known that has been made durable; None where its upload takes none any more."""
        part = PartRecord(incoming.id, upload.id, incoming.size, self._clock.wall())
        if self._table.add_part(part):
            return part
        self._blobs.delete(_blob(part.id))
        return None

    def parts(self, upload: UploadRecord) -> dict[str, PartRecord]:
        """The parts of an upload by id."""
        return self._table.parts(upload.id)

    def assemble(self, upload: UploadRecord, part_ids: Sequence[str], md5: str | None) -> Incoming:
        """The parts one after another, as content that can be kept. Touches no database.

        Raises:
            UsageError: the content has another MD5 digest.
            BlobNotFound: a part is gone.
        """
        incoming = self._files.begin()
        digest = hashlib.md5(usedforsecurity=False)
        target: IO[Any] = incoming.handle
        try:
            for part_id in part_ids:
                with self._blobs.local(_blob(part_id)).open("rb") as part:
                    if md5 is None:
                        shutil.copyfileobj(part, target, 1 << 20)
                        continue
                    while block := part.read(1 << 20):
                        digest.update(block)
                        target.write(block)
        except BaseException:
            incoming.discard()
            raise
        if md5 is not None and digest.hexdigest() != md5.lower():
            incoming.discard()
            raise UsageError("The MD5 digest of the parts, in this order, is another than md5 says.")
        incoming.size = upload.bytes
        return incoming

    def complete(self, upload: UploadRecord, incoming: Incoming) -> FileRecord | None:
        """Make the assembled file known and end the upload; None where it has ended meanwhile."""
        if not self._table.end(upload.id, "completed", incoming.id):
            self._blobs.delete(self._files.blob(incoming.id))
            return None
        record = self._files.enter(
            incoming,
            upload.tenant,
            purpose=upload.purpose,
            filename=upload.filename,
            expires_s=upload.file_expires_s,
        )
        self._forget_parts(upload.id)
        return record

    def cancel(self, upload: UploadRecord) -> bool:
        """Forget the parts; False where the upload has ended already."""
        if not self._table.end(upload.id, "cancelled"):
            return False
        self._forget_parts(upload.id)
        return True

    def sweep(self) -> None:
        """Forget the parts of uploads whose hour is over, and, a day later, the uploads."""
        now = self._clock.wall()
        for upload in self._table.over(now):
            self._forget_parts(upload.id)
        for upload in self._table.over(now - _KNOWN_S):
            self._table.forget(upload.id)

    def _forget_parts(self, upload_id: str) -> None:
        for part_id in self._table.parts(upload_id):
            self._blobs.delete(_blob(part_id))
        self._table.forget_parts(upload_id)

    def tidy(self) -> None:
        """Remove parts that no record speaks of, left by a crash; only while nobody else works here."""
        known = self._table.known_parts()
        for name in list(self._blobs.names("parts/")):
            if name.removeprefix("parts/") not in known:
                self._blobs.delete(name)


def _blob(part_id: str) -> str:
    return f"parts/{part_id}"
