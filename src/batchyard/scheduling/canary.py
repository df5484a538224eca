"""Floor 2. The canary: run a few requests first, and stop while little is spent when they fail.

Pure: it counts what it is told and answers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CanaryPolicy:
    """Stop when more than `max_failed_share` of the first `first` requests fail."""

    #: Between 0 and 1.
    max_failed_share: float
    first: int = 100


class Canary:
    """Watches the first requests of a run.

    Until they are all finished, no other request may start; it says stop as soon as the limit can no
    longer be kept.
    """

    def __init__(self, policy: CanaryPolicy, total: int) -> None:
        self.policy = policy
        self.first = min(policy.first, total)
        self.started = 0
        self.finished = 0
        self.failed = 0

    def __repr__(self) -> str:
        return f"<Canary [{self.finished} of {self.first} finished, {self.failed} failed]>"

    @property
    def decided(self) -> bool:
        """Whether the first requests are all finished."""
        return self.finished >= self.first

    @property
    def may_start(self) -> int | None:
        """How many more requests may start now; None when any number."""
        return None if self.decided else max(self.first - self.started, 0)

    @property
    def tripped(self) -> bool:
        """Whether too many have failed, counted over the first requests only."""
        return self.failed > self.policy.max_failed_share * self.first

    def start(self, count: int) -> None:
        """Note that *count* requests have started."""
        self.started += count

    def put_back(self, count: int = 1) -> None:
        """Note that *count* started requests have no result, or will not run."""
        self.started -= count

    def finish(self, *, succeeded: bool) -> None:
        """Note that a request has its result."""
        if not self.decided:
            self.finished += 1
            self.failed += not succeeded
