"""Batch functions that tell when they are called, for tests of the batcher."""

import asyncio


class Gate:
    """A batch function that tells when it is called and returns when it is let."""

    def __init__(self):
        self.batches = []
        self._open = asyncio.Event()
        self._called = asyncio.Event()

    async def __call__(self, items):
        self.batches.append(list(items))
        self._called.set()
        await self._open.wait()
        return [("answer", item) for item in items]

    async def called(self):
        await self._called.wait()
        self._called.clear()

    def open(self):
        self._open.set()


async def double(items):
    return [2 * item for item in items]


async def settle():
    for _ in range(6):
        await asyncio.sleep(0)
