"""Floor 9. Option values that people write: durations, shares, JSON objects."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from batchyard.errors import UsageError
from batchyard.scheduling.canary import CanaryPolicy

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")


def duration_s(value: str, option: str) -> float:
    """Seconds of `90s`, `30m`, `2h`, `1h30m` or `7d`.

    Raises:
        UsageError: it is no duration.
    """
    parts = _DURATION.findall(value)
    if not parts or _DURATION.sub("", value).strip():
        raise UsageError(f"{option} {value!r} is no duration. Write for example 90s, 30m, 2h, 1h30m or 7d.")
    total_s = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if total_s <= 0:
        raise UsageError(f"{option} {value!r} must be longer than nothing.")
    return total_s


def canary_policy(value: str) -> CanaryPolicy:
    """`5%` (of the first 100 requests) or `5%/200` (of the first 200) as a policy.

    Raises:
        UsageError: it is neither.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%(?:\s*/\s*(\d+))?", value)
    if not match or not 0 <= float(match[1]) <= 100 or match[2] == "0":
        raise UsageError(
            f"--fail-over {value!r} is no share. Write for example 5% (of the first 100 requests) or 5%/500."
        )
    return CanaryPolicy(float(match[1]) / 100, int(match[2] or 100))


def json_object(value: str, option: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UsageError: it is none.
    """
    try:
        # Strict: NaN, Infinity and numbers beyond a double are no JSON and would reach an engine.
        parsed = msgspec.json.decode(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{option} is not valid JSON ({error}). Write for example '{{\"max_tokens\": 64}}'."
        ) from error
    if not isinstance(parsed, dict):
        raise UsageError(f"{option} must be a JSON object, such as '{{\"max_tokens\": 64}}'.")
    return parsed
