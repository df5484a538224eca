"""What every store must do. Each implementation runs the same tests."""

from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import text

from batchyard.errors import BatchNotFound, StorageFull, StoreError
from batchyard.stores import database
from batchyard.stores.protocol import (
    BatchFilter,
    BatchRecord,
    ChunkProgress,
    ChunkRecord,
    Enqueued,
    NoRoom,
    Room,
)
from batchyard.stores.schema import metadata
from batchyard.stores.sql import SqlStore
from batchyard.types import Usage


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, tmp_path):
    """A new, empty database."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres").new_database()
    return tmp_path / "state.db"


@pytest.fixture
def store(place):
    opened = SqlStore(place)
    yield opened
    opened.close()


def make_batch(store, chunks=3, count=10, batch_id="batch_1", created_at=1.0):
    store.create(BatchRecord(batch_id, "validating", created_at, "/in.jsonl", {"engine": "echo"}))
    registered = [
        ChunkRecord(batch_id, no, no * 100, 100, no * count, no * count, count) for no in range(chunks)
    ]
    assert store.register(batch_id, "validating", "in_progress", registered, total=chunks * count)
    return batch_id


def done(chunk, succeeded=10, failed=0):
    return ChunkProgress(chunk.no, chunk.epoch, succeeded, failed, Usage(5, 7, 1), 123)


def test_a_batch_comes_back_as_it_was_made(store):
    batch_id = make_batch(store)
    batch = store.get(batch_id)
    assert (batch.status, batch.total, batch.settings) == ("in_progress", 30, {"engine": "echo"})
    with pytest.raises(BatchNotFound, match="batch_2"):
        store.get("batch_2")


def test_batches_are_listed_newest_first(store):
    make_batch(store, batch_id="old", created_at=1.0)
    make_batch(store, batch_id="new", created_at=2.0)
    assert [one.id for one in store.batches()] == ["new", "old"]


def test_a_move_happens_only_from_the_expected_status(store):
    batch_id = make_batch(store)
    assert store.move(batch_id, "in_progress", "finalizing", finalizing_at=9.0)
    assert not store.move(batch_id, "in_progress", "cancelling")
    assert store.get(batch_id).status == "finalizing"
    assert store.get(batch_id).finalizing_at == 9.0


def test_a_refused_registration_changes_nothing(store):
    batch_id = make_batch(store)
    other = [ChunkRecord(batch_id, 0, 0, 1, 0, 0, 1)]
    assert not store.register(batch_id, "validating", "in_progress", other, total=1)
    assert store.remaining(batch_id) == 3
    assert store.get(batch_id).total == 30


def test_claims_go_lowest_first_and_never_twice(store):
    batch_id = make_batch(store)
    first = store.claim(batch_id, "a", 2, now=0.0, lease_s=10)
    second = store.claim(batch_id, "b", 2, now=0.0, lease_s=10)
    assert [(one.no, one.epoch) for one in first] == [(0, 1), (1, 1)]
    assert [(one.no, one.epoch) for one in second] == [(2, 1)]
    assert store.claim(batch_id, "c", 2, now=5.0, lease_s=10) == []


def test_a_lapsed_lease_is_claimed_with_a_higher_epoch_and_the_old_holder_is_fenced_out(store):
    batch_id = make_batch(store, chunks=1)
    (old,) = store.claim(batch_id, "a", 1, now=0.0, lease_s=10)
    (new,) = store.claim(batch_id, "b", 1, now=11.0, lease_s=10)
    assert new.epoch == old.epoch + 1
    assert store.renew(batch_id, "a", [done(old)], now=12.0, lease_s=10) == [0]
    assert store.commit(batch_id, [done(old)], now=12.0) == [0]
    assert store.remaining(batch_id) == 1
    assert store.commit(batch_id, [done(new)], now=13.0) == []
    assert store.remaining(batch_id) == 0
    assert store.commit(batch_id, [done(new)], now=14.0) == [0]
    assert store.counts(batch_id).succeeded == 10


def test_a_renewed_lease_holds_and_shows_progress(store):
    batch_id = make_batch(store, chunks=1)
    (chunk,) = store.claim(batch_id, "a", 1, now=0.0, lease_s=10)
    assert store.renew(batch_id, "a", [done(chunk, 3, 1)], now=8.0, lease_s=10) == []
    assert store.claim(batch_id, "b", 1, now=15.0, lease_s=10) == []
    counts = store.counts(batch_id)
    assert (counts.succeeded, counts.failed, counts.usage) == (3, 1, Usage(5, 7, 1))
    assert store.done_counts(batch_id).succeeded == 0


def test_released_chunks_are_open_again_at_once(store):
    batch_id = make_batch(store, chunks=2)
    store.claim(batch_id, "a", 1, now=0.0, lease_s=10)
    store.claim(batch_id, "b", 1, now=0.0, lease_s=10)
    store.release(batch_id, "a")
    assert [(one.no, one.epoch) for one in store.claim(batch_id, "c", 5, now=1.0, lease_s=10)] == [(0, 2)]
    store.release(batch_id)
    assert len(store.claim(batch_id, "d", 5, now=1.0, lease_s=10)) == 2


def test_done_chunks_come_in_the_order_of_their_commits(store):
    batch_id = make_batch(store)
    chunks = store.claim(batch_id, "a", 3, now=0.0, lease_s=10)
    for at, no in enumerate((2, 0, 1)):
        store.commit(batch_id, [done(chunks[no])], now=float(at))
    found = store.done_chunks(batch_id)
    assert [one.no for one in found] == [2, 0, 1]
    assert {one.segment_bytes for one in found} == {123}


def test_batches_do_not_see_each_other(store):
    make_batch(store, batch_id="one")
    make_batch(store, batch_id="two")
    store.commit("one", [done(chunk) for chunk in store.claim("one", "a", 5, now=0, lease_s=1)], now=0)
    assert (store.remaining("one"), store.remaining("two")) == (0, 3)
    store.delete("one")
    assert [one.id for one in store.batches()] == ["two"]
    assert store.done_chunks("one") == []


def test_claims_use_the_partial_indexes(tmp_path):
    store = SqlStore(tmp_path / "state.db")
    with store.database._connected() as connection:
        for state, index in ((0, "chunks_open"), (1, "chunks_leased")):
            plan = connection.execute(
                text(
                    "explain query plan select no from chunks "
                    f"where batch_id = 'b' and state = {state} order by no limit 2"
                )
            ).all()
            assert any(index in row[3] for row in plan), plan
        connection.rollback()
    store.close()


def test_two_processes_worth_of_stores_share_a_database(place):
    one, two = SqlStore(place), SqlStore(place)
    batch_id = make_batch(one, chunks=40)
    claimed = []
    while more := one.claim(batch_id, "a", 3, now=0, lease_s=9) + two.claim(
        batch_id, "b", 3, now=0, lease_s=9
    ):
        claimed += [chunk.no for chunk in more]
    assert sorted(claimed) == list(range(40))
    one.close()
    two.close()


def test_a_file_of_another_version_or_kind_is_refused_in_words(tmp_path):
    path = tmp_path / "state.db"
    store = SqlStore(path)
    with store.database.writing() as connection:
        connection.exec_driver_sql("update schema_revision set version_num = '9999'")
    store.close()
    with pytest.raises(StoreError, match="another version of Batchyard"):
        SqlStore(path)
    other = tmp_path / "other.db"
    other.write_bytes(b"certainly no database" * 100)
    with pytest.raises(StoreError, match="damaged or no database"):
        SqlStore(other)


def test_after_a_full_disk_it_reads_at_once_and_writes_when_there_is_room(tmp_path):
    store = SqlStore(tmp_path / "state.db")
    store.create(BatchRecord("batch_1", "in_progress", 1.0, "in.jsonl", {}))
    with store.database._connected() as connection:
        connection.exec_driver_sql("pragma journal_mode = delete")
        pages = connection.exec_driver_sql("pragma page_count").scalar_one()
        connection.exec_driver_sql(f"pragma max_page_count = {pages}")
    large = {"note": "x" * 1_000_000}
    for _ in range(2):
        with pytest.raises(StorageFull):
            store.create(BatchRecord("batch_2", "in_progress", 2.0, "in.jsonl", large))
        assert store.get("batch_1").status == "in_progress"
        with store.database._connected() as connection:
            connection.exec_driver_sql(f"pragma max_page_count = {pages}")
    with store.database._connected() as connection:
        connection.exec_driver_sql("pragma max_page_count = 1000000")
    store.create(BatchRecord("batch_2", "in_progress", 2.0, "in.jsonl", large))
    assert store.move("batch_1", "in_progress", "paused")
    store.close()


def test_an_error_in_the_middle_of_a_transaction_spoils_no_later_one(tmp_path):
    store = SqlStore(tmp_path / "state.db")
    store.create(BatchRecord("batch_1", "in_progress", 1.0, "in.jsonl", {}))
    for _ in range(2):
        with pytest.raises(StoreError):
            with store.database.writing() as connection:
                connection.exec_driver_sql("insert into nothing values (1)")
        assert store.move("batch_1", "in_progress", "in_progress")
    store.close()


def test_a_folder_that_cannot_be_written_is_told_so(tmp_path):
    with pytest.raises(StoreError, match="folder exists and is writable"):
        SqlStore(tmp_path / "missing" / "state.db")


def test_a_second_batch_with_the_same_id_is_not_made(store):
    make_batch(store)
    assert not store.create(BatchRecord("batch_1", "validating", 9.0, "/other", {}))
    assert store.get("batch_1").created_at == 1.0


def test_every_change_from_outside_raises_the_revision(store):
    batch_id = make_batch(store)
    before = store.get(batch_id).revision
    store.move(batch_id, "in_progress", "in_progress", priority=3)
    store.withdraw(batch_id, [(0, 1), (0, 1), (2, 9)])
    assert store.get(batch_id).revision == before + 2
    assert store.withdrawn(batch_id) == {(0, 1), (2, 9)}
    assert store.get(batch_id).priority == 3


def test_one_process_at_a_time_holds_a_batch_and_a_lapsed_hold_passes_on(store):
    batch_id = make_batch(store)
    assert store.hold(batch_id, "a", now=0.0, lease_s=10)
    assert store.hold(batch_id, "a", now=5.0, lease_s=10)
    assert not store.hold(batch_id, "b", now=14.0, lease_s=10)
    assert store.hold(batch_id, "b", now=16.0, lease_s=10)
    store.let_go(batch_id, "a")
    assert not store.hold(batch_id, "a", now=16.0, lease_s=10)
    store.let_go(batch_id, "b")
    assert store.hold(batch_id, "a", now=16.0, lease_s=10)


def test_failures_and_what_never_ran_are_kept_by_chunk(store):
    batch_id = make_batch(store, chunks=2)
    one, two = store.claim(batch_id, "a", 2, now=0.0, lease_s=10)
    few = {"HTTP 400": [1, "bad", "a"]}
    many = {"HTTP 400": [1, "worse", "b"], "request_timeout": [5, "late", "c"]}
    first = ChunkProgress(one.no, one.epoch, 8, 1, never_ran=1, failures=few)
    store.renew(batch_id, "a", [first], now=1.0, lease_s=10)
    store.commit(batch_id, [ChunkProgress(two.no, two.epoch, 4, 6, failures=many)], now=1.0)
    assert store.failures(batch_id) == {0: few, 1: many}
    counts = store.counts(batch_id)
    assert (counts.succeeded, counts.failed, counts.never_ran) == (12, 7, 1)


def test_a_batch_beyond_its_tenants_room_is_not_registered(store):
    def register(name, tokens, **most):
        at = float(name[1:])
        store.create(BatchRecord(name, "validating", at, "", {}, tenant="t", dialect="openai"))
        room = Room("t", ["completed"], at, most.get("max_batches"), most.get("max_tokens"))
        chunk = ChunkRecord(name, 0, 0, 1, 0, 0, 5)
        return store.register(
            name, "validating", "in_progress", [chunk], room=room, total=5, enqueued_tokens=tokens
        )

    assert register("b1", 60, max_tokens=100)
    with pytest.raises(NoRoom):
        register("b2", 50, max_tokens=100)
    assert store.get("b2").status == "validating"
    with pytest.raises(NoRoom):
        register("b1.5", 1, max_batches=1)
    # It would fit, but others came before it.
    with pytest.raises(NoRoom):
        register("b4", 40, max_tokens=100, max_batches=2)
    store.move("b1", "in_progress", "completed")
    assert register("b1.5", 1, max_batches=1)
    assert register("b2", 50, max_tokens=100)
    assert register("b4", 40, max_tokens=100)


def test_a_batch_is_reopened_only_from_the_expected_status(store):
    batch_id = make_batch(store, chunks=1)
    (chunk,) = store.claim(batch_id, "a", 1, now=0.0, lease_s=10)
    store.commit(batch_id, [done(chunk)], now=1.0)
    assert not store.reopen(batch_id, "finalizing", "in_progress", [0])
    assert store.remaining(batch_id) == 0
    assert store.reopen(batch_id, "in_progress", "in_progress", [0])
    assert store.remaining(batch_id) == 1
    assert store.counts(batch_id).succeeded == 0


def test_where_joined_chunks_lie_is_remembered(store):
    batch_id = make_batch(store, chunks=2)
    first, second = store.chunks(batch_id)
    store.place(batch_id, [replace(second, output_offset=70, error_offset=5, attempts={"3": 2})])
    (found,) = store.chunks(batch_id, 1, 5)
    assert (found.no, found.output_offset, found.error_offset, found.attempts) == (1, 70, 5, {"3": 2})
    assert store.chunks(batch_id, 0, 1) == [first]


def test_pages_go_both_ways_and_are_filtered(store):
    for n in range(6):
        settings = {"metadata": {"team": "a" if n % 2 else "b", "odd.key": "x"}}
        store.create(
            BatchRecord(f"batch_{n}", "validating", float(n // 2), "", settings, tenant="t", dialect="openai")
        )
    store.create(
        BatchRecord("other", "validating", 9.0, "", {"metadata": None}, tenant="u", dialect="openai")
    )
    every = [one.id for one in store.page("t", "openai", 100)]
    assert every == ["batch_4", "batch_5", "batch_2", "batch_3", "batch_0", "batch_1"]
    middle = store.get("batch_2")
    assert [one.id for one in store.page("t", "openai", 2, after=middle)] == ["batch_3", "batch_0"]
    assert [one.id for one in store.page("t", "openai", 1, before=middle)] == ["batch_5"]
    assert [one.id for one in store.page("t", "openai", 9, before=middle)] == ["batch_4", "batch_5"]
    of_team = BatchFilter(metadata={"team": "a", "odd.key": "x"}, created_after=1.0)
    assert [one.id for one in store.page("t", "openai", 9, wanted=of_team)] == ["batch_5", "batch_3"]
    assert store.page("t", "openai", 9, wanted=BatchFilter(created_before=0.0)) == []
    assert store.page("t", "openai", 9, wanted=BatchFilter(metadata={"team": "c"})) == []


def test_what_a_tenant_has_enqueued_is_what_has_not_ended(store):
    for n, status in enumerate(["in_progress", "paused", "completed", "in_progress"]):
        tenant, model = ("u" if n == 3 else "t"), ("large" if n else "small")
        store.create(
            BatchRecord(f"b{n}", status, 1.0, "", {}, total=10, tenant=tenant, dialect="openai", model=model)
        )
        store.move(f"b{n}", status, status, enqueued_tokens=100)
    assert store.enqueued("t", ["completed"]) == Enqueued(2, 20, 200)
    assert store.enqueued("t", ["completed"], "large") == Enqueued(1, 10, 100)
    assert store.enqueued("nobody", []) == Enqueued(0, 0, 0)
    assert sorted(one[0] for one in store.moving(["completed", "paused"])) == ["b0", "b3"]


def test_a_database_of_the_last_release_is_migrated_and_keeps_what_it_holds(place):
    is_url = isinstance(place, str)
    _, engine = database._open_postgresql(place) if is_url else database._open_sqlite(place)
    with engine.connect() as connection:
        config = Config()
        config.set_main_option("script_location", str(Path(database.__file__).parent / "migrations"))
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("drop table schema_revision")
            connection.exec_driver_sql("pragma user_version = 2")
        connection.execute(
            sa.text(
                "insert into batches (id, tenant, dialect, status, created_at, input_path, input_bytes, "
                "input_mtime_ns, input_sha256, total, settings, errors, never_ran) values "
                "('b', 't', 'openai', 'cancelled', 1, '', 0, 0, '', 10, '{}', '[]', 4)"
            )
        )
        connection.execute(
            sa.text(
                'insert into chunks (batch_id, no, state, "offset", length, first_index, first_line, count, '
                "epoch, succeeded, failed, input_tokens, output_tokens, cached_tokens, segment_bytes) values "
                "('b', 0, 2, 0, 9, 0, 1, 10, 1, 5, 5, 0, 0, 0, 0)"
            )
        )
        connection.commit()
    for _ in range(2):
        store = SqlStore(place)
        counts = store.counts("b")
        assert (counts.succeeded, counts.failed, counts.never_ran) == (5, 1, 4)
        assert store.get("b").amendments == []
        store.close()
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": "schema_revision", "compare_type": True}
        )
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_postgres_gone_is_told_and_its_return_is_noticed(postgres):
    store = SqlStore(postgres.new_database())
    batch_id = make_batch(store)
    postgres.stop()
    try:
        for _ in range(2):
            with pytest.raises(StoreError, match="failed"):
                store.get(batch_id)
    finally:
        postgres.start()
    assert store.get(batch_id).status == "in_progress"
    store.close()


def test_an_address_that_is_none_is_refused_in_words():
    for address, words in {
        "mysql://localhost/x": "'mysql' is no database",
        "postgresql": "not understood",
        "postgresql://u:secret@127.0.0.1:1/x": "127.0.0.1",
    }.items():
        with pytest.raises(StoreError, match=words) as refused:
            SqlStore(address)
        assert "secret" not in str(refused.value)
