"""The curve t = a + b·n + c·cost: what it learns, what it admits not to know, and what spoils others."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.batching.latency import KEPT, LatencyCurve, LatencyFit

A, B, C = 0.005, 0.0002, 0.00001


def learnt(samples, *, noise=0.0, forgetting=0.98, seed=1):
    chance = random.Random(seed)
    fit = LatencyFit(forgetting)
    for n, cost in samples:
        exact = A + B * n + C * cost
        fit.observe(n, cost, exact * (1 + chance.uniform(-noise, noise)))
        _ = fit.curve
    return fit.curve


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 4096)), min_size=30, max_size=120).filter(
        lambda samples: len({n for n, _ in samples}) > 8 and len({cost for _, cost in samples}) > 8
    )
)
def test_without_noise_it_predicts_every_dispatch_that_it_saw(samples):
    curve = learnt(samples)
    assert curve.known
    for n, cost in samples[-20:]:
        assert curve.predict_s(n, cost) == pytest.approx(A + B * n + C * cost, rel=0.05)


def test_with_noise_the_coefficients_come_out_and_the_error_says_how_sure():
    chance = random.Random(7)
    samples = [(chance.randint(1, 64), chance.randint(0, 4000)) for _ in range(2000)]
    curve = learnt(samples, noise=0.1, forgetting=0.998)
    assert curve.fixed_s == pytest.approx(A, rel=0.25)
    assert curve.per_item_s == pytest.approx(B, rel=0.2)
    assert curve.per_cost_s == pytest.approx(C, rel=0.1)
    assert 0.0002 < curve.error_s < 0.01


def test_while_every_batch_had_one_size_a_larger_one_is_promised_slow_never_free():
    # Least squares of least norm would split the time evenly between a and b, and so promise 64 items in
    # 3.2 times the time of one (PEERS: 50 ms learnt as 25 + 25 where the truth was 0 + 50).
    curve = learnt([(1, 0)] * 40)
    assert not curve.spread
    assert curve.predict_s(1) == pytest.approx(A + B, rel=0.01)
    assert curve.predict_s(64) > 0.9 * 64 * (A + B)


def test_one_pause_of_the_machine_hardly_moves_it_and_a_true_change_does():
    fit = LatencyFit()
    chance = random.Random(3)

    def run(times, slow=1.0):
        for _ in range(times):
            n = chance.randint(1, 32)
            fit.observe(n, 0.0, slow * (A + B * n) * chance.uniform(0.97, 1.03))
            _ = fit.curve

    run(200)
    fit.observe(16, 0.0, 5.0)
    _ = fit.curve
    assert fit.curve.predict_s(16) == pytest.approx(A + B * 16, rel=0.1)
    run(200, slow=3.0)
    assert fit.curve.predict_s(16) == pytest.approx(3 * (A + B * 16), rel=0.1)


def test_a_dispatch_never_gets_faster_by_more_work():
    fit = LatencyFit()
    for n in range(1, 40):
        # Larger batches happen to be quicker, as when a cache warms up.
        fit.observe(n, 10.0 * n, 0.1 / n)
    curve = fit.curve
    assert curve.fixed_s >= 0
    assert curve.per_item_s >= 0
    assert curve.per_cost_s >= 0
    assert curve.predict_s(64, 640) >= curve.predict_s(1, 10)


def test_unread_samples_are_bounded():
    fit = LatencyFit()
    for _ in range(10 * KEPT):
        fit.observe(1, 0.0, 0.01)
    assert len(fit._new) == KEPT
    assert fit.curve.predict_s(1) == pytest.approx(0.01, rel=0.01)


def test_how_many_items_stay_within_a_goal():
    curve = LatencyCurve(fixed_s=A, per_item_s=B, weight=10)
    assert curve.largest_within(A + 10 * B) == 10
    assert curve.largest_within(A + 10.5 * B) == 10
    assert curve.largest_within(A / 2) == 0
    assert LatencyCurve(fixed_s=A, weight=10).largest_within(1.0) > 1_000_000
