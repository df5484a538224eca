"""Floor 8. Errors in Anthropic's envelope, and the request's id in its header."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from batchyard.api.errors import ApiError, as_api_error
from batchyard.errors import BatchNotFound, InvalidTransition, StoreError
from batchyard.stores.blobs import BlobNotFound

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
Handler = Callable[[Request], Awaitable[Response]]


def in_words(handler: Handler) -> Handler:
    """*handler*, with whatever it refuses told in Anthropic's words."""

    async def handle(request: Request) -> Response:
        request_id = request.state.request_id
        try:
            response = await handler(request)
        except ApiError as error:
            response = refused(error, request_id)
        except InvalidTransition as error:
            response = refused(ApiError(400, str(error)), request_id)
        except (BatchNotFound, BlobNotFound, StoreError) as error:
            response = refused(as_api_error(error), request_id)
        response.headers["request-id"] = request_id
        return response

    return handle


def error_event(message: str, kind: str) -> dict[str, Any]:
    """An error as the body of a response or of an event."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def refused(error: ApiError, request_id: str) -> Response:
    """*error* as its client gets it."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = error_event(error.message, kind) | {"request_id": request_id}
    return Response(msgspec.json.encode(body), error.status, error.headers, media_type="application/json")
