"""Floor 8. What goes in and out in Anthropic's dialect, as types that make the schemas.

Bodies are checked by `translate`, which tells more of what is wrong than a type can.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class MessageBody(Struct):
    """A message to be answered."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)]
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    stream: bool = False


class CountBody(Struct):
    """A message whose tokens are to be counted."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]


class TokenCount(Struct):
    """How many tokens there are."""

    input_tokens: int


class BatchItem(Struct):
    """One request of a message batch."""

    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class CreateMessageBatch(Struct):
    """A new message batch."""

    requests: Annotated[list[BatchItem], Meta(min_length=1, max_length=100_000)]


class MessageBatchCounts(Struct, kw_only=True):
    """What became of the requests; until the end all are processing."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Struct, kw_only=True):
    """A message batch."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None = None
    results_url: str | None


class MessageBatchList(Struct, kw_only=True):
    """A page of message batches."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(Struct, kw_only=True):
    """A message batch is gone."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class AnthropicFault(Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(Struct, kw_only=True):
    """The body of every error."""

    type: Literal["error"] = "error"
    error: AnthropicFault
    request_id: str | None
