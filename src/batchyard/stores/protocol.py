"""Floor 3. What a store is: it remembers Batches and chunks, and fences whoever works on them.

Every implementation passes `tests/conformance/test_stores.py`. Calls block; shells run them in the
store's own thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batchyard.types import Usage


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A Batch as the store knows it; `status` is a word of `service.lifecycle`."""

    id: str
    status: str
    created_at: float
    input_path: str
    settings: Mapping[str, Any]
    input_bytes: int = 0
    input_mtime_ns: int = 0
    input_sha256: str = ""
    total: int = 0
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    ended_at: float | None = None
    deadline_at: float | None = None
    output_path: str | None = None
    error_path: str | None = None
    #: Whose it is; empty for a run of the command line.
    tenant: str = ""
    #: `openai` or `anthropic`; empty for a run of the command line.
    dialect: str = ""
    cancelling_at: float | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    model: str | None = None
    #: Why the input was refused: code, line, message and param of each error.
    errors: Sequence[Mapping[str, Any]] = ()
    #: Requests that never ran because the Batch was cancelled or expired; known once it has ended.
    never_ran: int = 0


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a tenant; its content lies in a blob named by its id."""

    id: str
    tenant: str
    #: `batch`, `batch_output`, or another of the OpenAI Files API.
    purpose: str
    filename: str
    bytes: int
    created_at: float
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key, as far as it is remembered: never the key itself."""

    id: str
    tenant: str
    name: str
    #: SHA-256 of the key, in hex.
    digest: str
    hint: str
    created_at: float
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A run of consecutive requests: a byte range of the input, and the epoch of whoever holds it."""

    batch_id: str
    no: int
    offset: int
    length: int
    first_index: int
    first_line: int
    count: int
    epoch: int = 0
    segment_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChunkProgress:
    """How far the holder of a chunk has come."""

    no: int
    epoch: int
    succeeded: int
    failed: int
    usage: Usage = field(default_factory=Usage)
    #: Length of the segment file of this epoch, in bytes.
    segment_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What is finished of a Batch; `succeeded + failed` never exceeds its total."""

    succeeded: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)


class Store(Protocol):
    """Remembers Batches and chunks."""

    def create(self, batch: BatchRecord) -> None:
        """Remember a new Batch."""
        ...

    def get(self, batch_id: str) -> BatchRecord:
        """The Batch with this id.

        Raises:
            BatchNotFound: there is none.
        """
        ...

    def batches(self) -> list[BatchRecord]:
        """Every Batch, newest first."""
        ...

    def page(
        self,
        tenant: str,
        dialect: str,
        limit: int,
        *,
        after: BatchRecord | None = None,
        statuses: Sequence[str] = (),
    ) -> list[BatchRecord]:
        """Up to *limit* Batches of *tenant* in *dialect* that come after *after*, newest first."""
        ...

    def move(self, batch_id: str, expected: str, status: str, **changes: Any) -> bool:
        """Set *status* and *changes* if the status still is *expected*; False when it is not."""
        ...

    def register(
        self, batch_id: str, expected: str, status: str, registered: Iterable[ChunkRecord], **changes: Any
    ) -> bool:
        """`move` and the Batch's chunks, all or nothing. Chunks of an earlier attempt are replaced."""
        ...

    def claim(self, batch_id: str, owner: str, limit: int, now: float, lease_s: float) -> list[ChunkRecord]:
        """Lease up to *limit* chunks, open or with a lapsed lease, lowest first; raises their epochs."""
        ...

    def renew(
        self, batch_id: str, owner: str, progress: Sequence[ChunkProgress], now: float, lease_s: float
    ) -> list[int]:
        """Prolong the leases and note the progress; returns the numbers of chunks that are lost."""
        ...

    def commit(self, batch_id: str, done: Sequence[ChunkProgress], now: float) -> list[int]:
        """Mark chunks done where the epoch still holds; returns the numbers of those fenced out."""
        ...

    def release(self, batch_id: str, owner: str | None = None) -> None:
        """Open the leased chunks again, those of *owner* or all of them."""
        ...

    def reopen(self, batch_id: str, numbers: Sequence[int]) -> None:
        """Take back the commits of these chunks: their segments were found damaged."""
        ...

    def counts(self, batch_id: str) -> Counts:
        """What is finished, from committed chunks and heartbeats. Never writes."""
        ...

    def done_counts(self, batch_id: str) -> Counts:
        """What is finished in committed chunks alone. Never writes."""
        ...

    def remaining(self, batch_id: str) -> int:
        """How many chunks are not done."""
        ...

    def done_chunks(self, batch_id: str) -> list[ChunkRecord]:
        """Committed chunks in the order of their commits."""
        ...

    def delete(self, batch_id: str) -> None:
        """Forget a Batch and its chunks."""
        ...

    def close(self) -> None:
        """Let go of the database. Safe to call twice."""
        ...
