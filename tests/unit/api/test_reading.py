"""Bodies that stall, break off or come in odd pieces."""

import asyncio

import pytest
from starlette.requests import Request

from batchyard.api.errors import ApiError
from batchyard.api.reading import STALL_S, Form, read_body
from batchyard.testing.virtual_loop import VirtualTimeLoop


def request_of(pieces, content_type=b"multipart/form-data; boundary=b"):
    """A request whose body comes in *pieces*: bytes, seconds of silence, or None for a hang-up."""
    left = list(pieces)

    async def receive():
        while left:
            piece = left.pop(0)
            if piece is None:
                return {"type": "http.disconnect"}
            if isinstance(piece, bytes):
                return {"type": "http.request", "body": piece, "more_body": bool(left)}
            await asyncio.sleep(piece)
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", content_type)], "path": "/"}
    return Request(scope, receive)


def test_a_slow_body_is_taken_and_a_stalled_one_given_up():
    slow = request_of([b"a", STALL_S - 1, b"b", STALL_S - 1, b"c"])
    assert VirtualTimeLoop.run(read_body(slow, 10)) == b"abc"
    with pytest.raises(ApiError) as caught:
        VirtualTimeLoop.run(read_body(request_of([b"a", STALL_S + 1, b"b"]), 10))
    assert caught.value.status == 408


async def test_a_body_that_breaks_off_or_never_ends_is_refused():
    with pytest.raises(ApiError) as caught:
        await read_body(request_of([b"a", None]), 10)
    assert caught.value.status == 400
    with pytest.raises(ApiError) as caught:
        await read_body(request_of([b"aaaa"] * 100), 10)
    assert caught.value.status == 413


FORM = (
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\nline\r\n--not-b\r\n'
    b'\r\n--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_a_form_is_the_same_however_it_is_cut(size):
    taken = []
    form = Form("file", taken.append)
    await form.read(request_of([FORM[at : at + size] for at in range(0, len(FORM), size)]))
    assert b"".join(taken) == b"line\r\n--not-b\r\n"
    assert (form.fields, form.filename) == ({"purpose": "batch"}, "a.jsonl")
