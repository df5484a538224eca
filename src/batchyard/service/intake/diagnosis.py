"""Floor 6. What exactly is wrong with a line, in words; codes follow the OpenAI Batch API.

Slow and thorough: it runs only for lines that the fast check of `registration` did not take.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

from batchyard.errors import LineError
from batchyard.types import Endpoint

#: Longest custom_id taken, in characters. OpenAI states no limit; this one keeps lines and hashes sane.
MAX_CUSTOM_ID = 512
_NEEDS = {
    Endpoint.CHAT: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.EMBEDDINGS: "input",
    Endpoint.RESPONSES: "input",
}


def diagnose(raw: bytes, line: int, endpoints: frozenset[Endpoint], *, model_needed: bool) -> list[LineError]:
    """Every error of one line that is neither blank nor fine; never empty."""
    try:
        found = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        return [LineError("invalid_json_line", "The JSON is nested too deeply. Flatten it.", line)]
    except json.JSONDecodeError as error:
        return [
            LineError(
                "invalid_json_line",
                f"This is not valid JSON ({error.msg}, column {error.colno}). "
                "Each line must be one request as a JSON object.",
                line,
            )
        ]
    except ValueError as error:
        return [LineError("invalid_json_line", f"This is not valid JSON ({error}).", line)]
    if not isinstance(found, dict):
        return [LineError("invalid_json_line", f"This is {_kind(found)}; a request is a JSON object.", line)]
    errors = [*_check_id(found, line), *_check_method(found, line), *_check_url(found, line, endpoints)]
    errors += _check_body(found, line, model_needed=model_needed)
    if not errors:
        # What is left is text that the strict reader refuses: a lone surrogate, or nesting near the limit.
        errors.append(
            LineError(
                "invalid_json_line",
                "The JSON holds text that is no Unicode (a lone surrogate such as \\ud800) or nests too "
                "deeply. Write it again with a JSON library.",
                line,
            )
        )
    return errors


def too_long(line: int, length: int, limit: int) -> LineError:
    """The error of an overlong line."""
    return LineError(
        "line_too_long",
        f"The line has {length:,} bytes; the limit is {limit:,}. Split the request or shorten its text.",
        line,
    )


def not_utf8(line: int, raw: bytes) -> LineError:
    """The error of a line that is no UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return LineError(
            "invalid_json_line",
            f"Byte {error.start + 1} of this line (0x{raw[error.start]:02x}) is no UTF-8. "
            "Save the file as UTF-8.",
            line,
        )
    return LineError("invalid_json_line", "This line is no UTF-8. Save the file as UTF-8.", line)


def duplicate(line: int, earlier: int) -> LineError:
    """The error of a repeated custom_id."""
    return LineError(
        "duplicate_custom_id",
        f'"custom_id" repeats line {earlier}. Each request needs its own custom_id.',
        line,
        "custom_id",
    )


def _check_id(found: dict[str, Any], line: int) -> list[LineError]:
    if "custom_id" not in found:
        return [_missing("custom_id", 'Give each request its own, such as "request-1".', line)]
    custom_id = found["custom_id"]
    if not isinstance(custom_id, str):
        return [
            LineError(
                "invalid_type", f'"custom_id" is {_kind(custom_id)}; it must be a string.', line, "custom_id"
            )
        ]
    if not custom_id:
        return [
            LineError("invalid_value", '"custom_id" is empty. Give each request its own.', line, "custom_id")
        ]
    if len(custom_id) > MAX_CUSTOM_ID:
        message = f'"custom_id" has {len(custom_id):,} characters; the limit is {MAX_CUSTOM_ID}.'
        return [LineError("string_above_max_length", message, line, "custom_id")]
    return []


def _check_method(found: dict[str, Any], line: int) -> list[LineError]:
    if "method" not in found:
        return [_missing("method", 'It is always "POST".', line)]
    if found["method"] != "POST":
        message = f'"method" is {_short(found["method"])}; it must be "POST".'
        return [LineError("invalid_value", message, line, "method")]
    return []


def _check_url(found: dict[str, Any], line: int, endpoints: frozenset[Endpoint]) -> list[LineError]:
    known = ", ".join(sorted(endpoints))
    if "url" not in found:
        return [_missing("url", f"This engine takes: {known}.", line)]
    url = found["url"]
    if isinstance(url, str) and url in endpoints:
        return []
    close = difflib.get_close_matches(url, [*endpoints], 1, 0.7) if isinstance(url, str) else []
    meant = f" Did you mean {close[0]}?" if close else ""
    if isinstance(url, str) and url in set(Endpoint):
        message = f'This engine does not answer "url" {_short(url)}. It takes: {known}.'
    else:
        message = f'"url" is {_short(url)}, which is unknown.{meant} This engine takes: {known}.'
    return [LineError("invalid_url", message, line, "url")]


def _check_body(found: dict[str, Any], line: int, *, model_needed: bool) -> list[LineError]:
    if "body" not in found:
        return [_missing("body", "It holds the parameters of the request, as a JSON object.", line)]
    body = found["body"]
    if not isinstance(body, dict):
        return [
            LineError("invalid_type", f'"body" is {_kind(body)}; it must be a JSON object.', line, "body")
        ]
    errors = []
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        message = f'"body.model" is {_kind(model)}; it must be a string.'
        errors.append(LineError("invalid_type", message, line, "body.model"))
    elif not model and model_needed:
        message = '"body.model" is missing. Name the model here, or for all requests with --model.'
        errors.append(LineError("missing_required_parameter", message, line, "body.model"))
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        message = f'"body.stream" is {_kind(stream)}; leave it out.'
        errors.append(LineError("invalid_type", message, line, "body.stream"))
    elif stream:
        message = 'A Batch cannot stream: results are written to a file. Leave "stream" out.'
        errors.append(LineError("streaming_unsupported", message, line, "body.stream"))
    url = found.get("url")
    needed = _NEEDS.get(Endpoint(url)) if isinstance(url, str) and url in set(Endpoint) else None
    if needed and needed not in body:
        message = f'"body.{needed}" is missing; {url} needs it.'
        errors.append(LineError("missing_required_parameter", message, line, f"body.{needed}"))
    return errors


def _missing(name: str, remedy: str, line: int) -> LineError:
    return LineError("missing_required_parameter", f'"{name}" is missing. {remedy}', line, name)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
