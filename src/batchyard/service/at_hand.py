"""Floor 6. The requests that a worker has at hand: in which order they go, and which are asked only once.

Of requests that are alike to the byte, and whose answer is the same by rights, one goes and the others, its
*twins*, get its answer. Knows no store and no engine.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from batchyard.scheduling.order import ByLength, ByPrefix, Fifo, Order, OrderName, Sharing
from batchyard.service.chunk_run import WorkItem
from batchyard.types import Answer, Capabilities, Endpoint, PrefixCache, Request

_ABSENT = msgspec.Raw()
_ANSWER_BYTES = 32 << 20


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


class _Answers:
    """The latest answers to requests that may come again, up to so many bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()

    def get(self, key: bytes) -> Answer | None:
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: Answer) -> None:
        if key not in self._answers and len(answer.body) <= self._limit_bytes // 8:
            self._answers[key] = answer
            self._bytes += len(answer.body)
            while self._bytes > self._limit_bytes:
                self._bytes -= len(self._answers.popitem(last=False)[1].body)


class AtHand:
    """What may be dispatched next.

    Args:
        order: in which order.
        may_share: whether a request may have the answer of another one like it.
        answer_bytes: how much of answers is kept for requests that come later.
    """

    def __init__(
        self,
        order: Order[WorkItem],
        may_share: Callable[[Request], bool] | None,
        answer_bytes: int = _ANSWER_BYTES,
    ) -> None:
        self._order = order
        self._may_share = may_share
        self._answers = _Answers(answer_bytes)
        #: Who asks for all that are alike, and those who wait for the answer.
        self._leaders: dict[bytes, WorkItem] = {}
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

    def add(self, items: Sequence[WorkItem]) -> list[tuple[WorkItem, Answer]]:
        """More of them, in the order of the input; returns those whose answer is known, with it."""
        if self._may_share is None:
            self._order.add(items)
            return []
        known: list[tuple[WorkItem, Answer]] = []
        wanted: list[WorkItem] = []
        for item in items:
            if not self._may_share(item.request):
                wanted.append(item)
                continue
            key = _key_of(item.request)
            if (answer := self._answers.get(key)) is not None:
                known.append((item, answer))
            elif (leader := self._leaders.setdefault(key, item)) is item:
                wanted.append(item)
            else:
                self._twins.setdefault(leader, []).append(item)
        self._order.add(wanted)
        return known

    def again(self, items: Iterable[WorkItem]) -> None:
        """Some that were taken before; they go first."""
        self._order.again(items)

    def take(self, lane: int, most: int) -> list[WorkItem]:
        """Up to *most* for the next dispatch of *lane*; empty where there are none, or it should wait."""
        while found := self._order.take(lane, most):
            ours = [item for item in found if not item.run.lost]
            for item in found:
                if item.run.lost:
                    self.unanswered(item)
            if ours:
                return ours
        return []

    def answered(self, item: WorkItem, answer: Answer) -> list[WorkItem]:
        """*item* has this answer; returns those that wait for it and now have it too."""
        key = self._led_by(item)
        if key is None:
            return []
        del self._leaders[key]
        if answer.succeeded:
            self._answers.put(key, answer)
        return self._twins.pop(item, [])

    def unanswered(self, item: WorkItem) -> None:
        """*item* will have no answer; of those who waited for it the next one asks for all."""
        key = self._led_by(item)
        if key is None:
            return
        del self._leaders[key]
        if twins := self._twins.pop(item, None):
            first, *rest = twins
            self._leaders[key] = first
            if rest:
                self._twins[first] = rest
            self._order.again([first])

    def _led_by(self, item: WorkItem) -> bytes | None:
        if not self._leaders:
            return None
        key = _key_of(item.request)
        return key if self._leaders.get(key) is item else None

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


def _key_of(request: Request) -> bytes:
    """Two requests that are alike to the byte have the same."""
    head = f"{request.endpoint}\0{request.model}\0".encode(errors="surrogatepass")
    return hashlib.blake2b(head + request.body, digest_size=16).digest()
