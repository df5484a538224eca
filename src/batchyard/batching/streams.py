"""Floor 1, asyncio shell. Many items through a dispatcher, a bounded number at a time.

Knows nothing of how items are queued or dispatched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

from batchyard.batching.dispatcher import Dispatcher
from batchyard.batching.function import Future


async def in_order(
    dispatcher: Dispatcher, items: Iterable[Any] | AsyncIterable[Any], ahead: int, how: tuple[Any, ...]
) -> AsyncIterator[Any]:
    """Answers in the order of *items*; at most *ahead* are open at once, submitted as *how* says."""
    window: deque[Future] = deque()
    try:
        async for item in _as_async(items):
            window.append(dispatcher.submit(item, *how))
            if dispatcher.crowded:
                await dispatcher.room()
            while window and (len(window) >= ahead or window[0].done()):
                yield await window.popleft()
        while window:
            yield await window.popleft()
    finally:
        for future in window:
            future.cancel()


async def as_completed(
    dispatcher: Dispatcher, items: Iterable[Any] | AsyncIterable[Any], ahead: int, how: tuple[Any, ...]
) -> AsyncIterator[tuple[int, Any]]:
    """Each answer as it comes, with the place of its item; at most *ahead* are open at once."""
    source = _as_async(items)
    place: dict[Future, int] = {}
    finished: deque[Future] = deque()
    loop = asyncio.get_running_loop()
    bell: asyncio.Future[None] = loop.create_future()

    def arrived(future: Future) -> None:
        finished.append(future)
        if not bell.done():
            bell.set_result(None)

    try:
        index = 0
        more = True
        while more or place:
            while more and len(place) < ahead:
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    more = False
                    break
                future = dispatcher.submit(item, *how)
                place[future] = index
                future.add_done_callback(arrived)
                index += 1
                if dispatcher.crowded:
                    await dispatcher.room()
                if finished:
                    break
            if not finished and place:
                bell = loop.create_future()
                await bell
            while finished:
                future = finished.popleft()
                yield place.pop(future), future.result()
    finally:
        for future in place:
            future.remove_done_callback(arrived)
            future.cancel()


async def _as_async(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
