"""Whose turn it is: interactive first, deadlines kept, tenants fair, nothing starved, no slot overdrawn."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchyard.scheduling.demand import earliest, finishes
from batchyard.scheduling.scheduler import Demand, Policy, Scheduler, Ticket
from batchyard.scheduling.windows import BulkWindow, EngineWindow


def scheduler(slots=4, policy=None, **bulk):
    return Scheduler(EngineWindow(slots), BulkWindow(**bulk), policy)


def ask(one, demand, count, now=0.0, cost=1.0):
    tickets = [Ticket(demand, cost) for _ in range(count)]
    for ticket in tickets:
        one.submit(ticket, now)
    return tickets


def test_interactive_goes_before_everything_deferred():
    one = scheduler(slots=2)
    ask(one, Demand("a", interactive=False, deadline=10.0), 3)
    live = ask(one, Demand("b", interactive=True), 1)
    granted = one.schedule(0.0)
    assert granted[0] is live[0]
    assert [ticket.demand.interactive for ticket in granted] == [True, False]


def test_of_the_deferred_the_earliest_deadline_goes_first_and_the_larger_priority_before():
    one = scheduler(slots=1)
    late, early = Demand("a", False, deadline=9000.0), Demand("a", False, deadline=5000.0)
    loud = Demand("a", False, deadline=9999.0, priority=1)
    for demand in (late, early, loud):
        ask(one, demand, 1)
    order = []
    for now in range(3):
        (ticket,) = one.schedule(float(now))
        order.append(ticket.demand)
        one.complete(ticket, now + 0.5)
    assert order == [loud, early, late]


def test_a_demand_whose_slack_runs_out_goes_before_priority_and_fairness_and_is_not_flickering():
    one = scheduler(slots=1)
    one.service_s = 1.0
    tight = Demand("poor", False, deadline=100.0, remaining=60)
    loud = Demand("rich", False, deadline=1e6, remaining=10_000, priority=9)
    ask(one, tight, 3)
    ask(one, loud, 60)
    (ticket,) = one.schedule(0.0)
    # 100 s until then, 60 s of work: 40 s of slack are more than half of 60.
    assert ticket.demand is loud
    one.complete(ticket, 1.0)
    (ticket,) = one.schedule(15.0)
    assert ticket.demand is tight
    one.complete(ticket, 16.0)
    tight.remaining = 50
    (ticket,) = one.schedule(17.0)
    # 33 s of slack for 50 s of work: it stays promoted until there is twice what promoted it.
    assert ticket.demand is tight
    one.complete(ticket, 18.0)
    tight.remaining = 5
    (ticket,) = one.schedule(19.0)
    assert ticket.demand is loud


def test_deferred_work_leaves_slots_for_what_comes():
    one = scheduler(slots=8, reserve=3)
    ask(one, Demand("a", False), 20)
    assert len(one.schedule(0.0)) == 5
    live = ask(one, Demand("b", True), 3, 1.0)
    assert one.schedule(1.0) == live


def test_reserved_slots_follow_the_arrivals():
    window = BulkWindow()
    assert window.limit(0.0, 16) == 16
    now = 0.0
    for _ in range(600):  # 10 a second, each half a second: 5 busy, 5 + 1.65 * sqrt(5) reserved
        now += 0.1
        window.arrived(now)
        window.served(now, waited_s=0.0, held_s=0.5)
    assert window.limit(now, 16) == 16 - 9
    assert window.limit(now, 4) == 1
    assert window.limit(now + 61.0, 16) == 16


def test_near_its_ceiling_interactive_work_gets_half_of_the_bulk_slots():
    window = BulkWindow(reserve=0, ceiling_s=1.0)
    assert window.limit(0.0, 32) == 32
    for n in range(20):
        window.served(n * 0.1, waited_s=0.5, held_s=0.45)
    assert window.limit(2.0, 32) <= 16
    for n in range(200):
        window.served(20.0 + n * 0.1, waited_s=0.0, held_s=0.1)
    assert window.limit(40.0, 32) >= 26


def test_a_hidden_limit_is_found_and_followed():
    for hidden, later in ((40, 90), (120, 30)):
        window = EngineWindow(256, adaptive=True, start=8)
        limit, now, seen = hidden, 0.0, []
        for tick in range(1200):  # a tenth of a second each
            now = tick * 0.1
            if tick == 600:
                limit = later
            running = window.limit
            for _ in range(min(running, 20)):
                if running > limit:
                    window.limited(now)
                else:
                    window.answered(now, running)
            seen.append(window.limit)
        for found, wanted in ((seen[300:600], hidden), (seen[900:], later)):
            mean = sum(found) / len(found)
            assert 0.8 * wanted <= mean <= 1.2 * wanted, (mean, wanted)
            assert max(found) <= 2 * min(found)


def test_a_loud_tenant_takes_nothing_from_a_quiet_one():
    one = scheduler(slots=8)
    loud, quiet = Demand("loud", False, deadline=1e6), Demand("quiet", False, deadline=1e6)
    chance = random.Random(3)
    most_in, most_out = 400.0, 300.0
    now, running, gap = 0.0, [], 0.0
    for _ in range(4000):
        # One asks ten times as often; both always have something waiting.
        for demand, count in ((loud, 10), (quiet, 1)):
            if demand.waiting < 20:
                for _ in range(count):
                    one.submit(Ticket(demand, chance.uniform(1, most_in)), now)
        running += one.schedule(now)
        now += 1.0
        ended = chance.choice(running)
        running.remove(ended)
        one.complete(ended, now, tokens_out=chance.uniform(1, most_out))
        gap = max(gap, abs(one.got("loud", interactive=False) - one.got("quiet", interactive=False)))
    # FORMULAS §1: 2 max(w_p L_in, w_q M), with M the tokens that can be in flight at once.
    assert gap <= 2 * max(most_in, 2 * 8 * most_out)


def test_who_was_idle_has_saved_nothing_up():
    one = scheduler(slots=1)
    busy, late = Demand("busy", False, deadline=1e6), Demand("late", False, deadline=1e6)
    now = 0.0
    ask(one, busy, 50, cost=10.0)
    for _ in range(40):
        (ticket,) = one.schedule(now)
        one.complete(ticket, now := now + 1)
    ask(one, late, 20, now, cost=10.0)
    order = []
    for _ in range(10):
        (ticket,) = one.schedule(now)
        order.append(ticket.demand.tenant)
        one.complete(ticket, now := now + 1)
    assert Counter(order) == {"busy": 5, "late": 5}


def test_weights_share_as_they_say():
    one = scheduler(slots=1, policy=Policy(weights={"gold": 3.0}))
    ask(one, Demand("gold", False, deadline=1e6), 400)
    ask(one, Demand("tin", False, deadline=1e6), 400)
    got, now = Counter(), 0.0
    for _ in range(400):
        (ticket,) = one.schedule(now)
        got[ticket.demand.tenant] += 1
        one.complete(ticket, now := now + 0.01)
    assert abs(got["gold"] - 300) <= 4


def test_a_low_priority_does_not_starve():
    one = scheduler(slots=1, policy=Policy(age_s=60.0))
    ask(one, Demand("a", False, deadline=1e9, priority=-3), 1)
    now, loud = 0.0, Demand("a", False, deadline=1e8, priority=3)
    for _ in range(2000):
        ask(one, loud, 1, now)
        (ticket,) = one.schedule(now)
        if ticket.demand.priority == -3:
            break
        one.complete(ticket, now := now + 1.0)
    assert 300 <= now <= 600


def test_cancelled_tickets_are_passed_over():
    one = scheduler(slots=2)
    demand = Demand("a", False)
    tickets = ask(one, demand, 5)
    for ticket in tickets[:2] + tickets[3:4]:
        one.cancel(ticket)
        one.cancel(ticket)
    assert one.waiting_deferred == 2
    assert one.schedule(0.0) == [tickets[2], tickets[4]]
    assert one.schedule(0.0) == []
    assert (one.waiting_deferred, one.running_deferred) == (0, 2)


events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 5), st.booleans(), st.integers(-2, 2), st.floats(1, 500)),
        st.tuples(st.just("cancel"), st.integers(0, 200)),
        st.tuples(st.just("complete"), st.integers(0, 200), st.booleans()),
        st.tuples(st.just("pass"), st.floats(0, 30)),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=500)
@given(st.integers(1, 6), st.integers(0, 3), events)
def test_whatever_happens_no_slot_is_overdrawn_and_nothing_is_lost(slots, reserve, history):
    """DESIGN.md §6, invariants 2 to 6, over random histories; the same history gives the same decisions."""
    decisions = []
    for _ in range(2):
        one = scheduler(slots=slots, reserve=reserve)
        demands, waiting, running, ended, log, now = {}, [], [], 0, [], 0.0
        submitted = cancelled = 0

        def check(one=one, waiting=waiting, running=running):
            assert one.running_interactive + one.running_deferred == len(running) <= slots
            assert one.waiting_interactive + one.waiting_deferred == len(waiting)
            assert one.running_deferred <= max(slots - reserve, 1)

        for event in history:
            match event:
                case ("submit", tenant, interactive, priority, deadline):
                    key = (tenant, interactive, priority)
                    demand = demands.get(key)
                    if demand is None:
                        demand = demands[key] = Demand(
                            str(tenant), interactive, deadline=now + deadline, priority=priority
                        )
                    ticket = Ticket(demand)
                    submitted += 1
                    one.submit(ticket, now)
                    waiting.append(ticket)
                case ("cancel", number) if waiting:
                    ticket = waiting.pop(number % len(waiting))
                    cancelled += 1
                    one.cancel(ticket)
                case ("complete", number, limited) if running:
                    ticket = running.pop(number % len(running))
                    ended += 1
                    one.complete(ticket, now, tokens_out=3.0, limited=limited)
                case ("pass", seconds):
                    now += seconds
            granted = one.schedule(now)
            for ticket in granted:
                waiting.remove(ticket)
                running.append(ticket)
                log.append((round(now, 6), ticket.demand.tenant, ticket.demand.priority))
            check()
            # A free slot never stays empty while something interactive waits.
            assert not (one.waiting_interactive and len(running) < slots)
        while waiting or running:
            now += 1.0
            for ticket in running:
                one.complete(ticket, now)
                ended += 1
            running.clear()
            granted = one.schedule(now)
            for ticket in granted:
                waiting.remove(ticket)
            running += granted
            assert granted or not waiting
        assert ended + cancelled == submitted
        decisions.append(log)
    assert decisions[0] == decisions[1]


def test_the_demand_test_tells_what_can_be_promised():
    assert finishes([(10.0, 4.0), (5.0, 2.0)], 2.0, 0.0) == [3.0, 1.0]
    assert earliest([], 10.0, 2.0, 0.0) == 5.0
    # 4 of 10 s are taken by what is due before; due later than that, it displaces nobody.
    assert earliest([(4.0, 4.0)], 3.0, 1.0, 0.0) == pytest.approx(7.0)
    # There is room before a job that has time.
    assert earliest([(100.0, 4.0)], 3.0, 1.0, 0.0) == pytest.approx(3.0)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.floats(1, 100), st.floats(0.1, 30)), max_size=8),
    st.floats(0.1, 30),
    st.floats(0.2, 5),
)
def test_a_promised_deadline_is_kept_and_makes_nobody_late(jobs, work, rate):
    promised = earliest(jobs, work, rate, 0.0)
    before = finishes(jobs, rate, 0.0)
    after = finishes([*jobs, (promised, work)], rate, 0.0)
    assert after[-1] <= promised + 1e-6
    for (deadline, _), end, now in zip(jobs, before, after, strict=False):
        if end <= deadline:
            assert now <= deadline + 1e-6
