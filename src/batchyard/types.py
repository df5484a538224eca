"""Floor 0. The words that every floor shares: requests, answers, faults, capabilities.

Knows nothing but the standard library. Values are frozen; bodies are bytes of JSON, parsed only by
whoever needs to look inside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Endpoint(StrEnum):
    """What a request asks for, named by its path in the OpenAI API."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    RESPONSES = "/v1/responses"


@dataclass(frozen=True, slots=True)
class Request:
    """One unit of work."""

    #: The user's own key, unique in its Batch, echoed byte for byte.
    custom_id: str
    endpoint: Endpoint
    #: A JSON object in UTF-8, in the shape the endpoint's API defines.
    body: bytes
    #: `body.model`, where the body names one.
    model: str | None = None
    #: 0-based place in the Batch.
    index: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request took; names follow the Responses API, for every endpoint."""

    input_tokens: int = 0
    output_tokens: int = 0
    #: Part of `input_tokens` that came from a prefix cache.
    cached_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class LimitsSeen:
    """What an upstream said is left of its rate limits, and in how many seconds they are whole again."""

    requests_left: float | None = None
    requests_reset_s: float | None = None
    tokens_left: float | None = None
    tokens_reset_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's final word on a request: an HTTP status and a JSON body.

    A 4xx is an answer too: the request itself is at fault and no retry would help.
    """

    status_code: int
    #: A JSON object in UTF-8; for 4xx the OpenAI error envelope.
    body: bytes
    usage: Usage = field(default_factory=Usage)
    #: The upstream's request id, where it names one.
    request_id: str | None = None
    #: Its rate limits, where it tells of them.
    limits: LimitsSeen | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status_code < 300


class FaultKind(StrEnum):
    """Why a dispatch brought no answer. Each may be retried; `scheduling.retry` decides."""

    RATE_LIMITED = "rate_limited"  # 429
    SERVER_ERROR = "server_error"  # 5xx
    TIMEOUT = "timeout"  # no answer in time
    UNREACHABLE = "unreachable"  # no connection at all: nothing was sent
    DISCONNECTED = "disconnected"  # the connection broke before the answer was whole
    INVALID_ANSWER = "invalid_answer"  # a 2xx that is not what the API promises (HTML, torn JSON)
    ENGINE_DIED = "engine_died"  # the engine's process ended under the request


@dataclass(frozen=True, slots=True)
class Fault:
    """A dispatch that failed for no fault of the request."""

    kind: FaultKind
    #: One full sentence for the user.
    message: str
    #: The upstream's status and body, where there was one.
    status_code: int | None = None
    body: bytes = b""
    #: What `Retry-After` asked for, in seconds.
    retry_after_s: float | None = None
    #: The upstream's rate limits, where it tells of them.
    limits: LimitsSeen | None = None


Outcome = Answer | Fault


class PrefixCache(StrEnum):
    """Whose work a prompt finds that begins like an earlier one."""

    SLOT = "slot"  # of the slot that it comes to
    ENGINE = "engine"  # of every slot


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; asked, never guessed from its type."""

    endpoints: frozenset[Endpoint]
    #: The most requests that one dispatch may carry.
    max_batch: int = 1
    #: How many dispatches in flight keep the engine busy; None where only the user knows.
    slots: int | None = None
    #: Whether a dispatch costs `max(length) * n` rather than `sum(length)`.
    padded: bool = False
    #: Whether `stream` brings tokens as they are made.
    streams: bool = False
    #: Whether a cancelled dispatch stops computing.
    cancels: bool = True
    #: Whether requests may name different models.
    several_models: bool = False
    #: The most tokens, prompt and output together, that one request may take.
    context_tokens: int | None = None
    #: Whether prompts that begin alike are computed once; None where not, or where nobody knows.
    prefix_cache: PrefixCache | None = None
