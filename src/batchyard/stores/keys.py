"""Floor 3. API keys in the database, by their digests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import and_, insert, select, update

from batchyard.stores.database import Database
from batchyard.stores.protocol import KeyRecord
from batchyard.stores.schema import keys


class KeyTable:
    """The keys of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, record: KeyRecord) -> None:
        """Remember a key."""
        values = {column.name: getattr(record, column.name) for column in keys.columns}
        with self._database.writing() as connection:
            connection.execute(insert(keys).values(**values))

    def by_digest(self, digest: str) -> KeyRecord | None:
        """The key with this digest that is not revoked."""
        wanted = and_(keys.c.digest == digest, keys.c.revoked_at.is_(None))
        with self._database.reading() as connection:
            row = connection.execute(select(keys).where(wanted)).one_or_none()
        return None if row is None else KeyRecord(**row._mapping)  # noqa: SLF001 - a row's public mapping

    def change(self, key_id: str, **changes: Any) -> bool:
        """Set columns of a key; False where there is none with this id that still holds."""
        held = and_(keys.c.id == key_id, keys.c.revoked_at.is_(None))
        with self._database.writing() as connection:
            return connection.execute(update(keys).where(held).values(**changes)).rowcount == 1

    def by_ids(self, key_ids: Collection[str]) -> dict[str, KeyRecord]:
        """The keys with these ids, revoked ones included."""
        with self._database.reading() as connection:
            rows = connection.execute(select(keys).where(keys.c.id.in_(key_ids)))
            return {row.id: KeyRecord(**row._mapping) for row in rows}  # noqa: SLF001

    def all(self) -> list[KeyRecord]:
        """Every key, oldest first."""
        with self._database.reading() as connection:
            rows = connection.execute(select(keys).order_by(keys.c.created_at, keys.c.id))
            return [KeyRecord(**row._mapping) for row in rows]  # noqa: SLF001

    def revoke(self, key_id: str, now: float) -> bool:
        """Refuse a key from now on; False where there is none with this id that still holds."""
        return self.change(key_id, revoked_at=now)
