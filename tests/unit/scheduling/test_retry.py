"""Retries stay within their bounds, whatever the fault, the time and the dice."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.scheduling.retry import SUSPECT_KINDS, GiveUp, Retry, RetryPolicy, decide
from batchyard.types import Fault, FaultKind

policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 12),
    max_suspect_attempts=st.integers(1, 6),
    max_rate_limited_attempts=st.integers(1, 200),
    budget_s=st.floats(0, 1e5),
    base_s=st.floats(0, 10),
    cap_s=st.floats(0, 300),
    retry_after_cap_s=st.floats(0, 1e4),
)
faults = st.builds(
    Fault,
    kind=st.sampled_from(FaultKind),
    message=st.just("Broke."),
    retry_after_s=st.none() | st.floats(allow_nan=True, allow_infinity=True),
)
elapsed = st.floats(0, 2e5)
seeds = st.integers(0, 2**32)


@given(faults, st.integers(1, 300), elapsed, policies, seeds)
def test_a_delay_lies_between_what_was_asked_and_that_plus_the_bound(fault, attempt, elapsed_s, policy, seed):
    decision = decide(fault, attempt, elapsed_s, policy, random.Random(seed))
    if isinstance(decision, GiveUp):
        assert decision.reason in ("attempts", "budget")
        return
    asked_s = fault.retry_after_s if fault.retry_after_s is not None and fault.retry_after_s > 0 else 0.0
    asked_s = min(asked_s, policy.retry_after_cap_s)
    assert asked_s <= decision.delay_s <= asked_s + policy.back_off_s(attempt)
    assert policy.back_off_s(attempt) <= policy.cap_s


@given(faults, st.integers(1, 300), elapsed, policies, seeds)
def test_nothing_is_tried_after_the_budget_or_the_last_attempt(fault, attempt, elapsed_s, policy, seed):
    decision = decide(fault, attempt, elapsed_s, policy, random.Random(seed))
    if attempt >= policy.attempts_for(fault.kind) or elapsed_s >= policy.budget_s:
        assert isinstance(decision, GiveUp)
    if isinstance(decision, Retry):
        # The sum may round up by one unit in the last place.
        assert elapsed_s + decision.delay_s <= policy.budget_s * (1 + 1e-12)


@given(faults, policies, seeds, st.lists(elapsed, min_size=2, max_size=8))
def test_once_given_up_more_time_or_attempts_never_revive_it(fault, policy, seed, times):
    given_up = False
    for attempt, elapsed_s in enumerate(sorted(times), start=1):
        decision = decide(fault, attempt, elapsed_s, policy, random.Random(seed))
        assert not (given_up and isinstance(decision, Retry))
        given_up = isinstance(decision, GiveUp)


@given(policies)
def test_the_bound_never_shrinks_and_never_overflows(policy):
    bounds = [policy.back_off_s(attempt) for attempt in (1, 2, 3, 10, 100, 10_000)]
    assert bounds == sorted(bounds)


@given(st.sampled_from(FaultKind), policies)
def test_kinds_that_the_request_may_have_caused_get_fewer_attempts(kind, policy):
    allowed = policy.attempts_for(kind)
    assert allowed >= 1
    if kind in SUSPECT_KINDS:
        assert (
            allowed
            <= policy.attempts_for(FaultKind.SERVER_ERROR)
            <= policy.attempts_for(FaultKind.RATE_LIMITED)
        )


@pytest.mark.parametrize("kind", FaultKind)
def test_one_attempt_means_no_retry(kind):
    assert decide(Fault(kind, "Broke."), 1, 0.0, RetryPolicy(max_attempts=1), random.Random(1)) == GiveUp(
        "attempts"
    )


def test_a_retry_after_beyond_the_budget_gives_up_at_once():
    fault = Fault(FaultKind.RATE_LIMITED, "Too many requests.", retry_after_s=500)
    assert decide(fault, 1, 100, RetryPolicy(budget_s=300), random.Random(1)) == GiveUp("budget")


def test_delays_spread_over_the_whole_bound():
    dice = random.Random(7)
    fault = Fault(FaultKind.SERVER_ERROR, "Broke.")
    policy = RetryPolicy(base_s=8.0)
    delays = sorted(decide(fault, 1, 0.0, policy, dice).delay_s for _ in range(2000))
    assert delays[0] < 0.1
    assert delays[-1] > 7.9
    assert 3.5 < delays[1000] < 4.5
