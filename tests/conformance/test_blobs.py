"""What every place for blobs must do. Each implementation runs the same tests."""

import pytest

from batchyard.errors import StoreError, UsageError
from batchyard.stores.blobs import BlobNotFound, LocalBlobs
from batchyard.stores.object_blobs import open_blobs


@pytest.fixture(params=["local", "objects"])
def blobs(request, tmp_path, monkeypatch):
    if request.param == "local":
        return LocalBlobs(tmp_path)
    server = request.getfixturevalue("object_store")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return open_blobs(server.new_url(), tmp_path)


def put(blobs, name, content):
    path = blobs.spool / "incoming"
    path.write_bytes(content)
    blobs.put_file(name, path)
    return path


def test_what_is_put_is_there_and_its_way_in_is_cleared(blobs):
    incoming = put(blobs, "files/a", b"x" * 12_000_000)
    assert blobs.local("files/a").read_bytes() == b"x" * 12_000_000
    assert not incoming.exists()


def test_what_is_not_there_is_told(blobs):
    with pytest.raises(BlobNotFound):
        blobs.local("files/none")
    with pytest.raises(BlobNotFound):
        blobs.copy("files/none", "inputs/none")
    blobs.delete("files/none")
    blobs.delete_all("segments/none/")
    assert list(blobs.names("files/")) == []


def test_a_copy_stays_when_the_first_is_deleted(blobs):
    put(blobs, "files/a", b"content")
    blobs.copy("files/a", "inputs/b")
    blobs.copy("files/a", "inputs/b")
    blobs.delete("files/a")
    assert blobs.local("inputs/b").read_bytes() == b"content"
    with pytest.raises(BlobNotFound):
        blobs.local("files/a")


def test_names_are_those_of_one_folder(blobs):
    for name in ("segments/b1/0.1.seg", "segments/b1/1.1.seg", "segments/b10/0.1.seg"):
        put(blobs, name, b"x")
    assert sorted(blobs.names("segments/b1/")) == ["segments/b1/0.1.seg", "segments/b1/1.1.seg"]
    blobs.delete_all("segments/b1/")
    assert list(blobs.names("segments/b1/")) == []
    assert list(blobs.names("segments/b10/")) == ["segments/b10/0.1.seg"]


def test_what_is_put_again_is_read_anew(blobs):
    put(blobs, "segments/b/0.1.seg", b"one")
    assert blobs.local("segments/b/0.1.seg").read_bytes() == b"one"
    put(blobs, "segments/b/0.1.seg", b"one two")
    assert blobs.local("segments/b/0.1.seg", fresh=True).read_bytes() == b"one two"
    blobs.sweep()
    assert blobs.local("segments/b/0.1.seg").read_bytes() == b"one two"


def test_a_store_that_is_not_there_is_told_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    blobs = open_blobs("s3://bucket/prefix", tmp_path)
    with pytest.raises(StoreError, match="s3://bucket/prefix failed at files/a"):
        blobs.local("files/a")
    with pytest.raises(UsageError, match="no place for blobs"):
        open_blobs("ftp://somewhere", tmp_path)
