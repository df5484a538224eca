"""Floor 0. Every error that Batchyard raises on purpose, named by what failed.

A message says what happened, where, and what to do. Foreign errors are mapped at the border, with
`raise ... from`.
"""

from __future__ import annotations

from dataclasses import dataclass


class BatchyardError(Exception):
    """Base of all errors that Batchyard raises on purpose."""


class UsageError(BatchyardError):
    """An option, argument or setting does not make sense."""


@dataclass(frozen=True, slots=True)
class LineError:
    """One thing wrong with one line of an input; codes follow the OpenAI Batch API."""

    code: str
    message: str
    #: 1-based; None where the whole input is meant.
    line: int | None = None
    #: The field at fault, such as `custom_id` or `body.model`.
    param: str | None = None

    def __str__(self) -> str:
        return self.message if self.line is None else f"Line {self.line}: {self.message}"


class InvalidInput(BatchyardError):  # noqa: N818 - names what failed
    """The input was refused before anything ran.

    Args:
        errors: every error found, in line order, up to a cap.
        total: how many there were in all.
    """

    def __init__(self, errors: list[LineError], total: int | None = None) -> None:
        self.errors = errors
        self.total = len(errors) if total is None else total
        super().__init__("; ".join(str(error) for error in errors[:3]))


class EngineError(BatchyardError):
    """An engine cannot be used at all: it does not start, or its model does not load."""


class ModelError(EngineError):
    """A model is missing, damaged, or not what was asked for."""


class StoreError(BatchyardError):
    """What should remember cannot: the folder is missing, unwritable, or of another version."""


class StorageFull(StoreError):  # noqa: N818 - names what failed
    """The disk is full. What was finished is kept; the run can go on once there is room."""


class InputChanged(BatchyardError):  # noqa: N818 - names what failed
    """The input is not the one that this Batch was made from."""


class BatchNotFound(BatchyardError):  # noqa: N818 - names what failed
    """No Batch has this id."""


class InvalidTransition(BatchyardError):  # noqa: N818 - names what failed
    """A Batch in this state does not take this action."""


class BatcherError(BatchyardError):
    """Base of what a `Batcher` raises to its callers."""


class BatcherClosed(BatcherError):  # noqa: N818 - names what failed
    """The batcher takes no more work, or was closed before it came to this item."""


class QueueFull(BatcherError):  # noqa: N818 - names what failed
    """The queue holds `max_queue` items already, and this one was refused or pushed out."""


class ItemTooLarge(BatcherError):  # noqa: N818 - names what failed
    """One item alone costs more than `max_cost`, so no dispatch could carry it."""


class DeadlineExceeded(BatcherError, TimeoutError):  # noqa: N818 - names what failed
    """The item's deadline passed, or could no longer be met, before it was dispatched."""


class AnswerTimeout(BatcherError, TimeoutError):  # noqa: N818 - names what failed
    """The caller's `timeout_s` passed without an answer."""


class DispatchFailed(BatcherError):  # noqa: N818 - names what failed
    """The batch function gave no usable answer: a wrong number of results, or none at all."""


class WrongLoop(BatcherError):  # noqa: N818 - names what failed
    """The batcher is at work on another event loop, or the call would block its own loop."""
