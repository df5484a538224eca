"""Floor 6. The failed requests of a Batch that has ended, written as the input of a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from batchyard.errors import InvalidTransition
from batchyard.service.hosting.amendments import amending
from batchyard.service.hosting.files import Incoming
from batchyard.service.hosting.reader import Reader
from batchyard.service.hosting.shelf import Shelf
from batchyard.service.input_file import InputFile
from batchyard.service.intake.chunk import read_requests
from batchyard.service.intake.spans import ChunkSpan
from batchyard.service.lifecycle import TERMINAL, Status
from batchyard.service.lines import index_of, read_failure
from batchyard.stores.blobs import BlobNotFound
from batchyard.stores.protocol import BatchRecord, ChunkRecord


async def write_retried(
    shelf: Shelf, reader: Reader, batch: BatchRecord, target: Incoming, chosen: Callable[[str], bool]
) -> int:
    """Write those requests whose kind of failure is *chosen* to *target*; how many there are.

    Raises:
        InvalidTransition: the Batch has not ended, or its input or results are deleted.
        StorageFull: there is no room.
    """
    if Status(batch.status) not in TERMINAL - {Status.FAILED}:
        raise InvalidTransition(
            f"Cannot retry a batch with status '{batch.status}': only one that has run to its end."
        )
    chunks = await shelf.kept(lambda: shelf.store.chunks(batch.id))

    def write() -> int:
        failed: dict[int, set[int]] = {}
        for chunk, line in reader.failed_lines(batch, chunks):
            if chosen(read_failure(line).kind):
                failed.setdefault(chunk.no, set()).add(index_of(line))
        return _write(shelf, batch, chunks, failed, target) if failed else 0

    return await asyncio.to_thread(write)


def _write(
    shelf: Shelf,
    batch: BatchRecord,
    chunks: list[ChunkRecord],
    failed: dict[int, set[int]],
    target: Incoming,
) -> int:
    try:
        source = InputFile(batch, shelf.files.path(batch.settings["input_file_id"]))
    except BlobNotFound as error:
        raise InvalidTransition(
            f"The input file {batch.settings['input_file_id']} of batch {batch.id} has been deleted, so its "
            "requests are not known any more."
        ) from error
    amend = amending(batch.amendments)
    count = 0
    try:
        for chunk in chunks:
            wanted = failed.get(chunk.no)
            if not wanted:
                continue
            span = ChunkSpan(
                chunk.no, chunk.offset, chunk.length, chunk.first_index, chunk.first_line, chunk.count
            )
            for request in read_requests(source.read(chunk.offset, chunk.length), span):
                if request.index not in wanted:
                    continue
                asked = request if amend is None else amend(request)
                again = {
                    "custom_id": asked.custom_id,
                    "method": "POST",
                    "url": asked.endpoint.value,
                    "body": msgspec.Raw(asked.body),
                }
                target.write(msgspec.json.encode(again) + b"\n")
                count += 1
    finally:
        source.close()
    return count
