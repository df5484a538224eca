"""Uploads in parts, as the real SDK makes them."""

import hashlib

import httpx
import openai
import pytest
from served import Server, jsonl, line, start_batch, until


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(request, tmp_path_factory):
    store = []
    if request.param == "postgres":
        store = ["--database", request.getfixturevalue("postgres").new_database()]
    with Server(tmp_path_factory.mktemp("server"), "--engine", "echo", *store) as server:
        yield server


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


DATA = jsonl([line(f"r{n}", "x" * 100) for n in range(500)])


def begin(client, data=DATA, **more):
    wanted = {
        "bytes": len(data),
        "filename": "in.jsonl",
        "mime_type": "application/jsonl",
        "purpose": "batch",
    }
    return client.uploads.create(**wanted | more)


def test_a_file_in_parts_becomes_one_that_batches_take(client):
    upload = client.uploads.upload_file_chunked(
        file=DATA,
        filename="in.jsonl",
        bytes=len(DATA),
        mime_type="application/jsonl",
        purpose="batch",
        part_size=10_000,
        md5=hashlib.md5(DATA).hexdigest(),
    )
    assert (upload.status, upload.file.bytes, upload.file.purpose) == ("completed", len(DATA), "batch")
    assert client.files.content(upload.file.id).content == DATA
    batch = client.batches.create(
        input_file_id=upload.file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert until(client, batch.id).request_counts.completed == 500


def test_parts_are_taken_in_the_order_that_is_given(client):
    upload = begin(client, b"{}\n{ }\n")
    second = client.uploads.parts.create(upload.id, data=b"{ }\n")
    first = client.uploads.parts.create(upload.id, data=b"{}\n")
    done = client.uploads.complete(upload.id, part_ids=[first.id, second.id])
    assert client.files.content(done.file.id).content == b"{}\n{ }\n"
    for again in (
        lambda: client.uploads.complete(upload.id, part_ids=[first.id]),
        lambda: client.uploads.parts.create(upload.id, data=b"x"),
        lambda: client.uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.ConflictError):
            again()


def test_what_does_not_fit_together_is_refused(client):
    upload = begin(client, b"{}\n{ }\n")
    part = client.uploads.parts.create(upload.id, data=b"{}\n")
    other = client.uploads.parts.create(upload.id, data=b"{ }\n")
    for wrong, code in (
        ({"part_ids": [part.id]}, "invalid_size"),
        ({"part_ids": [part.id, part.id]}, "invalid_part"),
        ({"part_ids": ["part_x"]}, "invalid_part"),
        ({"part_ids": []}, "array_below_min_length"),
        ({"part_ids": [part.id, other.id], "md5": "0" * 32}, "md5_mismatch"),
        ({"part_ids": [part.id, other.id], "md5": "z"}, "invalid_value"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.uploads.complete(upload.id, **wrong)
        assert caught.value.code == code
    with pytest.raises(openai.BadRequestError):
        client.uploads.parts.create(upload.id, data=b"far too long for this upload")
    assert client.uploads.complete(upload.id, part_ids=[part.id, other.id]).status == "completed"


def test_uploads_that_cannot_be_are_refused(client, server):
    for wrong, param in (
        ({"bytes": 0}, "bytes"),
        ({"bytes": 300_000_000}, "file"),
        ({"filename": "in.csv"}, "filename"),
        ({"purpose": "odd"}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            begin(client, **wrong)
        assert caught.value.param == param
    assert begin(client, purpose="user_data", bytes=300_000_000, filename="a.csv").status == "pending"
    for name in ("upload_x", "..%2f..%2fstate"):
        answer = httpx.post(f"{server.base_url}/uploads/{name}/parts", files={"data": b"x"})
        assert answer.status_code == 404
    no_lines = begin(client, b"no json")
    part = client.uploads.parts.create(no_lines.id, data=b"no json")
    with pytest.raises(openai.BadRequestError):
        client.uploads.complete(no_lines.id, part_ids=[part.id])


def test_a_cancelled_upload_leaves_nothing(client):
    upload = begin(client)
    client.uploads.parts.create(upload.id, data=b"x")
    assert client.uploads.cancel(upload.id).status == "cancelled"
    with pytest.raises(openai.ConflictError):
        client.uploads.parts.create(upload.id, data=b"x")


def test_a_restart_keeps_parts(tmp_path):
    with Server(tmp_path, "--engine", "echo") as server:
        with server.client() as client:
            upload = begin(client, b"{}\n{}\n")
            part = client.uploads.parts.create(upload.id, data=b"{}\n")
        server.kill()
        server.start()
        with server.client() as client:
            other = client.uploads.parts.create(upload.id, data=b"{}\n")
            assert client.uploads.complete(upload.id, part_ids=[part.id, other.id]).status == "completed"
            assert until(client, start_batch(client, [line("a")]).id).status == "completed"
    assert list((tmp_path / "state" / "parts").iterdir()) == []
