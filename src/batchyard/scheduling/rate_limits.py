"""Floor 2. Rate limits: when an upstream may be asked the next time, by requests and by tokens a minute.

Pure. Token buckets that hold a tenth of a minute, so that calls are spread and not sent in one burst; what
the upstream itself says in its headers corrects them. Deferred work leaves a fifth of each bucket to those
who wait for an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from batchyard.types import LimitsSeen

#: Seconds of the limit that may be spent at once.
_BURST_S = 6.0
#: The share of a bucket that is kept for interactive calls.
_KEPT = 0.2


@dataclass(slots=True)
class _Bucket:
    """Tokens of a token bucket: *per_s* flow in up to *most*; it may go below zero by one call."""

    per_s: float
    most: float
    level: float
    at: float = 0.0

    def fill(self, now: float) -> None:
        self.level = min(self.most, self.level + max(now - self.at, 0.0) * self.per_s)
        self.at = now

    def ready_at(self, now: float, cost: float, *, interactive: bool) -> float:
        """When *cost* may be taken out. One that the bucket can never hold goes when it is full."""
        self.fill(now)
        wanted = min(cost + (0.0 if interactive else _KEPT * self.most), self.most)
        # Refilling leaves rounding behind: a hair below is there.
        short = wanted - self.level
        return now if short <= 1e-9 * self.most else now + short / self.per_s

    @classmethod
    def of(cls, per_minute: float) -> _Bucket:
        most = max(per_minute / 60.0 * _BURST_S, 1.0)
        return cls(per_minute / 60.0, most, most)


class RateLimits:
    """What may be sent when. Times are of one clock, whichever.

    Args:
        requests_per_minute: what the upstream allows; None for no such limit.
        tokens_per_minute: the same for tokens, prompt and answer together.
    """

    def __init__(
        self, requests_per_minute: float | None = None, tokens_per_minute: float | None = None
    ) -> None:
        self._requests = None if requests_per_minute is None else _Bucket.of(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else _Bucket.of(tokens_per_minute)
        self._held_until = -inf
        self._held_why = ""
        #: What is waited for, in words; "" while nothing is.
        self.why = ""

    def __repr__(self) -> str:
        return f"<RateLimits [{self.why or 'open'}]>"

    def ready_at(self, now: float, tokens: float, *, interactive: bool) -> float:
        """When a call of about *tokens* tokens may be sent; *now* where it may at once."""
        found, self.why = now, ""
        if self._held_until > now:
            found, self.why = self._held_until, self._held_why
        for bucket, cost, why in (
            (self._requests, 1.0, "the limit of requests a minute"),
            (self._tokens, tokens, "the limit of tokens a minute"),
        ):
            if bucket is not None:
                at = bucket.ready_at(now, cost, interactive=interactive)
                if at > found:
                    found, self.why = at, why
        return found

    def sent(self, now: float, tokens: float) -> None:
        """A call of about *tokens* tokens was sent."""
        for bucket, cost in ((self._requests, 1.0), (self._tokens, tokens)):
            if bucket is not None:
                bucket.fill(now)
                bucket.level -= cost

    def corrected(self, tokens: float) -> None:
        """A call took so many tokens more than was thought, or fewer where it is negative."""
        if self._tokens is not None:
            self._tokens.level = min(self._tokens.level - tokens, self._tokens.most)

    def hold(self, until: float, why: str) -> None:
        """The upstream wants no call before *until*."""
        if until > self._held_until:
            self._held_until, self._held_why = until, why

    def held_s(self, now: float) -> float:
        """Seconds until it wants calls again."""
        return max(self._held_until - now, 0.0)

    def seen(self, now: float, limits: LimitsSeen) -> None:
        """The upstream said what is left of its limits."""
        for bucket, left, reset_s in (
            (self._requests, limits.requests_left, limits.requests_reset_s),
            (self._tokens, limits.tokens_left, limits.tokens_reset_s),
        ):
            if left is None:
                continue
            if bucket is not None:
                bucket.level = min(bucket.level, left)
            if left <= 0 and reset_s is not None:
                self.hold(now + reset_s, "the upstream says that its limit is used up")
