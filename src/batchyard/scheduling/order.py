"""Floor 2. The order of the requests inside a Batch: which of those at hand a lane takes next.

Pure. A *lane* works on one dispatch after the other; what follows on a lane finds in the engine what went
before. Results are the same in any order, and are put back into that of the input.

`prefix` is no plain sort: sorted neighbours that start together would each compute what they share. Instead
every lane works through a run of the sorted list from its beginning to its end, so that of those who share a
prefix one computes it and the others find it (depth first over the prefix tree, which is optimal where the
cache holds one path: SGLang's RadixAttention, arxiv.org/abs/2312.07104). A lane without work takes the far
half of another one's run, cut where least is shared, if that saves more than the shared part costs.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)

#: Bytes of a prompt that count as one block, about 16 tokens; less in common is chance.
_BLOCK = 64
#: From so many bytes on a shared prefix is worth keeping its requests together.
_WORTH = 256
#: Where one cache serves every lane, from so many bytes on followers wait until their leader is through.
_WORTH_WAITING = 1_024
#: What a request costs beside its prompt, in bytes of prompt.
_OWN = 256


class OrderName(StrEnum):
    """How the requests of a Batch are ordered."""

    AUTO = "auto"
    FIFO = "fifo"
    PREFIX = "prefix"
    LENGTH = "length"


class Order(Protocol[T]):
    """Requests that wait for a lane."""

    def add(self, items: Sequence[T]) -> None:
        """More of them."""
        ...

    def again(self, items: Iterable[T]) -> None:
        """Some that were taken before; they go first."""
        ...

    def take(self, lane: int, most: int) -> list[T]:
        """Up to *most* for one dispatch of *lane*; empty where it is better to wait for others."""
        ...

    def done(self, item: T) -> bool:
        """*item* was answered; whether that lets lanes go on that were better waiting."""
        ...

    def hurry(self) -> None:
        """From now on nothing is worth waiting for."""
        ...

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[T]: ...


class Fifo(Generic[T]):
    """In the order of the input."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, items: Sequence[T]) -> None:
        self._items.extend(items)

    def again(self, items: Iterable[T]) -> None:
        self._items.extendleft(items)

    def take(self, lane: int, most: int) -> list[T]:  # noqa: ARG002 - all lanes are alike
        items = self._items
        return [items.popleft() for _ in range(min(most, len(items)))]

    def done(self, item: T) -> bool:  # noqa: ARG002
        return False

    def hurry(self) -> None:
        pass


class ByLength(Generic[T]):
    """The longest first: neighbours fit into one batch without padding, and no long one comes last."""

    def __init__(self, size: Callable[[T], int]) -> None:
        self._size = size
        self._again: deque[T] = deque()
        self._sorted: list[T] = []

    def __len__(self) -> int:
        return len(self._sorted) + len(self._again)

    def __iter__(self) -> Iterator[T]:
        return itertools.chain(self._again, self._sorted)

    def add(self, items: Sequence[T]) -> None:
        self._sorted += reversed(items)
        # The shortest stand first; of equal ones the later. Nearly sorted already, which Timsort likes.
        self._sorted.sort(key=self._size)

    def again(self, items: Iterable[T]) -> None:
        self._again.extendleft(items)

    def take(self, lane: int, most: int) -> list[T]:  # noqa: ARG002 - all lanes are alike
        found = [self._again.popleft() for _ in range(min(most, len(self._again)))]
        while len(found) < most and self._sorted:
            found.append(self._sorted.pop())
        return found

    def done(self, item: T) -> bool:  # noqa: ARG002
        return False

    def hurry(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class _Run(Generic[T]):
    """Requests that share prefixes, in the order of their prompts; the next one stands last."""

    #: Prompt, and what is in common with the one that goes before it, in bytes.
    entries: list[tuple[bytes, int, T]]
    owner: int | None = None
    #: Whether one of them has been answered, so that what they share is in the cache.
    landed: bool = False
    began: bool = False

    def own_work(self) -> int:
        """What its requests cost beside what they share."""
        return sum(len(prompt) - shared + _OWN for prompt, shared, _ in self.entries)


@dataclass(slots=True)
class _Last(Generic[T]):
    """What a lane did last."""

    run: _Run[T] | None = None
    prompt: bytes = b""


@dataclass(slots=True)
class Sharing:
    """How much of the prompts could come from a cache of prefixes, in bytes."""

    shared: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        """The part that is shared, 0 to 1."""
        return self.shared / self.total if self.total else 0.0


class ByPrefix(Generic[T]):
    """Runs of requests that share a prefix, each run on one lane.

    Args:
        prompt: what an engine computes from left to right, such as the messages of a chat as bytes.
        one_cache: whether lanes find what others computed; else each lane has a cache of its own.
    """

    def __init__(self, prompt: Callable[[T], bytes], *, one_cache: bool) -> None:
        self._prompt = prompt
        self._one_cache = one_cache
        self._worth = _WORTH_WAITING if one_cache else _WORTH
        self._again: deque[T] = deque()
        #: Requests that share nothing, in the order of the input.
        self._single: deque[T] = deque()
        #: Runs that no lane has begun, in the order of their prompts and the largest first.
        self._runs: list[tuple[bytes, int, _Run[T]]] = []
        self._largest: list[tuple[int, int, _Run[T]]] = []
        self._order = itertools.count()
        self._lanes: dict[int, _Last[T]] = {}
        self._begun: list[_Run[T]] = []
        self._run_of: dict[T, _Run[T]] = {}
        self._count = 0
        self._hurried = False
        #: What the order makes possible.
        self.sharing = Sharing()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        yield from self._again
        for run in (*self._begun, *(one for _, _, one in self._runs)):
            yield from (item for _, _, item in run.entries)
        yield from self._single

    def add(self, items: Sequence[T]) -> None:
        self._count += len(items)
        keyed = sorted(
            ((self._prompt(item), place, item) for place, item in enumerate(items)), key=lambda one: one[:2]
        )
        self.sharing.total += sum(len(prompt) for prompt, _, _ in keyed)
        singles: list[tuple[int, T]] = []
        run: list[tuple[bytes, int, T]] = []
        places: list[int] = []
        before = b""
        for prompt, place, item in keyed:
            alike = len(before) >= self._worth and before[: self._worth] == prompt[: self._worth]
            if not alike:
                self._close_run(run, places, singles)
                run, places = [], []
            run.append((prompt, _in_common(before, prompt) if alike else 0, item))
            places.append(place)
            before = prompt
        self._close_run(run, places, singles)
        self._single.extend(item for _, item in sorted(singles, key=lambda one: one[0]))

    def _close_run(
        self, entries: list[tuple[bytes, int, T]], places: list[int], singles: list[tuple[int, T]]
    ) -> None:
        if len(entries) == 1:
            singles.append((places[0], entries[0][2]))
        elif entries:
            self.sharing.shared += sum(shared for _, shared, _ in entries)
            self._put(_Run(entries[::-1]))

    def _put(self, run: _Run[T]) -> None:
        place = next(self._order)
        entry = (run.entries[-1][0], place, run)
        self._runs.insert(bisect_left(self._runs, entry[:2], key=lambda one: one[:2]), entry)
        heapq.heappush(self._largest, (-run.own_work(), place, run))

    def again(self, items: Iterable[T]) -> None:
        for item in items:
            self._again.appendleft(item)
            self._count += 1

    def hurry(self) -> None:
        self._hurried = True

    def take(self, lane: int, most: int) -> list[T]:
        found = [self._again.popleft() for _ in range(min(most, len(self._again)))]
        last = self._lanes.setdefault(lane, _Last())
        while len(found) < most:
            run = last.run
            if run is None or not run.entries:
                run = self._next_run(lane, last)
                if run is None:
                    break
            room = most - len(found)
            if self._one_cache and not run.landed and not self._hurried:
                # Its leader goes alone.
                room = 1
            for _ in range(min(room, len(run.entries))):
                prompt, _, item = run.entries.pop()
                self._run_of[item] = run
                last.prompt = prompt
                found.append(item)
            if self._one_cache and not run.landed:
                break
        while len(found) < most and self._single and (last.run is None or not last.run.entries):
            found.append(self._single.popleft())
        self._count -= len(found)
        return found

    def done(self, item: T) -> bool:
        run = self._run_of.pop(item, None)
        if run is None:
            return False
        first, run.landed = not run.landed, True
        return first and self._one_cache

    # --- runs -----------------------------------------------------------------------------------

    def _next_run(self, lane: int, last: _Last[T]) -> _Run[T] | None:
        self._begun = [run for run in self._begun if run.entries]
        run = self._near(last.prompt) or self._pop_largest() or self._half_of_another(lane)
        if run is not None:
            run.owner, run.began = lane, True
            last.run = run
            self._begun.append(run)
        return run

    def _near(self, prompt: bytes) -> _Run[T] | None:
        """The run that shares most with what the lane did last, if that is anything."""
        if not prompt or not self._runs:
            return None
        place = bisect_left(self._runs, prompt, key=lambda one: one[0])
        near = self._runs[max(place - 1, 0) : place + 1]
        best = max(near, key=lambda one: _in_common(prompt, one[0]))
        if _in_common(prompt, best[0]) < self._worth:
            return None
        self._runs.remove(best)
        return best[2]

    def _pop_largest(self) -> _Run[T] | None:
        while self._largest:
            _, place, run = heapq.heappop(self._largest)
            if not run.began and run.entries:
                key = (run.entries[-1][0], place)
                del self._runs[bisect_left(self._runs, key, key=lambda one: one[:2])]
                return run
        return None

    def _half_of_another(self, lane: int) -> _Run[T] | None:
        """The far half of a run that is worked on, cut where least is shared."""
        if self._single and not self._hurried:
            return None
        best: tuple[int, _Run[T], int] | None = None
        for run in self._begun:
            if run.owner == lane or len(run.entries) < (1 if run.landed else 2):
                continue
            if self._one_cache and not run.landed and not self._hurried:
                continue
            place = _cut_of(run.entries)
            costs = 0 if self._one_cache else run.entries[place - 1][1]
            gain = sum(len(one) - shared + _OWN for one, shared, _ in run.entries[:place]) - costs
            if (gain > costs or self._hurried) and (best is None or gain > best[0]):
                best = gain, run, place
        if best is None:
            return None
        _, run, place = best
        taken, run.entries = run.entries[:place], run.entries[place:]
        return _Run(taken, landed=run.landed)


def _cut_of(entries: Sequence[tuple[bytes, int, object]]) -> int:
    """How many of the far end to take: near the half, where least is shared by those on both sides.

    What an entry shares is with the one *behind* it in the list, which goes before it.
    """
    if len(entries) == 1:
        return 1
    half = len(entries) / 2
    return min(range(1, len(entries)), key=lambda at: (entries[at - 1][1] // _BLOCK, abs(at - half)))


def _in_common(one: bytes, other: bytes) -> int:
    """How many bytes two prompts have in common at their beginning, in whole blocks."""
    low, high = 0, min(len(one), len(other)) // _BLOCK
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * _BLOCK] == other[: middle * _BLOCK]:
            low = middle
        else:
            high = middle - 1
    return low * _BLOCK
