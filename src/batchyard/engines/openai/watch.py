"""Floor 3. Ends calls that take too long, without a timer for each.

All calls have the same limit, so the oldest is due first, and one timer for it serves them all.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from batchyard.types import Fault, FaultKind


class CallEnded(Exception):  # noqa: N818 - names what happened
    """A call was ended from here, not by the upstream."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.message)


class CallWatch:
    """Ends calls that take longer than *timeout_s*, with one timer for all; used as `with watch:`.

    The body of the `with` runs in the current task. Ending it cancels the task, and leaving turns that
    cancellation into `CallEnded`, unless somebody else cancelled the task too.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        #: When each call is due, oldest first.
        self._due: dict[asyncio.Task[Any], float] = {}
        self._ended: dict[asyncio.Task[Any], Fault] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        """Calls under way."""
        return len(self._due)

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        due = self._due[task] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(due, self._look, loop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._due.pop(task, None) is None:
            fault = self._ended.pop(task)
            if task.uncancel() == 0 and kind is asyncio.CancelledError:
                raise CallEnded(fault) from None

    def end_all(self, fault: Fault) -> None:
        """End every call with *fault*."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in list(self._due):
            self._end(task, fault)

    def _end(self, task: asyncio.Task[Any], fault: Fault) -> None:
        del self._due[task]
        self._ended[task] = fault
        task.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what is due and come back for the next."""
        now = loop.time()
        self._timer = None
        fault = None
        for task, due in list(self._due.items()):
            if due > now:
                self._timer = loop.call_at(due, self._look, loop)
                return
            fault = fault or Fault(FaultKind.TIMEOUT, f"No answer came within {self._timeout_s:g} s.")
            self._end(task, fault)
