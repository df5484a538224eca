"""Floor 6. How a Batch is worked on, how far that has come, and why it stopped."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from batchyard.scheduling.breaker import BreakerPolicy
from batchyard.scheduling.canary import CanaryPolicy
from batchyard.scheduling.order import OrderName
from batchyard.scheduling.retry import RetryPolicy
from batchyard.types import Request, Usage

ORDER_WINDOW = 4_096


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """How a Batch is worked on; none of it changes what the results are."""

    #: Dispatches in flight at once.
    concurrency: int
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    canary: CanaryPolicy | None = None
    #: Called once the first requests have finished and few enough failed.
    on_canary_passed: Callable[[], None] | None = None
    #: Unix seconds; what is unfinished then becomes a `batch_expired` line.
    deadline_at: float | None = None
    lease_s: float = 30.0
    #: How often leases are prolonged and progress is noted in the store.
    beat_s: float = 10.0
    #: Results reach the disk within this time; they are with the kernel at once.
    sync_every_s: float = 0.1
    #: What requests that have not run are to be before they are dispatched.
    amend: Callable[[Request], Request] | None = None
    order: OrderName = OrderName.AUTO
    #: Requests that are at hand at once where their order matters.
    order_window: int = ORDER_WINDOW
    #: Whether requests that are alike are asked once: True for all, None for those whose answer is the same
    #: by rights, False for none.
    dedupe: bool | None = None
    #: Single requests that were cancelled, by chunk number and place.
    withdrawn: AbstractSet[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a worker ended before every request had a result. Everything finished is kept."""

    #: `interrupted`, `paused`, `amended`, `storage_full`, `canary`, `unreachable`, `input_changed`,
    #: `engine_failed` or `store_failed`.
    reason: str
    #: One full sentence for the user.
    message: str


@dataclass(slots=True)
class Progress:
    """Live figures of a worker; read by whoever draws them, written by the worker only."""

    succeeded: int = 0
    failed: int = 0
    failed_by_kind: dict[str, int] = field(default_factory=dict)
    #: Cancelled or expired before they ran; not counted as failed.
    never_ran: int = 0
    usage_input: int = 0
    usage_output: int = 0
    usage_cached: int = 0
    running: int = 0
    retries: int = 0
    #: Requests that got the answer of another one like them.
    deduped: int = 0

    @property
    def finished(self) -> int:
        """Requests that have a line, whatever it says."""
        return self.succeeded + self.failed + self.never_ran

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(self.usage_input, self.usage_output, self.usage_cached)
