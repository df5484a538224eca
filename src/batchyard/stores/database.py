"""Floor 3. The database that stores share, through SQLAlchemy Core: SQLite or PostgreSQL.

SQLite runs in WAL mode with `synchronous = FULL`, and every write transaction begins `IMMEDIATE`, so
that two writers wait for each other instead of failing half-way. PostgreSQL runs at READ COMMITTED; rows
that are decided upon are locked.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    NullPool,
    Table,
    create_engine,
    event,
    inspect,
    make_url,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError, SQLAlchemyError

from batchyard.errors import StorageFull, StoreError
from batchyard.stores.schema import REVISION, metadata

_REVISIONS = "schema_revision"
#: Which advisory lock of PostgreSQL guards the making and migrating of tables.
_SCHEMA_LOCK = 0xBA7C4


class Database:
    """One database and the one connection to it.

    Not for several threads at once: shells give it a thread of its own.

    Args:
        place: a SQLite file, or the URL of a PostgreSQL database (`postgresql://…`).

    Raises:
        StoreError: it cannot be opened, is no database, or is of a later version.
        StorageFull: the disk is full.
    """

    def __init__(self, place: Path | str) -> None:
        self.name, self._engine = _open_postgresql(place) if isinstance(place, str) else _open_sqlite(place)
        #: Whether other processes may work on it too.
        self.shared = isinstance(place, str)
        self._connection: Connection | None = None
        try:
            with self.writing() as connection:
                _bring_up_to_date(connection, self.name)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Database {self.name}>"

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            yield self._connection
        except SQLAlchemyError as error:
            # What the connection is in the middle of is anybody's guess: the next call gets a new one.
            self._drop()
            raise _as_store_error(error, self.name) from error

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
            if not self.shared:
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
        """Let go of it. Safe to call twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._engine.dispose()


def new_row(
    connection: Connection, table: Table, values: Mapping[str, Any]
) -> postgresql.Insert | sqlite.Insert:
    """An insert that leaves a row with the same key as it is."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).values(**values).on_conflict_do_nothing()
    return sqlite.insert(table).values(**values).on_conflict_do_nothing()


def _open_sqlite(path: Path) -> tuple[str, Engine]:
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args={"check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        # SQLAlchemy must not begin transactions of its own: `begin immediate` is ours to send.
        connection.isolation_level = None
        connection.execute("pragma busy_timeout = 30000")
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")

    return str(path), engine


def _open_postgresql(url: str) -> tuple[str, Engine]:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "postgresql":
            raise StoreError(f"{parsed.get_backend_name()!r} is no database that Batchyard knows. {_URL}")
        engine = create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            poolclass=NullPool,
            isolation_level="READ COMMITTED",
            connect_args={"connect_timeout": 5, "options": "-c statement_timeout=30s"},
        )
    except ArgumentError as error:
        raise StoreError(f"The address of the database is not understood. {_URL}") from error
    except ImportError as error:
        raise StoreError("PostgreSQL needs its driver: pip install 'batchyard[postgres]'.") from error
    return parsed.render_as_string(hide_password=True), engine


_URL = "Write for example postgresql://user:password@host/database."


def _bring_up_to_date(connection: Connection, name: str) -> None:
    """Make the tables, or migrate those that an older release made."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"select pg_advisory_xact_lock({_SCHEMA_LOCK})"))
    tables = set(inspect(connection).get_table_names())
    if not tables & set(metadata.tables):
        metadata.create_all(connection)
        connection.execute(text(f"create table {_REVISIONS} (version_num varchar(32) primary key)"))
        connection.execute(text(f"insert into {_REVISIONS} values ('{REVISION}')"))  # noqa: S608
        return
    found = None
    if _REVISIONS in tables:
        found = connection.execute(text(f"select version_num from {_REVISIONS}")).scalar_one_or_none()  # noqa: S608
    elif connection.dialect.name == "sqlite":
        # Before there were migrations, the version stood in a pragma.
        version = connection.exec_driver_sql("pragma user_version").scalar_one()
        found = f"{version:04d}"
    if found != REVISION:
        _migrate(connection, name, found)


def _migrate(connection: Connection, name: str, found: str | None) -> None:
    from alembic import command  # noqa: PLC0415 - slow to import, and seldom needed
    from alembic.config import Config  # noqa: PLC0415
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    known = {one.revision for one in ScriptDirectory.from_config(config).walk_revisions()}
    if found not in known:
        raise StoreError(
            f"{name} was written by another version of Batchyard (schema {found or 'unknown'}; this one "
            f"reads {REVISION}). Use that version, or start over in another place."
        )
    command.stamp(config, found)
    command.upgrade(config, "head")


def _as_store_error(error: SQLAlchemyError, name: str) -> StoreError:
    cause = str(error.orig).strip() if isinstance(error, DatabaseError) else str(error)
    if "disk is full" in cause or getattr(getattr(error, "orig", None), "sqlstate", None) == "53100":
        return StorageFull(f"The disk that holds {name} is full.")
    if "not a database" in cause or "malformed" in cause:
        return StoreError(f"{name} is damaged or no database ({cause}). Move it away to start over.")
    if isinstance(error, OperationalError) and ("unable to open" in cause or "readonly" in cause):
        return StoreError(f"Cannot write {name} ({cause}). Check that its folder exists and is writable.")
    return StoreError(f"The store {name} failed: {cause}.")
