"""Floor 8. What goes in and out in OpenAI's dialect, as types: they validate, and they make the schemas.

Field names and meanings are those of the OpenAI API (files, uploads, batches, webhooks); what is ours is
said so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from batchyard.scheduling.order import OrderName
from batchyard.types import Endpoint

Seconds = Annotated[int, Meta(ge=3_600, le=2_592_000, description="From 1 hour to 30 days.")]
Id = Annotated[str, Meta(min_length=1, max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
Window = Annotated[
    str,
    Meta(
        pattern=r"^[1-9][0-9]{0,4}[mhd]$",
        description="A whole number of minutes, hours or days, from 1m to 7d, such as 24h.",
    ),
]
Priority = Annotated[int, Meta(ge=-1_000, le=1_000, description="Larger goes first. Ours.")]
CustomId = Annotated[str, Meta(min_length=1, max_length=512)]
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
Name = Annotated[str, Meta(max_length=512)]


class ExpiresAfter(Struct):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: Seconds


# --- files ---------------------------------------------------------------------------------------


class FileObject(Struct, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(Struct, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(Struct, kw_only=True):
    """Something is gone."""

    id: str
    object: str
    deleted: bool = True


# --- uploads -------------------------------------------------------------------------------------


class CreateUpload(Struct):
    """A file that will come in parts."""

    bytes: Annotated[int, Meta(ge=1)]
    filename: Annotated[str, Meta(min_length=1, max_length=512)]
    mime_type: Annotated[str, Meta(max_length=255)]
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CompleteUpload(Struct):
    """All parts are there, in this order."""

    part_ids: Annotated[list[Id], Meta(min_length=1, max_length=10_000)]
    md5: Annotated[str, Meta(pattern="^[0-9a-fA-F]{32}$")] | None = None


class UploadObject(Struct, kw_only=True):
    """A file that comes in parts."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileObject | None = None


class PartObject(Struct, kw_only=True):
    """One part."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


# --- batches -------------------------------------------------------------------------------------


class InlineRequest(Struct):
    """A request without a file. Ours."""

    custom_id: CustomId
    body: dict[str, Any]


class Canary(Struct):
    """Run the first requests alone; hold the Batch when more than this share of them fails. Ours."""

    first: Annotated[int, Meta(ge=1, le=50_000)] = 100
    max_failed_share: Annotated[float, Meta(ge=0, le=1)] = 0.05


class CreateBatch(Struct, kw_only=True):
    """A new Batch: of a file, or of requests right here."""

    endpoint: Endpoint
    completion_window: Window
    input_file_id: Id | None = None
    requests: Annotated[list[InlineRequest], Meta(min_length=1, max_length=50_000)] | None = None
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    several_models: bool = False
    priority: Priority = 0
    canary: Canary | None = None
    #: In which order its requests are worked on; results are in the order of the input all the same.
    work_order: OrderName = OrderName.AUTO
    #: Whether requests that are alike to the byte are asked once: all, none, or by default those whose answer
    #: is the same by rights (embeddings, temperature 0).
    dedupe: bool | None = None


class UpdateBatch(Struct):
    """What to change about a Batch. Ours."""

    priority: Priority | None = None
    completion_window: Window | None = None
    metadata: Metadata | None = None


class Replacement(Struct):
    """Text in prompts, and what to write instead."""

    find: Annotated[str, Meta(min_length=1, max_length=100_000)]
    with_: Annotated[str, Meta(max_length=100_000)] = msgspec.field(name="with")


class AmendBatch(Struct):
    """What to change about the requests that have not run. Ours."""

    body: Annotated[
        dict[str, Any],
        Meta(description="Merged into each body (RFC 7396): null removes a field. Names no model."),
    ] = msgspec.field(default_factory=dict)
    model: Name | None = None
    replace_text: Annotated[list[Replacement], Meta(max_length=100)] = msgspec.field(default_factory=list)


class CancelRequests(Struct):
    """Which requests to cancel: some by id, or every one whose id begins so. Ours."""

    custom_ids: Annotated[list[CustomId], Meta(min_length=1, max_length=50_000)] | None = None
    custom_id_prefix: CustomId | None = None


class CancelledRequests(Struct, kw_only=True):
    """What a cancel of single requests has met."""

    object: Literal["batch.requests.cancelled"] = "batch.requests.cancelled"
    batch_id: str
    matched: int
    unknown: list[str]


class RetryBatch(Struct):
    """Which failures to run again, as a new Batch; all by default. Ours."""

    kinds: Annotated[list[str], Meta(max_length=100)] | None = None
    completion_window: Window | None = None
    metadata: Metadata | None = None


class BatchError(Struct, kw_only=True):
    """Something wrong with the input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, kw_only=True):
    """Everything wrong with the input, up to a cap."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(Struct, kw_only=True):
    """What became of the requests so far."""

    total: int
    completed: int
    failed: int
    #: Ours: cancelled or expired before they ran; in neither of the others.
    never_ran: int


class InputDetails(Struct):
    """Part of the input tokens."""

    cached_tokens: int


class OutputDetails(Struct):
    """Part of the output tokens."""

    reasoning_tokens: int = 0


class BatchUsage(Struct, kw_only=True):
    """Tokens so far."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Saved(Struct, kw_only=True):
    """What was not run because the Batch was stopped. Ours; tokens and seconds are estimates."""

    requests: int
    tokens: int | None
    seconds: float | None


class BatchObject(Struct, kw_only=True):
    """A Batch. From `priority` on the fields are ours."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "paused",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    priority: int
    #: Why it does not move, in words.
    waiting_for: str | None
    amendments: list[dict[str, Any]]
    canary: Canary | None
    retry_of: str | None
    saved: Saved | None


class BatchList(Struct, kw_only=True):
    """A page of Batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RequestFailure(Struct, kw_only=True):
    """Why a request has no good answer."""

    code: str
    message: str


class RequestObject(Struct, kw_only=True):
    """One request of a Batch. Ours."""

    id: str
    object: Literal["batch.request"] = "batch.request"
    custom_id: str
    index: int
    status: Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
    attempts: int
    error: RequestFailure | None


class RequestList(Struct, kw_only=True):
    """A page of requests; it may hold fewer than there are, or none, with more to come."""

    object: Literal["list"] = "list"
    data: list[RequestObject]
    has_more: bool
    #: What to give as `after` for the next page.
    next_after: str | None


class FailureObject(Struct, kw_only=True):
    """Requests that failed in the same way. Ours."""

    code: str
    count: int
    message: str
    example_custom_id: str


class FailureList(Struct, kw_only=True):
    """What failed, the most frequent first."""

    object: Literal["list"] = "list"
    data: list[FailureObject]


class ResultList(Struct, kw_only=True):
    """Results that are there by now, as lines of the output and error files."""

    object: Literal["list"] = "list"
    data: list[msgspec.Raw]
    has_more: bool
    #: What to give as `after` for those that come next; good for as long as the results are kept.
    next_after: str
    #: Whether the Batch has ended, so that nothing comes after what there is now.
    ended: bool


class ResultsShown(Struct, kw_only=True):
    """`ResultList` as schemas show it."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    next_after: str
    ended: bool


class EstimateModel(Struct, kw_only=True):
    """What a Batch would ask of one model."""

    model: str
    served: bool
    #: Requests a second that it has answered so far with every slot busy; null until it has.
    requests_per_second: float | None


class EstimateObject(Struct, kw_only=True):
    """What a Batch would be. Ours."""

    object: Literal["batch.estimate"] = "batch.estimate"
    valid: bool
    errors: BatchErrors | None
    requests: int
    input_tokens: int | None
    models: list[EstimateModel]
    #: Until its end if the earliest window goes first; null where nothing was measured yet.
    seconds: float | None
    fits_window: bool | None
    #: The shortest window that can be promised without making another batch late.
    earliest_window_seconds: int | None


class CapacityObject(Struct, kw_only=True):
    """How much is enqueued, and how much may be. Ours."""

    object: Literal["capacity"] = "capacity"
    batches: int
    requests: int
    tokens: int
    max_batches: int | None
    max_enqueued_tokens: int | None
    available_batches: int | None
    available_tokens: int | None


# --- webhooks ------------------------------------------------------------------------------------

EventType = Literal["batch.completed", "batch.failed", "batch.cancelled", "batch.expired", "batch.paused"]
Url = Annotated[str, Meta(min_length=1, max_length=2_048)]


class CreateWebhook(Struct):
    """A new endpoint to be told of events."""

    event_types: Annotated[list[EventType], Meta(min_length=1, max_length=20)]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    url: Url


class UpdateWebhook(Struct):
    """What to change about an endpoint."""

    event_types: Annotated[list[EventType], Meta(min_length=1, max_length=20)] | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    url: Url | None = None


class RotateSecret(Struct):
    """Make a new secret."""

    keep_old_secret_active_for_24_hours: bool = False


class TestWebhook(Struct):
    """Send an event right now."""

    event_type: EventType


class WebhookObject(Struct, kw_only=True):
    """An endpoint that is told of events."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    name: str
    url: str
    event_types: list[str]
    created_at: int
    updated_at: int
    signing_secret_hint: str
    #: Only when it was just made.
    signing_secret: str | msgspec.UnsetType = msgspec.UNSET


class WebhookList(Struct, kw_only=True):
    """A page of endpoints."""

    object: Literal["list"] = "list"
    data: list[WebhookObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class WebhookTested(Struct, kw_only=True):
    """What an endpoint answered to a test."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    event_type: str
    status_code: int
    success: bool
    webhook_endpoint_id: str


# --- models and live requests --------------------------------------------------------------------


class ModelObject(Struct, kw_only=True):
    """A model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    endpoints: list[str]


class ModelList(Struct, kw_only=True):
    """The models."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class ChatBody(Struct):
    """A chat completion. Other fields are the engine's."""

    model: str
    messages: list[dict[str, Any]]
    stream: bool | None = None
    service_tier: str | None = None


class CompletionBody(Struct):
    """A completion. Other fields are the engine's."""

    model: str
    prompt: str | list[Any]
    stream: bool | None = None
    service_tier: str | None = None


class EmbeddingBody(Struct):
    """Embeddings. Other fields are the engine's."""

    model: str
    input: str | list[Any]
    stream: bool | None = None
    service_tier: str | None = None


class ResponseBody(Struct):
    """A response. Other fields are the engine's."""

    model: str
    input: str | list[Any]
    stream: bool | None = None
    service_tier: str | None = None


LIVE_BODIES: dict[Endpoint, type[ChatBody | CompletionBody | EmbeddingBody | ResponseBody]] = {
    Endpoint.CHAT: ChatBody,
    Endpoint.COMPLETIONS: CompletionBody,
    Endpoint.EMBEDDINGS: EmbeddingBody,
    Endpoint.RESPONSES: ResponseBody,
}
