"""Floor 6. API keys: made, checked, revoked. A key is shown once; its digest alone is kept."""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from batchyard.clock import Clock
from batchyard.errors import UsageError
from batchyard.stores.database import Database
from batchyard.stores.disk import as_store_error
from batchyard.stores.keys import KeyTable
from batchyard.stores.protocol import KeyRecord

_MAX_TENANT = 64
#: What a 32-bit column of the database holds.
_MOST = 2**31


class Scope(StrEnum):
    """What a key may be made for; one with no scopes may do anything."""

    LIVE = "live"  # chat, completions, embeddings, responses, messages; models
    BATCHES = "batches"  # files, uploads, batches, message batches
    READ = "batches:read"  # the same, as far as nothing is changed
    WEBHOOKS = "webhooks"  # webhook endpoints


@dataclass(frozen=True, slots=True)
class Rights:
    """What a key may do and use; what is None is not limited."""

    scopes: Sequence[str] | None = None
    models: Sequence[str] | None = None
    requests_per_minute: int | None = None
    max_batches: int | None = None
    max_enqueued_tokens: int | None = None

    def columns(self) -> dict[str, Any]:
        """As the store keeps it.

        Raises:
            UsageError: a right makes no sense.
        """
        for one in self.scopes or ():
            if one not in set(Scope):
                known = ", ".join(scope.value for scope in Scope)
                raise UsageError(f"There is no scope {one!r}. Choose of: {known}.")
        for name in ("requests_per_minute", "max_batches", "max_enqueued_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < _MOST:
                raise UsageError(f"{name} must be 1 or more, and not beyond all measure; it is {value}.")
        columns = asdict(self)
        for name in ("scopes", "models"):
            columns[name] = None if columns[name] is None else list(columns[name])
        return columns


def may_use(key: KeyRecord, model: str) -> bool:
    """Whether *key* may use *model*."""
    return key.models is None or model in key.models


class Keys:
    """The keys of one server. Every check asks the store, so that a revoked key is refused at once."""

    def __init__(self, table: KeyTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    def create(self, name: str, tenant: str, rights: Rights | None = None) -> tuple[KeyRecord, str]:
        """A new key for *tenant*: its record, and the key itself, which nobody can show again.

        Raises:
            UsageError: the name of the tenant is too long or empty, or a right makes no sense.
        """
        if not 1 <= len(tenant) <= _MAX_TENANT or "\0" in tenant + name:
            raise UsageError(f"A tenant's name has 1 to {_MAX_TENANT} characters. Choose another.")
        key = f"by-{secrets.token_urlsafe(32)}"
        record = KeyRecord(
            f"key_{uuid.uuid4().hex[:16]}", tenant, name, _digest(key), key[-4:], self._clock.wall()
        )
        self._table.add(replace(record, **(rights or Rights()).columns()))
        return record, key

    def change(self, key_id: str, rights: Rights) -> bool:
        """Give a key other rights, those that *rights* names; False where no key with this id holds."""
        columns = {name: value for name, value in rights.columns().items() if value is not None}
        return self._table.change(key_id, **columns) if columns else True

    def standing(self, key_ids: Collection[str]) -> dict[str, KeyRecord]:
        """The keys with these ids, revoked ones included."""
        return self._table.by_ids(key_ids) if key_ids else {}

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
def keys_of(folder: Path, clock: Clock, url: str | None = None) -> Iterator[Keys]:
    """The keys of the server whose state folder, or database at *url*, this is, whether it runs or not.

    Raises:
        StoreError: it cannot be used.
    """
    if url is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise as_store_error(error, folder) from error
    database = Database(url or folder / "state.db")
    try:
        yield Keys(KeyTable(database), clock)
    finally:
        database.close()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).hexdigest()
