"""What a worker has at hand: those alike go once, and what another took over is let go."""

import pytest

from batchyard.scheduling.order import Fifo
from batchyard.service.at_hand import AtHand, is_deterministic, prompt_of
from batchyard.service.chunk_run import WorkItem
from batchyard.types import Answer, Endpoint, Request


class Run:
    """A chunk, which is ours or lost."""

    lost = False


def item(run, no, body=b"{}", endpoint=Endpoint.EMBEDDINGS):
    return WorkItem(Request(f"r{no}", endpoint, body, "m"), run, no)


def all_alike(count, run):
    return [item(run, no) for no in range(count)]


def test_any_number_of_lost_requests_is_passed_over():
    lost, ours = Run(), Run()
    lost.lost = True
    hand = AtHand(Fifo(), None)
    hand.add([item(lost, no) for no in range(20_000)] + [item(ours, 7)])
    assert [one.place for one in hand.take(0, 1)] == [7]
    assert (hand.take(0, 1), len(hand)) == ([], 0)


def test_of_those_alike_one_goes_and_the_others_have_its_answer_whenever_they_come():
    hand = AtHand(Fifo(), is_deterministic)
    items = all_alike(4, Run())
    assert hand.add(items) == []
    assert (hand.take(0, 9), hand.take(0, 9)) == (items[:1], [])
    answer = Answer(200, b"{}")
    assert hand.answered(items[0], answer) == items[1:]
    late = item(Run(), 9)
    assert hand.add([late]) == [(late, answer)]
    assert len(hand) == 0


def test_answers_are_kept_up_to_so_many_bytes():
    hand = AtHand(Fifo(), is_deterministic, answer_bytes=1_000)
    for no in range(20):
        one = item(Run(), no, b"%d" % no)
        assert hand.add([one]) == []
        hand.answered(*hand.take(0, 1), Answer(200, bytes(100)))
    known = hand.add([item(Run(), no, b"%d" % no) for no in range(20)])
    assert [one.place for one, _ in known] == list(range(10, 20))


def test_of_those_alike_one_that_has_no_answer_leaves_it_to_the_next():
    hand = AtHand(Fifo(), is_deterministic)
    items = all_alike(3, Run())
    hand.add(items)
    hand.unanswered(*hand.take(0, 1))
    assert (hand.take(0, 9), hand.take(0, 9)) == ([items[1]], [])
    # An answer that failed is an answer, but not one to keep.
    assert hand.answered(items[1], Answer(400, b"{}")) == [items[2]]
    assert hand.add(all_alike(1, Run())) == []


def test_twins_of_a_lost_request_go_for_themselves():
    lost, ours = Run(), Run()
    hand = AtHand(Fifo(), is_deterministic)
    items = [item(lost, 0), item(lost, 1), item(ours, 2), item(ours, 3)]
    hand.add(items)
    lost.lost = True
    assert hand.take(0, 9) == [items[2]]
    assert hand.answered(items[2], Answer(200, b"{}")) == [items[3]]


def test_once_requests_change_each_goes_for_itself():
    hand = AtHand(Fifo(), is_deterministic)
    items = all_alike(3, Run())
    hand.add(items)
    hand.part_twins()
    assert sorted(one.place for one in hand.take(0, 9)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "endpoint", "wanted"),
    [
        (b'{"temperature": 0}', Endpoint.CHAT, True),
        (b'{"temperature": 0.0, "messages": []}', Endpoint.CHAT, True),
        (b'{"temperature": 1}', Endpoint.CHAT, False),
        (b'{"temperature": "0"}', Endpoint.CHAT, False),
        (b'{"temperature": null}', Endpoint.CHAT, False),
        (b"{}", Endpoint.CHAT, False),
        (b"{}", Endpoint.EMBEDDINGS, True),
        (b'{"temperature": ' + b"[" * 5_000, Endpoint.CHAT, False),
    ],
)
def test_what_has_the_same_answer_by_rights(body, endpoint, wanted):
    assert is_deterministic(item(None, 0, body, endpoint).request) is wanted


def test_the_prompt_begins_with_what_engines_read_first():
    one = item(None, 0, b'{"messages": [1, 2], "max_tokens": 4}', Endpoint.CHAT).request
    other = item(None, 1, b'{"max_tokens": 9, "messages": [1, 3]}', Endpoint.CHAT).request
    assert prompt_of(one).split(b"[1")[0] == prompt_of(other).split(b"[1")[0]
    assert prompt_of(one) != prompt_of(other)
    assert prompt_of(item(None, 2, b"[", Endpoint.CHAT).request) == b""
    assert prompt_of(item(None, 3).request) == b""
