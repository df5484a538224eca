"""Floor 1. Who waits, and in what order: entries, lines by rank, lanes by key, deadlines by instant.

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
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol

#: How many notes of departed entries `Deadlines` keeps at most, beside as many as there are entries.
_SWEEP = 200


class Ticket(Protocol):
    """What an entry hands its answer to."""

    def done(self) -> bool:
        """Whether nobody waits any more: answered, failed or cancelled."""
        ...


class Entry:
    """One waiting item.

    Made blank, then every attribute set, which takes half the time of a call with arguments; one is made
    for each item.
    """

    __slots__ = ("at", "cost", "due", "hard", "item", "line", "rank", "ticket")

    #: What brings the answer; None once the entry has left the queue.
    ticket: Any
    item: Any
    cost: float
    #: When it arrived.
    at: float
    rank: float
    #: When it wants its answer; infinity where nobody said.
    due: float
    #: Whether `due` is a deadline after which the answer is worthless.
    hard: bool
    #: The line it stands in; None before.
    line: Line | None


#: `blank(Entry)` is an entry with nothing set yet.
blank = object.__new__


class Line:
    """Entries that may ride together, drained by rank.

    Most pushes arrive in rank order (one tier, one constant deadline), so each tier has a run, a plain
    deque; the few that do not go to a heap. Run 0 holds what a draw had to skip.

    Args:
        runs: how many tiers there are; `push` names one, 1 and up.
        key: what the entries have in common.
        tracked: keep arrival order and sums too, for policies that hold and queues that drop the oldest.
    """

    __slots__ = (
        "_heap",
        "_runs",
        "_seq",
        "_tails",
        "_tracked",
        "arrivals",
        "arrivals_sum",
        "cost",
        "dead",
        "key",
        "largest",
        "live",
    )

    def __init__(self, runs: int, key: Hashable = None, *, tracked: bool = False) -> None:
        self.key = key
        self._runs: list[deque[Entry]] = [deque() for _ in range(runs + 1)]
        self._tails = [-math.inf] * (runs + 1)
        self._heap: list[tuple[float, int, Entry]] = []
        self._seq = 0
        #: Entries not yet known to be dead.
        self.live = 0
        self._tracked = tracked
        #: Of those, where tracked: their cost, the largest of any since the line was empty, the sum of
        #: their arrival times, and themselves in order of arrival.
        self.cost = 0.0
        self.largest = 0.0
        self.arrivals_sum = 0.0
        self.arrivals: deque[Entry] = deque()
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
        entry.line = self
        if self._tracked:
            cost = entry.cost
            self.cost += cost
            self.largest = max(self.largest, cost)
            self.arrivals_sum += entry.at
            self.arrivals.append(entry)

    def leave(self, entries: Sequence[Entry]) -> None:
        """Count *entries* out: drawn, cancelled or expired. Their tickets are the caller's to take."""
        self.live -= len(entries)
        if not self.live:
            self._reset()
        elif self._tracked:
            for entry in entries:
                self.cost -= entry.cost
                self.arrivals_sum -= entry.at

    def _reset(self) -> None:
        """Forget everything at once; also what rounding left, and tails that a far deadline pushed out."""
        self.cost = self.largest = self.arrivals_sum = 0.0
        for run in self._runs:
            run.clear()
        self._heap.clear()
        self._tails = [-math.inf] * len(self._tails)
        self.arrivals.clear()

    def drain(self) -> Iterator[Entry]:
        """Take live entries out of the order, first to last; the caller counts each out or puts it back.

        Nothing may be pushed while an iteration is under way.
        """
        while self.live:
            busy = [run for run in self._runs if run]
            if len(busy) == 1 and not self._heap:
                # One tier, in order: nothing to choose.
                run = busy[0]
                while run:
                    entry = run.popleft()
                    ticket = entry.ticket
                    if ticket is None:
                        continue
                    if ticket.done():
                        self._drop(entry)
                        continue
                    yield entry
                return
            first = self._pop(busy)
            if first is None:
                return
            yield first

    def _pop(self, busy: list[deque[Entry]]) -> Entry | None:
        """The first live entry of several runs and the heap."""
        heap = self._heap
        while True:
            source: deque[Entry] | None = None
            best = math.inf
            for run in busy:
                # Strictly smaller: among equals the earlier run, which is the earlier arrival.
                if run and (rank := run[0].rank) < best:
                    best = rank
                    source = run
            if heap and heap[0][0] < best:
                entry = heapq.heappop(heap)[2]
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

    def put_back(self, skipped: list[Entry]) -> None:
        """Return entries that a draw took out and could not carry, in the order they came."""
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
            self.leave((entry,))

    def head_rank(self) -> float:
        """Rank of the first live entry; infinity when nobody waits."""
        return min((entry.rank for entry in self._heads()), default=math.inf)

    def first_due(self) -> float:
        """The earliest due instant among the heads of the runs."""
        return min((entry.due for entry in self._heads()), default=math.inf)

    def oldest(self) -> Entry | None:
        """The longest waiting entry; only where arrivals are tracked."""
        arrivals = self.arrivals
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
        tracked: keep arrival order and sums in each.
    """

    __slots__ = ("_lines", "_order", "_runs", "_seq", "_tracked", "dead", "only")

    def __init__(self, runs: int, *, keyed: bool, tracked: bool) -> None:
        self._runs = runs
        self._tracked = tracked
        #: The one line there is where no key function was given.
        self.only = None if keyed else Line(runs, tracked=tracked)
        self._lines: dict[Hashable, Line] = {}
        #: Lines by the rank of their head at the time of the push; stale ones are put right when met.
        self._order: list[tuple[float, int, Line]] = []
        self._seq = 0
        self.dead = 0

    def __len__(self) -> int:
        """Entries not yet known to be dead."""
        if self.only is not None:
            return self.only.live
        return sum(line.live for line in self._lines.values())

    def __bool__(self) -> bool:
        if self.only is not None:
            return self.only.live > 0
        return any(line.live for line in self._lines.values())

    @property
    def keys(self) -> int:
        """How many lines there are."""
        return 1 if self.only is not None else len(self._lines)

    def push(self, entry: Entry, run: int, key: Hashable = None) -> Line:
        """Add *entry* to the line of *key*."""
        line = self.only
        if line is not None:
            line.push(entry, run)
            return line
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(self._runs, key, tracked=self._tracked)
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
        if self.only is not None:
            return self.only if self.only.live else None
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
        if self.only is not None:
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

    def all_dead(self) -> int:
        """Cancelled entries met so far, those that no draw has told of yet included."""
        lines = self._lines.values() if self.only is None else (self.only,)
        return self.dead + sum(line.dead for line in lines)

    def lines(self) -> list[Line]:
        """All lines with somebody in them."""
        if self.only is not None:
            return [self.only] if self.only.live else []
        return [line for line in self._lines.values() if line.live]

    def entries(self) -> Iterator[Entry]:
        """Every entry that has not left."""
        for line in self.lines():
            yield from line.entries()


class Deadlines:
    """Entries that expire, taken once their `due` has come.

    Most leave the queue before, so an entry is only noted at first, and those that still wait are put in
    order when somebody asks. Notes of entries that left are let go all at once, when they may outnumber
    the rest.
    """

    __slots__ = ("_heap", "_noted", "_seq", "_sweep_at")

    def __init__(self) -> None:
        self._noted: list[Entry] = []
        self._heap: list[tuple[float, int, Entry]] = []
        self._seq = 0
        self._sweep_at = _SWEEP

    def __len__(self) -> int:
        return len(self._noted) + len(self._heap)

    def add(self, entry: Entry) -> None:
        """Watch *entry*."""
        noted = self._noted
        noted.append(entry)
        if len(noted) >= self._sweep_at:
            noted[:] = [entry for entry in noted if entry.ticket is not None]
            # As many additions as there are left pay for the next sweep.
            self._sweep_at = max(_SWEEP, 2 * len(noted))

    def take_due(self, now: float) -> list[Entry]:
        """Take out the entries that still wait and whose instant is not after *now*."""
        self._order()
        due: list[Entry] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            entry = heapq.heappop(heap)[2]
            if _waits(entry):
                due.append(entry)
        return due

    def next_at(self) -> float:
        """The earliest instant that still matters; infinity when none does."""
        self._order()
        heap = self._heap
        while heap and not _waits(heap[0][2]):
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def _order(self) -> None:
        noted = [entry for entry in self._noted if _waits(entry)]
        self._noted.clear()
        heap = self._heap
        if len(heap) > 2 * len(noted) + 1024:
            heap = self._heap = [one for one in heap if _waits(one[2])]
            heapq.heapify(heap)
        for entry in noted:
            self._seq += 1
            heapq.heappush(heap, (entry.due, self._seq, entry))


def _waits(entry: Entry) -> bool:
    return entry.ticket is not None and not entry.ticket.done()
