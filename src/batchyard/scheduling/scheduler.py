"""Floor 2. The scheduler: whose request gets the next free slot of an engine.

Pure: it is told what happens, with the time, and says what may be dispatched. Production, tests and the
simulator drive this very object. The unit of decision is a `Demand`: a live request, or a whole Batch with
its many requests.

Order: interactive demands first; of the deferred those whose slack has run out (with hysteresis); then the
larger priority, which waiting raises; then the tenant that got least so far by its weight (virtual token
counters, VTC, arxiv.org/abs/2401.00588); within a tenant the earliest deadline. Deferred work never takes
more slots than the bulk window leaves it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from batchyard.scheduling.rate_limits import RateLimits
from batchyard.scheduling.windows import BulkWindow, EngineWindow

#: Weights of tokens in a tenant's counter, as VTC has them: read and written.
_READ, _WRITTEN = 1.0, 2.0
#: Slack and age are looked at after so many seconds, however many demands there are.
_LATEST_S = 10.0


@dataclass(slots=True, eq=False)
class Demand:
    """Somebody's wish for slots. Its owner may change priority, deadline and `remaining` at any time."""

    tenant: str
    interactive: bool
    #: Unix seconds or any other clock, as long as it is the scheduler's; infinite for none.
    deadline: float = inf
    #: Larger goes first; deferred demands only.
    priority: int = 0
    #: Requests that have no result yet, those that run included.
    remaining: int = 1
    #: Set while its slack is so small that it goes before the others.
    promoted: bool = False
    _waiting: deque[Ticket] = field(default_factory=deque, repr=False)
    _since: float = 0.0
    _queued: bool = False

    @property
    def waiting(self) -> int:
        """Its requests that wait for a slot here."""
        return len(self._waiting)


@dataclass(slots=True, eq=False)
class Ticket:
    """One dispatch that waits for a slot, or has one."""

    demand: Demand
    #: Prompt tokens, or what is taken for them.
    cost: float = 1.0
    asked_at: float = 0.0
    granted_at: float | None = None
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """How slots are shared; times in seconds."""

    #: A demand is promoted when its slack is below this share of the time that it still needs, and demoted
    #: above twice that.
    safety: float = 0.5
    #: Waiting for so long without a slot is worth one step of priority.
    age_s: float = 600.0
    #: Relative shares of tenants; 1 for those that are not named.
    weights: dict[str, float] = field(default_factory=dict)
    #: How often slack and age are looked at.
    reconsider_s: float = 0.25


class _Account:
    """What tenants got, and who of them wants more. Nobody saves credit up while idle."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self.got: dict[str, float] = {}
        self._wants: dict[str, int] = {}
        self._order = _Order(self)

    def want(self, tenant: str) -> None:
        """*tenant* wants one more."""
        count = self._wants.get(tenant, 0)
        if not count:
            least = self._order.first(self._wants.__contains__)
            floor = 0.0 if least is None else self.got[least]
            self.got[tenant] = max(self.got.get(tenant, 0.0), floor)
            self._order.add(tenant)
        self._wants[tenant] = count + 1

    def want_no_more(self, tenant: str) -> None:
        """*tenant* got one, or gave it up."""
        if self._wants[tenant] == 1:
            del self._wants[tenant]
        else:
            self._wants[tenant] -= 1

    def charge(self, tenant: str, tokens: float) -> None:
        """*tenant* got so much."""
        self.got[tenant] = self.got.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)


class _Order:
    """Tenants by what they got, the least first. What they got only grows, so places are mended when met."""

    def __init__(self, account: _Account) -> None:
        self._account = account
        self._heap: list[tuple[float, int, str]] = []
        self._count = itertools.count()
        self._here: set[str] = set()

    def add(self, tenant: str) -> None:
        """Let *tenant* take part."""
        if tenant not in self._here:
            self._here.add(tenant)
            heapq.heappush(self._heap, (self._account.got.get(tenant, 0.0), next(self._count), tenant))

    def first(self, takes_part: Callable[[str], bool]) -> str | None:
        """The one that got least; those that do not take part any more are left out from now on."""
        heap, got = self._heap, self._account.got
        while heap:
            known, _, tenant = heap[0]
            if not takes_part(tenant):
                heapq.heappop(heap)
                self._here.discard(tenant)
            elif known == got.get(tenant, 0.0):
                return tenant
            else:
                heapq.heapreplace(heap, (got[tenant], next(self._count), tenant))
        return None


class _Line:
    """Demands that wait, by tenant; each tenant's are ordered by their deadline."""

    def __init__(self, account: _Account) -> None:
        self._order = _Order(account)
        self._of_tenant: dict[str, list[tuple[float, int, Demand]]] = {}
        self._count = itertools.count()

    def push(self, demand: Demand) -> None:
        """*demand* has something that waits."""
        demand._queued = True  # noqa: SLF001 - theirs together
        key = 0.0 if demand.interactive else demand.deadline
        heapq.heappush(self._of_tenant.setdefault(demand.tenant, []), (key, next(self._count), demand))
        self._order.add(demand.tenant)

    def head(self) -> Demand | None:
        """The demand whose turn it is."""
        tenant = self._order.first(lambda one: self._first_of(one) is not None)
        return None if tenant is None else self._first_of(tenant)

    def _first_of(self, tenant: str) -> Demand | None:
        heap = self._of_tenant.get(tenant)
        while heap:
            demand = heap[0][2]
            if demand.waiting:
                return demand
            heapq.heappop(heap)
            demand._queued = False  # noqa: SLF001
        self._of_tenant.pop(tenant, None)
        return None

    def take_all(self) -> Iterator[Demand]:
        """Every demand that waits; the line is empty afterwards."""
        for heap in self._of_tenant.values():
            for _, _, demand in heap:
                if demand._queued:  # noqa: SLF001
                    demand._queued = False  # noqa: SLF001
                    if demand.waiting:
                        yield demand
        self._of_tenant.clear()


class Scheduler:
    """Shares the slots of one engine.

    Args:
        engine: how many dispatches the engine takes at once.
        bulk: how many of those deferred work may hold.
        rate: when the engine may be asked the next time.
    """

    def __init__(
        self,
        engine: EngineWindow,
        bulk: BulkWindow,
        policy: Policy | None = None,
        rate: RateLimits | None = None,
    ) -> None:
        self.engine = engine
        self.bulk = bulk
        self.rate = rate or RateLimits()
        #: When the rate lets the next one through, where it is all that keeps one back; else None.
        self.next_at: float | None = None
        self.policy = policy or Policy()
        self._accounts = {one: _Account(self.policy.weights) for one in (True, False)}
        self._now_line = _Line(self._accounts[True])
        #: Deferred demands by step of priority, the largest first when asked.
        self._deferred: dict[int, _Line] = {}
        self._promoted: list[tuple[float, int, Demand]] = []
        self._order = itertools.count()
        self._reconsider_at = self._reconsider_by = -inf
        self._decisions = self._worth = 0
        self.running_interactive = 0
        self.running_deferred = 0
        self.waiting_interactive = 0
        self.waiting_deferred = 0
        #: Mean seconds that a deferred dispatch holds a slot; 0 until one has ended.
        self.service_s = 0.0

    def __repr__(self) -> str:
        return (
            f"<Scheduler [{self.running_interactive} + {self.running_deferred} of {self.engine.limit} run, "
            f"{self.waiting_interactive} + {self.waiting_deferred} wait]>"
        )

    # --- what happens ---------------------------------------------------------------------------

    def submit(self, ticket: Ticket, now: float) -> None:
        """A dispatch wants a slot."""
        demand = ticket.demand
        ticket.asked_at = now
        if not demand._waiting:  # noqa: SLF001
            demand._since = now  # noqa: SLF001
        demand._waiting.append(ticket)  # noqa: SLF001
        self._accounts[demand.interactive].want(demand.tenant)
        if demand.interactive:
            self.waiting_interactive += 1
            self.bulk.arrived(now)
        else:
            self.waiting_deferred += 1
        if not demand._queued:  # noqa: SLF001
            self._enqueue(demand, now)

    def cancel(self, ticket: Ticket) -> None:
        """A dispatch that waits wants its slot no more."""
        if ticket.granted_at is None and not ticket.gone:
            ticket.gone = True
            self._accounts[ticket.demand.interactive].want_no_more(ticket.demand.tenant)
            if ticket.demand.interactive:
                self.waiting_interactive -= 1
            else:
                self.waiting_deferred -= 1
            self._clear(ticket.demand)

    def complete(self, ticket: Ticket, now: float, *, tokens_out: float = 0.0, limited: bool = False) -> None:
        """A dispatch has ended. *limited*: the engine said that it was too much (429, 503)."""
        assert ticket.granted_at is not None
        held_s = now - ticket.granted_at
        account = self._accounts[ticket.demand.interactive]
        account.charge(ticket.demand.tenant, _WRITTEN * tokens_out)
        self.rate.corrected(tokens_out)
        if ticket.demand.interactive:
            self.running_interactive -= 1
            self.bulk.served(now, waited_s=ticket.granted_at - ticket.asked_at, held_s=held_s)
        else:
            self.running_deferred -= 1
            self.service_s = held_s if not self.service_s else 0.9 * self.service_s + 0.1 * held_s
        if limited:
            self.engine.limited(now)
        else:
            self.engine.answered(now, self.running_interactive + self.running_deferred + 1)

    def changed(self, demand: Demand, now: float) -> None:
        """The owner of a demand has changed its deadline or its priority."""
        if demand._queued and not demand.interactive:  # noqa: SLF001
            self._enqueue(demand, now)

    # --- what follows ---------------------------------------------------------------------------

    def schedule(self, now: float) -> list[Ticket]:
        """Every dispatch that may go out now, in order."""
        self._decisions += 1
        if now >= self._reconsider_at and (self._decisions >= self._worth or now >= self._reconsider_by):
            self._reconsider(now)
        granted = []
        self.next_at = None
        while (ticket := self._next(now)) is not None:
            granted.append(ticket)
        return granted

    def _next(self, now: float) -> Ticket | None:
        if self.running_interactive + self.running_deferred >= self.engine.limit:
            return None
        demand = self._now_line.head()
        if demand is None:
            if self.running_deferred >= self.bulk.limit(now, self.engine.limit):
                return None
            demand = self._first_promoted() or self._first_deferred()
            if demand is None:
                return None
        # Whoever is next waits for the rate; others do not pass, or the larger would wait for ever.
        at = self.rate.ready_at(now, demand._waiting[0].cost, interactive=demand.interactive)  # noqa: SLF001
        if at > now:
            self.next_at = at
            return None
        return self._grant(demand, now)

    def _grant(self, demand: Demand, now: float) -> Ticket:
        ticket = demand._waiting.popleft()  # noqa: SLF001
        self._clear(demand)
        ticket.granted_at = now
        demand._since = now  # noqa: SLF001
        self.rate.sent(now, ticket.cost)
        account = self._accounts[demand.interactive]
        account.want_no_more(demand.tenant)
        account.charge(demand.tenant, _READ * ticket.cost)
        if demand.interactive:
            self.waiting_interactive -= 1
            self.running_interactive += 1
        else:
            self.waiting_deferred -= 1
            self.running_deferred += 1
        return ticket

    def _first_promoted(self) -> Demand | None:
        heap = self._promoted
        while heap:
            demand = heap[0][2]
            if demand.promoted and demand.waiting:
                return demand
            heapq.heappop(heap)
        return None

    def _first_deferred(self) -> Demand | None:
        for step in sorted(self._deferred, reverse=True):
            line = self._deferred[step]
            if (demand := line.head()) is not None:
                return demand
            del self._deferred[step]
        return None

    # --- order ----------------------------------------------------------------------------------

    def _enqueue(self, demand: Demand, now: float) -> None:
        if demand.interactive:
            self._now_line.push(demand)
            return
        step = demand.priority + int((now - demand._since) / self.policy.age_s)  # noqa: SLF001
        line = self._deferred.get(step)
        if line is None:
            # One account for each tenant, whatever the priority of what it asks.
            line = self._deferred[step] = _Line(self._accounts[False])
        line.push(demand)

    def _reconsider(self, now: float) -> None:
        """Look at slack and age; lines are made anew, as both change the order."""
        demands = [one for line in self._deferred.values() for one in line.take_all()]
        self._deferred = {}
        self._promoted = []
        # Where there are many, after many decisions: what one costs must not grow with their number.
        self._reconsider_at = now + self.policy.reconsider_s
        self._reconsider_by = now + _LATEST_S
        self._decisions, self._worth = 0, len(demands) // 2
        for demand in demands:
            self._enqueue(demand, now)
            needs_s = self._needs_s(demand)
            slack_s = demand.deadline - now - needs_s
            below = self.policy.safety * needs_s
            demand.promoted = slack_s < (2 * below if demand.promoted else below)
            if demand.promoted:
                heapq.heappush(self._promoted, (demand.deadline, next(self._order), demand))

    def _needs_s(self, demand: Demand) -> float:
        """Seconds that a demand needs if it gets every slot that deferred work may hold."""
        share = max(min(self.engine.limit, self.bulk.most(self.engine.limit)), 1)
        return self.service_s * max(demand.remaining, demand.waiting) / min(share, max(demand.remaining, 1))

    @staticmethod
    def _clear(demand: Demand) -> None:
        """Take tickets that were cancelled off the head."""
        waiting = demand._waiting  # noqa: SLF001
        while waiting and waiting[0].gone:
            waiting.popleft()

    def got(self, tenant: str, *, interactive: bool) -> float:
        """What a tenant got so far, in tokens by its weight."""
        return self._accounts[interactive].got.get(tenant, 0.0)
