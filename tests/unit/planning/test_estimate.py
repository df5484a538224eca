"""Estimates say how sure they are; the meter of a run is neither jumpy nor late."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.planning.estimate import (
    Figure,
    Price,
    RateMeter,
    Source,
    Verdict,
    cost,
    eta_s,
    total_of_sample,
    verdict,
)

# --- totals of a sample --------------------------------------------------------------------------


def test_a_whole_count_is_no_estimate():
    assert total_of_sample([1, 2, 3], 3) == Figure(6, 6, 6, Source.MEASURED)
    assert total_of_sample([], 0) == Figure(0, 0, 0, Source.MEASURED)


def test_the_range_by_hand():
    # Mean 20, variance 100, 3 of 12: error = 2 * sqrt(100 / 3 * 0.75) = 10.
    assert total_of_sample([10, 20, 30], 12) == Figure(
        240, pytest.approx(120), pytest.approx(360), Source.MEASURED
    )


def test_one_value_tells_little():
    assert total_of_sample([50], 10) == Figure(500, 50, 1000, Source.MEASURED)


@given(st.lists(st.integers(0, 10_000), min_size=1), st.integers(1, 1000))
def test_the_value_lies_in_its_range_and_above_what_was_counted(sample, more):
    found = total_of_sample(sample, len(sample) + more)
    assert sum(sample) <= found.low <= found.value * (1 + 1e-9)
    assert found.value <= found.high * (1 + 1e-9)


def test_nineteen_of_twenty_ranges_hold_the_truth():
    rng = random.Random(7)
    population = [max(1, round(rng.lognormvariate(4, 0.6))) for _ in range(5000)]
    truth, held = sum(population), 0
    for _ in range(400):
        found = total_of_sample(rng.sample(population, 200), len(population))
        held += found.low <= truth <= found.high
    assert 0.92 <= held / 400 <= 0.98


# --- cost ----------------------------------------------------------------------------------------


def test_cost_follows_the_range_and_the_weaker_source():
    measured = Figure(1e6, 0.5e6, 2e6, Source.MEASURED)
    assumed = Figure(2e6, 1e6, 4e6, Source.ASSUMED)
    assert cost(measured, measured, Price(0.5, 2)) == Figure(2.5, 1.25, 5.0, Source.GIVEN)
    assert cost(measured, assumed, Price(0.5, 2)) == Figure(4.5, 2.25, 9.0, Source.ASSUMED)


# --- rate, ETA, verdict --------------------------------------------------------------------------


def rate_after(points, **options):
    meter = RateMeter(**options)
    for now, total in points:
        meter.add(now, total)
    return meter.per_s


def test_nothing_is_told_before_two_points():
    assert rate_after([]) == 0
    assert rate_after([(5, 100)]) == 0
    assert rate_after([(5, 100), (5, 200)]) == 0


def test_the_first_seconds_count_from_the_start():
    assert rate_after([(100, 1000), (101, 1010), (102, 1030)]) == 15


def test_the_window_forgets():
    slow = [(now, now) for now in range(60)]
    fast = [(60 + now, 60 + 100 * now) for now in range(20)]
    assert rate_after(slow + fast) == 100


def test_what_was_done_before_is_no_speed():
    assert rate_after([(0, 5_000), (1, 5_010)]) == 10


def test_rare_answers_do_not_make_the_rate_fall_to_nothing():
    # One answer every 30 s, looked at four times a second.
    points = [(tick / 4, tick // 120) for tick in range(4 * 3600)]
    for end in range(4 * 1800, 4 * 1800 + 120, 7):
        assert rate_after(points[:end]) == pytest.approx(1 / 30, rel=0.15)


def test_a_stall_shows():
    going = [(now, 100 * now) for now in range(30)]
    stalled = [(30 + now, 2900) for now in range(300)]
    rates = [rate_after(going + stalled[:length]) for length in (1, 20, 100, 300)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1


def test_memory_stays_small_however_long_nothing_happens():
    meter = RateMeter()
    for tick in range(100_000):
        meter.add(tick / 4, tick // 1000)
    assert len(meter._points) < 100


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), min_size=2),
    st.floats(0.5, 20),
)
def test_the_rate_is_never_beyond_what_was_seen(steps, window_s):
    now = total = 0.0
    points = []
    for duration, growth in steps:
        now, total = now + duration, total + growth
        points.append((now, total))
    rate = rate_after(points, window_s=window_s)
    assert rate >= 0
    if now > points[0][0]:
        # The window holds at least min_growth or everything, over at most all of the time.
        assert rate * (now - points[0][0]) >= min(total - points[0][1], 8) * (1 - 1e-9)


def test_eta():
    assert eta_s(0, 0) == 0
    assert eta_s(10, 0) is None
    assert eta_s(10, 4) == 2.5


@pytest.mark.parametrize(
    ("needed", "left", "word"),
    [
        (None, 10, None),
        (8, 10, "early"),
        (8.1, 10, "tight"),
        (10, 10, "tight"),
        (10.1, 10, "late"),
        (0, 0, "early"),
        (1, -5, "late"),
    ],
)
def test_verdicts(needed, left, word):
    assert verdict(needed, left) == (word and Verdict(word))
