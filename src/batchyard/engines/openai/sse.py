"""Floor 3. Server-sent events, parsed from bytes as they come. Pure.

Only what upstreams of models send matters here: the data of each event. Events end at a blank line; LF,
CRLF and CR end a line; several `data` lines of one event are joined by LF; comments and other fields are
passed over. Source: the WHATWG HTML standard, section "Server-sent events".
"""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):  # noqa: N818 - names what failed
    """One event grew beyond the cap."""


class SseParser:
    """Feed it bytes in pieces of any size; it gives the data of each event that is complete."""

    def __init__(self, max_event_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_event_bytes = max_event_bytes
        self._pieces: list[bytes] = []
        self._pending = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._after_cr = False
        self._first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that *chunk* completes.

        Raises:
            EventTooLarge: an event is larger than the cap.
        """
        if self._after_cr and chunk:
            # The CR at the end of the piece before has ended its line already.
            self._after_cr = False
            if chunk[:1] == b"\n":
                chunk = chunk[1:]
        if b"\n" not in chunk and b"\r" not in chunk:
            self._keep(chunk)
            return []
        self._after_cr = chunk[-1:] == b"\r"
        *lines, rest = _LINE_END.split(chunk)
        lines[0] = b"".join((*self._pieces, lines[0]))
        self._pieces.clear()
        self._pending = 0
        self._keep(rest)
        events: list[bytes] = []
        for line in lines:
            self._read_line(line, events)
        return events

    def _keep(self, piece: bytes) -> None:
        if piece:
            self._pieces.append(piece)
            self._pending += len(piece)
            self._check_size()

    def _read_line(self, line: bytes, events: list[bytes]) -> None:
        if self._first:
            self._first = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value[1:] if value[:1] == b" " else value)
            self._data_bytes += len(value)
            self._check_size()

    def _check_size(self) -> None:
        if self._pending + self._data_bytes > self._max_event_bytes:
            raise EventTooLarge(f"An event is larger than {self._max_event_bytes:,} bytes.")
