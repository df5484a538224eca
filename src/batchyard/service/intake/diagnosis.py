"""Floor 6. What exactly is wrong with a line, in words; codes follow the OpenAI Batch API.

Slow and thorough: it runs only for lines that the fast check of `registration` did not take.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

from batchyard.errors import LineError
from batchyard.types import Endpoint

#: Longest custom_id taken, in characters. OpenAI states no limit; this one keeps lines and hashes sane.
MAX_CUSTOM_ID = 512
#: Deepest nesting of a line. No request needs it, and whoever parses a body later has room to do so.
MAX_DEPTH = 256
#: The member of its body that an endpoint cannot do without.
NEEDS = {
    Endpoint.CHAT: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.EMBEDDINGS: "input",
    Endpoint.RESPONSES: "input",
}


_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACKET = re.compile(rb"[][{}]")


def diagnose(
    raw: bytes,
    line: int,
    endpoints: frozenset[Endpoint],
    *,
    model_needed: bool,
    only_endpoint: str | None = None,
) -> list[LineError]:
    """Every error of one UTF-8 line that is neither blank nor fine; never empty.

    *only_endpoint* is the endpoint of the requests before, where all must ask for the same.
    """
    if is_too_deep(raw):
        message = f"The JSON nests deeper than {MAX_DEPTH} levels. Flatten it."
        return [LineError("invalid_json_line", message, line)]
    try:
        found = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        return [LineError("invalid_json_line", _no_json(raw, error), line)]
    except (ValueError, RecursionError) as error:
        return [LineError("invalid_json_line", f"This is not valid JSON ({error}).", line)]
    if not isinstance(found, dict):
        hint = " Write the items of the array as lines of their own." if isinstance(found, list) else ""
        message = f"This is {_kind(found)}; a request is a JSON object.{hint}"
        return [LineError("invalid_json_line", message, line)]
    surrogate = _find_surrogate(found)
    if surrogate is not None:
        message = (
            f"The JSON holds half of a surrogate pair (\\u{ord(surrogate):04x}), which is no text. "
            "Write it again with a JSON library."
        )
        return [LineError("invalid_json_line", message, line)]
    errors = [*_check_id(found, line), *_check_method(found, line)]
    errors += _check_url(found, line, endpoints, only_endpoint)
    errors += _check_body(found, line, model_needed=model_needed)
    if not errors:
        message = "This JSON is not accepted by a strict reader. Write it again with a JSON library."
        errors.append(LineError("invalid_json_line", message, line))
    return errors


def is_too_deep(raw: bytes) -> bool:
    """Whether a line nests deeper than `MAX_DEPTH`."""
    # Nearly every line has fewer brackets than that, and `replace` tells so at the speed of memchr.
    squares = len(raw) - len(raw.replace(b"[", b"", MAX_DEPTH + 1))
    curlies = len(raw) - len(raw.replace(b"{", b"", MAX_DEPTH + 1))
    if squares + curlies <= MAX_DEPTH:
        return False
    depth = 0
    for match in _BRACKET.finditer(_JSON_STRING.sub(b"", raw)):
        if match[0] in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        else:
            depth -= 1
    return False


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


def second_model(line: int, model: str, first: str, first_line: int) -> LineError:
    """The error of a model that is not that of the requests before."""
    return LineError(
        "mismatched_model",
        f"The model {_short(model)} is not the {_short(first)} of line {first_line}. "
        "This engine serves one model: make a file for each.",
        line,
        "body.model",
    )


def _no_json(raw: bytes, error: json.JSONDecodeError) -> str:
    if raw.strip() in {b"[", b"{"}:
        return (
            "This JSON goes on in the next line. Write each request in one line, "
            "as `jq -c .` does (or `jq -c '.[]'` for an array)."
        )
    return (
        f"This is not valid JSON ({error.msg}, column {error.colno}). "
        "Each line must be one request as a JSON object."
    )


def _find_surrogate(found: Any) -> str | None:
    """A lone surrogate in a parsed value, keys included."""
    waiting = [found]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                return value[error.start]
    return None


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


def _check_url(
    found: dict[str, Any], line: int, endpoints: frozenset[Endpoint], only: str | None
) -> list[LineError]:
    known = ", ".join(sorted(endpoints))
    if "url" not in found:
        return [_missing("url", f"This engine takes: {known}.", line)]
    url = found["url"]
    if not isinstance(url, str) or url not in set(Endpoint):
        meant = _meant(url, endpoints)
        message = f'"url" is {_short(url)}, which is unknown.{meant} This engine takes: {known}.'
    elif url not in endpoints:
        message = f'This engine does not answer "url" {_short(url)}. It takes: {known}.'
    elif only not in {None, url}:
        message = f'"url" is {_short(url)}, but the requests before ask for {only}. Make a file for each.'
    else:
        return []
    return [LineError("invalid_url", message, line, "url")]


def _meant(url: Any, endpoints: frozenset[Endpoint]) -> str:
    if not isinstance(url, str):
        return ""
    path = url.strip().rstrip("/").lower()
    # Whole addresses and paths without their version are the usual slips.
    likely: list[str] = [
        one for one in sorted(endpoints, key=len, reverse=True) if path.endswith(one[len("/v1") :])
    ]
    likely += difflib.get_close_matches(path[:200], sorted(endpoints), 1, 0.7)
    return f" Did you mean {likely[0]}?" if likely else ""


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
        message = '"body.model" is missing. Name it in each request; `batchyard run` also takes --model.'
        errors.append(LineError("invalid_request", message, line, "body.model"))
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        message = f'"body.stream" is {_kind(stream)}; leave it out.'
        errors.append(LineError("invalid_type", message, line, "body.stream"))
    elif stream:
        message = 'A Batch cannot stream: results are written to a file. Leave "stream" out.'
        errors.append(LineError("streaming_unsupported", message, line, "body.stream"))
    url = found.get("url")
    needed = NEEDS.get(Endpoint(url)) if isinstance(url, str) and url in set(Endpoint) else None
    if needed and needed not in body:
        message = f'"body.{needed}" is missing; {url} needs it.'
        errors.append(LineError("invalid_request", message, line, f"body.{needed}"))
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
