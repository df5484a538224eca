"""The canary lets the first requests go, and judges them alone."""

from hypothesis import given
from hypothesis import strategies as st

from batchyard.scheduling.canary import Canary, CanaryPolicy


def test_only_the_first_may_start_until_they_are_finished():
    canary = Canary(CanaryPolicy(0.5, first=3), total=10)
    assert canary.may_start == 3
    canary.start(3)
    assert canary.may_start == 0
    canary.put_back()
    assert canary.may_start == 1
    canary.start(1)
    for _ in range(3):
        canary.finish(succeeded=True)
    assert canary.decided
    assert canary.may_start is None
    assert not canary.tripped


def test_it_trips_as_soon_as_the_limit_cannot_be_kept():
    canary = Canary(CanaryPolicy(0.05, first=100), total=1000)
    canary.start(100)
    for _ in range(5):
        canary.finish(succeeded=False)
    assert not canary.tripped
    canary.finish(succeeded=False)
    assert canary.tripped
    assert canary.finished == 6


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 40), st.floats(0, 1))
def test_what_comes_after_the_first_never_changes_the_verdict(results, first, share):
    canary = Canary(CanaryPolicy(share, first), total=len(results))
    for succeeded in results:
        canary.finish(succeeded=succeeded)
    failed = results[: canary.first].count(False)
    assert canary.failed == failed
    assert canary.tripped == (failed > share * canary.first)
