"""The table of transitions: whatever happens, a Batch ends, and it ends once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.errors import InvalidTransition
from batchyard.service.lifecycle import TERMINAL, TRANSITIONS, Action, Status, step


def reachable(start):
    seen, todo = set(), [start]
    while todo:
        status = todo.pop()
        if status not in seen:
            seen.add(status)
            todo += [target for (one, _), target in TRANSITIONS.items() if one is status]
    return seen


def test_every_status_is_reached_and_leads_to_an_end():
    assert reachable(Status.VALIDATING) == set(Status)
    for status in Status:
        assert reachable(status) & TERMINAL


def test_ends_are_final():
    for (status, _), target in TRANSITIONS.items():
        if status in TERMINAL:
            assert target is status


@given(st.lists(st.sampled_from(Action), max_size=12))
def test_no_sequence_of_actions_leaves_an_end(actions):
    status = Status.VALIDATING
    for action in actions:
        try:
            after = step(status, action)
        except InvalidTransition:
            continue
        if status in TERMINAL:
            assert after is status
        status = after


def test_a_refusal_says_what_would_be_taken():
    with pytest.raises(InvalidTransition, match="It takes: cancel, finalize, pause"):
        step(Status.IN_PROGRESS, Action.RESUME)
    with pytest.raises(InvalidTransition, match="It has ended"):
        step(Status.COMPLETED, Action.CANCEL)
