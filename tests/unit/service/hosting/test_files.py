"""Files of tenants: whole or not there, theirs alone, gone in time, and nothing left by a crash."""

import pytest

from batchyard.clock import ManualClock
from batchyard.service.hosting.files import Files
from batchyard.service.hosting.keys import keys_of
from batchyard.stores.blobs import BlobNotFound, LocalBlobs
from batchyard.stores.database import Database
from batchyard.stores.files import FileTable


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def files(tmp_path, clock):
    database = Database(tmp_path / "state.db")
    yield Files(FileTable(database), LocalBlobs(tmp_path), clock)
    database.close()


def put(files, tenant="a", content=b"x", *, expires_s=None):
    incoming = files.begin()
    incoming.write(content)
    return files.keep(incoming, tenant, purpose="batch", filename="in.jsonl", expires_s=expires_s)


def test_a_file_is_its_tenants_alone(files):
    record = put(files, "a", b"content")
    assert files.path(record.id).read_bytes() == b"content"
    assert files.get("a", record.id) == record
    assert files.get("b", record.id) is None
    assert files.page("b", 10) == []


def test_a_file_is_gone_when_its_time_is_over(files, clock):
    record, kept = put(files, expires_s=3600), put(files)
    clock.advance(3601)
    assert files.get("a", record.id) is None
    assert files.page("a", 10) == [kept]
    files.sweep()
    with pytest.raises(BlobNotFound):
        files.path(record.id)
    assert files.path(kept.id).exists()


def test_what_a_crash_left_is_removed_at_the_next_start(files):
    record = put(files)
    orphan = files.begin()
    orphan.write(b"written, never told of")
    files.store(orphan)
    folder = files.path(record.id).parent
    assert len(list(folder.iterdir())) == 2
    files.tidy()
    assert [one.name for one in folder.iterdir()] == [record.id]


def test_pages_hold_their_order_where_times_are_equal(files):
    made = {put(files).id for _ in range(7)}
    seen, after = [], None
    while page := files.page("a", 2, after=after):
        seen += [one.id for one in page]
        after = page[-1]
    assert len(seen) == len(set(seen)) == 7
    assert set(seen) == made


def test_a_key_is_shown_once_and_refused_once_revoked(tmp_path, clock):
    with keys_of(tmp_path / "state", clock) as keys:
        record, key = keys.create("alice", "research")
        assert key not in repr(keys.all())
        assert keys.check(key).tenant == "research"
        assert keys.check(key + "x") is None
        with keys_of(tmp_path / "state", clock) as elsewhere:
            assert elsewhere.revoke(record.id)
            assert not elsewhere.revoke(record.id)
        assert keys.check(key) is None
