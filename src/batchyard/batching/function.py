"""Floor 1, asyncio shell. Calls the user's batch function and hands each answer to its caller.

Knows nothing of queues, policies or when to call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from batchyard.batching.draw import Limits
from batchyard.batching.stats import Tally
from batchyard.errors import DispatchFailed

Future = asyncio.Future[Any]
Invoke = Callable[[list[Any]], Awaitable[Any]]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling *function* makes a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - asks whether the call is async, not whether there is one
    )


class BatchFunction:
    """The user's function, wherever it runs, with failed dispatches taken apart."""

    def __init__(
        self,
        function: Callable[[list[Any]], Any],
        *,
        where: Executor | str,
        threads: int,
        limits: Limits,
        isolate: bool,
        name: str,
        tally: Tally,
    ) -> None:
        self._function = function
        self._where = where
        self._threads = threads
        self._limits = limits
        self._isolate = isolate
        self._name = name
        self._tally = tally
        self._own_threads: ThreadPoolExecutor | None = None
        #: Calls the function once; the await brings whatever it returned.
        self.invoke: Invoke
        if is_async(function):
            self.invoke = function
        elif where == "inline":
            self.invoke = self._inline
        else:
            self.invoke = self._in_executor

    async def _inline(self, items: list[Any]) -> Any:
        answer = self._function(items)
        return await answer if inspect.isawaitable(answer) else answer

    async def _in_executor(self, items: list[Any]) -> Any:
        where = self._where
        if isinstance(where, str):
            where = self._own_threads = self._own_threads or ThreadPoolExecutor(
                self._threads, thread_name_prefix=f"batchyard-{self._name}"
            )
        answer = await asyncio.get_running_loop().run_in_executor(where, self._function, items)
        return await answer if inspect.isawaitable(answer) else answer

    def forget_threads(self) -> None:
        """After a fork: the child has none of the parent's threads."""
        self._own_threads = None

    def close(self) -> None:
        """End the threads of our own, once they are idle."""
        if self._own_threads is not None:
            self._own_threads.shutdown(wait=False)
            self._own_threads = None

    def padded(self, items: list[Any], filler: Any) -> list[Any]:
        """*items*, repeated with *filler* up to the next allowed size; a new list where that adds any."""
        missing = self._limits.size_of(len(items)) - len(items)
        return items + [filler] * missing if missing else items

    def deliver(self, futures: list[Future], answer: Any) -> None:
        """Give each future its part of *answer*; futures that are done already are left alone.

        Raises:
            DispatchFailed: *answer* is no list of the right length. No future was touched.
        """
        results = answer if type(answer) is list else self._as_list(answer)
        n = len(futures)
        if len(results) != n:
            size = self._limits.size_of(n)
            if len(results) != size:
                raise DispatchFailed(
                    f"The batch function of {self._name} got {size} items and returned {len(results)} "
                    "results. It must return one result for each item, in the same order; an exception "
                    "object in an item's place fails that item alone."
                )
            del results[n:]
        failed = cancelled = 0
        for future, result in zip(futures, results, strict=True):
            if future.done():
                cancelled += 1
            elif isinstance(result, BaseException):
                failed += 1
                fail(future, result)
            else:
                future.set_result(result)
        tally = self._tally
        tally.running -= n
        tally.completed += n - failed - cancelled
        tally.failed += failed
        tally.cancelled += cancelled

    def _as_list(self, answer: Any) -> list[Any]:
        if isinstance(answer, str | bytes | Mapping | AbstractSet) or not hasattr(answer, "__iter__"):
            raise DispatchFailed(
                f"The batch function of {self._name} returned {_a(answer)}. "
                "It must return a list with one result for each item, in the same order."
            )
        return list(answer)

    def fail_all(self, futures: list[Future], error: BaseException) -> None:
        """Fail every future that still waits."""
        self._tally.running -= len(futures)
        for future in futures:
            if future.done():
                self._tally.cancelled += 1
            else:
                self._tally.failed += 1
                fail(future, error)

    async def settle_failure(self, futures: list[Future], items: list[Any], error: BaseException) -> None:
        """Decide the futures of a dispatch that raised *error*, so that none is left waiting.

        With isolation the items are halved until those that fail are alone; others get their answers.
        When log2(n) + 3 further calls brought no single success, it is the function that fails, not an
        item, and all of the rest get the error of their last call.
        """
        if not self._isolate or isinstance(error, DispatchFailed) or not isinstance(error, Exception):
            self.fail_all(futures, error)
            return
        patience = len(items).bit_length() + 3
        succeeded = False
        # Groups still to decide, the next one last.
        groups = [_Group(futures, items, error, known=True)]
        while groups:
            group = groups.pop()
            self._drop_cancelled(group)
            if not group.futures:
                continue
            if not group.known:
                if not succeeded and patience <= 0:
                    self.fail_all(group.futures, group.cause)
                    continue
                patience -= 1
                self._tally.retries += 1
                try:
                    self.deliver(group.futures, await self.invoke(self.padded(group.items, group.items[-1])))
                except DispatchFailed as wrong:
                    self.fail_all(group.futures, wrong)
                    continue
                except Exception as again:  # noqa: BLE001 - whatever the function raises belongs to its items
                    group.cause = again
                except BaseException:
                    # Cancelled or interrupted: nobody may be left waiting.
                    for left in (*groups, group):
                        self.fail_all(left.futures, left.cause)
                    raise
                else:
                    succeeded = True
                    other = group.other
                    if other is not None and len(other.futures) > 1:
                        # One half is clean, so the other holds what failed: it is split without a call.
                        other.known = True
                    continue
            if len(group.futures) == 1:
                self.fail_all(group.futures, group.cause)
                continue
            groups += group.halves()

    def _drop_cancelled(self, group: _Group) -> None:
        live = [i for i, future in enumerate(group.futures) if not future.done()]
        gone = len(group.futures) - len(live)
        if gone:
            self._tally.running -= gone
            self._tally.cancelled += gone
            group.futures = [group.futures[i] for i in live]
            group.items = [group.items[i] for i in live]
            # Without them it may no longer fail.
            group.known = False


class _Group:
    """Items of a failed dispatch; `known` says that as a whole they are bound to fail again."""

    __slots__ = ("cause", "futures", "items", "known", "other")

    def __init__(
        self, futures: list[Future], items: list[Any], cause: BaseException, *, known: bool = False
    ) -> None:
        self.futures = futures
        self.items = items
        self.cause = cause
        self.known = known
        self.other: _Group | None = None

    def halves(self) -> tuple[_Group, _Group]:
        """Both halves, the first one last; running it may settle what is known of the other."""
        middle = len(self.futures) // 2
        first = _Group(self.futures[:middle], self.items[:middle], self.cause)
        second = _Group(self.futures[middle:], self.items[middle:], self.cause)
        first.other = second
        return second, first


def fail(future: Future, error: BaseException) -> None:
    """Set *error* on *future*, wrapped where a future cannot carry it or a caller would misread it."""
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        # A CancelledError would look like the caller's own cancellation, a SystemExit would end its task.
        wrapped = DispatchFailed(
            f"The batch function ended with {type(error).__name__}, so this item has no answer."
        )
        wrapped.__cause__ = error
        error = wrapped
    future.set_exception(error)


def _a(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
