"""Floor 1, asyncio shell. The door for threads: many knocks, one wake-up of the loop.

Knows nothing of how a batch is formed. A thread puts a letter into a deque, which is atomic, and wakes
the loop only when no wake-up is under way yet.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from batchyard.batching.dispatcher import Dispatcher
from batchyard.batching.function import Future
from batchyard.errors import WrongLoop

Answer = concurrent.futures.Future[Any]


class _Letter:
    __slots__ = ("answer", "future", "item", "options")

    def __init__(self, item: Any, options: tuple[Any, ...]) -> None:
        self.item = item
        self.options = options
        self.answer: Answer = concurrent.futures.Future()
        self.future: Future | None = None

    def arrived(self, future: Future) -> None:
        """Hand the answer over; the thread may have given up meanwhile."""
        answer = self.answer
        if future.cancelled():
            answer.cancel()
        elif answer.set_running_or_notify_cancel():
            error = future.exception()
            if error is None:
                answer.set_result(future.result())
            else:
                answer.set_exception(error)


class Door:
    """Where threads hand items to a dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._letters: deque[_Letter] = deque()
        self._woken = False

    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = self._dispatcher.loop
        if loop is None or loop.is_closed() or not loop.is_running():
            loop = background_loop()
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            return loop
        if here is loop or self._dispatcher.loop is None:
            raise WrongLoop(
                f"call() would block the event loop that {self._dispatcher.options.name} answers on. "
                "Use await in coroutines; call() and call_map() are for threads."
            )
        return loop

    def _post(self, letters: Iterable[_Letter], loop: asyncio.AbstractEventLoop) -> None:
        self._letters.extend(letters)
        if not self._woken:
            self._woken = True
            loop.call_soon_threadsafe(self._open)

    def _open(self) -> None:
        # Lowered first: a letter that comes after the last look finds the flag down and knocks again.
        self._woken = False
        letters = self._letters
        submit = self._dispatcher.submit
        while letters:
            letter = letters.popleft()
            if letter.answer.cancelled():
                continue
            try:
                letter.future = submit(letter.item, *letter.options)
            except Exception as error:  # noqa: BLE001 - raised again where the thread waits
                letter.answer.set_exception(error)
            else:
                letter.future.add_done_callback(letter.arrived)

    def call(self, item: Any, *options: Any) -> Any:
        """Submit *item* and block until its answer is there."""
        loop = self._loop()
        letter = _Letter(item, options)
        self._post([letter], loop)
        try:
            return letter.answer.result()
        except BaseException:
            self._give_up([letter], loop)
            raise

    def call_map(self, items: Iterable[Any], *options: Any) -> list[Any]:
        """Submit all *items* with one wake-up and block until all answers are there."""
        loop = self._loop()
        letters = [_Letter(item, options) for item in items]
        self._post(letters, loop)
        try:
            return [letter.answer.result() for letter in letters]
        except BaseException:
            self._give_up(letters, loop)
            raise

    def _give_up(self, letters: list[_Letter], loop: asyncio.AbstractEventLoop) -> None:
        """The thread was interrupted, or one of many failed: cancel what is open."""
        open_letters = [letter for letter in letters if letter.answer.cancel()]
        if open_letters and not loop.is_closed():

            def cancel() -> None:
                for letter in open_letters:
                    if letter.future is not None:
                        letter.future.cancel()

            loop.call_soon_threadsafe(cancel)

    def close(self, *, drain: bool) -> None:
        """Close the dispatcher from a thread, and wait until it is closed."""
        if self._dispatcher.loop is None:
            asyncio.run(self._dispatcher.close(drain=drain))
            return
        loop = self._loop()
        asyncio.run_coroutine_threadsafe(self._dispatcher.close(drain=drain), loop).result()


_lock = threading.Lock()
_background: asyncio.AbstractEventLoop | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """The one loop for batchers that only threads use, running in a daemon thread."""
    global _background  # noqa: PLW0603 - one for the process, made when first needed
    with _lock:
        if _background is None or _background.is_closed():
            _background = asyncio.new_event_loop()
            threading.Thread(target=_background.run_forever, name="batchyard-loop", daemon=True).start()
        return _background


def _no_loop_in_child() -> None:
    global _background, _lock  # noqa: PLW0603 - as above
    _lock = threading.Lock()
    _background = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_no_loop_in_child)
