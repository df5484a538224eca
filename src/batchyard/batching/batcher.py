"""Floor 1, asyncio shell. `Batcher`: the handle that users hold.

Knows nothing of how the queue is kept or drawn from; it turns the ways of asking (one, many, a stream, a
thread) into submits.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import Executor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

from batchyard.batching.dispatcher import Dispatcher
from batchyard.batching.latency import LatencyCurve
from batchyard.batching.options import OnError, Overflow, PolicyChoice, Where, make_options
from batchyard.batching.policy import Policy
from batchyard.batching.stats import BatcherStats
from batchyard.batching.streams import as_completed, in_order
from batchyard.batching.threads import Door
from batchyard.errors import UsageError
from batchyard.events import EventBus

In = TypeVar("In")
Out = TypeVar("Out")


def _call(
    item: Any,
    /,
    *,
    tier: str | None = None,
    deadline_s: float | None = None,
    priority: float = 0,
    timeout_s: float | None = None,
) -> asyncio.Future[Any]:
    """Queue an item at once; await the result for its answer, or cancel it.

    Args:
        item: what the function gets in its list.
        tier: latency class, one of `tiers`.
        deadline_s: seconds from now after which the answer is worthless. An item that is still in the
            queue then, or that no dispatch could answer in time, fails with `DeadlineExceeded`.
        priority: points of head start, `priority_step_s` each; may be negative.
        timeout_s: seconds from now after which the caller gives up, wherever the item is then.

    Raises:
        BatcherClosed: the batcher takes no more items.
        WrongLoop: it is at work on another event loop.
    """
    raise NotImplementedError  # stands for `Dispatcher.submit` where signatures and docs are read


class _CallSignature:
    """`inspect.signature` of an instance, which a slot cannot tell; nothing on the class itself."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is None:
            raise AttributeError("__signature__")
        return _SIGNATURE


_SIGNATURE = inspect.signature(_call)


class Batcher(Generic[In, Out]):
    """Combines calls of a short time into one call of *function*.

    `await batcher(item)` queues the item and brings its answer. A dispatch is drawn the moment a slot is
    free, never before, so batches grow exactly while the function is busy, and an idle function answers
    at once. Cancelling the await takes the item out; its neighbours notice nothing.

    Args:
        function: from a list of items to a list of answers, one each, in order. An exception object in
            an item's place fails that item alone. Async functions run on the loop; others in a thread
            (see *executor*).
        max_items: the most items in a dispatch; 64 unless *allowed_sizes* says more.
        max_cost: the most that a dispatch may cost; needs *cost*.
        cost: what one item costs (tokens, bytes); called once, in `submit`.
        padded: a dispatch costs `max(cost) * n`, not `sum(cost)`. Of those that wait, the ones nearest in
            cost to the first ride with it, and nobody whose padding would take longer than another
            dispatch, by what was learnt of the function.
        lookahead: how many items that do not fit the budget are looked past for one that does.
        max_wait_s: how long a batch that is not full may be held while a slot is free.
        policy: `greedy`, `threshold`, `tcp_ack`, `deadline`, `adaptive`, or an object like those in
            `batchyard.batching.policy`.
        goal_s: the latency goal of `adaptive`.
        max_parallel: dispatches at once.
        max_queue: the most items in the queue; beyond it *overflow* acts.
        overflow: `block` (callers wait for room, and `map` and `stream` stop reading), `reject` (the new
            item gets `QueueFull`) or `drop_oldest` (the oldest gets it).
        allowed_sizes: sizes that the function takes; a dispatch is filled up by repeating its cheapest
            item (its last, without *cost*), and the answers to those repeats are thrown away.
        key: only items with equal keys share a dispatch.
        on_error: `isolate` halves a dispatch that raised until the items at fault fail alone (the
            function runs again on the others); `all` fails the dispatch as it is.
        executor: where a plain function runs: `thread` (threads of its own, one for each parallel
            dispatch), `inline` (on the loop, for functions of microseconds), or an `Executor`.
        tiers: latency classes, name to the seconds within which each wants its answer; the first is for
            items without a tier. Order in the queue is by arrival plus these seconds, so that lower
            tiers wait longer but never for ever.
        priority_step_s: the head start that one point of *priority* gives.
        events: where `dispatch.started` and `dispatch.finished` go.
        name: for messages, events and threads.

    Raises:
        UsageError: the options contradict each other.
    """

    if TYPE_CHECKING:
        __slots__ = ("__weakref__", "_dispatcher", "_door", "_owner")
    else:
        # `__call__` and `submit` are slots that hold the dispatcher's own method, so that calling the
        # batcher is calling that: one more Python frame would be a tenth of what a call costs.
        __slots__ = {  # noqa: RUF023 - by what they are
            "__weakref__": None,
            "_dispatcher": None,
            "_door": None,
            "_owner": None,
            "__call__": _call.__doc__,
            "submit": _call.__doc__,
        }
        __signature__ = _CallSignature()

    @overload
    def __init__(
        self,
        function: Callable[[list[In]], Awaitable[Sequence[Out | Exception]]],
        *,
        max_items: int | None = ...,
        max_cost: float | None = ...,
        cost: Callable[[In], float] | None = ...,
        padded: bool = ...,
        lookahead: int = ...,
        max_wait_s: float = ...,
        policy: PolicyChoice | Policy = ...,
        goal_s: float | None = ...,
        max_parallel: int = ...,
        max_queue: int | None = ...,
        overflow: Overflow = ...,
        allowed_sizes: Sequence[int] | None = ...,
        key: Callable[[In], Hashable] | None = ...,
        on_error: OnError = ...,
        executor: Executor | Where = ...,
        tiers: Mapping[str, float] | None = ...,
        priority_step_s: float = ...,
        events: EventBus | None = ...,
        name: str | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        function: Callable[[list[In]], Sequence[Out | Exception]],
        *,
        max_items: int | None = ...,
        max_cost: float | None = ...,
        cost: Callable[[In], float] | None = ...,
        padded: bool = ...,
        lookahead: int = ...,
        max_wait_s: float = ...,
        policy: PolicyChoice | Policy = ...,
        goal_s: float | None = ...,
        max_parallel: int = ...,
        max_queue: int | None = ...,
        overflow: Overflow = ...,
        allowed_sizes: Sequence[int] | None = ...,
        key: Callable[[In], Hashable] | None = ...,
        on_error: OnError = ...,
        executor: Executor | Where = ...,
        tiers: Mapping[str, float] | None = ...,
        priority_step_s: float = ...,
        events: EventBus | None = ...,
        name: str | None = ...,
    ) -> None: ...
    def __init__(
        self,
        function: Callable[[list[In]], Any],
        *,
        max_items: int | None = None,
        max_cost: float | None = None,
        cost: Callable[[In], float] | None = None,
        padded: bool = False,
        lookahead: int = 32,
        max_wait_s: float = 0.0,
        policy: PolicyChoice | Policy = "greedy",
        goal_s: float | None = None,
        max_parallel: int = 1,
        max_queue: int | None = None,
        overflow: Overflow = "block",
        allowed_sizes: Sequence[int] | None = None,
        key: Callable[[In], Hashable] | None = None,
        on_error: OnError = "isolate",
        executor: Executor | Where = "thread",
        tiers: Mapping[str, float] | None = None,
        priority_step_s: float = 1.0,
        events: EventBus | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(function):
            raise UsageError(f"Batcher needs a function from a list to a list, not {function!r}.")
        options = make_options(
            max_items=max_items,
            max_cost=max_cost,
            cost=cost,
            padded=padded,
            lookahead=lookahead,
            max_wait_s=max_wait_s,
            policy=policy,
            goal_s=goal_s,
            max_parallel=max_parallel,
            max_queue=max_queue,
            overflow=overflow,
            allowed_sizes=allowed_sizes,
            key=key,
            on_error=on_error,
            executor=executor,
            tiers=tiers,
            priority_step_s=priority_step_s,
            events=events,
            name=name or getattr(function, "__qualname__", None) or type(function).__name__,
        )
        self._take_up(Dispatcher(function, options), None)

    def _take_up(self, dispatcher: Dispatcher, owner: object) -> None:
        self._dispatcher = dispatcher
        submit = dispatcher.submit if dispatcher.options.plain else dispatcher.enter
        self.__call__ = self.submit = submit  # type: ignore[method-assign]
        self._door: Door | None = None
        self._owner = owner

    @classmethod
    def _of(cls, dispatcher: Dispatcher, owner: object) -> Self:
        """One more handle on *dispatcher*, holding *owner* as a bound method holds its object."""
        handle = cls.__new__(cls)
        handle._take_up(dispatcher, owner)  # noqa: SLF001 - our own, before __init__ would run
        return handle

    def __repr__(self) -> str:
        stats = self.stats
        state = "closed, " if self._dispatcher.closed else ""
        options = self._dispatcher.options
        return (
            f"<Batcher {options.name} [{state}{stats.waiting} waiting, {stats.running} running | "
            f"{stats.completed} completed, {stats.failed} failed, {stats.cancelled} cancelled, "
            f"{stats.expired} expired, {stats.dropped} dropped | {stats.dispatches} dispatches]>"
        )

    # -- one item ----------------------------------------------------------------------------------

    if TYPE_CHECKING:

        def __call__(
            self,
            item: In,
            /,
            *,
            tier: str | None = None,
            deadline_s: float | None = None,
            priority: float = 0,
            timeout_s: float | None = None,
        ) -> Awaitable[Out]: ...

        def submit(
            self,
            item: In,
            /,
            *,
            tier: str | None = None,
            deadline_s: float | None = None,
            priority: float = 0,
            timeout_s: float | None = None,
        ) -> asyncio.Future[Out]: ...

    # -- many items --------------------------------------------------------------------------------

    async def map(
        self,
        items: Iterable[In] | AsyncIterable[In],
        /,
        *,
        tier: str | None = None,
        deadline_s: float | None = None,
        priority: float = 0,
        timeout_s: float | None = None,
    ) -> list[Out]:
        """Answers to all *items*, in their order.

        The first error is raised as soon as its turn comes, and the items that are still open are
        cancelled. Where the queue is bounded and blocks, reading *items* stops while it is full.
        """
        dispatcher = self._dispatcher
        submit = dispatcher.submit
        futures: list[asyncio.Future[Out]] = []
        try:
            if isinstance(items, AsyncIterable):
                async for item in items:
                    futures.append(submit(item, tier, deadline_s, priority, timeout_s))
                    if dispatcher.crowded:
                        await dispatcher.room()
            else:
                for item in items:
                    futures.append(submit(item, tier, deadline_s, priority, timeout_s))
                    if dispatcher.crowded:
                        await dispatcher.room()
            return [await future for future in futures]
        except BaseException:
            for future in futures:
                if not future.cancel() and not future.cancelled():
                    # Its error is not the one raised; asking for it keeps the loop from warning.
                    future.exception()
            raise

    @overload
    def stream(
        self,
        items: Iterable[In] | AsyncIterable[In],
        /,
        *,
        ordered: Literal[True] = ...,
        ahead: int | None = ...,
        tier: str | None = ...,
        deadline_s: float | None = ...,
        priority: float = ...,
        timeout_s: float | None = ...,
    ) -> AsyncIterator[Out]: ...
    @overload
    def stream(
        self,
        items: Iterable[In] | AsyncIterable[In],
        /,
        *,
        ordered: Literal[False],
        ahead: int | None = ...,
        tier: str | None = ...,
        deadline_s: float | None = ...,
        priority: float = ...,
        timeout_s: float | None = ...,
    ) -> AsyncIterator[tuple[int, Out]]: ...
    def stream(
        self,
        items: Iterable[In] | AsyncIterable[In],
        /,
        *,
        ordered: bool = True,
        ahead: int | None = None,
        tier: str | None = None,
        deadline_s: float | None = None,
        priority: float = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Any]:
        """Answers as an async iterator: in order, or as `(index, answer)` in the order they come.

        *items* is read only as far as *ahead* reaches, by default enough to fill every slot twice, so it
        may be endless. With *ordered* false each answer comes as soon as it is there, with the place of
        its item.
        """
        options = self._dispatcher.options
        if ahead is None:
            ahead = 2 * options.limits.max_items * options.max_parallel
        how = (tier, deadline_s, priority, timeout_s)
        stream = in_order if ordered else as_completed
        return stream(self._dispatcher, items, ahead, how)

    # -- from threads ------------------------------------------------------------------------------

    def call(
        self,
        item: In,
        /,
        *,
        tier: str | None = None,
        deadline_s: float | None = None,
        priority: float = 0,
        timeout_s: float | None = None,
    ) -> Out:
        """The answer to *item*, for threads; blocks until it is there.

        Where no event loop works for this batcher yet, one is started in a thread of its own.

        Raises:
            WrongLoop: called on the batcher's own loop, which it would block for ever.
        """
        answer: Out = self._threads().call(item, tier, deadline_s, priority, timeout_s)
        return answer

    def call_map(
        self,
        items: Iterable[In],
        /,
        *,
        tier: str | None = None,
        deadline_s: float | None = None,
        priority: float = 0,
        timeout_s: float | None = None,
    ) -> list[Out]:
        """Answers to all *items*, in their order, for threads; blocks until all are there."""
        return self._threads().call_map(items, tier, deadline_s, priority, timeout_s)

    def _threads(self) -> Door:
        if self._door is None:
            self._door = Door(self._dispatcher)
        return self._door

    # -- state -------------------------------------------------------------------------------------

    @property
    def stats(self) -> BatcherStats:
        """What was counted so far, as a value."""
        return self._dispatcher.stats()

    @property
    def curve(self) -> LatencyCurve:
        """How long a dispatch takes by its size and cost, as learnt so far."""
        return self._dispatcher.fit.curve

    # -- ends --------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Return once nothing waits and nothing runs; nothing is held back until then."""
        await self._dispatcher.drain()

    async def close(self, *, drain: bool = True) -> None:
        """Take no more items, answer those that wait, and end. Safe to call twice.

        With *drain* false, items in the queue fail with `BatcherClosed`; a dispatch that runs is finished.
        """
        await self._dispatcher.close(drain=drain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._dispatcher.close(drain=kind is None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads().close(drain=kind is None)
