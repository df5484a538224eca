"""The order inside a Batch: nothing lost, nothing twice, and those who share a prefix do so in the cache."""

import itertools
import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchyard.scheduling.order import ByLength, ByPrefix, Fifo


class Item:
    """A request: its prompt."""

    def __init__(self, prompt, no=0):
        self.prompt = prompt
        self.no = no

    def __repr__(self):
        return f"{self.no}:{self.prompt[:8]!r}({len(self.prompt)})"


def by_prefix(one_cache=False):
    return ByPrefix(lambda item: item.prompt, one_cache=one_cache)


ORDERS = {
    "fifo": Fifo,
    "length": lambda: ByLength(lambda item: len(item.prompt)),
    "slot": by_prefix,
    "engine": lambda: by_prefix(one_cache=True),
}
prompts = st.builds(
    lambda stem, size, tail: bytes([stem]) * size + tail,
    st.integers(0, 3),
    st.sampled_from([0, 70, 300, 1500]),
    st.binary(max_size=4),
)


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(ORDERS)),
    st.lists(st.lists(prompts, max_size=30), max_size=4),
    st.integers(1, 5),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_each_request_is_taken_once_whatever_fails_on_the_way(name, parts, lanes, most, chance):
    order = ORDERS[name]()
    items, running, done = [], {}, []
    parts = list(parts)
    while parts or len(order) or running:
        if parts and (chance.random() < 0.3 or not (len(order) or running)):
            more = [Item(prompt, len(items) + place) for place, prompt in enumerate(parts.pop())]
            items += more
            order.add(more)
        taken = False
        for lane in range(lanes):
            if lane not in running and (found := order.take(lane, most)):
                assert len(found) <= most
                running[lane] = found
                taken = True
        assert len(list(order)) == len(order)
        # Whoever waits does so for somebody.
        assert taken or running or not len(order)
        if running:
            found = running.pop(chance.choice(sorted(running)))
            if chance.random() < 0.2:
                order.again(found)
            else:
                for item in found:
                    order.done(item)
                done += found
    assert sorted(item.no for item in done) == list(range(len(items)))


class Slots:
    """Caches of an engine: each slot holds its last prompt, or one cache holds all that were."""

    def __init__(self, slots, one_cache):
        self.one_cache = one_cache
        self.last = [b""] * slots
        self.known = OrderedDict()
        self.hit = self.total = self.computed = 0

    def start(self, lane, prompt):
        known = list(self.known) if self.one_cache else [self.last[lane]]
        shared = max((common(prompt, one) for one in known), default=0)
        self.hit += shared
        self.total += len(prompt)
        self.last[lane] = prompt
        return len(prompt) - shared

    def end(self, prompt):
        self.known[prompt] = True


def common(one, other):
    return next(
        (at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other))
    )


def play(order, items, lanes, one_cache):
    """All of *items*, each taking as long as what has to be computed of it; time, hits and what was possible."""
    slots = Slots(lanes, one_cache)
    order.add(items)
    now, running = 0.0, []
    idle = list(range(lanes))
    while len(order) or running:
        for lane in list(idle):
            if found := order.take(lane, 1):
                idle.remove(lane)
                running.append((now + slots.start(lane, found[0].prompt) + 100, lane, found[0]))
        now, lane, item = min(running, key=lambda one: one[0])
        running.remove((now, lane, item))
        slots.end(item.prompt)
        order.done(item)
        idle.append(lane)
    distinct = sorted(item.prompt for item in items)
    possible = sum(common(a, b) for a, b in itertools.pairwise(distinct))
    return now, slots.hit, possible


def table(groups, each, size=2_000, seed=1, head=b""):
    chance = random.Random(seed)
    stems = [head + chance.randbytes(size) for _ in range(groups)]
    items = [Item(stem + chance.randbytes(60)) for stem in stems for _ in range(each)]
    chance.shuffle(items)
    return items


class Sorted(Fifo):
    """What is wrong: a plain sort."""

    def add(self, items):
        super().add(sorted(items, key=lambda item: item.prompt))


@pytest.mark.parametrize("one_cache", [False, True])
@pytest.mark.parametrize("lanes", [1, 4, 8])
@pytest.mark.parametrize("head", [b"", b"You are helpful." * 100])
def test_a_table_job_finds_nearly_all_that_can_be_found(one_cache, lanes, head):
    items = table(24, 5, head=head)
    took, hit, possible = play(by_prefix(one_cache), items, lanes, one_cache)
    first_took, first_hit, _ = play(Fifo(), items, lanes, one_cache)
    # Each further lane computes what all have in common once.
    assert hit >= 0.95 * (possible - len(head) * (lanes - 1))
    if not one_cache:
        assert first_took > 2.5 * took or head
        assert first_hit < hit
    if lanes > 1 and not head:
        sorted_took, sorted_hit, _ = play(Sorted(), items, lanes, one_cache)
        assert sorted_took > 2 * took or lanes < 8
        assert hit > sorted_hit


def test_one_prefix_for_all_is_shared_out_to_every_lane():
    items = table(1, 200, size=2_000)
    took, hit, possible = play(by_prefix(), items, 8, one_cache=False)
    # Seven more lanes compute it, which is cheaper than to leave them idle.
    assert hit == pytest.approx(possible - 7 * 2_000, rel=0.02)
    assert took < 200 * 160 / 8 + 2_000 * 1.3
    took, hit, possible = play(by_prefix(one_cache=True), items, 8, one_cache=True)
    assert hit == pytest.approx(possible, rel=0.02)
    assert took < 200 * 160 / 8 + 2_000 * 1.3


def test_a_tail_is_not_torn_apart_for_less_than_it_costs():
    items = table(1, 3, size=50_000)
    _, hit, possible = play(by_prefix(), items, 8, one_cache=False)
    assert hit == possible


@pytest.mark.parametrize("one_cache", [False, True])
def test_where_nothing_is_shared_the_order_is_that_of_the_input(one_cache):
    chance = random.Random(3)
    items = [Item(b"Hi. " + chance.randbytes(300), no) for no in range(100)]
    order = by_prefix(one_cache)
    order.add(items)
    assert [order.take(no % 8, 1)[0].no for no in range(100)] == list(range(100))
    assert order.sharing.share == 0


def test_what_a_cache_could_give_is_told():
    order = by_prefix()
    order.add(table(10, 5, size=2_000))
    assert order.sharing.share == pytest.approx(4 / 5 * 1_984 / 2_060, rel=0.01)


def test_the_longest_go_first_and_equal_ones_in_the_order_of_the_input():
    order = ORDERS["length"]()
    order.add([Item(b"aa", 0), Item(b"bbbb", 1), Item(b"cc", 2)])
    order.add([Item(b"ddd", 3)])
    assert [order.take(0, 1)[0].no for _ in range(4)] == [1, 3, 0, 2]
