"""Floor 9. An asyncio loop whose time jumps: hours of waiting pass in microseconds, in true order.

While anything is ready the loop runs it; when all wait for timers, time jumps to the nearest one. Sockets
and threads still work: a wait without timers is a real one.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.BaseSelector):
    """Asks the real selector, and instead of waiting moves the clock."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = self._real.select(timeout if timeout is None else 0)
        if not found and timeout is not None and timeout > 0:
            self.now += timeout
        return found

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop on virtual time, which starts at 0. Use `run` for one coroutine."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now

    @classmethod
    def run(cls, main: Coroutine[Any, Any, T]) -> T:
        """Run *main* to its end on a loop of its own."""
        with asyncio.Runner(loop_factory=cls) as runner:
            return runner.run(main)
