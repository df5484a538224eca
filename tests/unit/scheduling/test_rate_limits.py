"""Rate limits: kept over any minute, shared in the scheduler's order, corrected by what the upstream says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchyard.engines.openai.limits import limits_seen
from batchyard.scheduling.rate_limits import RateLimits
from batchyard.scheduling.scheduler import Demand, Scheduler, Ticket
from batchyard.scheduling.windows import BulkWindow, EngineWindow
from batchyard.types import LimitsSeen


@settings(max_examples=200)
@given(
    st.floats(1, 600),
    st.one_of(st.none(), st.floats(100, 100_000)),
    st.lists(st.tuples(st.floats(0, 5), st.floats(1, 50)), min_size=1, max_size=200),
)
def test_no_minute_holds_more_than_the_limit_and_one_burst(requests, tokens, calls):
    limits = RateLimits(requests, tokens)
    now, sent = 0.0, []
    for pause, cost in calls:
        now += pause
        at = limits.ready_at(now, cost, interactive=True)
        assert at >= now
        now = at
        assert limits.ready_at(now, cost, interactive=True) <= now + 1e-6
        limits.sent(now, cost)
        sent.append((now, cost))
    for start, _ in sent:
        inside = [cost for at, cost in sent if start <= at < start + 60]
        assert len(inside) <= requests + max(requests / 10, 1) + 1e-6
        if tokens is not None:
            # A call that is larger than the burst goes when the bucket is full.
            assert sum(inside) <= tokens * 1.1 + 50 + 1e-6


def test_what_the_upstream_says_is_left_holds_back_until_it_is_whole():
    limits = RateLimits()
    limits.seen(100.0, LimitsSeen(0, 6.0, 5_000, 1.0))
    assert limits.ready_at(100.0, 1, interactive=True) == 106.0
    assert "used up" in limits.why
    assert limits.held_s(103.0) == 3.0
    assert limits.ready_at(106.0, 1, interactive=True) == 106.0
    few = RateLimits(requests_per_minute=600)
    few.ready_at(0.0, 1, interactive=True)
    few.seen(0.0, LimitsSeen(requests_left=2))
    for _ in range(2):
        assert few.ready_at(0.0, 1, interactive=True) == 0.0
        few.sent(0.0, 1)
    assert few.ready_at(0.0, 1, interactive=True) == pytest.approx(0.1)


def test_deferred_work_leaves_some_of_the_limit_to_those_who_wait():
    limits = RateLimits(requests_per_minute=600)
    scheduler = Scheduler(EngineWindow(1000), BulkWindow(), rate=limits)
    bulk = Demand("a", interactive=False, remaining=100)
    for _ in range(100):
        scheduler.submit(Ticket(bulk), 0.0)
    assert len(scheduler.schedule(0.0)) == 48
    assert scheduler.next_at == pytest.approx(0.1)
    chat = Ticket(Demand("b", interactive=True))
    scheduler.submit(chat, 0.0)
    assert scheduler.schedule(0.0) == [chat]
    # Ten a second from now on.
    assert sum(len(scheduler.schedule(now / 10)) for now in range(1, 31)) == pytest.approx(30, abs=2)


@pytest.mark.parametrize(
    ("headers", "seen"),
    [
        ({}, None),
        (
            {
                "x-ratelimit-remaining-requests": "59",
                "x-ratelimit-reset-requests": "6m0s",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "20ms",
            },
            LimitsSeen(59, 360, 149_984, 0.02),
        ),
        (
            {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1.5"},
            LimitsSeen(None, None, 0, 1.5),
        ),
        (
            {
                "anthropic-ratelimit-requests-remaining": "0",
                "anthropic-ratelimit-requests-reset": "1970-01-01T00:01:40Z",
                "anthropic-ratelimit-tokens-remaining": "x",
                "anthropic-ratelimit-tokens-reset": "soon",
            },
            LimitsSeen(0, 90.0),
        ),
        (
            {"x-ratelimit-remaining-requests": "-1", "x-ratelimit-reset-requests": "9999999h"},
            LimitsSeen(0, 86_400.0),
        ),
    ],
)
def test_headers_of_both_dialects_are_read(headers, seen):
    assert limits_seen(headers, 10.0) == seen
