"""Which upstream takes a call: the least busy, the one that knows the prompt, none that is ill."""

from hypothesis import given
from hypothesis import strategies as st

from batchyard.scheduling.upstreams import Result, Upstreams, UpstreamState


def call(them, now=0.0, tried=(), prefix=b""):
    no = them.choose(now, tried, prefix)
    them.sent(no, prefix)
    return no


def test_calls_go_where_least_is_out_for_its_room():
    them = Upstreams([1, 3])
    assert [call(them) for _ in range(4)] == [0, 1, 1, 1]
    them.ended(0, Result.ANSWERED, 1.0)
    assert call(them) == 0
    assert repr(them) == "<Upstreams [1 of 1, 3 of 3]>"


def test_a_prompt_that_begins_like_another_goes_where_that_was_answered():
    them = Upstreams([8, 8])
    system = b"s" * 600
    assert call(them, prefix=system + b"1") == 0
    # The other one is free, but this one has computed the beginning.
    assert call(them, prefix=system + b"2") == 0
    # Bounded: the beginning is worth no more than that.
    assert call(them, prefix=system + b"3") == 1
    them.ended(0, Result.ANSWERED, 1.0)
    assert call(Upstreams([8, 8]), prefix=b"short") == 0


def test_three_bad_calls_in_a_row_eject_and_one_good_call_brings_back():
    them = Upstreams([4, 4])
    for _ in range(3):
        them.sent(0)
        them.ended(0, Result.BAD, 1.0, why="500")
    assert them.all[0].state is UpstreamState.EJECTED
    assert {call(them, 2.0) for _ in range(9)} == {1}
    # Its rest is over: one call at a time finds out.
    for _ in range(4):
        them.ended(1, Result.ANSWERED, 6.0)
    assert call(them, 6.5) == 0
    assert call(them, 6.5) == 1
    them.ended(0, Result.ANSWERED, 7.0)
    assert them.all[0].state is UpstreamState.HEALTHY
    assert call(them, 7.0) == 0


def test_each_further_rest_is_twice_as_long_up_to_a_minute():
    them = Upstreams([1, 1])
    now, rests = 0.0, []
    for _ in range(6):
        them.choose(now)
        them.sent(0)
        them.ended(0, Result.GONE, now, why="refused")
        rests.append(them.all[0].rests_until - now)
        now = them.all[0].rests_until
    assert rests == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_one_that_asked_for_time_gets_it_if_there_are_others():
    them = Upstreams([2, 2])
    them.sent(0)
    them.ended(0, Result.LIMITED, 10.0, wait_s=30.0)
    assert them.choose(20.0) == 1
    assert them.choose(40.0) == 0
    assert them.choose(20.0, {1}) == 0
    assert not them.has_room(20.0, {1})
    assert them.has_room(40.0, {1})
    assert them.choose(20.0, {0, 1}) is None


def test_a_health_check_shortens_a_rest_or_makes_it_longer():
    them = Upstreams([1])
    them.sent(0)
    them.ended(0, Result.GONE, 0.0)
    them.found(0, 6.0, well=False, why="still away")
    assert (them.all[0].rests_until, them.all[0].why) == (16.0, "still away")
    them.found(0, 7.0, well=True)
    assert them.all[0].state is UpstreamState.HALF_OPEN


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(list(Result)), st.floats(0, 20)), max_size=60),
)
def test_somebody_always_takes_a_call_and_nothing_is_counted_twice(rooms, steps):
    them = Upstreams(rooms)
    now, out = 0.0, []
    for result, pause in steps:
        now += pause
        no = them.choose(now)
        assert no is not None
        them.sent(no)
        out.append(no)
        if len(out) > 2:
            them.ended(out.pop(0), result, now)
        assert [one.busy for one in them.all] == [out.count(no) for no in range(len(rooms))]
        assert all(one.rests_until - now <= 60.0 for one in them.all)
