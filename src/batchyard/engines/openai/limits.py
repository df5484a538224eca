"""Floor 3. Rate limits in the headers of an upstream, in OpenAI's dialect and in Anthropic's. Pure.

OpenAI: `x-ratelimit-remaining-requests: 59`, `x-ratelimit-reset-requests: 6m0s`, and the same for `tokens`.
Anthropic: `anthropic-ratelimit-requests-remaining: 59`, `anthropic-ratelimit-requests-reset:` a time of
RFC 3339, and the same for `tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite

from batchyard.types import LimitsSeen

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
#: What a server may say is longer than anybody waits.
_LONGEST_S = 86_400.0

Headers = Mapping[str, str]


def limits_seen(headers: Headers, wall_s: float) -> LimitsSeen | None:
    """What *headers* say of rate limits; None where they say nothing. *wall_s* is now, in Unix seconds."""
    if "x-ratelimit-remaining-requests" in headers or "x-ratelimit-remaining-tokens" in headers:
        return LimitsSeen(
            _number(headers.get("x-ratelimit-remaining-requests")),
            _span_s(headers.get("x-ratelimit-reset-requests")),
            _number(headers.get("x-ratelimit-remaining-tokens")),
            _span_s(headers.get("x-ratelimit-reset-tokens")),
        )
    if "anthropic-ratelimit-requests-remaining" in headers:
        return LimitsSeen(
            _number(headers.get("anthropic-ratelimit-requests-remaining")),
            _until_s(headers.get("anthropic-ratelimit-requests-reset"), wall_s),
            _number(headers.get("anthropic-ratelimit-tokens-remaining")),
            _until_s(headers.get("anthropic-ratelimit-tokens-reset"), wall_s),
        )
    return None


def _number(text: str | None) -> float | None:
    try:
        found = float(text or "")
    except ValueError:
        return None
    return max(found, 0.0) if isfinite(found) else None


def _span_s(text: str | None) -> float | None:
    """Seconds of `1s`, `6m0s`, `20ms`, or of a plain number."""
    if text is None:
        return None
    pieces = _SPAN.findall(text)
    if pieces and "".join(number + unit for number, unit in pieces) == text:
        return min(sum(float(number) * _UNITS[unit] for number, unit in pieces), _LONGEST_S)
    number = _number(text)
    return None if number is None else min(number, _LONGEST_S)


def _until_s(text: str | None, wall_s: float) -> float | None:
    try:
        when = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return min(max(when.timestamp() - wall_s, 0.0), _LONGEST_S)
