"""Floor 3. Files in the database: what they are called, whose they are. Their content lies in blobs."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import and_, delete, or_, select

from batchyard.stores.database import Database, new_row
from batchyard.stores.protocol import FileRecord
from batchyard.stores.schema import files


class FileTable:
    """The files of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, records: Sequence[FileRecord]) -> None:
        """Remember files, all or none; those that are known already stay as they are."""
        columns = [column.name for column in files.columns]
        with self._database.writing() as connection:
            for record in records:
                values = {name: getattr(record, name) for name in columns}
                connection.execute(new_row(connection, files, values))

    def get(self, tenant: str, file_id: str) -> FileRecord | None:
        """The file of *tenant* with this id, if there is one."""
        wanted = and_(files.c.tenant == tenant, files.c.id == file_id)
        with self._database.reading() as connection:
            row = connection.execute(select(files).where(wanted)).one_or_none()
        return None if row is None else FileRecord(**row._mapping)  # noqa: SLF001 - a row's public mapping

    def page(
        self,
        tenant: str,
        limit: int,
        *,
        after: FileRecord | None = None,
        purpose: str | None = None,
        oldest_first: bool = False,
    ) -> list[FileRecord]:
        """Up to *limit* files of *tenant* that come after *after*."""
        wanted = files.c.tenant == tenant
        if purpose is not None:
            wanted = and_(wanted, files.c.purpose == purpose)
        at = files.c.created_at
        if after is not None:
            later = at > after.created_at if oldest_first else at < after.created_at
            wanted = and_(wanted, or_(later, and_(at == after.created_at, files.c.id > after.id)))
        order = at.asc() if oldest_first else at.desc()
        with self._database.reading() as connection:
            rows = connection.execute(select(files).where(wanted).order_by(order, files.c.id).limit(limit))
            return [FileRecord(**row._mapping) for row in rows]  # noqa: SLF001

    def expired(self, now: float, limit: int = 100) -> list[FileRecord]:
        """Files whose time is over."""
        with self._database.reading() as connection:
            rows = connection.execute(select(files).where(files.c.expires_at <= now).limit(limit))
            return [FileRecord(**row._mapping) for row in rows]  # noqa: SLF001

    def known(self) -> set[str]:
        """The ids of all files."""
        with self._database.reading() as connection:
            return set(connection.execute(select(files.c.id)).scalars())

    def remove(self, file_id: str) -> None:
        """Forget a file."""
        with self._database.writing() as connection:
            connection.execute(delete(files).where(files.c.id == file_id))
