"""Floor 6. API keys: made, checked, revoked. A key is shown once; its digest alone is kept."""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchyard.clock import Clock
from batchyard.stores.database import Database
from batchyard.stores.keys import KeyTable
from batchyard.stores.protocol import KeyRecord
from batchyard.stores.segments import as_store_error


class Keys:
    """The keys of one server. Every check asks the store, so that a revoked key is refused at once."""

    def __init__(self, table: KeyTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    def create(self, name: str, tenant: str) -> tuple[KeyRecord, str]:
        """A new key for *tenant*: its record, and the key itself, which nobody can show again."""
        key = f"by-{secrets.token_urlsafe(32)}"
        record = KeyRecord(
            f"key_{uuid.uuid4().hex[:16]}", tenant, name, _digest(key), key[-4:], self._clock.wall()
        )
        self._table.add(record)
        return record, key

    def check(self, key: str) -> KeyRecord | None:
        """The record of *key* if it holds."""
        # Looked up by digest: how long that takes says nothing about the key.
        return self._table.by_digest(_digest(key))

    def all(self) -> list[KeyRecord]:
        """Every key, revoked ones included, oldest first."""
        return self._table.all()

    def revoke(self, key_id: str) -> bool:
        """Refuse a key from now on; False where there is none with this id that still holds."""
        return self._table.revoke(key_id, self._clock.wall())


@contextmanager
def keys_of(folder: Path, clock: Clock) -> Iterator[Keys]:
    """The keys of the server whose state folder this is, whether it runs or not.

    Raises:
        StoreError: the folder cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise as_store_error(error, folder) from error
    database = Database(folder / "state.db")
    try:
        yield Keys(KeyTable(database), clock)
    finally:
        database.close()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).hexdigest()
