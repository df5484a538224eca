"""Floor 2. Windows: how many dispatches an engine gets at once, and how many of them may be deferred work.

Pure. Both move by additive increase and multiplicative decrease; each says why it last moved.
"""

from __future__ import annotations

from collections import deque
from math import ceil, sqrt

#: Delay probability of about 5 % in square-root staffing.
_Z = 1.65


class EngineWindow:
    """How many dispatches an engine gets at once: *most*, or fewer once it says that it is too much.

    An adaptive one doubles for each interval that was full and clean until the first refusal (slow start),
    then grows by a twentieth of itself; a refusal cuts it by a fifth, at most once an interval.

    Args:
        most: what the engine or the user allows.
        adaptive: whether refusals move it; an engine with a known number of slots needs none of that.
        start: where an adaptive one begins; by default at *most*.
    """

    def __init__(
        self, most: int, *, adaptive: bool = False, start: int | None = None, interval_s: float = 1.0
    ) -> None:
        self.most = most
        self._adaptive = adaptive
        self._interval_s = interval_s
        self._window = float(min(most, start or most))
        self._slow_start = True
        self._interval_began = 0.0
        self._was_full = False
        self._cut_at = -1e9
        self.why = "as configured"

    def __repr__(self) -> str:
        return f"<EngineWindow [{self.limit} of {self.most}, {self.why}]>"

    @property
    def limit(self) -> int:
        """Dispatches at once, 1 or more."""
        return max(int(self._window), 1)

    def answered(self, now: float, running: int) -> None:
        """A dispatch was answered while *running* ran, itself included."""
        if not self._adaptive or self._window >= self.most:
            return
        self._was_full = self._was_full or running >= self.limit
        if now - self._interval_began < self._interval_s:
            return
        # What was in flight when the window was cut says nothing of the new one.
        if self._was_full and now - self._cut_at >= self._interval_s:
            step = self._window if self._slow_start else max(1.0, 0.05 * self._window)
            self._window = min(self._window + step, float(self.most))
            self.why = "it was full and clean"
        self._interval_began, self._was_full = now, False

    def limited(self, now: float) -> None:
        """The engine refused a dispatch as too much."""
        if self._adaptive and now - self._cut_at >= self._interval_s:
            self._window = max(0.8 * self._window, 1.0)
            self._slow_start = False
            self._cut_at = self._interval_began = now
            self._was_full = False
            self.why = "the engine refused"


class BulkWindow:
    """How many slots deferred work may hold, so that interactive work finds one when it comes.

    Slots are reserved by square-root staffing, `R = λs + z √(λs)`, from the interactive arrivals λ and the
    time s that one holds a slot, over the last minute. With a ceiling for the time that an interactive
    request waits and runs, the rest is cut by half when 95 in 100 of them come near it, and grows by one for
    each clean interval.

    Args:
        least: what deferred work may always hold, so that it never starves.
    """

    def __init__(
        self,
        *,
        least: int = 1,
        reserve: int | None = None,
        ceiling_s: float | None = None,
        interval_s: float = 1.0,
    ) -> None:
        self._least = least
        self._reserve = reserve
        self._ceiling_s = ceiling_s
        self._interval_s = interval_s
        self._arrivals: deque[float] = deque()
        self._held_s = 0.0
        self._window: float | None = None
        self._slots = 1
        self._recent: deque[tuple[float, float]] = deque()
        self._moved_at = -1e9
        self.why = "nothing interactive came"

    def __repr__(self) -> str:
        return f"<BulkWindow [{self._window or 'open'}, {self.why}]>"

    def arrived(self, now: float) -> None:
        """An interactive request came."""
        self._arrivals.append(now)
        self._forget(now)

    def served(self, now: float, *, waited_s: float, held_s: float) -> None:
        """An interactive request has ended."""
        self._held_s = held_s if not self._held_s else 0.9 * self._held_s + 0.1 * held_s
        if self._ceiling_s is None:
            return
        self._recent.append((now, waited_s + held_s))
        while self._recent and self._recent[0][0] < now - 10 * self._interval_s:
            self._recent.popleft()
        if now - self._moved_at < self._interval_s:
            return
        times = sorted(took for _, took in self._recent)
        near = times[min(int(len(times) * 0.95), len(times) - 1)] > 0.9 * self._ceiling_s
        if near:
            self._window = max((self._window or float(self._slots)) * 0.5, float(self._least))
            self._recent.clear()
            self.why = "interactive requests came near their ceiling"
        elif self._window is not None:
            self._window += 1.0
            self.why = "interactive requests kept well below their ceiling"
        self._moved_at = now

    def reserved(self, now: float) -> int:
        """Slots that are kept free for interactive work."""
        if self._reserve is not None:
            return self._reserve
        self._forget(now)
        if not self._arrivals or not self._held_s:
            return 0
        span_s = max(now - self._arrivals[0], 1.0)
        load = len(self._arrivals) / span_s * self._held_s
        return ceil(load + _Z * sqrt(load))

    def limit(self, now: float, slots: int) -> int:
        """Slots that deferred work may hold now."""
        self._slots = slots
        left = slots - self.reserved(now)
        if self._window is not None:
            left = min(left, int(self._window))
        return min(max(left, self._least), slots)

    def most(self, slots: int) -> int:
        """Slots that deferred work may hold when little else is there."""
        return max(slots - (self._reserve or 0), self._least)

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0] < now - 60.0:
            self._arrivals.popleft()
