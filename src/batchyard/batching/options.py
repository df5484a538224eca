"""Floor 1. The options of a batcher, checked once.

Knows no loop and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

from batchyard.batching.draw import Limits
from batchyard.batching.policy import Policy, make_policy
from batchyard.errors import UsageError
from batchyard.events import EventBus

Overflow = Literal["block", "reject", "drop_oldest"]
OnError = Literal["isolate", "all"]
PolicyChoice = Literal["greedy", "threshold", "tcp_ack", "deadline", "adaptive"]
#: Where a plain (not async) function runs: threads of the batcher's own, the loop's thread, or yours.
Where = Literal["thread", "inline"]

#: Latency classes and the seconds within which each wants its answer.
DEFAULT_TIERS: Mapping[str, float] = {"interactive": 1.0, "flex": 10.0, "batch": 60.0}


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options; `Batcher` documents each."""

    limits: Limits
    policy: Policy
    max_wait_s: float
    max_parallel: int
    max_queue: int | None
    overflow: Overflow
    cost: Callable[[Any], float] | None
    key: Callable[[Any], Hashable] | None
    on_error: OnError
    executor: Executor | Where
    tiers: Mapping[str, float]
    priority_step_s: float
    events: EventBus | None
    name: str
    #: Whether the policy ever holds a batch while a slot is free.
    holds: bool
    #: Whether nothing but `max_items` decides: the queue then is two plain deques.
    plain: bool


def make_options(
    *,
    max_items: int | None,
    max_cost: float | None,
    cost: Callable[[Any], float] | None,
    padded: bool,
    lookahead: int,
    max_wait_s: float,
    policy: PolicyChoice | Policy,
    goal_s: float | None,
    max_parallel: int,
    max_queue: int | None,
    overflow: Overflow,
    allowed_sizes: Sequence[int] | None,
    key: Callable[[Any], Hashable] | None,
    on_error: OnError,
    executor: Executor | Where,
    tiers: Mapping[str, float] | None,
    priority_step_s: float,
    events: EventBus | None,
    name: str,
) -> Options:
    """Check the options against each other.

    Raises:
        UsageError: one of them makes no sense, or two contradict each other.
    """
    for label, value in (("max_items", max_items), ("max_parallel", max_parallel), ("max_queue", max_queue)):
        if value is not None and value < 1:
            raise UsageError(f"{label}={value} leaves no room for any item. Give 1 or more.")
    if max_wait_s < 0 or math.isnan(max_wait_s):
        raise UsageError(f"max_wait_s={max_wait_s} is not a time to wait. Give 0 or more seconds.")
    if max_cost is not None and cost is None:
        raise UsageError("max_cost needs a cost function. Give cost, such as cost=len.")
    if max_cost is not None and not max_cost > 0:
        raise UsageError(f"max_cost={max_cost} leaves no room for any item. Give a number above zero.")
    if overflow not in {"block", "reject", "drop_oldest"}:
        raise UsageError(f'overflow="{overflow}" is not known. Use "block", "reject" or "drop_oldest".')
    if on_error not in {"isolate", "all"}:
        raise UsageError(f'on_error="{on_error}" is not known. Use "isolate" or "all".')
    if isinstance(executor, str) and executor not in {"thread", "inline"}:
        raise UsageError(f'executor="{executor}" is not known. Use "thread", "inline" or an Executor.')
    if not priority_step_s > 0:
        raise UsageError(
            f"priority_step_s={priority_step_s} gives priority no meaning. Give seconds above zero."
        )
    sizes = tuple(sorted(set(allowed_sizes))) if allowed_sizes else ()
    if sizes and sizes[0] < 1:
        raise UsageError(f"allowed_sizes holds {sizes[0]}. Sizes are 1 or more.")
    limit = 64 if max_items is None else max_items
    if sizes:
        if max_items is not None and max_items > sizes[-1]:
            raise UsageError(
                f"max_items={max_items} is larger than the largest of allowed_sizes, {sizes[-1]}. "
                "Raise one or lower the other."
            )
        limit = sizes[-1] if max_items is None else max_items
    chosen = make_policy(policy, goal_s)
    holds = max_wait_s > 0 or chosen.holds
    return Options(
        limits=Limits(limit, math.inf if max_cost is None else max_cost, padded, sizes, lookahead),
        policy=chosen,
        max_wait_s=max_wait_s,
        max_parallel=max_parallel,
        max_queue=max_queue,
        overflow=overflow,
        cost=cost,
        key=key,
        on_error=on_error,
        executor=executor,
        tiers=DEFAULT_TIERS if tiers is None else dict(tiers),
        priority_step_s=priority_step_s,
        events=events,
        name=name,
        holds=holds,
        plain=not holds and cost is None and key is None and max_queue is None,
    )
