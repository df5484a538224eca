"""Floor 2. The breaker: when an upstream cannot be reached at all, hold every dispatch and probe.

A request that could not be sent has lost nothing, so it keeps its attempts; what is decided here is when
the whole run tries again, and when it gives up. Pure: `now` is any clock's seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """How patiently an unreachable upstream is awaited."""

    #: Pause after the first failure; doubled with each failed probe.
    base_s: float = 0.5
    cap_s: float = 15.0
    #: Give up when nothing was reached for this long.
    patience_s: float = 120.0


class Breaker:
    """Closed while the upstream is reached; open while it is not, with one probe after each pause."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self.policy = policy
        self._since: float | None = None
        self._next_try_at = 0.0
        self._probes = 0
        self._probing = False

    def __repr__(self) -> str:
        if self._since is None:
            return "<Breaker closed>"
        return f"<Breaker open since {self._since:.6g} s, {self._probes} probes failed>"

    @property
    def troubled(self) -> bool:
        """Whether the upstream was last found unreachable."""
        return self._since is not None

    def may_dispatch(self, now: float) -> bool:
        """Whether a dispatch may start; while open, a yes is the one probe."""
        if self._since is None:
            return True
        if self._probing or now < self._next_try_at:
            return False
        self._probing = True
        return True

    def next_try_at(self, now: float) -> float:
        """When to ask again."""
        if self._since is None:
            return now
        # A probe under way ends in `reached` or `unreachable`; the pause is only a guard.
        return now + self.policy.cap_s if self._probing else max(self._next_try_at, now)

    def unreachable(self, now: float) -> None:
        """A dispatch found no connection."""
        if self._since is None:
            self._since = now
            self._probes = 0
        elif not self._probing:
            # One of the dispatches that were under way when the first failed: no news.
            return
        self._probing = False
        pause_s = min(self.policy.base_s * 2**self._probes, self.policy.cap_s)
        self._probes = min(self._probes + 1, 32)
        self._next_try_at = now + pause_s

    def reached(self) -> None:
        """Any answer or fault with an answer arrived: the upstream is there."""
        self._since = None
        self._probing = False

    def gives_up(self, now: float) -> bool:
        """Whether it has been unreachable for longer than the policy waits."""
        return self._since is not None and now - self._since >= self.policy.patience_s
