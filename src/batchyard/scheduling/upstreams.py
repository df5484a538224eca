"""Floor 2. Upstreams: which of several that serve one model takes the next call.

Pure: it is told what is sent and what came of it, with the time. Each upstream is in one of three states,
like a circuit breaker of its own:

    healthy ── unreachable, or bad three times in a row ──▶ ejected ── rest over, or found well ──▶ half-open
       ▲                                                       ▲                                      │   │
       │                                                       └──────────── bad ──────────────────────┘   │
       └───────────────────────────────────── answered (one call at a time) ─────────────────────────────┘

A call goes where least is outstanding for its room; where its prompt begins like one that was served lately,
to the upstream that did, as long as that one is not much busier than the rest (its prefix cache has it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

#: Bad calls in a row after which an upstream is an outlier.
_BAD_IN_A_ROW = 3
#: The first rest of an ejected upstream; each further one doubles, up to the longest.
_REST_S, _LONGEST_REST_S = 5.0, 60.0
#: A limited upstream that names no time is left alone for so long, if there are others.
_HOLD_S = 1.0
#: Bytes of a body by which the beginning of a prompt is known, the longest first.
_PREFIXES = (8_192, 2_048, 512)
#: Beginnings that are remembered.
_REMEMBERED = 8_192


class UpstreamState(StrEnum):
    """Whether an upstream takes calls: all, none, or one to see whether it is well again."""

    HEALTHY = "healthy"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"


class Result(Enum):
    """What came of a call, as far as it says something about the upstream."""

    ANSWERED = auto()  # whatever it said, a client's fault included
    LIMITED = auto()  # asked too much: 429 or 503 with a time to wait
    BAD = auto()  # 5xx, a timeout, a broken or an invalid answer
    GONE = auto()  # no connection, or the engine cannot be used
    CANCELLED = auto()  # nothing is known


@dataclass(slots=True)
class Upstream:
    """What is known of one of them."""

    #: Calls that it takes at once.
    room: int
    busy: int = 0
    state: UpstreamState = UpstreamState.HEALTHY
    #: Bad calls since the last good one.
    bad: int = 0
    #: Rests in a row.
    ejections: int = 0
    #: When its rest is over.
    rests_until: float = 0.0
    #: It asked to be left alone until then.
    held_until: float = 0.0
    #: Why it was ejected last, in words.
    why: str = ""


class Upstreams:
    """Chooses among upstreams that serve the same.

    Args:
        rooms: how many calls each takes at once.
    """

    def __init__(self, rooms: Sequence[int]) -> None:
        self.all = [Upstream(room) for room in rooms]
        self._served: OrderedDict[int, int] = OrderedDict()

    def __repr__(self) -> str:
        shown = (f"{one.busy} of {one.room}{_suffix(one)}" for one in self.all)
        return f"<Upstreams [{', '.join(shown)}]>"

    def choose(self, now: float, tried: Container[int] = (), prefix: bytes = b"") -> int | None:
        """The number of the upstream that takes a call now; None where all were *tried*.

        One that rests or asked to be left alone is taken only where nothing else is left: somebody must
        find out, and say what is wrong.
        """
        left = [no for no in range(len(self.all)) if no not in tried]
        if not left:
            return None
        for no in left:
            one = self.all[no]
            if one.state is UpstreamState.EJECTED and one.rests_until <= now:
                one.state = UpstreamState.HALF_OPEN
        well = [no for no in left if self._takes(self.all[no], now)]
        if not well:
            return min(left, key=lambda no: (max(self.all[no].rests_until, self.all[no].held_until), no))
        best = min(well, key=self._rank)
        known = self._known(prefix)
        if known is not None and known in well and self._is_near(known, best):
            return known
        return best

    def has_room(self, now: float, tried: Container[int]) -> bool:
        """Whether one that was not *tried* takes calls and has a free place."""
        return any(
            no not in tried and one.busy < one.room and self._takes(one, now)
            for no, one in enumerate(self.all)
        )

    def _rank(self, no: int) -> tuple[bool, int, float, int]:
        """The least goes first: one to be tried again; then, so that the next attempt lands elsewhere, those
        with fewer bad calls; then the least busy.
        """
        one = self.all[no]
        return one.state is not UpstreamState.HALF_OPEN, one.bad, one.busy / one.room, no

    @staticmethod
    def _takes(one: Upstream, now: float) -> bool:
        if one.held_until > now or one.state is UpstreamState.EJECTED:
            return False
        return one.state is UpstreamState.HEALTHY or not one.busy

    def _is_near(self, known: int, best: int) -> bool:
        """Bounded loads: the cache is worth a wait behind a quarter more, not behind everybody."""
        one, other = self.all[known], self.all[best]
        return one.bad <= other.bad and one.busy < one.room and one.busy <= 1.25 * other.busy + 1

    def _known(self, prefix: bytes) -> int | None:
        for length in _PREFIXES:
            if len(prefix) >= length and (no := self._served.get(hash(prefix[:length]))) is not None:
                return no
        return None

    def sent(self, no: int, prefix: bytes = b"") -> None:
        """A call goes to the upstream *no*; *prefix* is how its body begins."""
        self.all[no].busy += 1
        for length in _PREFIXES:
            if len(prefix) >= length:
                key = hash(prefix[:length])
                self._served[key] = no
                self._served.move_to_end(key)
        while len(self._served) > _REMEMBERED:
            self._served.popitem(last=False)

    def ended(
        self, no: int, result: Result, now: float, *, wait_s: float | None = None, why: str = ""
    ) -> None:
        """A call has ended; *wait_s* is what a limited upstream asked for, *why* what was wrong, in words."""
        one = self.all[no]
        one.busy -= 1
        match result:
            case Result.ANSWERED:
                one.bad = one.ejections = 0
                one.state = UpstreamState.HEALTHY
            case Result.LIMITED:
                # It speaks, so it is there.
                one.held_until = max(one.held_until, now + (wait_s or _HOLD_S))
                one.state = UpstreamState.HEALTHY
            case Result.GONE:
                self._eject(one, now, why)
            case Result.BAD:
                one.bad += 1
                if one.bad >= _BAD_IN_A_ROW or one.state is UpstreamState.HALF_OPEN:
                    self._eject(one, now, why)

    def hold(self, no: int, until: float) -> None:
        """An upstream wants no calls before *until*, if there are others."""
        self.all[no].held_until = max(self.all[no].held_until, until)

    def found(self, no: int, now: float, *, well: bool, why: str = "") -> None:
        """A health check of an ejected upstream has ended."""
        one = self.all[no]
        if well and one.state is UpstreamState.EJECTED:
            one.state = UpstreamState.HALF_OPEN
            one.rests_until = now
        elif not well:
            self._eject(one, now, why)

    @staticmethod
    def _eject(one: Upstream, now: float, why: str) -> None:
        if one.state is UpstreamState.EJECTED and one.rests_until > now:
            # One of those that were under way when it was ejected.
            return
        rest_s = min(_REST_S * 2.0 ** min(one.ejections, 30), _LONGEST_REST_S)
        one.ejections += 1
        one.rests_until = now + rest_s
        one.state = UpstreamState.EJECTED
        one.why = why


def _suffix(one: Upstream) -> str:
    return "" if one.state is UpstreamState.HEALTHY else f", {one.state}"
