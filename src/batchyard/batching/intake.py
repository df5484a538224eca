"""Floor 1, asyncio shell. How items come in: the loop, the queue, its bound, and who leaves early.

`submit` is a plain function that appends and returns a bare future; whatever an option adds is paid for
only by those who use it.

Knows nothing of when a dispatch is drawn, of slots, of calling the function, of threads.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from batchyard.batching.function import Future, fail
from batchyard.batching.latency import LatencyFit
from batchyard.batching.options import Options
from batchyard.batching.policy import Deadline, Greedy
from batchyard.batching.queue import Deadlines, Entry, Lanes, Line, blank
from batchyard.batching.stats import Tally
from batchyard.errors import (
    AnswerTimeout,
    BatcherClosed,
    DeadlineExceeded,
    ItemTooLarge,
    QueueFull,
    UsageError,
    WrongLoop,
)

_running_loop = asyncio.get_running_loop


def _time_out(future: Future) -> None:
    if not future.done():
        future.set_exception(AnswerTimeout("The item's timeout_s passed without an answer."))


def _no_cost(cost: object) -> str:
    return f"The cost function gave {cost!r} for an item. It must give a number, 0 or more."


class Intake(ABC):
    """The queue of one batcher as those see it who put items in, take them out, or count them."""

    # Slots, as a class with so many attributes would else look each of them up in a dictionary.
    __slots__ = (
        "_alarm",
        "_alarm_at",
        "_asks_deadlines",
        "_ats",
        "_bell",
        "_closing",
        "_crowd",
        "_deadlines",
        "_drainers",
        "_drawn_at",
        "_entry_of",
        "_exact",
        "_futures",
        "_hold",
        "_items",
        "_lanes",
        "_learns",
        "_lobby",
        "_loop",
        "_max_item_cost",
        "_new_future",
        "_now",
        "_plain",
        "_push_at",
        "_push_future",
        "_push_item",
        "_rate",
        "_tier_of",
        "fit",
        "options",
        "tally",
    )

    def __init__(self, options: Options) -> None:
        self.options = options
        self.tally = Tally()
        self.fit = LatencyFit()
        #: The run and the target in seconds of each tier; items without one have a run of their own and
        #: the target of the first tier.
        self._tier_of: dict[str | None, tuple[int, float]] = {
            tier: (run, target_s) for run, (tier, target_s) in enumerate(options.tiers.items(), start=1)
        }
        self._tier_of[None] = (len(options.tiers) + 1, next(iter(options.tiers.values()), 0.0))
        #: The most that an item may cost, by itself and filled up to the smallest allowed size.
        self._max_item_cost = options.limits.max_cost / options.limits.size_of(1)
        self._asks_deadlines = isinstance(options.policy, Deadline)
        #: Whether the policy reads the curve and hears of dispatches; greedy needs neither.
        self._learns = not isinstance(options.policy, Greedy)
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Not None while an arrival should wake somebody.
        self._bell: Any = None
        self._forget()

    @abstractmethod
    def _ring(self) -> None:
        """Wake whoever draws next; asked only while there is a bell."""

    @abstractmethod
    def _bind_slots(self) -> None:
        """A loop was adopted: start with all slots free."""

    @abstractmethod
    def _consider(self, line: Line) -> None:
        """*line* grew under a policy that may hold it: ring, or set the timer."""

    @abstractmethod
    def _arm(self, at: float) -> None:
        """Have the alarm for deadlines ring at *at* or before."""

    @abstractmethod
    def _wake_drainers(self) -> None:
        """The queue may have become empty."""

    # -- the loop ----------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Start from nothing: at birth, on a new loop, in a forked child."""
        self._futures: deque[Future] = deque()
        self._items: deque[Any] = deque()
        self._ats: deque[float] = deque()
        self._push_future = self._futures.append
        self._push_item = self._items.append
        self._push_at = self._ats.append
        self._lanes: Lanes | None = None if self.options.plain else self._new_lanes()
        self._plain = self._lanes is None and not self._closing
        #: Entries by future where a cancelled one must be counted out at once: bounded or holding queues.
        self._exact = self.options.holds or self.options.max_queue is not None
        self._entry_of: dict[Future, Entry] = {}
        self._lobby: deque[tuple[Entry, int, Any]] = deque()
        self._deadlines = Deadlines()
        self._alarm: asyncio.TimerHandle | None = None
        #: When the alarm rings; infinity while none is set.
        self._alarm_at = math.inf
        self._hold: asyncio.TimerHandle | None = None
        #: Those who wait for the lobby to become empty before they bring more.
        self._crowd: list[Future] = []
        #: Those who wait for the queue to become empty; while there are any, no policy holds.
        self._drainers: list[Future] = []
        self._rate = (0.0, 0.0)
        self._drawn_at = 0.0
        self.tally.running = 0

    def _new_lanes(self) -> Lanes:
        options = self.options
        track = options.holds or options.overflow == "drop_oldest"
        return Lanes(len(options.tiers) + 1, keyed=options.key is not None, tracked=track)

    def bind(self) -> None:
        """Make the running loop ours.

        Raises:
            WrongLoop: another loop is at work on this batcher, or no loop runs.
        """
        try:
            loop = _running_loop()
        except RuntimeError:
            raise WrongLoop(
                f"{self.options.name} was called without a running event loop. "
                "Await it in a coroutine, or use call() or call_map() from a thread."
            ) from None
        old = self._loop
        if (
            old is not None
            and not old.is_closed()
            and (old.is_running() or self.tally.running or self.in_queue())
        ):
            raise WrongLoop(
                f"{self.options.name} is at work on another event loop. Make one batcher for each loop, "
                "or use call() or call_map() to reach this one from another thread."
            )
        if old is not None:
            self.tally.cancelled += self.in_queue() + self.tally.running
            self._forget()
        self._loop = loop
        self._new_future = loop.create_future
        plain_time = getattr(type(loop), "time", None) is asyncio.BaseEventLoop.time
        #: The loop's clock, without the method around it where that only asks the monotonic clock.
        self._now: Callable[[], float] = time.monotonic if plain_time else loop.time
        self._bind_slots()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that this batcher works on, once it has one."""
        return self._loop

    # -- arrivals ----------------------------------------------------------------------------------

    def submit(
        self,
        item: Any,
        tier: str | None = None,
        deadline_s: float | None = None,
        priority: float = 0,
        timeout_s: float | None = None,
    ) -> Future:
        """Queue *item*; the future brings its answer, or the reason why there is none."""
        if _running_loop() is not self._loop:
            self.bind()
        future = self._new_future()
        if self._plain and tier is None and deadline_s is None and priority == 0 and timeout_s is None:
            self._push_future(future)
            self._push_item(item)
            self._push_at(self._now())
            if self._bell is not None:
                self._ring()
            return future
        return self.enter(item, tier, deadline_s, priority, timeout_s, future)

    def enter(  # noqa: PLR0917 - `submit`, and its future
        self,
        item: Any,
        tier: str | None = None,
        deadline_s: float | None = None,
        priority: float = 0,
        timeout_s: float | None = None,
        future: Future | None = None,
    ) -> Future:
        """What `submit` does where an item has more to it than being one; *future* is its own."""
        if future is None:
            if _running_loop() is not self._loop:
                self.bind()
            future = self._new_future()
        if self._closing:
            raise BatcherClosed(f"{self.options.name} is closed and takes no more items.")
        options = self.options
        try:
            run, target_s = self._tier_of[tier]
        except (KeyError, TypeError):
            known = ", ".join(options.tiers)
            raise UsageError(f'tier="{tier}" is not known to {options.name}. Use one of: {known}.') from None
        lanes = self._lanes
        if lanes is None:
            lanes = self._upgrade()
        key = None
        cost = 1.0
        try:
            if options.cost is not None:
                cost = options.cost(item)
                if not cost >= 0:
                    raise UsageError(_no_cost(cost))  # noqa: TRY301 - the item's own error too
            if options.key is not None:
                key = options.key(item)
                hash(key)
        except Exception as error:  # noqa: BLE001 - the item's own error, whatever it is
            self.tally.failed += 1
            fail(future, error)
            return future
        if cost > self._max_item_cost:
            self._refuse_size(future, cost)
            return future
        at = self._now()
        entry = blank(Entry)
        entry.ticket = future
        entry.item = item
        entry.cost = cost
        entry.at = at
        rank = at + target_s
        if deadline_s is None:
            entry.due = math.inf if tier is None else rank
            entry.hard = False
        else:
            due = at + deadline_s
            if due < rank or tier is None:
                rank = due
            entry.due = due
            entry.hard = True
        entry.rank = rank - priority * options.priority_step_s if priority else rank
        if timeout_s is not None:
            assert self._loop is not None
            timer = self._loop.call_at(at + timeout_s, _time_out, future)
            future.add_done_callback(lambda _: timer.cancel())
        if deadline_s is not None:
            if not deadline_s > 0:
                self.tally.expired += 1
                future.set_exception(DeadlineExceeded("The deadline had passed when the item was submitted."))
                return future
            self._deadlines.add(entry)
            if due < self._alarm_at:
                self._arm(due)
        if not self._exact:
            line = lanes.only
            if line is None:
                lanes.push(entry, run, key)
            else:
                line.push(entry, run)
            if self._bell is not None:
                self._ring()
        elif options.max_queue is not None and len(lanes) >= options.max_queue:
            self._overflow(entry, run, key)
        else:
            self._admit(entry, run, key)
        return future

    def _refuse_size(self, future: Future, cost: float) -> None:
        limits = self.options.limits
        self.tally.failed += 1
        future.set_exception(
            ItemTooLarge(
                f"This item alone costs {limits.cost_alone(cost):g}, and a dispatch of "
                f"{self.options.name} may cost {limits.max_cost:g}. Split it, or raise max_cost."
            )
        )

    def _admit(self, entry: Entry, run: int, key: Any) -> None:
        """Queue *entry* where cancelled items are counted out at once, or where a policy may hold."""
        lanes = self._lanes
        assert lanes is not None
        line = lanes.push(entry, run, key)
        self._entry_of[entry.ticket] = entry
        entry.ticket.add_done_callback(self._left_queue)
        if self._bell is not None:
            if self.options.holds:
                self._consider(line)
            else:
                self._ring()

    def _overflow(self, entry: Entry, run: int, key: Any) -> None:
        overflow = self.options.overflow
        full = f"The queue of {self.options.name} holds {self.options.max_queue} items, its max_queue"
        if overflow == "block":
            entry.line = None
            self._lobby.append((entry, run, key))
            return
        self.tally.dropped += 1
        if overflow == "reject":
            future = entry.ticket
            entry.ticket = None
            future.set_exception(QueueFull(f'{full}. Try again later, or use overflow="block".'))
            return
        assert self._lanes is not None
        line = min(self._lanes.lines(), key=Line.oldest_at)
        oldest = line.oldest()
        if oldest is not None:
            pushed_out = self._take_out(oldest)
            pushed_out.set_exception(QueueFull(f"{full}, and this one was pushed out as the oldest."))
        self._admit(entry, run, key)

    def _upgrade(self) -> Lanes:
        """Move from the plain deques to lanes: somebody uses a tier, deadline, priority or timeout."""
        lanes = self._lanes = self._new_lanes()
        self._plain = False
        run, target_s = self._tier_of[None]
        for future, item, at in zip(self._futures, self._items, self._ats, strict=True):
            if future.done():
                self.tally.cancelled += 1
            else:
                entry = blank(Entry)
                entry.ticket, entry.item, entry.cost, entry.at = future, item, 1.0, at
                entry.rank, entry.due, entry.hard = at + target_s, math.inf, False
                lanes.push(entry, run)
        self._futures.clear()
        self._items.clear()
        self._ats.clear()
        return lanes

    def _left_queue(self, future: Future) -> None:
        """A queued item's future is done before its turn: its caller gave up."""
        entry = self._entry_of.get(future)
        if entry is not None:
            self.tally.cancelled += 1
            self._take_out(entry)
            self._fill_from_lobby()
            self._wake_drainers()

    def _take_out(self, entry: Entry) -> Future:
        """Take *entry* out of the queue, or out of the lobby; its future is the caller's to decide."""
        future: Future = entry.ticket
        entry.ticket = entry.item = None
        if entry.line is not None:
            entry.line.leave((entry,))
            if self._exact:
                del self._entry_of[future]
                future.remove_done_callback(self._left_queue)
        return future

    def _fill_from_lobby(self) -> None:
        lobby = self._lobby
        room = self.options.max_queue
        while lobby and room is not None and len(self._lanes or ()) < room:
            entry, run, key = lobby.popleft()
            if entry.ticket is None or entry.ticket.done():
                self.tally.cancelled += entry.ticket is not None
                continue
            self._admit(entry, run, key)
        if not lobby and self._crowd:
            self._let_crowd_in()

    @property
    def crowded(self) -> bool:
        """Whether items wait for room in the queue."""
        return bool(self._lobby)

    async def room(self) -> None:
        """Return once no item waits for room in the queue."""
        while self._lobby:
            free = asyncio.get_running_loop().create_future()
            self._crowd.append(free)
            await free

    def _let_crowd_in(self) -> None:
        crowd, self._crowd = self._crowd, []
        for future in crowd:
            if not future.done():
                future.set_result(None)

    # -- counts ------------------------------------------------------------------------------------

    def _clear_queue(self) -> list[Future]:
        """Take everything out of the queue; the live futures are the caller's to decide."""
        futures = [future for future in self._futures if not future.done()]
        self.tally.cancelled += len(self._futures) - len(futures)
        self._futures.clear()
        self._items.clear()
        self._ats.clear()
        entries = [entry for entry, _, _ in self._lobby if entry.ticket is not None]
        if self._lanes is not None:
            entries += self._lanes.entries()
            self._count_dead()
        self._lobby.clear()
        self._let_crowd_in()
        for entry in entries:
            future = self._take_out(entry)
            if future.done():
                self.tally.cancelled += 1
            else:
                futures.append(future)
        return futures

    def _count_dead(self) -> None:
        lanes = self._lanes
        if lanes is not None and lanes.dead:
            self.tally.cancelled += lanes.dead
            lanes.dead = 0

    def in_queue(self) -> int:
        """Items in the queue and before it, cancelled ones included until they are met."""
        waiting = len(self._futures) + len(self._lobby)
        return waiting if self._lanes is None else waiting + len(self._lanes)

    def waiting(self) -> tuple[int, int]:
        """Items that wait, and items whose callers gave up but that nobody has met yet."""
        live = sum(not future.done() for future in self._futures)
        dead = len(self._futures) - live
        tickets = [entry.ticket for entry, _, _ in self._lobby if entry.ticket is not None]
        if self._lanes is not None:
            tickets += [entry.ticket for entry in self._lanes.entries()]
            dead += self._lanes.all_dead()
        lives = sum(not ticket.done() for ticket in tickets)
        return live + lives, dead + len(tickets) - lives
