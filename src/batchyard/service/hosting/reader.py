"""Floor 6. Looking at a Batch, running or ended: counts, requests, results, failures. Never writes.

While a Batch runs, its results lie in segments; once it has ended, in its two files, where each chunk's
lines are one range. Both are read chunk by chunk, so that a look costs the same in a large Batch.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from batchyard.errors import BatchNotFound, InputChanged, InvalidTransition
from batchyard.service.hosting.cursor import Cursor
from batchyard.service.hosting.journeys import Journeys
from batchyard.service.hosting.shelf import Shelf
from batchyard.service.input_file import InputFile
from batchyard.service.intake.chunk import read_requests
from batchyard.service.intake.spans import ChunkSpan
from batchyard.service.lifecycle import TERMINAL, Status
from batchyard.service.lines import NEVER_RAN, index_of, read_custom_id, read_failure
from batchyard.stores.blobs import BlobNotFound
from batchyard.stores.protocol import BatchRecord, ChunkRecord
from batchyard.types import Usage

#: Chunks that one look at requests goes through, wanted ones or not.
_MOST_CHUNKS = 64
_MOST_BYTES = 8 << 20
#: What a look meets when a Batch ends under it: its input and segments are removed.
_GONE = (BlobNotFound, FileNotFoundError, InputChanged)


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What became of the requests of a Batch so far."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)
    #: Cancelled or expired before they ran; in neither of the counts above.
    never_ran: int = 0


@dataclass(frozen=True, slots=True)
class RequestState:
    """One request of a Batch."""

    index: int
    custom_id: str
    #: `queued`, `running`, `succeeded`, `failed`, `cancelled` or `expired`.
    status: str
    #: Dispatches so far, the running one included.
    attempts: int
    #: Why it has no good answer: `HTTP 400` or the code of its line, and words.
    kind: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Some requests, in input order."""

    requests: list[RequestState]
    #: The index of the last one looked at; None where there are none left.
    next_after: int | None


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Requests that failed in the same way."""

    kind: str
    count: int
    message: str
    custom_id: str


class Reader:
    """Looks at the Batches of one server."""

    def __init__(self, shelf: Shelf, journeys: Journeys) -> None:
        self._shelf = shelf
        self._journeys = journeys

    async def get(self, tenant: str, batch_id: str, dialect: str = "openai") -> BatchRecord:
        """The Batch of *tenant* with this id.

        Raises:
            BatchNotFound: there is none; another tenant's is none either, nor is one of another dialect.
        """
        batch = await self._shelf.kept(lambda: self._shelf.store.get(batch_id))
        if (batch.tenant, batch.dialect) != (tenant, dialect):
            raise BatchNotFound(f"There is no Batch {batch_id!r}.")
        return batch

    async def counts(self, batch: BatchRecord) -> BatchCounts:
        """What became of its requests so far."""
        journey = self._journeys.of(batch.id)
        progress = None if journey is None else journey.progress
        if progress is not None and not self._shelf.shared and Status(batch.status) not in TERMINAL:
            done, failed, never_ran = progress.succeeded, progress.failed, progress.never_ran
            return BatchCounts(batch.total, done, failed, progress.usage, never_ran)
        worker = None if journey is None else journey.worker
        held = {} if worker is None else worker.held()
        # Newer than what the last heartbeat noted of them.
        found = await self._shelf.kept(lambda: self._shelf.store.counts(batch.id, held.keys()))
        found = sum(held.values(), start=found)
        return BatchCounts(batch.total, found.succeeded, found.failed, found.usage, found.never_ran)

    def note(self, batch: BatchRecord) -> str | None:
        """Why a Batch does not move, in words; None while it does."""
        if batch.held_because is not None:
            return batch.held_because
        journey = self._journeys.of(batch.id)
        if journey is None:
            return None
        return journey.note if journey.worker is None else journey.worker.note

    # --- requests -------------------------------------------------------------------------------

    async def requests(
        self, batch: BatchRecord, after: int, limit: int, wanted: Callable[[RequestState], bool]
    ) -> Page:
        """Up to *limit* requests with an index above *after*, those that are *wanted*.

        A page may hold fewer than there are: one look goes through so many requests and no more.

        Raises:
            InvalidTransition: the Batch has ended and its results are deleted, so nothing is known.
        """
        chunks = await self._shelf.kept(lambda: self._shelf.store.chunks(batch.id))
        if not chunks:
            # It is still checked, or was refused.
            return Page([], None)
        first = max(bisect_right([one.first_index for one in chunks], after + 1) - 1, 0)
        running: dict[tuple[int, int], int] = {}
        journey = self._journeys.of(batch.id)
        if journey is not None and journey.worker is not None:
            running = journey.worker.running()

        def look() -> Page:
            states = self._ended(batch, chunks) if _has_ended(batch) else self._live(batch, running)
            with states as of_chunk:
                found: list[RequestState] = []
                for seen, chunk in enumerate(chunks[first:]):
                    if seen == _MOST_CHUNKS:
                        return Page(found, chunk.first_index - 1)
                    for one in of_chunk(chunk):
                        if one.index > after and wanted(one):
                            if len(found) == limit:
                                return Page(found, found[-1].index)
                            found.append(one)
                return Page(found, None)

        try:
            return await asyncio.to_thread(look)
        except _GONE:
            now = await self.get(batch.tenant, batch.id, batch.dialect)
            if now.status == batch.status:
                raise
            # It has ended while it was looked at.
            return await self.requests(now, after, limit, wanted)

    def _live(self, batch: BatchRecord, running: dict[tuple[int, int], int]) -> _Look:
        source = InputFile(batch, self._shelf.input_of(batch))
        folder = self._shelf.segments(batch.id)

        def states(chunk: ChunkRecord) -> Iterator[RequestState]:
            finished = {}
            if chunk.epoch:
                finished = {one.index: one for one in folder.read(chunk.no, chunk.epoch)}
            requests = read_requests(source.read(chunk.offset, chunk.length), _span(chunk))
            for place, request in enumerate(requests):
                if (record := finished.get(place)) is not None:
                    yield _state(record.line, record.attempts, succeeded=record.succeeded)
                elif (attempt := running.get((chunk.no, place))) is not None:
                    yield RequestState(request.index, request.custom_id, "running", attempt)
                else:
                    yield RequestState(request.index, request.custom_id, "queued", 0)

        return _Look(states, source.close)

    def _ended(self, batch: BatchRecord, chunks: Sequence[ChunkRecord]) -> _Look:
        files = _Ranges(self._shelf, batch, chunks)

        def states(chunk: ChunkRecord) -> Iterator[RequestState]:
            attempts = chunk.attempts or {}
            found = [
                _state(line, attempts.get(str(index_of(line) - chunk.first_index), 1), succeeded=succeeded)
                for succeeded, line in files.lines(chunk)
            ]
            yield from sorted(found, key=lambda one: one.index)

        return _Look(states, files.close)

    async def places(self, batch: BatchRecord, wanted: Callable[[str], bool]) -> list[tuple[int, int]]:
        """Chunk number and place of the requests whose `custom_id` is *wanted*."""
        chunks = await self._shelf.kept(lambda: self._shelf.store.chunks(batch.id))
        if not chunks:
            return []

        def look() -> list[tuple[int, int]]:
            source = InputFile(batch, self._shelf.input_of(batch))
            try:
                return [
                    (chunk.no, place)
                    for chunk in chunks
                    for place, request in enumerate(
                        read_requests(source.read(chunk.offset, chunk.length), _span(chunk))
                    )
                    if wanted(request.custom_id)
                ]
            finally:
                source.close()

        try:
            return await asyncio.to_thread(look)
        except _GONE:
            now = await self.get(batch.tenant, batch.id, batch.dialect)
            if now.status == batch.status:
                raise
            return []

    # --- results --------------------------------------------------------------------------------

    async def results(self, batch: BatchRecord, cursor: Cursor, limit: int) -> tuple[list[bytes], bool]:
        """Up to *limit* result lines that *cursor* has not passed, as they were finished, chunk by chunk.

        The cursor is moved past them. The second value says whether there are more by now.

        Raises:
            InvalidTransition: the Batch has ended and its results are deleted.
        """
        chunks = await self._shelf.kept(lambda: self._shelf.store.chunks(batch.id))

        def look() -> tuple[list[bytes], bool]:
            ended = _has_ended(batch)
            folder = self._shelf.segments(batch.id)
            files = _Ranges(self._shelf, batch, chunks) if ended else None
            found: list[bytes] = []
            size = 0
            try:
                for chunk in chunks:
                    if cursor.is_past(chunk.no) or not (ended or chunk.epoch):
                        continue
                    if files is not None:
                        lines = [line for _, line in files.lines(chunk)]
                    else:
                        lines = [one.line for one in folder.read(chunk.no, chunk.epoch)]
                    for line in lines:
                        place = index_of(line) - chunk.first_index
                        if cursor.has(chunk.no, place):
                            continue
                        if len(found) == limit or size > _MOST_BYTES:
                            return found, True
                        cursor.add(chunk.no, place, chunk.count)
                        found.append(line)
                        size += len(line)
            finally:
                if files is not None:
                    files.close()
            return found, False

        return await asyncio.to_thread(look)

    def finished(self, batch_id: str) -> int | None:
        """How many lines there are by now, where that is known at once; it only grows."""
        journey = self._journeys.of(batch_id)
        if journey is None or journey.progress is None or self._shelf.shared:
            return None
        return journey.progress.finished

    # --- failures -------------------------------------------------------------------------------

    async def failures(self, batch: BatchRecord) -> list[FailureGroup]:
        """What failed, in groups, the most frequent first."""
        by_chunk = await self._shelf.kept(lambda: self._shelf.store.failures(batch.id))
        journey = self._journeys.of(batch.id)
        if journey is not None and journey.worker is not None:
            # Newer than what its last heartbeat noted.
            by_chunk |= journey.worker.failures()
        groups: dict[str, FailureGroup] = {}
        for of_chunk in by_chunk.values():
            for kind, (count, message, custom_id) in of_chunk.items():
                before = groups.get(kind, FailureGroup(kind, 0, message, custom_id))
                groups[kind] = FailureGroup(kind, before.count + count, before.message, before.custom_id)
        return sorted(groups.values(), key=lambda one: -one.count)

    def failed_lines(
        self, batch: BatchRecord, chunks: Sequence[ChunkRecord]
    ) -> Iterator[tuple[ChunkRecord, bytes]]:
        """Each line of the error file of a Batch that has ended, with its chunk. Blocks."""
        files = _Ranges(self._shelf, batch, chunks)
        try:
            for chunk in chunks:
                for succeeded, line in files.lines(chunk):
                    if not succeeded:
                        yield chunk, line
        finally:
            files.close()


@dataclass(slots=True)
class _Look:
    """The states of a chunk's requests, and what to close afterwards."""

    states: Callable[[ChunkRecord], Iterator[RequestState]]
    close: Callable[[], None]

    def __enter__(self) -> Callable[[ChunkRecord], Iterator[RequestState]]:
        return self.states

    def __exit__(self, *_: object) -> None:
        self.close()


class _Ranges:
    """The result files of a Batch that has ended, read by chunk.

    Raises:
        InvalidTransition: they are deleted.
    """

    def __init__(self, shelf: Shelf, batch: BatchRecord, chunks: Sequence[ChunkRecord]) -> None:
        self._files = {}
        wanted = {True: batch.output_file_id, False: batch.error_file_id}
        try:
            for succeeded, file_id in wanted.items():
                if file_id is not None:
                    self._files[succeeded] = shelf.files.path(file_id).open("rb")
        except (BlobNotFound, FileNotFoundError) as error:
            self.close()
            raise InvalidTransition(f"The results of batch {batch.id} have been deleted.") from error
        self._ends: dict[bool, dict[int, int | None]] = {True: {}, False: {}}
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=False):
            self._ends[True][chunk.no] = None if following is None else following.output_offset
            self._ends[False][chunk.no] = None if following is None else following.error_offset

    def lines(self, chunk: ChunkRecord) -> Iterator[tuple[bool, bytes]]:
        """Whether it succeeded, and the line, of every request of *chunk*."""
        for succeeded, file in self._files.items():
            offset = chunk.output_offset if succeeded else chunk.error_offset
            if offset is None:
                continue
            file.seek(offset)
            end = self._ends[succeeded][chunk.no]
            data = file.read() if end is None else file.read(end - offset)
            for line in data.split(b"\n")[:-1]:
                yield succeeded, line

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _state(line: bytes, attempts: int, *, succeeded: bool) -> RequestState:
    index = index_of(line)
    if succeeded:
        return RequestState(index, read_custom_id(line), "succeeded", attempts)
    failure = read_failure(line)
    if failure.kind not in NEVER_RAN:
        return RequestState(index, failure.custom_id, "failed", attempts, failure.kind, failure.message)
    status = "expired" if failure.kind == "batch_expired" else "cancelled"
    # What was stopped while it ran says nothing of its attempts.
    return RequestState(index, failure.custom_id, status, attempts - 1, failure.kind, failure.message)


def _has_ended(batch: BatchRecord) -> bool:
    return Status(batch.status) in TERMINAL


def _span(chunk: ChunkRecord) -> ChunkSpan:
    return ChunkSpan(chunk.no, chunk.offset, chunk.length, chunk.first_index, chunk.first_line, chunk.count)
