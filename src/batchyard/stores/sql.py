"""Floor 3. Batches and chunks in a database. Knows nothing of what a status means."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
from batchyard.stores.database import Database, new_row
from batchyard.stores.protocol import (
    BatchFilter,
    BatchRecord,
    ChunkProgress,
    ChunkRecord,
    Counts,
    DeliveryRecord,
    Enqueued,
    NoRoom,
    Room,
)
from batchyard.stores.schema import DONE, LEASED, OPEN, batches, chunks, deliveries, withdrawn
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
    chunks.c.output_offset,
    chunks.c.error_offset,
    chunks.c.attempts,
)
_ALL = BatchFilter()

# The terms below are literal, not bound: SQLite proves a partial index only from the exact term.
_IS_OPEN = text("state = 0")
_IS_LEASED = text("state = 1")


class SqlStore:
    """Batches and chunks in one database.

    Not for several threads at once: shells give it a thread of its own.

    Args:
        place: a SQLite file, or the URL of a PostgreSQL database.

    Raises:
        StoreError: it cannot be opened, is no database, or is of a later version.
        StorageFull: the disk is full.
    """

    def __init__(self, place: Path | str) -> None:
        self.database = Database(place)
        self._writing = self.database.writing
        self._reading = self.database.reading

    def __repr__(self) -> str:
        return f"<SqlStore {self.database.name}>"

    def create(self, batch: BatchRecord) -> bool:
        values = {column.name: getattr(batch, column.name) for column in batches.columns}
        values["settings"] = dict(batch.settings)
        values["errors"] = [dict(one) for one in batch.errors]
        values["amendments"] = [dict(one) for one in batch.amendments]
        with self._writing() as connection:
            return connection.execute(new_row(connection, batches, values)).rowcount == 1

    def get(self, batch_id: str) -> BatchRecord:
        with self._reading() as connection:
            row = connection.execute(select(batches).where(batches.c.id == batch_id)).one_or_none()
        if row is None:
            raise BatchNotFound(f"There is no Batch {batch_id!r} in {self.database.name}.")
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
        before: BatchRecord | None = None,
        wanted: BatchFilter = _ALL,
    ) -> list[BatchRecord]:
        at, key = batches.c.created_at, batches.c.id
        chosen = and_(batches.c.tenant == tenant, batches.c.dialect == dialect, *_filtered(wanted))
        if after is not None:
            chosen = and_(chosen, or_(at < after.created_at, and_(at == after.created_at, key > after.id)))
        order: tuple[ColumnElement[Any], ...] = (at.desc(), key)
        if before is not None:
            chosen = and_(chosen, or_(at > before.created_at, and_(at == before.created_at, key < before.id)))
            order = (at, key.desc())
        with self._reading() as connection:
            rows = connection.execute(select(batches).where(chosen).order_by(*order).limit(limit)).all()
        found = [BatchRecord(**row._mapping) for row in rows]  # noqa: SLF001
        return found if before is None else found[::-1]

    def moving(self, ended: Sequence[str]) -> list[tuple[str, str, int]]:
        not_ended = and_(batches.c.status.not_in(ended), batches.c.dialect != "")
        columns = select(batches.c.id, batches.c.status, batches.c.revision)
        with self._reading() as connection:
            return [(row[0], row[1], row[2]) for row in connection.execute(columns.where(not_ended))]

    def enqueued(self, tenant: str, ended: Sequence[str], model: str | None = None) -> Enqueued:
        with self._reading() as connection:
            return _enqueued(connection, tenant, ended, model)

    def move(
        self,
        batch_id: str,
        expected: str,
        status: str,
        *,
        expected_revision: int | None = None,
        deliveries: Sequence[DeliveryRecord] = (),
        **changes: Any,
    ) -> bool:
        with self._writing() as connection:
            if not _move(connection, batch_id, expected, status, changes, revision=expected_revision):
                return False
            _remember(connection, deliveries)
            return True

    def pass_canary(self, batch_id: str) -> None:
        with self._writing() as connection:
            connection.execute(update(batches).where(batches.c.id == batch_id).values(canary_passed=1))

    def hold(self, batch_id: str, owner: str, now: float, lease_s: float) -> bool:
        free = or_(batches.c.owner.is_(None), batches.c.owner == owner, batches.c.lease_until < now)
        taken = update(batches).where(batches.c.id == batch_id, free)
        with self._writing() as connection:
            return connection.execute(taken.values(owner=owner, lease_until=now + lease_s)).rowcount == 1

    def let_go(self, batch_id: str, owner: str) -> None:
        held = update(batches).where(batches.c.id == batch_id, batches.c.owner == owner)
        with self._writing() as connection:
            connection.execute(held.values(owner=None, lease_until=None))

    def let_go_all(self) -> None:
        with self._writing() as connection:
            connection.execute(update(batches).values(owner=None, lease_until=None))
            leased = update(chunks).where(_IS_LEASED)
            connection.execute(leased.values(state=OPEN, owner=None, lease_until=None))

    def withdraw(self, batch_id: str, places: Sequence[tuple[int, int]]) -> None:
        with self._writing() as connection:
            for no, place in places:
                row = {"batch_id": batch_id, "no": no, "place": place}
                connection.execute(new_row(connection, withdrawn, row))
            connection.execute(
                update(batches).where(batches.c.id == batch_id).values(revision=batches.c.revision + 1)
            )

    def withdrawn(self, batch_id: str) -> set[tuple[int, int]]:
        places = select(withdrawn.c.no, withdrawn.c.place).where(withdrawn.c.batch_id == batch_id)
        with self._reading() as connection:
            return {(row[0], row[1]) for row in connection.execute(places)}

    def register(
        self,
        batch_id: str,
        expected: str,
        status: str,
        registered: Iterable[ChunkRecord],
        *,
        room: Room | None = None,
        **changes: Any,
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
            if room is not None and not _has_room(connection, room, changes):
                raise NoRoom
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
            # Locked rows are being claimed by another process; SQLite locks the whole file instead.
            free = of_batch.with_for_update(skip_locked=True)
            found = list(connection.execute(free.where(_IS_OPEN).limit(limit)))
            if len(found) < limit:
                expired = and_(_IS_LEASED, chunks.c.lease_until < now)
                found += connection.execute(free.where(expired).limit(limit - len(found)))
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

    def reopen(self, batch_id: str, expected: str, status: str, numbers: Sequence[int]) -> bool:
        back = update(chunks).where(chunks.c.batch_id == batch_id, chunks.c.no == bindparam("n"))
        nothing = {"succeeded": 0, "failed": 0, "input_tokens": 0, "output_tokens": 0, "cached_tokens": 0}
        nothing |= {"never_ran": 0, "segment_bytes": 0}
        files: dict[str, Any] = {"output_path": None, "error_path": None}
        with self._writing() as connection:
            if not _move(connection, batch_id, expected, status, files):
                return False
            connection.execute(
                back.values(state=OPEN, owner=None, done_at=None, failures=None, **nothing),
                [{"n": no} for no in numbers],
            )
        return True

    def place(self, batch_id: str, joined: Sequence[ChunkRecord]) -> None:
        of_chunk = update(chunks).where(chunks.c.batch_id == batch_id, chunks.c.no == bindparam("n"))
        values: dict[str, Any] = {
            "output_offset": bindparam("o"),
            "error_offset": bindparam("e"),
            "attempts": bindparam("a"),
        }
        rows = [
            {"n": one.no, "o": one.output_offset, "e": one.error_offset, "a": one.attempts} for one in joined
        ]
        with self._writing() as connection:
            if rows:
                connection.execute(of_chunk.values(**values), rows)

    def counts(self, batch_id: str, but_not: Collection[int] = ()) -> Counts:
        return self._sum(and_(chunks.c.batch_id == batch_id, chunks.c.no.not_in(but_not)))

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
                chunks.c.never_ran,
            )
        ]
        with self._reading() as connection:
            row = [int(one) for one in connection.execute(select(*sums).where(which)).one()]
        return Counts(row[0], row[1], Usage(row[2], row[3], row[4]), row[5])

    def remaining(self, batch_id: str) -> int:
        open_chunks = select(func.count()).where(chunks.c.batch_id == batch_id, chunks.c.state != DONE)
        with self._reading() as connection:
            return connection.execute(open_chunks).scalar_one()

    def done_chunks(self, batch_id: str) -> list[ChunkRecord]:
        of_batch = select(*_CHUNK_COLUMNS).where(chunks.c.batch_id == batch_id, chunks.c.state == DONE)
        with self._reading() as connection:
            rows = connection.execute(of_batch.order_by(chunks.c.done_at, chunks.c.no)).all()
        return [ChunkRecord(**row._mapping) for row in rows]  # noqa: SLF001

    def chunks(self, batch_id: str, first: int = 0, limit: int | None = None) -> list[ChunkRecord]:
        from_first = select(*_CHUNK_COLUMNS).where(chunks.c.batch_id == batch_id, chunks.c.no >= first)
        with self._reading() as connection:
            rows = connection.execute(from_first.order_by(chunks.c.no).limit(limit)).all()
        return [ChunkRecord(**row._mapping) for row in rows]  # noqa: SLF001

    def failures(self, batch_id: str) -> dict[int, dict[str, Sequence[Any]]]:
        columns = select(chunks.c.no, chunks.c.failures)
        some = columns.where(chunks.c.batch_id == batch_id, chunks.c.failed > 0)
        with self._reading() as connection:
            rows = connection.execute(some.order_by(chunks.c.no)).all()
        return {row[0]: row[1] or {} for row in rows}

    def delete(self, batch_id: str) -> None:
        with self._writing() as connection:
            connection.execute(delete(withdrawn).where(withdrawn.c.batch_id == batch_id))
            connection.execute(delete(chunks).where(chunks.c.batch_id == batch_id))
            connection.execute(delete(batches).where(batches.c.id == batch_id))

    def close(self) -> None:
        self.database.close()


def _move(
    connection: Connection,
    batch_id: str,
    expected: str,
    status: str,
    changes: dict[str, Any],
    *,
    revision: int | None = None,
) -> bool:
    as_expected = and_(batches.c.id == batch_id, batches.c.status == expected)
    if revision is not None:
        as_expected = and_(as_expected, batches.c.revision == revision)
    values = {"status": status, "revision": batches.c.revision + 1, **changes}
    return connection.execute(update(batches).where(as_expected).values(**values)).rowcount == 1


def _enqueued(connection: Connection, tenant: str, ended: Sequence[str], model: str | None) -> Enqueued:
    # Those that are still validated have no total and do not count yet.
    chosen = and_(batches.c.tenant == tenant, batches.c.status.not_in(ended), batches.c.total > 0)
    if model is not None:
        chosen = and_(chosen, batches.c.model == model)
    sums = select(
        func.count(),
        func.coalesce(func.sum(batches.c.total), 0),
        func.coalesce(func.sum(batches.c.enqueued_tokens), 0),
    )
    row = connection.execute(sums.where(chosen)).one()
    return Enqueued(row[0], int(row[1]), int(row[2]))


def _has_room(connection: Connection, room: Room, changes: dict[str, Any]) -> bool:
    if connection.dialect.name == "postgresql":
        # Two Batches of one tenant must not both take the last room.
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(room.tenant))))
    earlier = select(func.count()).where(
        batches.c.tenant == room.tenant,
        batches.c.status.not_in(room.ended),
        batches.c.dialect != "",
        batches.c.total == 0,
        batches.c.created_at < room.created_at,
    )
    if connection.execute(earlier).scalar_one():
        return False
    there = _enqueued(connection, room.tenant, room.ended, None)
    fits = room.max_batches is None or there.batches < room.max_batches
    tokens = there.tokens + changes.get("enqueued_tokens", 0)
    return fits and (room.max_tokens is None or tokens <= room.max_tokens)


def _remember(connection: Connection, records: Sequence[DeliveryRecord]) -> None:
    for one in records:
        values = {column.name: getattr(one, column.name) for column in deliveries.columns}
        connection.execute(insert(deliveries).values(**values))


def _filtered(wanted: BatchFilter) -> list[ColumnElement[bool]]:
    terms: list[ColumnElement[bool]] = []
    if wanted.statuses:
        terms.append(batches.c.status.in_(wanted.statuses))
    if wanted.model is not None:
        terms.append(batches.c.model == wanted.model)
    if wanted.created_after is not None:
        terms.append(batches.c.created_at >= wanted.created_after)
    if wanted.created_before is not None:
        terms.append(batches.c.created_at < wanted.created_before)
    for key, value in wanted.metadata.items():
        terms.append(batches.c.settings[("metadata", key)].as_string() == value)
    return terms


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
                never_ran=one.never_ran,
                failures=dict(one.failures) or None,
                **values,
            )
        )
        if changed.rowcount == 0:
            lost.append(one.no)
    return lost
