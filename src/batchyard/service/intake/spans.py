"""Floor 6. The words of intake: what an input may hold, where its chunks lie, what was found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchyard.service.intake.source import MAX_LINE_BYTES
from batchyard.types import Endpoint


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A run of consecutive requests: where its bytes lie, and what it starts with."""

    no: int
    offset: int
    length: int
    #: 0-based place of its first request in the Batch.
    first_index: int
    #: 1-based line of its first byte.
    first_line: int
    count: int


@dataclass(frozen=True, slots=True)
class Registration:
    """What was found in an input."""

    path: Path
    size_bytes: int
    mtime_ns: int
    sha256: str
    total: int
    chunks: tuple[ChunkSpan, ...]
    #: Every model that requests name, in order of appearance.
    models: tuple[str, ...]
    #: How many requests each endpoint has.
    endpoints: dict[str, int]


@dataclass(frozen=True, slots=True)
class IntakeRules:
    """What an input may hold."""

    endpoints: frozenset[Endpoint]
    several_models: bool = True
    #: Whether all requests must ask for the endpoint of the first, as the OpenAI Batch API demands.
    same_endpoint: bool = False
    #: Whether a request may leave its model to the engine.
    allow_missing_model: bool = False
    #: Take the first so many requests only.
    limit: int | None = None
    max_line_bytes: int = MAX_LINE_BYTES
    #: How many errors are told one by one; after that, bad lines are only counted.
    max_errors: int = 100
    chunk_requests: int = 500
    chunk_bytes: int = 4 << 20
