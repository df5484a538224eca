"""Floor 3. What a store is: it remembers Batches and chunks, and fences whoever works on them.

Every implementation passes `tests/conformance/test_stores.py`. Calls block; shells run them in the
store's own thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
    #: Raised by every change that somebody asked for.
    revision: int = 0
    #: Which process validates it or joins its results now, and until when it may.
    owner: str | None = None
    lease_until: float | None = None
    #: Larger goes first.
    priority: int = 0
    #: What was changed about the requests that had not run: each with when, what and how many.
    amendments: Sequence[Mapping[str, Any]] = ()
    #: Why it is paused, if nobody asked for it.
    held_because: str | None = None
    #: 1 once the first requests of a canary went well, or somebody resumed it all the same.
    canary_passed: int = 0
    #: By which key it was made.
    key_id: str | None = None
    #: How many prompt tokens it was taken to have when it was registered.
    enqueued_tokens: int = 0


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
    #: What it may do, and which models it may use; None for anything.
    scopes: Sequence[str] | None = None
    models: Sequence[str] | None = None
    requests_per_minute: int | None = None
    #: Batches of its tenant that have not ended, and their prompt tokens.
    max_batches: int | None = None
    max_enqueued_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """A file that comes in parts."""

    id: str
    tenant: str
    #: `pending`, `completed` or `cancelled`.
    status: str
    purpose: str
    filename: str
    bytes: int
    created_at: float
    expires_at: float
    file_expires_s: float | None = None
    file_id: str | None = None


@dataclass(frozen=True, slots=True)
class PartRecord:
    """One part of an upload; its content lies in a blob named by its id."""

    id: str
    upload_id: str
    bytes: int
    created_at: float


@dataclass(frozen=True, slots=True)
class WebhookRecord:
    """Where a tenant wants to be told of events."""

    id: str
    tenant: str
    name: str
    url: str
    event_types: Sequence[str]
    created_at: float
    updated_at: float
    secret: str
    old_secret: str | None = None
    old_secret_until: float | None = None


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """An event that an endpoint has not acknowledged yet."""

    id: str
    webhook_id: str
    #: The JSON that is sent, byte for byte, each time.
    body: str
    created_at: float
    next_at: float
    attempts: int = 0


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
    #: Once joined: where its lines begin in the two result files, and which of its requests took more
    #: than one attempt (place to number).
    output_offset: int | None = None
    error_offset: int | None = None
    attempts: Mapping[str, int] | None = None


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
    #: Requests that were cancelled or expired before they ran; in neither of the counts above.
    never_ran: int = 0
    #: Kind of failure to how often it happened, a message and a `custom_id` that met it.
    failures: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """What is finished of a Batch; the three counts together never exceed its total."""

    succeeded: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)
    never_ran: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.succeeded + other.succeeded,
            self.failed + other.failed,
            self.usage + other.usage,
            self.never_ran + other.never_ran,
        )


@dataclass(frozen=True, slots=True)
class BatchFilter:
    """Which Batches of a tenant are wanted; what is None is not asked for."""

    statuses: Sequence[str] = ()
    model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_after: float | None = None
    created_before: float | None = None


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What a tenant has in Batches that have not ended."""

    batches: int = 0
    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """How much a tenant may have enqueued; None for any amount. Batches take turns as they were made."""

    tenant: str
    ended: Sequence[str]
    #: When the Batch that asks for room was made.
    created_at: float
    max_batches: int | None
    max_tokens: int | None


class NoRoom(Exception):  # noqa: N818 - a state of things, no fault
    """A Batch has to wait, as its tenant has as much enqueued as it may."""


_ALL = BatchFilter()


class Store(Protocol):
    """Remembers Batches and chunks."""

    def create(self, batch: BatchRecord) -> bool:
        """Remember a new Batch; False where there is one with its id already."""
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
        before: BatchRecord | None = None,
        wanted: BatchFilter = _ALL,
    ) -> list[BatchRecord]:
        """Up to *limit* Batches of *tenant* in *dialect*, newest first: those that come after *after*, or
        those next before *before*.
        """
        ...

    def moving(self, ended: Sequence[str]) -> list[tuple[str, str, int]]:
        """Id, status and revision of every Batch of a server whose status is none of *ended*."""
        ...

    def enqueued(self, tenant: str, ended: Sequence[str], model: str | None = None) -> Enqueued:
        """What *tenant* has in registered Batches whose status is none of *ended*."""
        ...

    def move(
        self,
        batch_id: str,
        expected: str,
        status: str,
        *,
        expected_revision: int | None = None,
        deliveries: Sequence[DeliveryRecord] = (),
        **changes: Any,
    ) -> bool:
        """Set *status* and *changes* if status (and revision) still are as expected; False when not.

        Raises the revision. *deliveries* are remembered in the same transaction.
        """
        ...

    def pass_canary(self, batch_id: str) -> None:
        """Note that the first requests of a Batch went well."""
        ...

    def hold(self, batch_id: str, owner: str, now: float, lease_s: float) -> bool:
        """Take or prolong the right to validate and to join a Batch; False while another has it."""
        ...

    def let_go(self, batch_id: str, owner: str) -> None:
        """Give that right back."""
        ...

    def let_go_all(self) -> None:
        """Open every Batch and chunk that is held: whoever held them is gone."""
        ...

    def withdraw(self, batch_id: str, places: Sequence[tuple[int, int]]) -> None:
        """Note single requests as cancelled, by chunk number and place; raises the revision."""
        ...

    def withdrawn(self, batch_id: str) -> set[tuple[int, int]]:
        """Every request noted so."""
        ...

    def register(
        self,
        batch_id: str,
        expected: str,
        status: str,
        registered: Iterable[ChunkRecord],
        *,
        room: Room | None = None,
        **changes: Any,
    ) -> bool:
        """`move` and the Batch's chunks, all or nothing. Chunks of an earlier attempt are replaced.

        Raises:
            NoRoom: with it, the tenant would have more enqueued than *room* allows.
        """
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

    def reopen(self, batch_id: str, expected: str, status: str, numbers: Sequence[int]) -> bool:
        """Take back the commits of these chunks, as their segments were found damaged, and `move`."""
        ...

    def place(self, batch_id: str, joined: Sequence[ChunkRecord]) -> None:
        """Note where the lines of these chunks begin in the result files, and their attempts."""
        ...

    def counts(self, batch_id: str, but_not: Collection[int] = ()) -> Counts:
        """What is finished, from committed chunks and heartbeats, some chunks left out. Never writes."""
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

    def chunks(self, batch_id: str, first: int = 0, limit: int | None = None) -> list[ChunkRecord]:
        """Up to *limit* chunks from number *first* on, whatever their state, in order."""
        ...

    def failures(self, batch_id: str) -> dict[int, dict[str, Sequence[Any]]]:
        """By chunk: kind of failure to how often it happened, a message and a `custom_id`."""
        ...

    def delete(self, batch_id: str) -> None:
        """Forget a Batch and its chunks."""
        ...

    def close(self) -> None:
        """Let go of the database. Safe to call twice."""
        ...
