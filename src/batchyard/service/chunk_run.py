"""Floor 6. One claimed chunk while it is worked on: its requests, its segment, how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchyard.service.input_file import InputFile
from batchyard.service.intake.chunk import read_requests
from batchyard.service.intake.registration import ChunkSpan
from batchyard.service.lines import NEVER_RAN, read_failure
from batchyard.stores.protocol import ChunkProgress, ChunkRecord, Counts
from batchyard.stores.segments import SegmentFolder, SegmentWriter, encode_record
from batchyard.types import Request, Usage


@dataclass(slots=True, eq=False)
class WorkItem:
    """One request on its way: which chunk it belongs to, and what was tried so far."""

    request: Request
    run: ChunkRun
    #: 0-based place in the chunk.
    place: int
    attempts: int = 0
    #: When its first attempt began, on the loop's clock; None before that.
    first_tried_at: float | None = None
    #: Set once its last attempt met a fault, which is its result.
    gave_up: bool = False


@dataclass(slots=True, eq=False)
class ChunkRun:
    """A claimed chunk. Lives in the worker that claimed it, until it is committed or lost."""

    chunk: ChunkRecord
    segment: SegmentWriter
    #: What earlier attempts left to do.
    items: list[WorkItem] = field(default_factory=list)
    remaining: int = 0
    succeeded: int = 0
    failed: int = 0
    never_ran: int = 0
    #: Kind of failure to how often, a message and a `custom_id`.
    failures: dict[str, list[Any]] = field(default_factory=dict)
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    _known_bytes: int = 0
    _unwritten: list[bytes] = field(default_factory=list)
    #: Set when another worker took the chunk over: results no longer count.
    lost: bool = False

    def finish(self, item: WorkItem, failure: str | None, usage: Usage, line: bytes) -> bool:
        """Take the result of *item*; whether it is the first that waits for `write`."""
        succeeded = failure is None
        attempts = max(item.attempts + (failure not in NEVER_RAN and not item.gave_up), 1)
        record = encode_record(item.place, succeeded=succeeded, usage=usage, line=line, attempts=attempts)
        self._unwritten.append(record)
        self._count(failure, usage, line)
        return len(self._unwritten) == 1

    def write(self) -> None:
        """Hand the results that wait to the kernel, in one call.

        Raises:
            StorageFull: there is no room for them.
        """
        if self._unwritten:
            # Kept until they are written: a chunk must never be committed without them.
            self.segment.append(b"".join(self._unwritten))
            self._unwritten.clear()

    def grown(self) -> bool:
        """Whether its segment is longer than when this was last asked."""
        before, self._known_bytes = self._known_bytes, self.segment.written_bytes
        return self.segment.written_bytes > before

    def progress(self) -> ChunkProgress:
        """How far it has come, as the store keeps it."""
        return ChunkProgress(
            self.chunk.no,
            self.chunk.epoch,
            self.succeeded,
            self.failed,
            Usage(self.input_tokens, self.output_tokens, self.cached_tokens),
            self.segment.written_bytes,
            self.never_ran,
            # Read by the store's thread while more failures are counted here.
            {kind: tuple(one) for kind, one in self.failures.items()},
        )

    def counts(self) -> Counts:
        """What is finished."""
        usage = Usage(self.input_tokens, self.output_tokens, self.cached_tokens)
        return Counts(self.succeeded, self.failed, usage, self.never_ran)

    def _count(self, failure: str | None, usage: Usage, line: bytes) -> None:
        self.remaining -= 1
        if failure is None:
            self.succeeded += 1
        elif failure in NEVER_RAN:
            self.never_ran += 1
        else:
            self.failed += 1
            seen = self.failures.get(failure)
            if seen is None:
                # Told by one example a chunk: reading every line of a hopeless Batch would be slow.
                found = read_failure(line)
                self.failures[failure] = [1, found.message, found.custom_id]
            else:
                seen[0] += 1
        self.input_tokens += usage.input_tokens
        self.output_tokens += usage.output_tokens
        self.cached_tokens += usage.cached_tokens

    @classmethod
    def load(
        cls,
        chunk: ChunkRecord,
        source: InputFile,
        folder: SegmentFolder,
        changes: Sequence[Callable[[Request], Request]] = (),
    ) -> ChunkRun:
        """Read a claimed chunk's requests, changed as *changes* say, and salvage what earlier attempts at it
        finished.

        Raises:
            StoreError: the segment cannot be written.
            InputChanged: the input no longer holds what was registered.
        """
        span = ChunkSpan(
            chunk.no, chunk.offset, chunk.length, chunk.first_index, chunk.first_line, chunk.count
        )
        requests = read_requests(source.read(chunk.offset, chunk.length), span)
        run = cls(chunk, folder.create(chunk.no, chunk.epoch), remaining=len(requests))
        finished: set[int] = set()
        if chunk.epoch > 1:
            finished = run._salvage(folder, len(requests))
        for place, request in enumerate(requests):
            if place not in finished:
                asked = request
                for change in changes:
                    asked = change(asked)
                run.items.append(WorkItem(asked, run, place))
        return run

    def _salvage(self, folder: SegmentFolder, count: int) -> set[int]:
        found = [one for one in folder.salvage(self.chunk.no, self.chunk.epoch) if one.index < count]
        copied = b"".join(
            encode_record(
                one.index, succeeded=one.succeeded, usage=one.usage, line=one.line, attempts=one.attempts
            )
            for one in found
        )
        self.segment.append(copied)
        self.segment.sync()
        folder.sync()
        for one in found:
            self._count(None if one.succeeded else read_failure(one.line).kind, one.usage, one.line)
        folder.drop_before(self.chunk.no, self.chunk.epoch)
        return {one.index for one in found}
