"""Floor 6. Registering an input: one streaming pass that checks every line and finds every chunk.

Lines end at newline bytes alone. The common case is decided by one typed decode of a line; whatever is
unusual goes to `diagnosis`, which finds the words. Memory holds one block, one line, and a 64-bit hash
for each request.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from batchyard.errors import InvalidInput, LineError, UsageError
from batchyard.service.intake.diagnosis import MAX_CUSTOM_ID, diagnose, duplicate, not_utf8, too_long
from batchyard.types import Endpoint

_BLOCK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


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
    #: Whether a request may leave its model to the engine.
    allow_missing_model: bool = False
    #: Take the first so many requests only.
    limit: int | None = None
    max_line_bytes: int = 16 << 20
    #: How many errors are told one by one; the rest is counted.
    max_errors: int = 100
    chunk_requests: int = 500
    chunk_bytes: int = 4 << 20


def register(
    path: Path, rules: IntakeRules, *, on_progress: Callable[[int], None] | None = None
) -> Registration:
    """Check all of *path* and say where its chunks lie.

    *on_progress* is called now and then with the number of bytes read.

    Raises:
        InvalidInput: with every error found, in line order, up to `rules.max_errors`.
        UsageError: the file cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from error
    try:
        found = os.fstat(handle)
        scan = _Scan(rules)
        digest = _hash_beside(handle, scan, rules, on_progress)
        if scan.suspects:
            scan.settle_duplicates(_blocks(handle, None))
    finally:
        os.close(handle)
    if scan.total == 0 and not scan.error_count:
        scan.refuse(
            LineError(
                "empty_file", f"{path} holds no request. Each line must be one request as a JSON object."
            )
        )
    if scan.error_count:
        raise InvalidInput(sorted(scan.errors, key=lambda one: one.line or 0), scan.error_count)
    return Registration(
        path,
        found.st_size,
        found.st_mtime_ns,
        digest,
        scan.total,
        tuple(scan.chunks),
        tuple(scan.models),
        {url: count for url, count in scan.endpoints.items() if count},
    )


def _hash_beside(
    handle: int, scan: _Scan, rules: IntakeRules, on_progress: Callable[[int], None] | None
) -> str:
    """Feed the scan; the SHA-256 of the same blocks is computed in a thread meanwhile."""
    digest = hashlib.sha256()
    read = 0
    with ThreadPoolExecutor(1, thread_name_prefix="batchyard-sha256") as thread:
        pending: Future[None] | None = None
        for block in _blocks(handle, on_progress):
            if pending is not None:
                pending.result()
            pending = thread.submit(digest.update, block)
            if rules.limit is None or scan.total < rules.limit:
                scan.feed(block)
            read += len(block)
        if rules.limit is None or scan.total < rules.limit:
            scan.end()
        else:
            scan.close_chunk()
    return digest.hexdigest()


def _blocks(handle: int, on_progress: Callable[[int], None] | None) -> Iterator[bytes]:
    os.lseek(handle, 0, os.SEEK_SET)
    read = 0
    while block := os.read(handle, _BLOCK_BYTES):
        read += len(block)
        yield block
        if on_progress is not None:
            on_progress(read)


class _Body(msgspec.Struct, gc=False):
    """What registration looks at; the rest of a body is only skipped over."""

    model: str | None = None
    stream: bool | None = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class _Line(msgspec.Struct, gc=False):
    custom_id: str
    method: str
    url: str
    body: _Body


_decode = msgspec.json.Decoder(_Line).decode
#: What a body must have, by endpoint.
_NEEDS = {
    Endpoint.CHAT: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.EMBEDDINGS: "input",
    Endpoint.RESPONSES: "input",
}


@dataclass(slots=True)
class _Scan:
    """The state of one pass over an input."""

    rules: IntakeRules
    total: int = 0
    line: int = 0
    #: Byte position of the next line.
    position: int = 0
    errors: list[LineError] = field(default_factory=list)
    error_count: int = 0
    chunks: list[ChunkSpan] = field(default_factory=list)
    models: dict[str, int] = field(default_factory=dict)
    endpoints: dict[str, int] = field(default_factory=dict)
    #: Lines whose custom_id has a hash that was seen before: duplicates, or (never yet) a collision.
    suspects: list[tuple[int, str]] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _rest: bytes = b""
    #: Bytes of an overlong line that are being passed over; 0 when none is.
    _skipped: int = 0
    _chunk_at: int = 0
    _chunk_line: int = 1
    _chunk_index: int = 0
    _needs: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._needs = {url.value: _NEEDS[url] for url in self.rules.endpoints}
        self.endpoints = dict.fromkeys(self._needs, 0)

    def feed(self, block: bytes) -> None:
        """Check the lines that *block* completes."""
        if self._skipped:
            end = block.find(b"\n")
            if end < 0:
                self._skipped += len(block)
                return
            self._pass_over(self._skipped + end + 1)
            block = block[end + 1 :]
        data = self._rest + block if self._rest else block
        if self.line == 0 and data.startswith(_BOM):
            self.position = self._chunk_at = len(_BOM)
            data = data[len(_BOM) :]
        lines = data.split(b"\n")
        self._rest = lines.pop()
        self._check(lines, all_utf8=_is_utf8(data, len(self._rest)))
        if len(self._rest) > self.rules.max_line_bytes:
            self._skipped = len(self._rest)
            self._rest = b""

    def end(self) -> None:
        """The input is over: check a last line that has no newline, close the last chunk."""
        if self._skipped:
            self._pass_over(self._skipped)
        elif self._rest:
            self._check([self._rest], all_utf8=_is_utf8(self._rest, 0))
        self.close_chunk()

    def refuse(self, error: LineError) -> None:
        """Note an error."""
        self.error_count += 1
        if len(self.errors) < self.rules.max_errors:
            self.errors.append(error)

    def _pass_over(self, length: int) -> None:
        self.line += 1
        self.position += length
        self._skipped = 0
        self.refuse(too_long(self.line, length, self.rules.max_line_bytes))

    def _check(self, lines: list[bytes], *, all_utf8: bool) -> None:
        rules, needs, seen = self.rules, self._needs, self._seen
        models, endpoints, missing_model_is_fine = self.models, self.endpoints, rules.allow_missing_model
        limit = rules.limit if rules.limit is not None else -1
        chunk_requests, chunk_bytes, max_line = rules.chunk_requests, rules.chunk_bytes, rules.max_line_bytes
        for raw in lines:
            if self.total == limit:
                return
            self.line += 1
            self.position += len(raw) + 1
            if not raw:
                continue
            if len(raw) > max_line:
                self.refuse(too_long(self.line, len(raw), max_line))
                continue
            if not all_utf8 and not _is_utf8(raw, 0):
                self.refuse(not_utf8(self.line, raw))
                continue
            try:
                line = _decode(raw)
                custom_id, body = line.custom_id, line.body
                model = body.model
                fine = (
                    line.method == "POST"
                    and 0 < len(custom_id) <= MAX_CUSTOM_ID
                    and getattr(body, needs[line.url])
                    and not body.stream
                    and (model or missing_model_is_fine)
                )
            except (msgspec.MsgspecError, RecursionError, KeyError):
                fine = False
            if not fine:
                if raw.strip():
                    for error in diagnose(
                        raw, self.line, rules.endpoints, model_needed=not missing_model_is_fine
                    ):
                        self.refuse(error)
                continue
            key = hash(custom_id)
            if key in seen:
                self.suspects.append((self.line, custom_id))
            else:
                seen.add(key)
            if model and model not in models:
                self._new_model(model)
            endpoints[line.url] += 1
            self.total += 1
            if (
                self.total - self._chunk_index >= chunk_requests
                or self.position - self._chunk_at >= chunk_bytes
            ):
                self.close_chunk()

    def _new_model(self, model: str) -> None:
        if self.models and not self.rules.several_models:
            first, line = next(iter(self.models.items()))
            self.refuse(
                LineError(
                    "mismatched_model",
                    f'The model "{model}" is not the "{first}" of line {line}. This engine serves one model: '
                    "make a file for each, or choose the model for all with --model.",
                    self.line,
                    "body.model",
                )
            )
        self.models[model] = self.line

    def close_chunk(self) -> None:
        """End the current chunk after the last line that was checked."""
        count = self.total - self._chunk_index
        if count:
            self.chunks.append(
                ChunkSpan(
                    len(self.chunks),
                    self._chunk_at,
                    self.position - self._chunk_at,
                    self._chunk_index,
                    self._chunk_line,
                    count,
                )
            )
        self._chunk_at, self._chunk_line, self._chunk_index = self.position, self.line + 1, self.total

    def settle_duplicates(self, blocks: Iterator[bytes]) -> None:
        """Read again to learn which suspects are duplicates, and of which line."""
        wanted = {custom_id for _, custom_id in self.suspects}
        suspects = dict(self.suspects)
        first: dict[str, int] = {}
        for number, raw in _lines(blocks, self.rules.max_line_bytes):
            try:
                custom_id = _decode(raw).custom_id
            except (msgspec.MsgspecError, RecursionError):
                continue
            if custom_id in wanted:
                earlier = first.setdefault(custom_id, number)
                if earlier != number and number in suspects:
                    self.refuse(duplicate(number, earlier))
        # A suspect that is no duplicate after all was a collision of hashes; it is a request like others.


def _lines(blocks: Iterator[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a stream of blocks; an overlong one is empty."""
    number, rest = 0, b""
    for block in blocks:
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        for raw in lines:
            number += 1
            yield number, raw.removeprefix(_BOM) if number == 1 else raw
        if len(rest) > max_line_bytes:
            rest = b"-"
    if rest:
        yield number + 1, rest


def _is_utf8(data: bytes, unfinished: int) -> bool:
    if data.isascii():
        return True
    try:
        data[: len(data) - unfinished].decode()
    except UnicodeDecodeError:
        return False
    return True
