"""Floor 6. The life of a Batch as one pure table: which action leads from which status to which.

Pure: no clock, file or database. `docs/reference/lifecycle.md` draws this table, and a test holds the
two against each other. Names and meanings follow the OpenAI Batch API; `paused` is ours.
"""

from __future__ import annotations

from enum import StrEnum

from batchyard.errors import InvalidTransition


class Status(StrEnum):
    """Where a Batch stands."""

    VALIDATING = "validating"  # the input is being checked
    FAILED = "failed"  # the input was refused; nothing ran
    IN_PROGRESS = "in_progress"  # waiting or running
    PAUSED = "paused"  # held; nothing is dispatched until it is resumed
    FINALIZING = "finalizing"  # every request has a result; the files are being written
    COMPLETED = "completed"  # done, even if every request failed
    CANCELLING = "cancelling"  # what runs is being stopped, results are being gathered
    CANCELLED = "cancelled"  # stopped; finished answers are kept
    EXPIRED = "expired"  # the deadline passed; finished answers are kept


class Action(StrEnum):
    """What moves a Batch."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    PAUSE = "pause"
    RESUME = "resume"
    FINALIZE = "finalize"
    COMPLETE = "complete"
    REOPEN = "reopen"
    CANCEL = "cancel"
    EXPIRE = "expire"


#: Every step there is. What is not here does not exist.
TRANSITIONS: dict[tuple[Status, Action], Status] = {
    (Status.VALIDATING, Action.ACCEPT): Status.IN_PROGRESS,
    (Status.VALIDATING, Action.REFUSE): Status.FAILED,
    (Status.VALIDATING, Action.CANCEL): Status.CANCELLING,
    (Status.IN_PROGRESS, Action.PAUSE): Status.PAUSED,
    (Status.IN_PROGRESS, Action.FINALIZE): Status.FINALIZING,
    (Status.IN_PROGRESS, Action.CANCEL): Status.CANCELLING,
    (Status.PAUSED, Action.RESUME): Status.IN_PROGRESS,
    (Status.PAUSED, Action.CANCEL): Status.CANCELLING,
    (Status.FINALIZING, Action.COMPLETE): Status.COMPLETED,
    # Its window closed before every request had run; what was not run says so in its line.
    (Status.FINALIZING, Action.EXPIRE): Status.EXPIRED,
    # Some results turned out to be damaged on the disk: those requests are run again.
    (Status.FINALIZING, Action.REOPEN): Status.IN_PROGRESS,
    (Status.CANCELLING, Action.COMPLETE): Status.CANCELLED,
    (Status.CANCELLING, Action.REOPEN): Status.CANCELLING,
    # Asking again to cancel is no error: the caller's wish is already met.
    (Status.CANCELLING, Action.CANCEL): Status.CANCELLING,
    (Status.CANCELLED, Action.CANCEL): Status.CANCELLED,
}

TERMINAL = frozenset({Status.FAILED, Status.COMPLETED, Status.CANCELLED, Status.EXPIRED})


def step(status: Status, action: Action) -> Status:
    """The status that *action* leads to.

    Raises:
        InvalidTransition: a Batch in this status does not take this action.
    """
    target = TRANSITIONS.get((status, action))
    if target is None:
        taken = sorted(one.value for state, one in TRANSITIONS if state is status)
        remedy = f"It takes: {', '.join(taken)}." if taken else "It has ended and takes no action."
        raise InvalidTransition(f"Cannot {action.value} a Batch with status '{status.value}'. {remedy}")
    return target
