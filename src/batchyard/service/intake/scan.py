"""Floor 6. The one pass over an input that checks every line and notes where chunks lie.

Lines end at newline bytes alone. The common case is decided by one typed decode of a line; whatever is
unusual goes to `diagnosis`, which finds the words. Memory holds one block, one line, and a 60-bit hash
for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

import msgspec

from batchyard.errors import LineError
from batchyard.service.intake.diagnosis import (
    MAX_CUSTOM_ID,
    MAX_DEPTH,
    NEEDS,
    diagnose,
    duplicate,
    is_too_deep,
    not_utf8,
    second_model,
    too_long,
)
from batchyard.service.intake.source import BOM, numbered_lines
from batchyard.service.intake.spans import ChunkSpan, IntakeRules


class Body(msgspec.Struct, gc=False):
    """What registration looks at; the rest of a body is only skipped over."""

    model: str | None = None
    stream: bool | None = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class Line(msgspec.Struct, gc=False):
    custom_id: str
    method: Literal["POST"]
    # A Literal decodes to one and the same object each time, so that `is` tells a change of endpoint.
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    body: Body


class _Id(msgspec.Struct, gc=False):
    """Enough to find duplicates among lines that have other errors as well."""

    custom_id: str


decode_line = msgspec.json.Decoder(Line).decode
_decode_id = msgspec.json.Decoder(_Id).decode
#: The member of a body that an endpoint cannot do without, as a getter; empty where it is absent.
_NEEDED = {endpoint.value: attrgetter(name) for endpoint, name in NEEDS.items()}
#: 60 bits fit in two digits of a Python int: 16 bytes less than a full hash for each request.
_HASH_BITS = (1 << 60) - 1


def _absent(_: Body) -> object:
    return None


@dataclass(slots=True)
class Scan:
    """The state of one pass over an input."""

    rules: IntakeRules
    total: int = 0
    #: Whether as many requests as wanted were found.
    full: bool = False
    errors: list[LineError] = field(default_factory=list)
    error_count: int = 0
    chunks: list[ChunkSpan] = field(default_factory=list)
    #: Model to the line that named it first.
    models: dict[str, int] = field(default_factory=dict)
    endpoints: dict[str, int] = field(default_factory=dict)
    #: Lines checked so far.
    _line: int = 0
    #: Byte position of the next line.
    _position: int = 0
    #: Hashes of all ids, keyed anew in each process by Python itself, so that nobody can forge collisions.
    _seen: set[int] = field(default_factory=set)
    #: Hashes met twice: duplicates, unless two ids collide.
    _repeated: set[int] = field(default_factory=set)
    #: The unfinished last line of what was fed.
    _rest: bytes = b""
    #: Length so far of an overlong line that is being dropped.
    _skipped: int = 0
    _started: bool = False
    _chunk_at: int = 0
    _chunk_line: int = 1
    _chunk_index: int = 0

    def feed(self, block: bytes) -> None:
        """Check the lines that *block* completes."""
        if self._skipped:
            end = block.find(b"\n")
            if end < 0:
                self._skipped += len(block)
                return
            self._pass_over(self._skipped + end, newline=1)
            block = block[end + 1 :]
        data = self._rest + block if self._rest else block
        if not self._started:
            self._started = True
            if data.startswith(BOM):
                self._position = self._chunk_at = len(BOM)
                data = data[len(BOM) :]
        lines = data.split(b"\n")
        self._rest = lines.pop()
        self._check(lines, all_utf8=_is_utf8(data, len(data) - len(self._rest)))
        if len(self._rest) > self.rules.max_line_bytes:
            self._skipped = len(self._rest)
            self._rest = b""

    def end(self) -> None:
        """The input is over: check a last line that has no newline."""
        if self._skipped:
            self._pass_over(self._skipped, newline=0)
        elif self._rest:
            self._check([self._rest], all_utf8=False)
            self._position -= 1  # it had no newline

    def _pass_over(self, length: int, *, newline: int) -> None:
        self._line += 1
        self._position += length + newline
        self._skipped = 0
        self._note([too_long(self._line, length, self.rules.max_line_bytes)])

    def _note(self, errors: list[LineError]) -> None:
        self.error_count += len(errors)
        self.errors += errors[: max(self.rules.max_errors - len(self.errors), 0)]

    def _check(self, lines: list[bytes], *, all_utf8: bool) -> None:
        # This loop is the cost of registering, so state that changes with every line lives in locals. Taking
        # a whole block together with list operations was measured to be no faster: what counts is the cache.
        rules, seen, decode = self.rules, self._seen, decode_line
        missing_model_is_fine, max_line = rules.allow_missing_model, rules.max_line_bytes
        number, position, total = self._line, self._position, self.total
        limit = -1 if rules.limit is None else rules.limit
        chunk_full_at = self._chunk_index + rules.chunk_requests
        chunk_ends_at = self._chunk_at + rules.chunk_bytes
        needed: Callable[[Body], object] = _absent
        last_model: str | None = None
        url, asked = "", 0
        for raw in lines:
            if total == limit:
                break
            number += 1
            length = len(raw)
            position += length + 1
            try:
                line = decode(raw)
                if line.url is not url:
                    self._count(url, asked)
                    url, asked = line.url, 0
                    needed = self._needed_by(url)
                custom_id, body = line.custom_id, line.body
                fine = (
                    0 < len(custom_id) <= MAX_CUSTOM_ID
                    and needed(body)
                    and not body.stream
                    and (body.model or missing_model_is_fine)
                    and length <= max_line
                    and (length <= 2 * MAX_DEPTH or not is_too_deep(raw))
                    and (all_utf8 or _is_utf8(raw, length))
                )
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                fine = False
            if not fine:
                if raw and not raw.isspace():
                    self._count(url, asked)
                    asked = 0
                    self._refuse(raw, number)
                continue
            key = hash(custom_id) & _HASH_BITS
            if key in seen:
                self._repeated.add(key)
            else:
                seen.add(key)
            if body.model != last_model and body.model:
                last_model = body.model
                if last_model not in self.models:
                    self._new_model(last_model, number)
            asked += 1
            total += 1
            if total >= chunk_full_at or position >= chunk_ends_at:
                self._line, self._position, self.total = number, position, total
                self.close_chunk()
                chunk_full_at = total + rules.chunk_requests
                chunk_ends_at = position + rules.chunk_bytes
        self._count(url, asked)
        self._line, self._position, self.total = number, position, total
        self.full = total == limit

    def _count(self, url: str, asked: int) -> None:
        if asked:
            self.endpoints[url] = self.endpoints.get(url, 0) + asked

    def _needed_by(self, url: str) -> Callable[[Body], object]:
        """What requests to *url* must have; nothing satisfies it where *url* is not to be asked for."""
        if url not in self.rules.endpoints or (self._only_endpoint not in {None, url}):
            return _absent
        return _NEEDED[url]

    @property
    def _only_endpoint(self) -> str | None:
        """The endpoint that all must ask for, once that is known."""
        return next(iter(self.endpoints), None) if self.rules.same_endpoint else None

    def _refuse(self, raw: bytes, number: int) -> None:
        """Find the words for a line that is not fine."""
        if len(raw) > self.rules.max_line_bytes:
            self._note([too_long(number, len(raw), self.rules.max_line_bytes)])
            return
        custom_id = _id_of(raw)
        if custom_id is not None:
            key = hash(custom_id) & _HASH_BITS
            (self._repeated if key in self._seen else self._seen).add(key)
        if len(self.errors) >= self.rules.max_errors:
            self.error_count += 1
        elif not _is_utf8(raw, len(raw)):
            self._note([not_utf8(number, raw)])
        else:
            self._note(
                diagnose(
                    raw,
                    number,
                    self.rules.endpoints,
                    model_needed=not self.rules.allow_missing_model,
                    only_endpoint=self._only_endpoint,
                )
            )

    def _new_model(self, model: str, number: int) -> None:
        if self.models and not self.rules.several_models:
            first, line = next(iter(self.models.items()))
            self._note([second_model(number, model, first, line)])
        self.models[model] = number

    def close_chunk(self) -> None:
        """End the current chunk after the last line that was checked."""
        count = self.total - self._chunk_index
        if not count:
            return
        length = self._position - self._chunk_at
        self.chunks.append(
            ChunkSpan(len(self.chunks), self._chunk_at, length, self._chunk_index, self._chunk_line, count)
        )
        self._chunk_at, self._chunk_line, self._chunk_index = self._position, self._line + 1, self.total

    def settle_duplicates(self, found: Iterator[bytes]) -> list[LineError]:
        """Read again, where hashes met twice, to learn which ids really repeat, and which line."""
        errors: list[LineError] = []
        first: dict[str, int] = {}
        if not self._repeated:
            return errors
        for number, raw in numbered_lines(found, self.rules.max_line_bytes):
            if number > self._line:
                break
            custom_id = _id_of(raw) if isinstance(raw, bytes) else None
            if custom_id is None or hash(custom_id) & _HASH_BITS not in self._repeated:
                continue
            earlier = first.setdefault(custom_id, number)
            if earlier != number:
                self.error_count += 1
                if len(errors) < self.rules.max_errors:
                    errors.append(duplicate(number, earlier))
        return errors


def _id_of(raw: bytes) -> str | None:
    try:
        return _decode_id(raw).custom_id
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _is_utf8(data: bytes, length: int) -> bool:
    """Whether the first *length* bytes are UTF-8."""
    if data.isascii():
        return True
    try:
        data[:length].decode()
    except UnicodeDecodeError:
        return False
    return True
