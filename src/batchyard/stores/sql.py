"""Floor 3. Batches and chunks in the database. Knows nothing of what a status means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    update,
)

from batchyard.errors import BatchNotFound
from batchyard.stores.database import Database
from batchyard.stores.protocol import BatchRecord, ChunkProgress, ChunkRecord, Counts
from batchyard.stores.schema import DONE, LEASED, OPEN, batches, chunks
from batchyard.types import Usage

_CHUNK_COLUMNS = (
    chunks.c.batch_id,
    chunks.c.no,
    chunks.c.offset,
    chunks.c.length,
    chunks.c.first_index,
    chunks.c.first_line,
    chunks.c.count,
    chunks.c.epoch,
    chunks.c.segment_bytes,
)

# The terms below are literal, not bound: SQLite proves a partial index only from the exact term.
_IS_OPEN = text("state = 0")
_IS_LEASED = text("state = 1")


class SqlStore:
    """Batches and chunks in one SQLite file.

    Not for several threads at once: shells give it a thread of its own.

    Raises:
        StoreError: the file cannot be opened, is no database, or is of a later version.
        StorageFull: the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = Database(path)
        self._writing = self.database.writing
        self._reading = self.database.reading

    def __repr__(self) -> str:
        return f"<SqlStore {self.path}>"

    def create(self, batch: BatchRecord) -> None:
        values = {column.name: getattr(batch, column.name) for column in batches.columns}
        values["settings"] = dict(batch.settings)
        values["errors"] = [dict(one) for one in batch.errors]
        with self._writing() as connection:
            connection.execute(insert(batches).values(**values))

    def get(self, batch_id: str) -> BatchRecord:
        with self._reading() as connection:
            row = connection.execute(select(batches).where(batches.c.id == batch_id)).one_or_none()
        if row is None:
            raise BatchNotFound(f"There is no Batch {batch_id!r} in {self.path}.")
        return BatchRecord(**row._mapping)  # noqa: SLF001 - the public name of a row as a mapping

    def batches(self) -> list[BatchRecord]:
        newest_first = select(batches).order_by(batches.c.created_at.desc(), batches.c.id)
        with self._reading() as connection:
            rows = connection.execute(newest_first).all()
        return [BatchRecord(**row._mapping) for row in rows]  # noqa: SLF001

    def page(
        self,
        tenant: str,
        dialect: str,
        limit: int,
        *,
        after: BatchRecord | None = None,
        statuses: Sequence[str] = (),
    ) -> list[BatchRecord]:
        wanted = and_(batches.c.tenant == tenant, batches.c.dialect == dialect)
        if statuses:
            wanted = and_(wanted, batches.c.status.in_(statuses))
        if after is not None:
            older = batches.c.created_at < after.created_at
            same = and_(batches.c.created_at == after.created_at, batches.c.id > after.id)
            wanted = and_(wanted, or_(older, same))
        newest_first = select(batches).where(wanted).order_by(batches.c.created_at.desc(), batches.c.id)
        with self._reading() as connection:
            rows = connection.execute(newest_first.limit(limit)).all()
        return [BatchRecord(**row._mapping) for row in rows]  # noqa: SLF001

    def move(self, batch_id: str, expected: str, status: str, **changes: Any) -> bool:
        with self._writing() as connection:
            return _move(connection, batch_id, expected, status, changes)

    def register(
        self, batch_id: str, expected: str, status: str, registered: Iterable[ChunkRecord], **changes: Any
    ) -> bool:
        rows = [
            {
                "batch_id": batch_id,
                "no": chunk.no,
                "state": OPEN,
                "offset": chunk.offset,
                "length": chunk.length,
                "first_index": chunk.first_index,
                "first_line": chunk.first_line,
                "count": chunk.count,
            }
            for chunk in registered
        ]
        with self._writing() as connection:
            connection.execute(delete(chunks).where(chunks.c.batch_id == batch_id))
            if rows:
                connection.execute(insert(chunks), rows)
            if not _move(connection, batch_id, expected, status, changes):
                connection.rollback()
                return False
        return True

    def claim(self, batch_id: str, owner: str, limit: int, now: float, lease_s: float) -> list[ChunkRecord]:
        with self._writing() as connection:
            of_batch = select(*_CHUNK_COLUMNS).where(chunks.c.batch_id == batch_id).order_by(chunks.c.no)
            found = list(connection.execute(of_batch.where(_IS_OPEN).limit(limit)))
            if len(found) < limit:
                expired = and_(_IS_LEASED, chunks.c.lease_until < now)
                found += connection.execute(of_batch.where(expired).limit(limit - len(found)))
            if not found:
                return []
            claimed = [ChunkRecord(**row._mapping) for row in found]  # noqa: SLF001
            connection.execute(
                update(chunks)
                .where(chunks.c.batch_id == bindparam("b"), chunks.c.no == bindparam("n"))
                .values(state=LEASED, epoch=chunks.c.epoch + 1, owner=owner, lease_until=now + lease_s),
                [{"b": batch_id, "n": chunk.no} for chunk in claimed],
            )
        return [
            ChunkRecord(
                batch_id,
                one.no,
                one.offset,
                one.length,
                one.first_index,
                one.first_line,
                one.count,
                one.epoch + 1,
            )
            for one in claimed
        ]

    def renew(
        self, batch_id: str, owner: str, progress: Sequence[ChunkProgress], now: float, lease_s: float
    ) -> list[int]:
        with self._writing() as connection:
            return _fenced(connection, batch_id, progress, {"owner": owner, "lease_until": now + lease_s})

    def commit(self, batch_id: str, done: Sequence[ChunkProgress], now: float) -> list[int]:
        with self._writing() as connection:
            return _fenced(connection, batch_id, done, {"state": DONE, "done_at": now, "lease_until": None})

    def release(self, batch_id: str, owner: str | None = None) -> None:
        leased = and_(chunks.c.batch_id == batch_id, _IS_LEASED)
        if owner is not None:
            leased = and_(leased, chunks.c.owner == owner)
        with self._writing() as connection:
            connection.execute(update(chunks).where(leased).values(state=OPEN, owner=None, lease_until=None))

    def reopen(self, batch_id: str, numbers: Sequence[int]) -> None:
        back = update(chunks).where(chunks.c.batch_id == batch_id, chunks.c.no == bindparam("n"))
        nothing = {"succeeded": 0, "failed": 0, "input_tokens": 0, "output_tokens": 0, "cached_tokens": 0}
        with self._writing() as connection:
            connection.execute(
                back.values(state=OPEN, owner=None, done_at=None, segment_bytes=0, **nothing),
                [{"n": no} for no in numbers],
            )

    def counts(self, batch_id: str) -> Counts:
        return self._sum(chunks.c.batch_id == batch_id)

    def done_counts(self, batch_id: str) -> Counts:
        return self._sum(and_(chunks.c.batch_id == batch_id, chunks.c.state == DONE))

    def _sum(self, which: ColumnElement[bool]) -> Counts:
        sums = [
            func.coalesce(func.sum(column), 0)
            for column in (
                chunks.c.succeeded,
                chunks.c.failed,
                chunks.c.input_tokens,
                chunks.c.output_tokens,
                chunks.c.cached_tokens,
            )
        ]
        with self._reading() as connection:
            row = connection.execute(select(*sums).where(which)).one()
        return Counts(row[0], row[1], Usage(row[2], row[3], row[4]))

    def remaining(self, batch_id: str) -> int:
        open_chunks = select(func.count()).where(chunks.c.batch_id == batch_id, chunks.c.state != DONE)
        with self._reading() as connection:
            return connection.execute(open_chunks).scalar_one()

    def done_chunks(self, batch_id: str) -> list[ChunkRecord]:
        of_batch = select(*_CHUNK_COLUMNS).where(chunks.c.batch_id == batch_id, chunks.c.state == DONE)
        with self._reading() as connection:
            rows = connection.execute(of_batch.order_by(chunks.c.done_at, chunks.c.no)).all()
        return [ChunkRecord(**row._mapping) for row in rows]  # noqa: SLF001

    def delete(self, batch_id: str) -> None:
        with self._writing() as connection:
            connection.execute(delete(chunks).where(chunks.c.batch_id == batch_id))
            connection.execute(delete(batches).where(batches.c.id == batch_id))

    def close(self) -> None:
        self.database.close()


def _move(connection: Connection, batch_id: str, expected: str, status: str, changes: dict[str, Any]) -> bool:
    as_expected = and_(batches.c.id == batch_id, batches.c.status == expected)
    moved = connection.execute(update(batches).where(as_expected).values(status=status, **changes))
    return moved.rowcount == 1


def _fenced(
    connection: Connection, batch_id: str, progress: Sequence[ChunkProgress], values: dict[str, Any]
) -> list[int]:
    lost = []
    for one in progress:
        held = and_(
            chunks.c.batch_id == batch_id,
            chunks.c.no == one.no,
            chunks.c.epoch == one.epoch,
            chunks.c.state == LEASED,
        )
        changed = connection.execute(
            update(chunks)
            .where(held)
            .values(
                succeeded=one.succeeded,
                failed=one.failed,
                input_tokens=one.usage.input_tokens,
                output_tokens=one.usage.output_tokens,
                cached_tokens=one.usage.cached_tokens,
                segment_bytes=one.segment_bytes,
                **values,
            )
        )
        if changed.rowcount == 0:
            lost.append(one.no)
    return lost
