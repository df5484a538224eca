"""What every store must do. Each implementation runs the same tests."""

import pytest
from sqlalchemy import text

from batchyard.errors import BatchNotFound, StorageFull, StoreError
from batchyard.stores.protocol import BatchRecord, ChunkProgress, ChunkRecord
from batchyard.stores.sql import SqlStore
from batchyard.types import Usage

STORES = {"sqlite": lambda tmp_path: SqlStore(tmp_path / "state.db")}


@pytest.fixture(params=sorted(STORES))
def store(request, tmp_path):
    opened = STORES[request.param](tmp_path)
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


def test_two_processes_worth_of_stores_share_a_file(tmp_path):
    one, two = SqlStore(tmp_path / "state.db"), SqlStore(tmp_path / "state.db")
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
    with store.database._connected() as connection:
        connection.exec_driver_sql("pragma user_version = 99")
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
