"""Packs never lose or double an item, stay within their limits, and pad as little as promised."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchyard.batching.packing import (
    PassTimes,
    draw_pack,
    pack_best_fit,
    pack_by_time,
    pack_by_tokens,
    padding_ratio,
)
from batchyard.errors import UsageError

lengths_of_texts = st.lists(st.integers(0, 600), max_size=80)
limits = st.integers(1, 1024)
counts = st.none() | st.integers(1, 20)


def cost(lengths, pack, *, padded):
    own = [lengths[index] for index in pack]
    return max(own) * len(own) if padded else sum(own)


def each_once(lengths, packs):
    return sorted(index for pack in packs for index in pack) == list(range(len(lengths)))


@given(lengths_of_texts, limits, counts, st.booleans(), counts)
def test_a_token_budget_holds_and_no_item_is_lost(lengths, max_tokens, max_items, padded, max_lengths):
    packs = pack_by_tokens(
        lengths, max_tokens=max_tokens, max_items=max_items, padded=padded, max_lengths=max_lengths
    )
    assert each_once(lengths, packs)
    for pack in packs:
        assert len(pack) == 1 or cost(lengths, pack, padded=padded) <= max_tokens
        assert max_items is None or len(pack) <= max_items
        assert max_lengths is None or len({lengths[index] for index in pack}) <= max_lengths
    flat = [lengths[index] for pack in packs for index in pack]
    assert flat == sorted(flat)


@given(lengths_of_texts, limits)
def test_two_neighbouring_packs_never_fit_into_one_budget(lengths, max_tokens):
    packs = pack_by_tokens(lengths, max_tokens=max_tokens)
    for one, following in itertools.pairwise(packs):
        assert cost(lengths, one, padded=False) + lengths[following[0]] > max_tokens


@given(lengths_of_texts, limits, counts)
def test_best_fit_holds_its_budget_and_keeps_near_the_fewest_packs(lengths, max_tokens, max_items):
    packs = pack_best_fit(lengths, max_tokens=max_tokens, max_items=max_items)
    assert each_once(lengths, packs)
    for pack in packs:
        assert len(pack) == 1 or cost(lengths, pack, padded=False) <= max_tokens
        assert max_items is None or len(pack) <= max_items
    if max_items is None and all(length <= max_tokens for length in lengths):
        fewest = -(-sum(lengths) // max_tokens)
        # First Fit Decreasing's bound is against the optimum; twice the volume bounds any such rule.
        assert len(packs) <= 2 * fewest + 1


def test_best_fit_needs_fewer_packs_than_sorted_runs_where_lengths_complement_each_other():
    lengths = [300, 212, 300, 212, 300, 212]
    assert len(pack_best_fit(lengths, max_tokens=512)) == 3
    assert len(pack_by_tokens(lengths, max_tokens=512)) == 4


@given(lengths_of_texts, limits, counts, counts, st.integers(1, 50))
@example([2, 0], 1, None, None, 2)
def test_drawing_until_the_queue_is_empty_takes_each_once_and_the_oldest_always(
    lengths, max_tokens, max_items, max_lengths, window
):
    waiting = list(range(len(lengths)))
    packs = []
    while waiting:
        queue = [lengths[index] for index in waiting]
        drawn = draw_pack(
            queue, max_tokens=max_tokens, max_items=max_items, max_lengths=max_lengths, window=window
        )
        assert 0 in drawn
        assert max(drawn) < window
        assert len(drawn) == 1 or cost(queue, drawn, padded=False) <= max_tokens
        assert max_items is None or len(drawn) <= max_items
        assert max_lengths is None or len({queue[place] for place in drawn}) <= max_lengths
        assert [queue[place] for place in drawn] == sorted(queue[place] for place in drawn)
        packs.append([waiting[place] for place in drawn])
        waiting = [index for place, index in enumerate(waiting) if place not in set(drawn)]
    assert each_once(lengths, packs)


def test_a_drawn_pack_holds_the_oldest_and_its_nearest_in_length():
    assert draw_pack([50, 400, 51, 10, 49, 50], max_tokens=200) == (4, 0, 5, 2)
    assert draw_pack([50, 400, 51, 10, 49, 50], max_tokens=100) == (0, 5)
    assert draw_pack([900, 10], max_tokens=512) == (0,)
    assert draw_pack([], max_tokens=512) == ()


def test_of_one_length_the_oldest_are_drawn_first():
    assert draw_pack([30, 20, 20, 20], max_tokens=70) == (1, 2, 0)


GRID = PassTimes(items=(1, 32), lengths=(1, 512), seconds=((0.001, 0.01), (0.032, 0.32)))


@given(st.lists(st.integers(1, 300), max_size=9), st.integers(1, 5))
def test_cutting_by_time_is_never_slower_than_any_other_cut_of_the_sorted_list(lengths, max_items):
    packs = pack_by_time(lengths, GRID, max_items=max_items)
    assert each_once(lengths, packs)
    assert all(len(pack) <= max_items for pack in packs)

    def total(cut):
        return sum(GRID.of(len(run), run[-1]) for run in cut)

    def cuts(rest):
        if not rest:
            yield []
        for size in range(1, min(max_items, len(rest)) + 1):
            for tail in cuts(rest[size:]):
                yield [rest[:size], *tail]

    least = min(total(cut) for cut in cuts(sorted(lengths)))
    assert total([[lengths[index] for index in pack] for pack in packs]) == pytest.approx(least)


def test_pass_times_are_interpolated_and_go_on_beyond_the_grid():
    times = PassTimes(items=(1, 3), lengths=(10, 20), seconds=((1.0, 2.0), (3.0, 6.0)))
    assert times.of(1, 10) == 1.0
    assert times.of(2, 15) == 3.0
    assert times.of(5, 20) == 10.0
    assert times.of(1, 30) == 3.0


def test_cutting_by_time_joins_where_a_pass_costs_most_and_parts_where_padding_does():
    a_pass_costs = PassTimes(items=(1, 2), lengths=(1, 100), seconds=((10.0, 10.1), (10.0, 10.2)))
    assert len(pack_by_time([1, 100], a_pass_costs, max_items=8)) == 1
    padding_costs = PassTimes(items=(1, 2), lengths=(1, 100), seconds=((1.0, 100.0), (2.0, 200.0)))
    assert len(pack_by_time([1, 100], padding_costs, max_items=8)) == 2


@given(st.lists(st.integers(1, 600), min_size=1, max_size=80))
def test_packs_of_one_length_pad_nothing(lengths):
    packs = pack_by_tokens(lengths, max_tokens=10**6, max_lengths=1)
    assert padding_ratio(lengths, packs) == 1.0


def test_padding_is_counted():
    assert padding_ratio([10, 30], [(0, 1)]) == 1.5
    assert padding_ratio([], []) == 1.0


@pytest.mark.parametrize("limit", ["max_tokens", "max_items", "max_lengths"])
def test_a_limit_below_one_is_refused(limit):
    settings = {"max_tokens": 10, "max_items": 1, "max_lengths": 1} | {limit: 0}
    with pytest.raises(UsageError, match=f"{limit} must be at least 1, not 0"):
        pack_by_tokens([1], **settings)


def test_a_grid_of_the_wrong_shape_is_refused():
    with pytest.raises(UsageError, match="rising values"):
        PassTimes(items=(1,), lengths=(1, 2), seconds=((1.0, 2.0),))
    with pytest.raises(UsageError, match="one value for each pair"):
        PassTimes(items=(1, 2), lengths=(1, 2), seconds=((1.0, 2.0),))
