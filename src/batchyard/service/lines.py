"""Floor 6. Output lines in the shape of the OpenAI Batch API, safe for every line reader.

Lines are ASCII: the OpenAI SDK's line iterator also splits at U+2028, U+2029 and U+0085, so everything
beyond ASCII is written as a JSON escape. Bodies pass through as text; no number is parsed and printed
again.
"""

from __future__ import annotations

import re
from json import dumps
from json.encoder import encode_basestring_ascii

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


_NEVER_RAN = (
    b'"response":null,"error":{"code": "batch_cancelled"',
    b'"response":null,"error":{"code": "batch_expired"',
)


def never_ran(line: bytes) -> bool:
    """Whether *line*, written here, says that its request was not run, as its Batch was stopped before."""
    # A custom_id cannot hold these bytes: its quotes are escaped.
    return any(mark in line for mark in _NEVER_RAN)


def _escape(match: re.Match[str]) -> str:
    return encode_basestring_ascii(match.group())[1:-1]


def _envelope(fault: Fault) -> bytes:
    error = {"message": fault.message, "type": fault.kind.value, "param": None, "code": None}
    return dumps({"error": error}).encode()
