"""Floor 8. `/v1/batches`: create, retrieve, list, cancel; and, beyond OpenAI, pause and resume."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from batchyard.api.access import Access
from batchyard.api.errors import NO_RETRY, ApiError, json_response
from batchyard.api.openai.files import listed
from batchyard.api.reading import (
    page_limit,
    parse_object,
    read_body,
    required_string,
    seconds,
    wrong_type,
)
from batchyard.errors import BatchNotFound
from batchyard.service.hosting.host import BatchCounts, Host, NewBatch
from batchyard.service.lifecycle import TERMINAL, Status
from batchyard.stores.protocol import BatchRecord
from batchyard.types import Endpoint

_MAX_BODY = 1 << 20
_MAX_ID = 512
_WINDOW = re.compile(r"([1-9]\d{0,4})([mhd])")
_UNITS_S = {"m": 60, "h": 3_600, "d": 86_400}
_LONGEST_S = 7 * 86_400
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512


class BatchesApi:
    """The Batches of a tenant."""

    def __init__(self, host: Host, access: Access) -> None:
        self._host = host
        self._access = access

    def routes(self) -> list[BaseRoute]:
        """What it answers to."""
        return [
            Route("/v1/batches", self.list, methods=["GET"]),
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches/{id}", self.get, methods=["GET"]),
            Route("/v1/batches/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/batches/{id}/pause", self.pause, methods=["POST"]),
            Route("/v1/batches/{id}/resume", self.resume, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """A new Batch. A repeat with the same `Idempotency-Key` returns the first."""
        tenant = await self._access.tenant(request)
        body = parse_object(await read_body(request, _MAX_BODY))
        file_id = required_string(body, "input_file_id")
        if len(file_id) > _MAX_ID:
            message = f"Invalid 'input_file_id': string too long. No id is longer than {_MAX_ID} characters."
            raise ApiError(400, message, code="string_above_max_length", param="input_file_id")
        endpoint = required_string(body, "endpoint")
        if endpoint not in set(Endpoint):
            known = ", ".join(repr(one.value) for one in Endpoint)
            message = f"Invalid value: {endpoint[:200]!r}. Supported values are: {known}."
            raise ApiError(400, message, code="invalid_value", param="endpoint")
        window = required_string(body, "completion_window")
        expires = body.get("output_expires_after")
        file = await self._host.kept(lambda: self._host.files.get(tenant, file_id))
        wanted = NewBatch(
            source=None if file is None else self._host.files.path(file.id),
            input_file_id=file_id,
            endpoint=endpoint,
            completion_window=window,
            window_s=_window_s(window),
            metadata=_metadata(body.get("metadata")),
            output_expires_s=(
                None if expires is None else seconds(expires, "output_expires_after", 3_600, 2_592_000)
            ),
        )
        key = request.headers.get("idempotency-key")
        batch = await self._host.create(tenant, wanted, idempotency_key=key)
        if key is not None and batch.settings != wanted.settings():
            message = "This Idempotency-Key was used with other parameters. Use a new key for a new batch."
            raise ApiError(409, message, code="idempotency_conflict", headers=NO_RETRY)
        return json_response(await self._shown(batch))

    async def get(self, request: Request) -> Response:
        """Where a Batch stands. Changes nothing."""
        tenant = await self._access.tenant(request)
        return json_response(await self._shown(await self._host.get(tenant, request.path_params["id"])))

    async def list(self, request: Request) -> Response:
        """A page of Batches, newest first; `status` names the wanted ones, with commas between."""
        tenant = await self._access.tenant(request)
        limit = page_limit(request, 20, 100)
        query = request.query_params
        statuses = [one for one in query.get("status", "").split(",") if one]
        for one in statuses:
            if one not in set(Status):
                known = ", ".join(repr(status.value) for status in Status)
                message = f"Invalid value: {one[:64]!r}. Supported values are: {known}."
                raise ApiError(400, message, code="invalid_value", param="status")
        after = None
        if query.get("after"):
            try:
                after = await self._host.get(tenant, query["after"])
            except BatchNotFound:
                raise ApiError(404, "No batch found with the id given as after.", param="after") from None
        found = await self._host.page(tenant, limit + 1, after=after, statuses=statuses)
        data = [await self._shown(one) for one in found[:limit]]
        return json_response(listed(data, has_more=len(found) > limit))

    async def cancel(self, request: Request) -> Response:
        """Stop a Batch; what is finished is kept."""
        tenant = await self._access.tenant(request)
        batch = await self._host.get(tenant, request.path_params["id"])
        if Status(batch.status) in TERMINAL - {Status.CANCELLED}:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise ApiError(409, message, headers=NO_RETRY)
        return json_response(await self._shown(await self._host.cancel(tenant, batch.id)))

    async def pause(self, request: Request) -> Response:
        """Dispatch nothing more of a Batch until it is resumed."""
        tenant = await self._access.tenant(request)
        return json_response(await self._shown(await self._host.pause(tenant, request.path_params["id"])))

    async def resume(self, request: Request) -> Response:
        """Go on with a paused Batch."""
        tenant = await self._access.tenant(request)
        return json_response(await self._shown(await self._host.resume(tenant, request.path_params["id"])))

    async def _shown(self, batch: BatchRecord) -> dict[str, Any]:
        return _shown(batch, await self._host.counts(batch), self._host.note(batch.id))


def _shown(batch: BatchRecord, counts: BatchCounts, note: str | None) -> dict[str, Any]:
    status, settings = Status(batch.status), batch.settings
    ended = {one: None if status is not one else _at(batch.ended_at) for one in TERMINAL}
    usage = counts.usage
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": settings["endpoint"],
        "model": batch.model,
        "errors": {"object": "list", "data": list(batch.errors)} if batch.errors else None,
        "input_file_id": settings["input_file_id"],
        "completion_window": settings["completion_window"],
        "status": status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at),
        "in_progress_at": _at(batch.in_progress_at),
        "expires_at": _at(batch.deadline_at),
        "finalizing_at": _at(batch.finalizing_at),
        "completed_at": ended[Status.COMPLETED],
        "failed_at": ended[Status.FAILED],
        "expired_at": ended[Status.EXPIRED],
        "cancelling_at": _at(batch.cancelling_at),
        "cancelled_at": ended[Status.CANCELLED],
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "usage": {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
        "metadata": settings["metadata"],
        # Beyond OpenAI: why it does not move, in words.
        "waiting_for": note,
    }


def _at(value: float | None) -> int | None:
    return None if value is None else int(value)


def _window_s(window: str) -> float:
    found = _WINDOW.fullmatch(window)
    length_s = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < length_s <= _LONGEST_S:
        message = (
            f"Invalid value: {window[:64]!r}. completion_window is a whole number of minutes, hours or days "
            "from '1m' to '7d', such as '24h'."
        )
        raise ApiError(400, message, code="invalid_value", param="completion_window")
    return length_s


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type("metadata", "an object", value)
    if len(value) > _MAX_PAIRS:
        message = (
            f"Invalid 'metadata': too many properties. Expected an object with at most {_MAX_PAIRS} "
            f"properties, but got an object with {len(value)} properties instead."
        )
        raise ApiError(400, message, code="object_above_max_properties", param="metadata")
    for key, one in value.items():
        if len(key) > _MAX_KEY:
            message = (
                f"Invalid property name in 'metadata': {key[:80]!r} is too long. Expected a string with "
                f"maximum length {_MAX_KEY}, but got a string with length {len(key)} instead."
            )
            raise ApiError(400, message, code="property_name_above_max_length", param="metadata")
        if not isinstance(one, str):
            raise wrong_type(f"metadata.{key}", "a string", one)
        if len(one) > _MAX_VALUE:
            message = (
                f"Invalid 'metadata.{key}': string too long. Expected a string with maximum length "
                f"{_MAX_VALUE}, but got a string with length {len(one)} instead."
            )
            raise ApiError(400, message, code="string_above_max_length", param=f"metadata.{key}")
    return value
