"""Floor 1, asyncio shell. When a dispatch is drawn: holds, alarms, and the draw itself.

The decisions are `policy`, `queue` and `draw`; here they meet the loop's clock and timers. Whoever has a
free slot asks `draw_next`.

Knows nothing of slots, of calling the function, of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from batchyard.batching.draw import draw
from batchyard.batching.function import Future
from batchyard.batching.intake import Intake
from batchyard.batching.latency import LatencyCurve
from batchyard.batching.policy import NOW, Waiting
from batchyard.batching.queue import Entry, Lanes, Line
from batchyard.errors import DeadlineExceeded

_UNREAD = LatencyCurve()


@dataclass(slots=True)
class Dispatch:
    """What rides in one call of the function."""

    futures: list[Future]
    items: list[Any]
    cost: float
    padding_cost: float
    #: When each item arrived.
    ats: list[float]
    #: What closed it.
    reason: str
    #: The item to repeat where an allowed size asks for more.
    filler: Any


def _cost(entry: Entry) -> float:
    return entry.cost


class WaitingRoom(Intake):
    """The queue of one batcher as those see it who draw from it."""

    __slots__ = ()

    # -- holds and alarms ----------------------------------------------------------------------------

    def _consider(self, line: Line) -> None:
        """Ring, or set the timer to when the policy wants to dispatch *line*."""
        if self._closing or self._drainers:
            self._ring()
            return
        at = self._hold_until(line, self._now())
        if at <= self._now():
            self._ring()
        else:
            self._hold_at(at)

    def _hold_at(self, at: float) -> None:
        hold = self._hold
        if hold is not None:
            # An earlier timer asks again when it fires; only a later one must move.
            if hold.when() <= at:
                return
            hold.cancel()
        assert self._loop is not None
        self._hold = self._loop.call_at(at, self._hold_over)

    def _hold_over(self) -> None:
        self._hold = None
        if self._bell is not None and self._lanes is not None:
            self._consider_all()

    def _consider_all(self) -> None:
        assert self._lanes is not None
        lines = self._lanes.lines()
        if not lines:
            return
        now = self._now()
        at = min(self._hold_until(line, now) for line in lines)
        if at <= now or self._closing or self._drainers:
            self._ring()
        else:
            self._hold_at(at)

    def _hold_until(self, line: Line, now: float) -> float:
        options = self.options
        curve = self.fit.curve if self._learns else _UNREAD
        limits = options.limits
        n = line.live
        waiting = Waiting(
            items=n,
            cost=line.largest * n if limits.padded else line.cost,
            oldest_at=line.oldest_at(),
            arrivals_sum=line.arrivals_sum,
            first_due=line.first_due(),
            full_items=options.policy.item_limit(limits.max_items, curve),
            full_cost=limits.max_cost,
            max_wait_s=options.max_wait_s,
            curve=curve,
            arrival_rate=self._rate[0] / self._rate[1] if self._rate[1] > 0 else 0.0,
        )
        try:
            return options.policy.hold_until(waiting, now)
        except Exception as error:  # noqa: BLE001 - a policy's fault must not stop the queue
            self._report(f"The policy {options.policy!r} raised; what waits is dispatched now.", error)
            return NOW

    def _arm(self, at: float) -> None:
        """Have the alarm ring at *at* or before."""
        if self._alarm_at <= at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        assert self._loop is not None
        self._alarm_at = at
        self._alarm = self._loop.call_at(at, self._alarm_rings)

    def _alarm_rings(self) -> None:
        self._alarm = None
        self._alarm_at = math.inf
        # The loop fires a timer up to its clock's resolution early.
        now = self._now() + 1e-6
        for entry in self._deadlines.take_due(now):
            self._expire(entry)
        at = self._deadlines.next_at()
        if at < math.inf:
            self._arm(at)

    def _expire(self, entry: Entry) -> None:
        self.tally.expired += 1
        self._take_out(entry).set_exception(
            DeadlineExceeded("The item's deadline passed while it was in the queue.")
        )
        self._fill_from_lobby()
        self._wake_drainers()

    def _report(self, message: str, error: BaseException) -> None:
        assert self._loop is not None
        self._loop.call_exception_handler({"message": message, "exception": error})

    # -- draws -------------------------------------------------------------------------------------

    def draw_next(self) -> Dispatch | None:
        """Draw the next dispatch for a free slot, or None when nothing waits or the policy holds."""
        return self._draw_plain() if self._lanes is None else self._draw_from(self._lanes)

    def _draw_plain(self) -> Dispatch | None:
        waiting = self._futures
        limit = self.options.limits.max_items
        if self._learns:
            limit = self.options.policy.item_limit(limit, self.fit.curve)
        while waiting:
            n = len(waiting)
            if n <= limit:
                futures, items, ats = list(waiting), list(self._items), list(self._ats)
                waiting.clear()
                self._items.clear()
                self._ats.clear()
            else:
                n = limit
                pop, pop_item, pop_at = waiting.popleft, self._items.popleft, self._ats.popleft
                futures = [pop() for _ in range(n)]
                items = [pop_item() for _ in range(n)]
                ats = [pop_at() for _ in range(n)]
            for future in futures:
                if future.done():
                    live = [i for i in range(n) if not futures[i].done()]
                    self.tally.cancelled += n - len(live)
                    futures = [futures[i] for i in live]
                    items = [items[i] for i in live]
                    ats = [ats[i] for i in live]
                    break
            if futures:
                reason = "full" if n == limit else "free"
                return Dispatch(futures, items, float(len(items)), 0.0, ats, reason, items[-1])
        return None

    def _draw_from(self, lanes: Lanes) -> Dispatch | None:
        options = self.options
        limits = options.limits
        while True:
            now = self._now()
            line = self._line_to_serve(lanes, now)
            if line is None:
                self._count_dead()
                return None
            curve = self.fit.curve if self._learns else _UNREAD
            limit = options.policy.item_limit(limits.max_items, curve)
            asked = curve if self._asks_deadlines and curve.known else None
            drawn = draw(line, limits, limit, now, asked, max_waste=self._max_waste())
            if drawn.late:
                self._too_late(drawn.late)
            entries = drawn.entries
            items = [entry.item for entry in entries]
            filler = self._filler(entries)
            futures = self._detach(entries)
            lanes.settle(line)
            self._count_dead()
            if self._lobby:
                self._fill_from_lobby()
            if options.holds:
                self._measure_rate(len(entries), now)
            if entries:
                ats = [entry.at for entry in entries]
                padding = 0.0 if options.cost is None else drawn.cost - drawn.real_cost
                reason = drawn.reason
                if reason == "free" and (self._closing or self._drainers):
                    reason = "drain"
                elif reason == "free" and options.holds:
                    reason = "waited"
                return Dispatch(futures, items, drawn.cost, padding, ats, reason, filler)

    def _max_waste(self) -> float:
        """How much padding one more item may cost: no more than a dispatch of its own would take."""
        limits = self.options.limits
        if not limits.padded or limits.sizes:
            return math.inf
        curve = self.fit.curve
        if not curve.known or curve.per_cost_s <= 0.0:
            return math.inf
        return curve.fixed_s / curve.per_cost_s

    def _filler(self, entries: list[Entry]) -> Any:
        """The item that stands in where an allowed size asks for more: the cheapest, or the last."""
        if not entries or not self.options.limits.sizes:
            return None
        return (entries[-1] if self.options.cost is None else min(entries, key=_cost)).item

    def _too_late(self, entries: list[Entry]) -> None:
        self.tally.expired += len(entries)
        for future in self._detach(entries):
            future.set_exception(
                DeadlineExceeded("The item's deadline had passed or no dispatch could meet it any more.")
            )

    def _detach(self, entries: list[Entry]) -> list[Future]:
        """The futures of drawn entries, free of the watch over the queue."""
        futures: list[Future] = [entry.ticket for entry in entries]
        for entry in entries:
            # An alarm may keep the entry a while; it need not keep the item.
            entry.ticket = entry.item = None
        if self._exact:
            for future in futures:
                del self._entry_of[future]
                future.remove_done_callback(self._left_queue)
        return futures

    def _line_to_serve(self, lanes: Lanes, now: float) -> Line | None:
        """The line that is due, or None with the timer set to when one will be."""
        if not self.options.holds or self._closing or self._drainers:
            return lanes.first()
        best: Line | None = None
        at = math.inf
        for line in lanes.lines():
            until = self._hold_until(line, now)
            if until <= now:
                # Among lines that are due, the one whose head ranks first.
                if best is None or line.head_rank() < best.head_rank():
                    best = line
            elif until < at:
                at = until
        if best is None and at < math.inf:
            self._hold_at(at)
        return best

    def _measure_rate(self, n: int, now: float) -> None:
        count, span = self._rate
        gap = max(now - self._drawn_at, 0.0) if self._drawn_at else 0.0
        self._drawn_at = now
        self._rate = (count * 0.95 + n, span * 0.95 + gap) if gap or span else (0.0, 0.0)
