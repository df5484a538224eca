"""Floor 3. From the body of an answer to its `Usage`, for every endpoint's spelling.

Names: `prompt_tokens`/`completion_tokens` (chat, completions, embeddings) or
`input_tokens`/`output_tokens` (responses); cached tokens stand in a `..._details` object.
"""

from __future__ import annotations

from typing import Any

import msgspec

from batchyard.types import Usage


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class UsageFields(msgspec.Struct):
    """`usage` as upstreams write it; every part may be missing or null."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None

    def usage(self) -> Usage:
        """The same in our words."""
        details = self.prompt_tokens_details or self.input_tokens_details
        return Usage(
            self.prompt_tokens or self.input_tokens or 0,
            self.completion_tokens or self.output_tokens or 0,
            (details.cached_tokens or 0) if details else 0,
        )


def usage_of(value: Any) -> Usage:
    """`Usage` from a decoded `usage` object of any shape; what is no count reads as 0."""
    if not isinstance(value, dict):
        return Usage()
    details = value.get("prompt_tokens_details") or value.get("input_tokens_details")
    return Usage(
        _count(value.get("prompt_tokens")) or _count(value.get("input_tokens")),
        _count(value.get("completion_tokens")) or _count(value.get("output_tokens")),
        _count(details.get("cached_tokens")) if isinstance(details, dict) else 0,
    )


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    return int(value) if 0 <= value < 2**63 else 0
