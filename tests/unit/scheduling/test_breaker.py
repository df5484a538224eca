"""The breaker holds a run while its upstream is gone, and costs no request an attempt."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchyard.scheduling.breaker import Breaker, BreakerPolicy, BreakerState

POLICY = BreakerPolicy(threshold=3, probe_after_s=1.0, probe_cap_s=8.0, probe_lease_s=10.0, patience_s=60.0)


def opened(at=0.0):
    breaker = Breaker(POLICY)
    for _ in range(POLICY.threshold):
        assert breaker.may_dispatch(at)
        breaker.unreachable(at)
    return breaker


def test_a_single_failure_changes_nothing():
    breaker = Breaker(POLICY)
    breaker.unreachable(0.0)
    assert breaker.troubled
    assert breaker.may_dispatch(0.0)
    breaker.reached()
    assert not breaker.troubled


def test_failures_in_a_row_hold_everything_and_then_one_probe_goes():
    breaker = opened()
    assert not breaker.may_dispatch(0.5)
    assert breaker.next_try_at(0.5) == 1.0
    assert breaker.may_dispatch(1.0)
    assert not breaker.may_dispatch(1.0)
    assert breaker.state is BreakerState.HALF_OPEN


def test_pauses_between_probes_double_up_to_the_cap():
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(6):
        pauses.append(breaker.next_try_at(now) - now)
        now = breaker.next_try_at(now)
        assert breaker.may_dispatch(now)
        breaker.unreachable(now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_those_under_way_when_it_opens_are_no_probes():
    breaker = opened()
    for _ in range(64):
        breaker.unreachable(0.2)
    assert breaker.next_try_at(0.2) == 1.0


def test_a_probe_that_is_never_heard_of_keeps_nothing_back_for_ever():
    breaker = opened()
    assert breaker.may_dispatch(1.0)
    assert not breaker.may_dispatch(10.9)
    assert breaker.may_dispatch(11.0)


def test_it_closes_when_reached_and_starts_afresh():
    breaker = opened()
    assert breaker.may_dispatch(1.0)
    breaker.unreachable(1.0)
    breaker.reached()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.may_dispatch(1.0)
    breaker.unreachable(50.0)
    assert not breaker.gives_up(59.0)


def test_patience_ends():
    breaker = opened(at=100.0)
    assert not breaker.gives_up(159.9)
    assert breaker.gives_up(160.0)


class AnyUpstream(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    def __init__(self):
        super().__init__()
        self.breaker = Breaker(POLICY)
        self.now = 0.0
        self.under_way = 0
        self.failing_since = None

    @rule(eighths=st.integers(0, 240))
    def wait(self, eighths):
        # Eighths of a second add up exactly, so that bounds can be checked without a tolerance.
        self.now += eighths / 8

    @rule()
    def dispatch(self):
        held = self.breaker.state is not BreakerState.CLOSED
        if self.breaker.may_dispatch(self.now):
            self.under_way += 1
            if held:
                assert not self.breaker.may_dispatch(self.now)
        else:
            assert held
            assert self.breaker.next_try_at(self.now) > self.now

    @precondition(lambda self: self.under_way)
    @rule()
    def fail(self):
        self.under_way -= 1
        self.breaker.unreachable(self.now)
        if self.failing_since is None:
            self.failing_since = self.now

    @precondition(lambda self: self.under_way)
    @rule()
    def succeed(self):
        self.under_way -= 1
        self.breaker.reached()
        self.failing_since = None
        assert self.breaker.may_dispatch(self.now)
        self.under_way += 1

    @invariant()
    def something_is_always_tried_again(self):
        wait_s = self.breaker.next_try_at(self.now) - self.now
        assert 0 <= wait_s <= max(POLICY.probe_cap_s, POLICY.probe_lease_s)

    @invariant()
    def it_gives_up_only_after_its_patience(self):
        if self.breaker.gives_up(self.now):
            assert self.failing_since is not None
            assert self.now - self.failing_since >= POLICY.patience_s


AnyUpstream.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnyUpstream = AnyUpstream.TestCase
