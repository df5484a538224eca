"""Floor 6. Reading the requests of a chunk again while it is worked on: cheaper than keeping them."""

from __future__ import annotations

import msgspec

from batchyard.errors import InputChanged
from batchyard.service.intake.registration import ChunkSpan
from batchyard.types import Endpoint, Request


class _Line(msgspec.Struct, gc=False):
    custom_id: str
    url: str
    body: msgspec.Raw


class _Head(msgspec.Struct, gc=False):
    model: str | None = None


_decode = msgspec.json.Decoder(_Line).decode
_decode_head = msgspec.json.Decoder(_Head).decode
_ENDPOINTS = {one.value: one for one in Endpoint}


def read_requests(data: bytes, span: ChunkSpan) -> list[Request]:
    """The requests in *data*, the bytes of a registered chunk.

    Raises:
        InputChanged: they are not what was registered.
    """
    requests = []
    index = span.first_index
    try:
        for raw in data.split(b"\n"):
            if not raw or raw.isspace():
                continue
            line = _decode(raw)
            model = _decode_head(line.body).model
            requests.append(Request(line.custom_id, _ENDPOINTS[line.url], bytes(line.body), model, index))
            index += 1
    except (msgspec.MsgspecError, RecursionError, KeyError) as error:
        raise InputChanged(_changed(span)) from error
    if len(requests) != span.count:
        raise InputChanged(_changed(span))
    return requests


def _changed(span: ChunkSpan) -> str:
    return (
        f"The input changed while it was worked on: the {span.count} requests from line {span.first_line} on "
        "are no longer there as registered. Put the old content back, or start over with --restart."
    )
