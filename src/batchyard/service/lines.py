"""Floor 6. Output lines in the shape of the OpenAI Batch API, safe for every line reader.

Lines are ASCII: the OpenAI SDK's line iterator also splits at U+2028, U+2029 and U+0085, so everything
beyond ASCII is written as a JSON escape. Bodies pass through as text; no number is parsed and printed
again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from json import dumps
from json.encoder import encode_basestring_ascii

import msgspec

from batchyard.types import Answer, Fault, FaultKind, Request

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
#: Whitespace between JSON tokens; inside a JSON string a raw control character is not allowed.
_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")

#: `error.code` of a line whose request never got an HTTP answer. The first two are OpenAI's words.
_FAULT_CODES = {
    FaultKind.TIMEOUT: "request_timeout",
    FaultKind.UNREACHABLE: "engine_unreachable",
    FaultKind.DISCONNECTED: "engine_disconnected",
    FaultKind.INVALID_ANSWER: "invalid_answer",
    FaultKind.ENGINE_DIED: "engine_died",
    FaultKind.RATE_LIMITED: "rate_limited",
    FaultKind.SERVER_ERROR: "server_error",
}


def ascii_json(body: bytes) -> bytes:
    """*body*, a JSON text, on one line and in ASCII, equal in meaning and otherwise untouched."""
    if not body.isascii():
        text = body.decode("utf-8", errors="replace")
        body = _NOT_ASCII.sub(_escape, text).encode("ascii")
    if b"\n" in body or b"\r" in body:
        body = body.translate(_LINE_BREAKS)
    return body


class LineWriter:
    """Makes the output lines of one Batch."""

    def __init__(self, batch_id: str) -> None:
        self._id_prefix = f"batch_req_{batch_id.removeprefix('batch_')}".encode()

    def answered(self, request: Request, answer: Answer) -> bytes:
        """The line of a request that the engine answered, with whatever status."""
        request_id = answer.request_id or f"req_{request.index}"
        return (
            b'{"id":"%b_%d","custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}'
            % (
                self._id_prefix,
                request.index,
                encode_basestring_ascii(request.custom_id).encode(),
                answer.status_code,
                encode_basestring_ascii(request_id).encode(),
                ascii_json(answer.body),
            )
        )

    def gave_up(self, request: Request, fault: Fault, attempts: int) -> bytes:
        """The line of a request whose every attempt met a fault."""
        tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        if fault.status_code is not None:
            body = fault.body if fault.body.lstrip()[:1] == b"{" else _envelope(fault)
            return self.answered(request, Answer(fault.status_code, body))
        message = f"{fault.message} Gave up after {tries}."
        return self.not_answered(request, _FAULT_CODES[fault.kind], message)

    def not_answered(self, request: Request, code: str, message: str) -> bytes:
        """The line of a request that got no HTTP answer, or was never sent."""
        error = dumps({"code": code, "message": message}).encode()
        return b'{"id":"%b_%d","custom_id":%b,"response":null,"error":%b}' % (
            self._id_prefix,
            request.index,
            encode_basestring_ascii(request.custom_id).encode(),
            error,
        )


#: Codes of lines whose requests were not run: their Batch, or they alone, were stopped before.
NEVER_RAN = frozenset({"batch_cancelled", "batch_expired", "request_cancelled"})


@dataclass(frozen=True, slots=True)
class Failure:
    """What a line of an error file says."""

    custom_id: str
    #: `HTTP 400` and the like where there was an answer, else the line's `error.code`.
    kind: str
    message: str


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


class _Said(msgspec.Struct):
    message: str = ""


class _Envelope(msgspec.Struct):
    error: _Said | str | None = None


_decode = msgspec.json.Decoder(_Line).decode
_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_LONGEST_MESSAGE = 300


def read_failure(line: bytes) -> Failure:
    """*line*, written here to an error file, as what failed."""
    found = _decode(line)
    if found.error is not None:
        return Failure(found.custom_id, found.error.code, found.error.message[:_LONGEST_MESSAGE])
    assert found.response is not None
    try:
        error = _decode_envelope(found.response.body).error
        message = error.message if isinstance(error, _Said) else error or ""
    except msgspec.MsgspecError:
        message = ""
    return Failure(found.custom_id, f"HTTP {found.response.status_code}", message[:_LONGEST_MESSAGE])


class _Id(msgspec.Struct):
    custom_id: str


_decode_id = msgspec.json.Decoder(_Id).decode


def read_custom_id(line: bytes) -> str:
    """The `custom_id` of *line*, written here."""
    return _decode_id(line).custom_id


def index_of(line: bytes) -> int:
    """The 0-based place in the Batch of the request that *line*, written here, belongs to."""
    # {"id":"batch_req_…_17", …: the id holds no quote.
    return int(line[7 : line.index(b'"', 7)].rpartition(b"_")[2])


def _escape(match: re.Match[str]) -> str:
    return encode_basestring_ascii(match.group())[1:-1]


def _envelope(fault: Fault) -> bytes:
    error = {"message": fault.message, "type": fault.kind.value, "param": None, "code": None}
    return dumps({"error": error}).encode()
