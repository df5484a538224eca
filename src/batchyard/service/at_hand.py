"""Floor 6. The requests that a worker has at hand: in which order they go, and which are asked only once.

Of requests that are alike to the byte, and whose answer is the same by rights, one goes and the others, its
*twins*, get its answer. Knows no store and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from batchyard.scheduling.order import ByLength, ByPrefix, Fifo, Order, OrderName, Sharing
from batchyard.service.chunk_run import WorkItem
from batchyard.types import Capabilities, Endpoint, PrefixCache, Request

_ABSENT = msgspec.Raw()


class _Body(msgspec.Struct):
    """What decides about order and likeness; everything else is skipped over."""

    tools: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    temperature: Any = None


_read = msgspec.json.Decoder(_Body).decode


def prompt_of(request: Request) -> bytes:
    """What an engine computes from left to right: two requests that begin alike here do so in its cache.

    Empty for what no such cache serves.
    """
    if request.endpoint is Endpoint.EMBEDDINGS:
        return b""
    try:
        body = _read(request.body)
    except (msgspec.MsgspecError, RecursionError):
        return b""
    parts = (body.tools, body.instructions, body.messages, body.prompt, body.input)
    return b"\0".join((str(request.model).encode(errors="surrogatepass"), *map(bytes, parts)))


def is_deterministic(request: Request) -> bool:
    """Whether the same request has the same answer by rights: embeddings, and temperature 0."""
    if request.endpoint is Endpoint.EMBEDDINGS:
        return True
    if b'"temperature"' not in request.body:
        return False
    try:
        return bool(_read(request.body).temperature == 0)
    except (msgspec.MsgspecError, RecursionError):
        return False


def make_order(name: OrderName, engine: Capabilities) -> Order[WorkItem]:
    """The order *name* for an engine; `auto` takes the one that serves it."""
    if name is OrderName.AUTO:
        if engine.padded:
            name = OrderName.LENGTH
        else:
            name = OrderName.FIFO if engine.prefix_cache is None else OrderName.PREFIX
    match name:
        case OrderName.PREFIX:
            one_cache = engine.prefix_cache is not PrefixCache.SLOT
            return ByPrefix(lambda item: prompt_of(item.request), one_cache=one_cache)
        case OrderName.LENGTH:
            return ByLength(lambda item: len(item.request.body))
        case _:
            return Fifo()


class AtHand:
    """What may be dispatched next.

    Args:
        order: in which order.
        may_share: whether a request may have the answer of another one like it.
    """

    def __init__(self, order: Order[WorkItem], may_share: Callable[[Request], bool] | None) -> None:
        self._order = order
        self._may_share = may_share
        self._leaders: dict[tuple[str, str | None, bytes], WorkItem] = {}
        self._twins: dict[WorkItem, list[WorkItem]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[WorkItem]:
        return iter(self._order)

    @property
    def reorders(self) -> bool:
        """Whether it helps to have many at hand."""
        return not isinstance(self._order, Fifo)

    @property
    def sharing(self) -> Sharing | None:
        """How much of the prompts could come from a cache, where that decides the order."""
        return self._order.sharing if isinstance(self._order, ByPrefix) else None

    def add(self, items: Sequence[WorkItem]) -> None:
        """More of them, in the order of the input."""
        if self._may_share is not None:
            items = [item for item in items if not self._is_twin(item, self._may_share)]
        self._order.add(items)

    def _is_twin(self, item: WorkItem, may_share: Callable[[Request], bool]) -> bool:
        request = item.request
        if not may_share(request):
            return False
        leader = self._leaders.setdefault((request.endpoint, request.model, request.body), item)
        if leader is item:
            return False
        self._twins.setdefault(leader, []).append(item)
        return True

    def again(self, items: Sequence[WorkItem]) -> None:
        """Some that were taken before; they go first."""
        self._order.again(items)

    def take(self, lane: int, most: int) -> list[WorkItem]:
        """Up to *most* for the next dispatch of *lane*; empty where there are none, or it should wait."""
        found = self._order.take(lane, most)
        if any(item.run.lost for item in found):
            for item in found:
                if item.run.lost:
                    self._order.again(self.twins_of(item))
            return [item for item in found if not item.run.lost] or self.take(lane, most)
        return found

    def twins_of(self, item: WorkItem) -> list[WorkItem]:
        """Those that wait for the answer of *item*; from now on they wait no more."""
        if not self._leaders:
            return []
        request = item.request
        key = (request.endpoint, request.model, request.body)
        if self._leaders.get(key) is item:
            del self._leaders[key]
        return self._twins.pop(item, [])

    def part_twins(self) -> None:
        """Requests change: from now on each goes for itself."""
        self._leaders.clear()
        for twins in self._twins.values():
            self._order.again(twins)
        self._twins.clear()

    def done(self, item: WorkItem) -> bool:
        """*item* has its result; whether lanes should look again."""
        return self._order.done(item)

    def hurry(self) -> None:
        """Nothing is worth waiting for any more."""
        self._order.hurry()
