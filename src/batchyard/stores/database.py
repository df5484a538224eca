"""Floor 3. The database that stores share: SQLAlchemy Core; SQLite today, the same statements for PostgreSQL.

SQLite runs in WAL mode with `synchronous = FULL`, and every write transaction begins `IMMEDIATE`, so
that two writers wait for each other instead of failing half-way.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, Engine, NullPool, create_engine, event, text
from sqlalchemy.exc import DatabaseError, OperationalError, SQLAlchemyError

from batchyard.errors import StorageFull, StoreError
from batchyard.stores.schema import SCHEMA_VERSION, metadata


class Database:
    """One SQLite file and the one connection to it.

    Not for several threads at once: shells give it a thread of its own.

    Raises:
        StoreError: the file cannot be opened, is no database, or is of a later version.
        StorageFull: the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine = _open_sqlite(path)
        self._connection: Connection | None = None
        try:
            with self.writing() as connection:
                _check_version(connection, path)
                metadata.create_all(connection)
        except StoreError:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Database {self.path}>"

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            yield self._connection
        except SQLAlchemyError as error:
            # What the connection is in the middle of is anybody's guess: the next call gets a new one.
            self._drop()
            raise _as_store_error(error, self.path) from error

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.invalidate()
            with suppress(SQLAlchemyError):
                connection.close()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction that may write; committed at the end, rolled back by any error."""
        with self._connected() as connection:
            connection.execute(text("begin immediate"))
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One transaction that only reads."""
        with self._connected() as connection:
            try:
                yield connection
            finally:
                connection.rollback()

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._engine.dispose()


def _open_sqlite(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args={"check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        # SQLAlchemy must not begin transactions of its own: `begin immediate` is ours to send.
        connection.isolation_level = None
        connection.execute("pragma busy_timeout = 30000")
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")

    return engine


def _check_version(connection: Connection, path: Path) -> None:
    version = connection.exec_driver_sql("pragma user_version").scalar_one()
    if version not in {0, SCHEMA_VERSION}:
        raise StoreError(
            f"{path} was written by another version of Batchyard (schema {version}; this one reads "
            f"{SCHEMA_VERSION}). Use that version, or start over in another folder."
        )
    connection.exec_driver_sql(f"pragma user_version = {SCHEMA_VERSION}")


def _as_store_error(error: SQLAlchemyError, path: Path) -> StoreError:
    cause = str(error.orig) if isinstance(error, DatabaseError) else str(error)
    if "disk is full" in cause:
        return StorageFull(f"The disk that holds {path} is full.")
    if "not a database" in cause or "malformed" in cause:
        return StoreError(f"{path} is damaged or no database ({cause}). Move it away to start over.")
    if isinstance(error, OperationalError) and ("unable to open" in cause or "readonly" in cause):
        return StoreError(f"Cannot write {path} ({cause}). Check that its folder exists and is writable.")
    return StoreError(f"The store {path} failed: {cause}.")
