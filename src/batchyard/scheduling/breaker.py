"""Floor 2. The breaker: an upstream that cannot be reached at all holds the run, not its requests.

Pure: it is told what happened and when. A connection that was never made sent nothing, so it says
nothing about the request and costs none of its attempts. After a few in a row the breaker opens: all is
held, and single probes with growing pauses find out when the upstream is back.

    closed ── threshold unreachable in a row ──▶ open ── pause over ──▶ half-open (one probe)
       ▲                                           ▲                        │
       └───────────── reached ─────────────────────┼──── unreachable ───────┤
                                                   └────────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """What the breaker lets through: everything, nothing, or one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When to hold a run, how often to probe, and when to stop it so that it can be resumed."""

    #: Unreachable faults in a row that open the breaker.
    threshold: int = 3
    #: The first pause between probes; each failed probe doubles it.
    probe_after_s: float = 0.5
    #: No pause between probes is longer.
    probe_cap_s: float = 15.0
    #: A probe without a word for this long no longer keeps the next one back: it may have connected and
    #: be slow to answer, or never have been sent.
    probe_lease_s: float = 10.0
    #: After so long without reaching the upstream the run should stop. Servers that load a large
    #: model take minutes to come back.
    patience_s: float = 300.0


class Breaker:
    """Watches whether an upstream can be reached. Times are seconds of one monotonic clock."""

    def __init__(self, policy: BreakerPolicy | None = None) -> None:
        self.policy = policy or BreakerPolicy()
        self.state = BreakerState.CLOSED
        #: Unreachable faults since the upstream was last reached.
        self.failures = 0
        self._since = 0.0
        self._probes = 0
        self._next_at = 0.0

    def __repr__(self) -> str:
        return f"<Breaker {self.state} [{self.failures} unreachable in a row, {self._probes} probes failed]>"

    @property
    def troubled(self) -> bool:
        """Whether the last thing known is that the upstream could not be reached."""
        return self.failures > 0

    def may_dispatch(self, now: float) -> bool:
        """Whether one dispatch may go out now. In trouble, True hands out the one probe."""
        if self.state is BreakerState.CLOSED:
            return True
        if now < self._next_at:
            return False
        self.state = BreakerState.HALF_OPEN
        self._next_at = now + self.policy.probe_lease_s
        return True

    def next_try_at(self, now: float) -> float:
        """When `may_dispatch` is worth asking again; *now* where it is at once."""
        return now if self.state is BreakerState.CLOSED else max(now, self._next_at)

    def unreachable(self, now: float) -> None:
        """Note that a dispatch could not connect."""
        if not self.failures:
            self._since = now
        self.failures += 1
        if self.state is BreakerState.OPEN:
            # One of those that were under way when it opened; it is no probe.
            return
        if self.state is BreakerState.CLOSED:
            if self.failures < self.policy.threshold:
                return
            self._probes = 0
        else:
            self._probes += 1
        self.state = BreakerState.OPEN
        pause_s = self.policy.probe_after_s * 2.0 ** min(self._probes, 60)
        self._next_at = now + min(self.policy.probe_cap_s, pause_s)

    def reached(self) -> None:
        """Note that the upstream was reached, whatever it said."""
        self.state = BreakerState.CLOSED
        self.failures = 0
        self._probes = 0

    def gives_up(self, now: float) -> bool:
        """Whether patience is over and the run should stop, to be resumed later."""
        return self.state is not BreakerState.CLOSED and now - self._since >= self.policy.patience_s
