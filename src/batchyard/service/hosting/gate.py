"""Floor 6. The gate before an engine: asks the scheduler whose turn it is, and wakes who may go.

Knows nothing of Batches or callers; whoever comes says by a `Demand` what is asked.
"""

from __future__ import annotations

import asyncio

from batchyard.clock import Clock
from batchyard.scheduling.rate_limits import RateLimits
from batchyard.scheduling.scheduler import Demand, Policy, Scheduler, Ticket
from batchyard.scheduling.windows import BulkWindow, EngineWindow

#: While deferred work waits and nothing else happens, the scheduler is asked again after so long.
_LOOK_AGAIN_S = 0.25


class Gate:
    """Lets dispatches through to one engine, as the scheduler says."""

    def __init__(
        self,
        engine: EngineWindow,
        bulk: BulkWindow,
        clock: Clock,
        policy: Policy | None = None,
        rate: RateLimits | None = None,
    ) -> None:
        self.scheduler = Scheduler(engine, bulk, policy, rate)
        self._clock = clock
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    def __repr__(self) -> str:
        return f"<Gate {self.scheduler!r}>"

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return self.scheduler.waiting_interactive + self.scheduler.waiting_deferred

    async def enter(self, demand: Demand, cost: float) -> Ticket:
        """Wait for a slot; give the ticket to `leave` afterwards."""
        ticket = Ticket(demand, cost)
        now = self._clock.wall()
        self.scheduler.submit(ticket, now)
        self._let_in(now)
        if ticket.granted_at is not None:
            return ticket
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # The slot came in the same moment: pass it on.
                self.leave(ticket)
            elif not ticket.gone:
                self.scheduler.cancel(ticket)
            raise
        finally:
            self._turns.pop(ticket, None)
        return ticket

    def leave(self, ticket: Ticket, *, tokens_out: float = 0.0, limited: bool = False) -> None:
        """Give a slot back. *limited*: the engine said that it was too much."""
        now = self._clock.wall()
        self.scheduler.complete(ticket, now, tokens_out=tokens_out, limited=limited)
        self._let_in(now)

    def changed(self, demand: Demand) -> None:
        """The deadline or the priority of a demand has changed."""
        now = self._clock.wall()
        self.scheduler.changed(demand, now)
        self._let_in(now)

    def _let_in(self, now: float) -> None:
        if not self.waiting:
            return
        while granted := self.scheduler.schedule(now):
            for ticket in granted:
                # None for the one that is just entering.
                turn = self._turns.get(ticket)
                if turn is not None and turn.cancelled():
                    # It gave up in this moment, and has not come to say so.
                    ticket.gone = True
                    self.scheduler.complete(ticket, now)
                elif turn is not None:
                    turn.set_result(None)
        again_s = _LOOK_AGAIN_S if self.scheduler.waiting_deferred else None
        if self.scheduler.next_at is not None:
            until_s = max(self.scheduler.next_at - now, 0.001)
            again_s = until_s if again_s is None else min(until_s, again_s)
        if again_s is not None:
            self._look_again_at(now + again_s, again_s)

    def _look_again_at(self, due: float, again_s: float) -> None:
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(again_s, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._let_in(self._clock.wall())
