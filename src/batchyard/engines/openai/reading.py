"""Floor 3. What an HTTP exchange with an upstream means: an `Answer`, a `Fault`, or the end. Pure.

A 2xx is checked to be the JSON object that the endpoint promises. A 4xx is an answer; 408, 409, 425 and
429 are faults, for the same request may succeed later, unless `x-should-retry: false` says otherwise.
401 and an exhausted quota concern every request alike, so they end the engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from batchyard.engines.usage import UsageFields, usage_of
from batchyard.errors import EngineError
from batchyard.types import Answer, Endpoint, Fault, FaultKind, Outcome, Usage

_RETRIED = {
    408: FaultKind.TIMEOUT,
    409: FaultKind.SERVER_ERROR,
    425: FaultKind.SERVER_ERROR,
    429: FaultKind.RATE_LIMITED,
}
_SHOWN = 80

_ABSENT = msgspec.Raw()

Headers = Mapping[str, str]


class _Body(msgspec.Struct):
    """The parts of an answer that decide; everything else is skipped over, not built."""

    usage: UsageFields | None = None
    #: The field that each endpoint cannot do without; only whether it is there counts.
    choices: msgspec.Raw = _ABSENT
    data: msgspec.Raw = _ABSENT
    output: msgspec.Raw = _ABSENT


_decode = msgspec.json.Decoder(_Body).decode


def read_outcome(
    endpoint: Endpoint,
    status: int,
    headers: Headers,
    body: bytes,
    *,
    wall_s: float,
    api_key_env: str = "OPENAI_API_KEY",
) -> Outcome:
    """What an upstream's whole reply means for one request; *wall_s* is the time now, in Unix seconds.

    Raises:
        EngineError: no request can succeed at this upstream as things are.
    """
    if status == 200:
        outcome = _read_success(endpoint, headers, body)
        if outcome is not None:
            return outcome
    if 200 <= status < 300:
        return _read_odd_success(endpoint, status, headers, body)
    error = _error_of(body)
    if 300 <= status < 400:
        where = headers.get("Location")
        hint = f" to {where}. Use the address it points to as the base URL." if where else "."
        return Fault(FaultKind.INVALID_ANSWER, f"The upstream answered with a redirect ({status}){hint}")
    if status >= 500 or (status in _RETRIED and headers.get("x-should-retry") != "false"):
        return _read_fault(status, headers, body, error, wall_s)
    if status == 401:
        raise EngineError(unauthorized(body, api_key_env))
    if status in (404, 405) and not error.get("enveloped"):
        # Not the API speaking but a server that has no such path, so every request would meet it.
        raise EngineError(
            f"The upstream has nothing at {endpoint} ({status}). Is the base URL right, and does this server "
            f"serve this endpoint? Its answer begins: {_beginning(body)}"
        )
    return Answer(status, _envelope(status, body, error), request_id=headers.get("x-request-id"))


def unauthorized(body: bytes, api_key_env: str) -> str:
    """The sentence for a refused key."""
    message = _error_of(body).get("message")
    said = f" It said: {_short(message)}" if message else ""
    return (
        f"The upstream refused the API key (401). Set the environment variable {api_key_env} to a valid key "
        f"of this upstream.{said}"
    )


def unusable(problem: object, body: bytes) -> Fault:
    """The fault for a 2xx whose body is not what the API promises."""
    start = _beginning(body)
    if start[:1] == "<":
        message = (
            f"The upstream answered with a web page, not JSON; is the base URL right? It begins: {start}"
        )
    elif not start:
        message = "The upstream answered with an empty body."
    else:
        message = f"The upstream's answer is not what the API promises ({problem}). It begins: {start}"
    return Fault(FaultKind.INVALID_ANSWER, message)


class _LastChunk(msgspec.Struct):
    choices: list[dict[str, Any]] = []
    usage: msgspec.Raw = _ABSENT
    type: str = ""


_decode_last = msgspec.json.Decoder(_LastChunk).decode


def ends_stream(endpoint: Endpoint, event: bytes) -> bool:
    """Whether *event* can be the last of a stream; a server that says no `[DONE]` may end with it."""
    try:
        last = _decode_last(event)
    except (msgspec.MsgspecError, RecursionError):
        return False
    if endpoint is Endpoint.RESPONSES:
        return last.type in {"response.completed", "response.failed", "response.incomplete"}
    if not last.choices:
        # Usage comes after everything else.
        return last.usage is not _ABSENT
    return any(one.get("finish_reason") for one in last.choices)


def retry_after_s(headers: Headers, wall_s: float) -> float | None:
    """Seconds that the upstream asks to wait: `retry-after-ms`, or `retry-after` as seconds or a date."""
    millis = _positive(headers.get("retry-after-ms"))
    if millis is not None:
        return millis / 1000
    given = headers.get("Retry-After")
    if given is None:
        return None
    seconds = _positive(given)
    if seconds is not None:
        return seconds
    try:
        when = parsedate_to_datetime(given)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    wait_s = (when - datetime.fromtimestamp(wall_s, UTC)).total_seconds()
    return wait_s if wait_s > 0 else None


def _read_success(endpoint: Endpoint, headers: Headers, body: bytes) -> Answer | None:
    """The answer in the usual case; None asks for a closer look."""
    try:
        parts = _decode(body)
        if not body.isascii():
            # Strings that are skipped over are not checked to be UTF-8.
            body.decode("utf-8")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if endpoint is Endpoint.EMBEDDINGS:
        needed = parts.data
    elif endpoint is Endpoint.RESPONSES:
        # A response that failed says so inside and is an answer all the same.
        needed = parts.output
    else:
        needed = parts.choices
    if needed is _ABSENT or bytes(memoryview(needed)[:5]) == b"null":
        return None
    usage = parts.usage.usage() if parts.usage is not None else Usage()
    return Answer(200, body, usage, headers.get("x-request-id"))


def _read_odd_success(endpoint: Endpoint, status: int, headers: Headers, body: bytes) -> Outcome:
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        return unusable(problem, body)
    if not isinstance(value, dict):
        return unusable("it is no JSON object", body)
    needed = {Endpoint.EMBEDDINGS: "data", Endpoint.RESPONSES: "output"}.get(endpoint, "choices")
    if value.get(needed) is not None:
        return Answer(status, body, usage_of(value.get("usage")), headers.get("x-request-id"))
    error = value.get("error")
    if not error:
        return unusable(f'"{needed}" is missing', body)
    code = error.get("code") if isinstance(error, dict) else None
    real = code if isinstance(code, int) and 400 <= code < 600 else 502
    if real < 500 and real not in _RETRIED:
        return Answer(real, _envelope(real, body, _error_of(body)), request_id=headers.get("x-request-id"))
    said = error.get("message") if isinstance(error, dict) else error
    kind = _RETRIED.get(real, FaultKind.SERVER_ERROR)
    message = f"The upstream answered {status} with an error inside. It said: {_short(str(said))}"
    return Fault(kind, message, real, _envelope(real, body, _error_of(body)))


def _read_fault(status: int, headers: Headers, body: bytes, error: dict[str, Any], wall_s: float) -> Fault:
    said = f" It said: {_short(str(error['message']))}" if error.get("message") else ""
    if status == 429 and "insufficient_quota" in (error.get("code"), error.get("type")):
        raise EngineError(f"The account has no quota left at the upstream (insufficient_quota).{said}")
    kind = _RETRIED.get(status, FaultKind.SERVER_ERROR)
    if kind is FaultKind.RATE_LIMITED:
        message = f"The upstream limits the rate of requests (429).{said}"
    else:
        message = f"The upstream answered {status}.{said}"
    return Fault(kind, message, status, _envelope(status, body, error), retry_after_s(headers, wall_s))


def _error_of(body: bytes) -> dict[str, Any]:
    """The error that *body* tells of, in whichever of the known shapes; empty where it is no JSON.

    `enveloped` tells whether it stood where the OpenAI API puts errors.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    enveloped = bool(value.get("error"))
    error = value.get("error", value)
    if not isinstance(error, dict):
        return {"message": str(error), "enveloped": enveloped}
    message = error.get("message") or error.get("detail")
    shown = message if isinstance(message, str) else json.dumps(message or error)
    return {**error, "message": shown, "enveloped": enveloped}


def _envelope(status: int, body: bytes, error: dict[str, Any]) -> bytes:
    """*body* where it is the OpenAI error envelope, else the envelope with what *body* says."""
    if error and b'"error"' in body:
        try:
            if isinstance(json.loads(body.decode("utf-8"))["error"], dict):
                return body
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
    message = error.get("message") or f"The upstream answered {status}. Its answer begins: {_beginning(body)}"
    kind = error.get("type") or ("server_error" if status >= 500 else "invalid_request_error")
    code = error.get("code")
    inner = {
        "message": str(message),
        "type": str(kind),
        "param": error.get("param"),
        "code": None if code is None else str(code),
    }
    return json.dumps({"error": inner}).encode("ascii")


def _positive(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def _beginning(body: bytes) -> str:
    """The first characters of *body* on one line."""
    return " ".join(body.lstrip()[:_SHOWN].decode("utf-8", errors="replace").split())


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]} ..."
