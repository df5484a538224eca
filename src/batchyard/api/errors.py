"""Floor 8. Every error that leaves the server, in the envelope of the OpenAI API.

Four keys, always: `message`, `type`, `param`, `code`. The SDKs turn the status into an exception class and
read the rest from here.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from batchyard.errors import BatchNotFound, InvalidTransition, StorageFull, StoreError
from batchyard.stores.blobs import BlobNotFound

_log = logging.getLogger("batchyard.api")

#: A permanent conflict must not be tried again; the SDKs would, as the status is 409.
NO_RETRY = {"x-should-retry": "false"}


class ApiError(Exception):
    """An error for the client.

    Args:
        status: the HTTP status.
        message: what is wrong and what to do, in a full sentence.
        kind: the envelope's `type`.
        code: what programs test for.
        param: the parameter at fault.
        headers: more headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def envelope(message: str, kind: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """The body of an error response."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """*value* as JSON."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """*error* as its client gets it."""
    body = envelope(error.message, error.kind, code=error.code, param=error.param)
    return Response(body, error.status, error.headers, media_type="application/json")


async def on_api_error(_: Request, error: Exception) -> Response:
    """Errors that we raise on purpose."""
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"Unknown request URL: {request.method} {request.url.path}. Check the path."
        return error_response(ApiError(404, message, code="unknown_url"))
    if error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}."
        return error_response(ApiError(405, message, code="method_not_allowed", headers=error.headers))
    return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers))


def as_api_error(error: Exception) -> ApiError:
    """Errors of the service that mean the same on every path."""
    if isinstance(error, BatchNotFound):
        return ApiError(404, "No batch found with this id.")
    if isinstance(error, InvalidTransition):
        return ApiError(409, str(error), headers=NO_RETRY)
    if isinstance(error, BlobNotFound):
        return ApiError(404, "The content of what you ask for has been deleted.")
    if isinstance(error, StorageFull):
        message = "The server has no room left on its disk. Nothing was changed; try again later."
        return _unavailable(message, "storage_full")
    _log.error("The store failed: %s", error)
    message = "The server cannot reach its store right now. Try again later."
    return _unavailable(message, "store_failed")


async def on_batchyard_error(_: Request, error: Exception) -> Response:
    """The same, as a response."""
    return error_response(as_api_error(error))


async def on_bug(request: Request, error: Exception) -> Response:
    """A fault of ours: logged in full, told without a traceback."""
    _log.error(
        "%s %s failed:\n%s", request.method, request.url.path, "".join(traceback.format_exception(error))
    )
    message = "The server met a fault of its own. It is logged under this request's id."
    return error_response(ApiError(500, message, kind="server_error", code="internal_error"))


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, headers={"retry-after": "5"})


HANDLERS = {
    ApiError: on_api_error,
    HTTPException: on_http_exception,
    BatchNotFound: on_batchyard_error,
    InvalidTransition: on_batchyard_error,
    StoreError: on_batchyard_error,
    BlobNotFound: on_batchyard_error,
    Exception: on_bug,
}
