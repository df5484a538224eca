"""Floor 1. Who waits, and in what order: entries, lines by rank, lanes by key, alarms by instant.

Pure: knows no clock and no loop. A future is anything that can say `done()`; a cancelled one is skipped
when its turn comes, so cancelling costs nothing here.

Order is one number, the *rank*: the instant by which the entry wants its answer, less a head start for
priority. Smaller goes first, equal ranks in order of arrival. A rank never changes, and new arrivals
rank later by the clock, so every entry reaches the front: nothing starves.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Ticket(Protocol):
    """What an entry hands its answer to."""

    def done(self) -> bool:
        """Whether nobody waits any more: answered, failed or cancelled."""
        ...


class Entry:
    """One waiting item. `ticket` turns None once the entry has left the queue."""

    __slots__ = ("at", "cost", "due", "hard", "item", "line", "rank", "ticket")

    def __init__(  # noqa: PLR0917 - positional, as one is made for each item
        self,
        ticket: Any,
        item: Any,
        cost: float,
        at: float,
        rank: float,
        due: float,
        hard: bool,  # noqa: FBT001 - as above
    ) -> None:
        self.ticket: Any = ticket
        self.item = item
        self.cost = cost
        self.at = at
        self.rank = rank
        #: When it wants its answer; infinity where nobody said.
        self.due = due
        #: Whether `due` is a deadline after which the answer is worthless.
        self.hard = hard
        #: The line it stands in, once it does.
        self.line: Line | None = None


class Line:
    """Entries that may ride together, popped by rank.

    Most pushes arrive in rank order (one tier, one constant deadline), so each tier has a run, a plain
    deque; the few that do not go to a heap. Run 0 holds what a draw had to skip.
    """

    __slots__ = (
        "_heap",
        "_runs",
        "_seq",
        "_tails",
        "arrivals",
        "arrivals_sum",
        "cost",
        "dead",
        "key",
        "largest",
        "live",
    )

    def __init__(self, runs: int, key: Hashable = None, *, track_arrivals: bool = False) -> None:
        self.key = key
        self._runs: list[deque[Entry]] = [deque() for _ in range(runs + 1)]
        self._tails = [-math.inf] * (runs + 1)
        self._heap: list[tuple[float, int, Entry]] = []
        self._seq = 0
        #: Entries not yet known to be dead, their cost, their largest cost and their arrival times.
        self.live = 0
        self.cost = 0.0
        self.largest = 0.0
        self.arrivals_sum = 0.0
        self.arrivals: deque[Entry] | None = deque() if track_arrivals else None
        #: Cancelled entries met and dropped so far.
        self.dead = 0

    def push(self, entry: Entry, run: int) -> None:
        """Add *entry*, whose tier has *run* (1 and up)."""
        rank = entry.rank
        if rank >= self._tails[run]:
            self._tails[run] = rank
            self._runs[run].append(entry)
        else:
            self._seq += 1
            heapq.heappush(self._heap, (rank, self._seq, entry))
        self.live += 1
        cost = entry.cost
        self.cost += cost
        self.largest = max(self.largest, cost)
        self.arrivals_sum += entry.at
        entry.line = self
        if self.arrivals is not None:
            self.arrivals.append(entry)

    def leave(self, entry: Entry) -> None:
        """Count *entry* out: drawn, cancelled or expired. Its ticket is the caller's to take."""
        self.live -= 1
        if self.live:
            self.cost -= entry.cost
            self.arrivals_sum -= entry.at
        else:
            self._reset()

    def _reset(self) -> None:
        """Forget everything at once; also what rounding left, and tails that a far deadline pushed out."""
        self.cost = self.largest = self.arrivals_sum = 0.0
        for run in self._runs:
            run.clear()
        self._heap.clear()
        self._tails = [-math.inf] * len(self._tails)
        if self.arrivals is not None:
            self.arrivals.clear()

    def pop(self) -> Entry | None:
        """Take the first live entry out of the order; the caller counts it out or puts it back."""
        while self.live:
            source: deque[Entry] | None = None
            best = math.inf
            for run in self._runs:
                # Strictly smaller: among equals the earlier run, which is the earlier arrival.
                if run and (rank := run[0].rank) < best:
                    best = rank
                    source = run
            if self._heap and self._heap[0][0] < best:
                entry = heapq.heappop(self._heap)[2]
            elif source is not None:
                entry = source.popleft()
            else:
                return None
            ticket = entry.ticket
            if ticket is None:
                continue
            if ticket.done():
                self._drop(entry)
                continue
            return entry
        return None

    def put_back(self, skipped: list[Entry]) -> None:
        """Return entries that a draw popped and could not take, in the order they were popped."""
        self._runs[0].extendleft(reversed(skipped))

    def _heads(self) -> Iterator[Entry]:
        for run in self._runs:
            while run and (run[0].ticket is None or run[0].ticket.done()):
                self._drop(run.popleft())
            if run:
                yield run[0]
        heap = self._heap
        while heap and (heap[0][2].ticket is None or heap[0][2].ticket.done()):
            self._drop(heapq.heappop(heap)[2])
        if heap:
            yield heap[0][2]

    def _drop(self, entry: Entry) -> None:
        if entry.ticket is not None:
            entry.ticket = None
            self.dead += 1
            self.leave(entry)

    def head_rank(self) -> float:
        """Rank of the first live entry; infinity when nobody waits."""
        return min((entry.rank for entry in self._heads()), default=math.inf)

    def first_due(self) -> float:
        """The earliest due instant among the heads of the runs."""
        return min((entry.due for entry in self._heads()), default=math.inf)

    def oldest(self) -> Entry | None:
        """The longest waiting entry; only where arrivals are tracked."""
        arrivals = self.arrivals
        if arrivals is None:
            return None
        while arrivals and (arrivals[0].ticket is None or arrivals[0].ticket.done()):
            arrivals.popleft()
        return arrivals[0] if arrivals else None

    def oldest_at(self) -> float:
        """When the longest waiting entry arrived; infinity where nobody waits or nobody tracks."""
        entry = self.oldest()
        return math.inf if entry is None else entry.at

    def entries(self) -> Iterator[Entry]:
        """Every entry that has not left, in no particular order."""
        for run in self._runs:
            yield from (entry for entry in run if entry.ticket is not None)
        yield from (entry for _, _, entry in self._heap if entry.ticket is not None)


class Lanes:
    """One `Line` for each key; the line whose head ranks first is served first.

    Args:
        runs: how many tiers there are; `push` names one, 1 and up.
        keyed: whether there are several lines at all.
        track_arrivals: keep arrival order too, for policies that hold.
    """

    __slots__ = ("_lines", "_only", "_order", "_runs", "_seq", "_track", "dead")

    def __init__(self, runs: int, *, keyed: bool, track_arrivals: bool) -> None:
        self._runs = runs
        self._track = track_arrivals
        self._only = None if keyed else Line(runs, track_arrivals=track_arrivals)
        self._lines: dict[Hashable, Line] = {}
        #: Lines by the rank of their head at the time of the push; stale ones are put right when met.
        self._order: list[tuple[float, int, Line]] = []
        self._seq = 0
        self.dead = 0

    def __len__(self) -> int:
        """Entries not yet known to be dead."""
        if self._only is not None:
            return self._only.live
        return sum(line.live for line in self._lines.values())

    def __bool__(self) -> bool:
        if self._only is not None:
            return self._only.live > 0
        return any(line.live for line in self._lines.values())

    @property
    def keys(self) -> int:
        """How many lines there are."""
        return 1 if self._only is not None else len(self._lines)

    @property
    def only(self) -> Line | None:
        """The one line there is where no key function was given."""
        return self._only

    def push(self, entry: Entry, run: int, key: Hashable = None) -> Line:
        """Add *entry* to the line of *key*."""
        line = self._only
        if line is not None:
            line.push(entry, run)
            return line
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(self._runs, key, track_arrivals=self._track)
            self._promise(line, entry.rank)
        elif entry.rank < line.head_rank():
            self._promise(line, entry.rank)
        line.push(entry, run)
        return line

    def _promise(self, line: Line, rank: float) -> None:
        self._seq += 1
        heapq.heappush(self._order, (rank, self._seq, line))

    def first(self) -> Line | None:
        """The line to serve next."""
        if self._only is not None:
            return self._only if self._only.live else None
        while self._order:
            rank, _, line = self._order[0]
            actual = line.head_rank()
            if actual == rank:
                return line
            heapq.heappop(self._order)
            if self._lines.get(line.key) is not line:
                continue
            if actual == math.inf:
                self._forget(line)
            elif actual > rank:
                self._promise(line, actual)
        return None

    def settle(self, line: Line) -> None:
        """After a draw from *line*: place it by its new head, or let it go."""
        if self._only is not None:
            self.dead += line.dead
            line.dead = 0
            return
        rank = line.head_rank()
        if rank == math.inf:
            self._forget(line)
        else:
            self.dead += line.dead
            line.dead = 0
            self._promise(line, rank)

    def _forget(self, line: Line) -> None:
        self.dead += line.dead
        line.dead = 0
        self._lines.pop(line.key, None)

    def lines(self) -> list[Line]:
        """All lines with somebody in them."""
        if self._only is not None:
            return [self._only] if self._only.live else []
        return [line for line in self._lines.values() if line.live]

    def entries(self) -> Iterator[Entry]:
        """Every entry that has not left."""
        for line in self.lines():
            yield from line.entries()


class Alarm(Generic[T]):
    """Things with an instant each, taken once it has come.

    Most come in order of their instant and lie in two plain deques; the others in a heap. Things that
    need no alarm any more are let go as they are met, and all at once when they outnumber the rest.
    """

    __slots__ = ("_ats", "_heap", "_needed", "_seq", "_sweep_at", "_things")

    def __init__(self, needed: Callable[[T], bool]) -> None:
        self._needed = needed
        self._ats: deque[float] = deque()
        self._things: deque[T] = deque()
        self._heap: list[tuple[float, int, T]] = []
        self._seq = 0
        self._sweep_at = 1024

    def __len__(self) -> int:
        return len(self._ats) + len(self._heap)

    def add(self, at: float, thing: T) -> None:
        """Set *thing*'s alarm to *at*."""
        ats = self._ats
        needed = self._needed
        while ats and not needed(self._things[0]):
            ats.popleft()
            self._things.popleft()
        if not ats or at >= ats[-1]:
            ats.append(at)
            self._things.append(thing)
        else:
            self._seq += 1
            heapq.heappush(self._heap, (at, self._seq, thing))
        if len(ats) + len(self._heap) >= self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        kept = [(at, thing) for at, thing in zip(self._ats, self._things, strict=True) if self._needed(thing)]
        self._ats = deque(at for at, _ in kept)
        self._things = deque(thing for _, thing in kept)
        self._heap = [one for one in self._heap if self._needed(one[2])]
        heapq.heapify(self._heap)
        # Doubling what is left pays for the next sweep with the additions until then.
        self._sweep_at = max(1024, 2 * len(self))

    def next_at(self) -> float:
        """The earliest instant that still matters; infinity when none does."""
        while self._ats and not self._needed(self._things[0]):
            self._ats.popleft()
            self._things.popleft()
        while self._heap and not self._needed(self._heap[0][2]):
            heapq.heappop(self._heap)
        first = self._ats[0] if self._ats else math.inf
        return min(first, self._heap[0][0]) if self._heap else first

    def take_due(self, now: float) -> list[T]:
        """Take out every thing whose instant is not after *now*, needed ones only."""
        due: list[T] = []
        while self._ats and self._ats[0] <= now:
            self._ats.popleft()
            due.append(self._things.popleft())
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return [thing for thing in due if self._needed(thing)]
