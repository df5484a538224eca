"""Floor 3. Files that come in parts, in the database. Their content lies in blobs."""

from __future__ import annotations

from sqlalchemy import delete, insert, select, update

from batchyard.stores.database import Database
from batchyard.stores.protocol import PartRecord, UploadRecord
from batchyard.stores.schema import upload_parts, uploads


class UploadTable:
    """The uploads of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, record: UploadRecord) -> None:
        """Remember an upload."""
        values = {column.name: getattr(record, column.name) for column in uploads.columns}
        with self._database.writing() as connection:
            connection.execute(insert(uploads).values(**values))

    def get(self, tenant: str, upload_id: str) -> UploadRecord | None:
        """The upload of *tenant* with this id, if there is one."""
        wanted = select(uploads).where(uploads.c.tenant == tenant, uploads.c.id == upload_id)
        with self._database.reading() as connection:
            row = connection.execute(wanted).one_or_none()
        return None if row is None else UploadRecord(**row._mapping)  # noqa: SLF001 - a row's public mapping

    def add_part(self, part: PartRecord) -> bool:
        """Remember a part; False where its upload takes none any more."""
        pending = select(uploads.c.id).where(uploads.c.id == part.upload_id, uploads.c.status == "pending")
        values = {column.name: getattr(part, column.name) for column in upload_parts.columns}
        with self._database.writing() as connection:
            if connection.execute(pending.with_for_update()).first() is None:
                return False
            connection.execute(insert(upload_parts).values(**values))
        return True

    def parts(self, upload_id: str) -> dict[str, PartRecord]:
        """The parts of an upload by id."""
        wanted = select(upload_parts).where(upload_parts.c.upload_id == upload_id)
        with self._database.reading() as connection:
            found = [PartRecord(**row._mapping) for row in connection.execute(wanted)]  # noqa: SLF001
        return {one.id: one for one in found}

    def end(self, upload_id: str, status: str, file_id: str | None = None) -> bool:
        """Complete or cancel an upload; False where it has ended already."""
        pending = update(uploads).where(uploads.c.id == upload_id, uploads.c.status == "pending")
        with self._database.writing() as connection:
            return connection.execute(pending.values(status=status, file_id=file_id)).rowcount == 1

    def over(self, now: float, limit: int = 100) -> list[UploadRecord]:
        """Uploads whose time is over, whatever became of them."""
        wanted = select(uploads).where(uploads.c.expires_at <= now).limit(limit)
        with self._database.reading() as connection:
            return [UploadRecord(**row._mapping) for row in connection.execute(wanted)]  # noqa: SLF001

    def known_parts(self) -> set[str]:
        """The ids of all parts."""
        with self._database.reading() as connection:
            return set(connection.execute(select(upload_parts.c.id)).scalars())

    def forget_parts(self, upload_id: str) -> None:
        """Forget the parts of an upload."""
        with self._database.writing() as connection:
            connection.execute(delete(upload_parts).where(upload_parts.c.upload_id == upload_id))

    def forget(self, upload_id: str) -> None:
        """Forget an upload and its parts."""
        with self._database.writing() as connection:
            connection.execute(delete(upload_parts).where(upload_parts.c.upload_id == upload_id))
            connection.execute(delete(uploads).where(uploads.c.id == upload_id))
