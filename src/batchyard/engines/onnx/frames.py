"""Floor 3. What the engine `onnx` and its child process say to each other: msgpack frames on pipes.

A frame is its length in four bytes, little-endian, then one message. Values only: nothing that is read
can run code.
"""

from __future__ import annotations

import asyncio
import os
import struct

import msgspec

_LENGTH = struct.Struct("<I")


class Job(msgspec.Struct, tag="job"):
    """Parent to child: embed these inputs, each a text or token ids."""

    id: int
    inputs: list[str | list[int]]


class Drop(msgspec.Struct, tag="drop"):
    """Parent to child: nobody waits for this job any more."""

    id: int


class Count(msgspec.Struct, tag="count"):
    """Parent to child: how many tokens has each text?"""

    id: int
    texts: list[str]


class Vectors(msgspec.Struct, tag="vectors"):
    """Child to parent: the vectors of a job, float32 in the order of its inputs."""

    id: int
    data: bytes
    #: Tokens that were computed for each input, special tokens included.
    tokens: list[int]
    #: Inputs that were longer than the model takes and were cut.
    cut: list[int]


class Counts(msgspec.Struct, tag="counts"):
    """Child to parent: tokens of each text, special tokens included, before any cut."""

    id: int
    tokens: list[int]


ToChild = Job | Drop | Count
FromChild = Vectors | Counts

_encode = msgspec.msgpack.Encoder().encode
_decode_to_child = msgspec.msgpack.Decoder(ToChild).decode
_decode_from_child = msgspec.msgpack.Decoder(FromChild).decode


def frame(message: ToChild | FromChild) -> bytes:
    """A message as bytes on a pipe."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


def read_to_child(handle: int) -> ToChild | None:
    """In the child: the next message; None when the parent is gone."""
    head = _read_exactly(handle, _LENGTH.size)
    if head is None:
        return None
    body = _read_exactly(handle, _LENGTH.unpack(head)[0])
    return None if body is None else _decode_to_child(body)


async def read_from_child(stream: asyncio.StreamReader) -> FromChild | None:
    """In the parent: the next message; None when the child is gone."""
    try:
        head = await stream.readexactly(_LENGTH.size)
        return _decode_from_child(await stream.readexactly(_LENGTH.unpack(head)[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_all(handle: int, data: bytes) -> None:
    """Write every byte of *data*."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _read_exactly(handle: int, length: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < length:
        part = os.read(handle, length - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
