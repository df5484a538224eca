"""Floor 8. `/v1/messages/batches`: create, retrieve, list, cancel, delete, results.

Each request is translated when it is taken, each result when it is read; in between it is a Batch like any
other. Formats as Anthropic's SDK (2.15) defines them: three states, and counts that stay zero, but for
`processing`, until the Batch has ended.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from batchyard.api.access import Access
from batchyard.api.anthropic.envelope import in_words
from batchyard.api.anthropic.translate import to_chat, to_message
from batchyard.api.errors import ApiError, json_response
from batchyard.api.reading import page_limit, read_body
from batchyard.errors import BatchNotFound
from batchyard.service.hosting.host import BatchCounts, Host, NewBatch
from batchyard.service.lifecycle import TERMINAL, Status
from batchyard.stores.protocol import BatchRecord
from batchyard.types import Endpoint

_MAX_BODY = 256 << 20
_MOST_REQUESTS = 100_000
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_WINDOW_S = 86_400.0
_ENDS = ("first_id", "last_id")
DIALECT = "anthropic"


class _Item(msgspec.Struct):
    custom_id: str
    params: dict[str, Any]


class _Create(msgspec.Struct):
    requests: list[_Item]


class MessageBatchesApi:
    """Message batches of a tenant."""

    def __init__(self, host: Host, access: Access) -> None:
        self._host = host
        self._access = access

    def routes(self) -> list[BaseRoute]:
        """What it answers to."""
        base = "/v1/messages/batches"
        return [
            Route(base, in_words(self.create), methods=["POST"]),
            Route(base, in_words(self.list), methods=["GET"]),
            Route(base + "/{id}", in_words(self.get), methods=["GET"]),
            Route(base + "/{id}", in_words(self.delete), methods=["DELETE"]),
            Route(base + "/{id}/cancel", in_words(self.cancel), methods=["POST"]),
            Route(base + "/{id}/results", in_words(self.results), methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """A new batch of inline requests, which may name different models."""
        tenant = await self._access.tenant(request)
        body = await read_body(request, _MAX_BODY)
        lines, total = await asyncio.to_thread(_translated, body)
        incoming = self._host.files.begin()
        try:
            for line in lines:
                incoming.write(line)
            incoming.handle.close()
            wanted = NewBatch(
                source=incoming.path,
                input_file_id="",
                endpoint=Endpoint.CHAT,
                completion_window="24h",
                window_s=_WINDOW_S,
                dialect=DIALECT,
                several_models=True,
                total=total,
            )
            batch = await self._host.create(tenant, wanted)
        finally:
            incoming.discard()
        return json_response(await self._shown(request, batch))

    async def get(self, request: Request) -> Response:
        """Where a batch stands."""
        return json_response(await self._shown(request, await self._asked_for(request)))

    async def list(self, request: Request) -> Response:
        """A page of batches, newest first."""
        tenant = await self._access.tenant(request)
        limit = page_limit(request, 20, 1_000)
        query = request.query_params
        after = await self._named(tenant, query.get("after_id"), "after_id")
        before = await self._named(tenant, query.get("before_id"), "before_id")
        if before is None:
            found = await self._host.page(tenant, limit + 1, dialect=DIALECT, after=after)
            more = len(found) > limit
            found = found[:limit]
        else:
            newer: list[BatchRecord] = []
            for one in await self._host.page(tenant, 1_000_000, dialect=DIALECT):
                if one.id == before.id:
                    break
                newer.append(one)
            more, found = len(newer) > limit, newer[-limit:]
        data = [await self._shown(request, one) for one in found]
        ends = {"first_id": found[0].id, "last_id": found[-1].id} if found else dict.fromkeys(_ENDS)
        return json_response({"data": data, "has_more": more, **ends})

    async def cancel(self, request: Request) -> Response:
        """Stop a batch; what is finished is kept."""
        batch = await self._asked_for(request)
        if Status(batch.status) not in TERMINAL:
            batch = await self._host.cancel(batch.tenant, batch.id, DIALECT)
        return json_response(await self._shown(request, batch))

    async def delete(self, request: Request) -> Response:
        """Forget a batch that has ended."""
        batch = await self._asked_for(request)
        if Status(batch.status) not in TERMINAL:
            raise ApiError(400, f"Batch {batch.id} has not ended. Cancel it first.")
        await self._host.delete(batch.tenant, batch.id, DIALECT)
        return json_response({"id": batch.id, "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        """One line for each request, as the batch's files hold them."""
        batch = await self._asked_for(request)
        if Status(batch.status) not in TERMINAL:
            raise ApiError(400, f"Batch {batch.id} has no results yet: it has not ended.")
        return StreamingResponse(self._lines(batch), media_type="application/x-jsonl")

    def _lines(self, batch: BatchRecord) -> Iterator[bytes]:
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is None:
                continue
            with self._host.files.path(file_id).open("rb") as file:
                for line in file:
                    yield msgspec.json.encode(_result(msgspec.json.decode(line))) + b"\n"

    async def _asked_for(self, request: Request) -> BatchRecord:
        tenant = await self._access.tenant(request)
        return await self._host.get(tenant, request.path_params["id"], DIALECT)

    async def _named(self, tenant: str, batch_id: str | None, param: str) -> BatchRecord | None:
        if not batch_id:
            return None
        try:
            return await self._host.get(tenant, batch_id, DIALECT)
        except BatchNotFound:
            raise ApiError(404, f"{param}: there is no batch with this id", param=param) from None

    async def _shown(self, request: Request, batch: BatchRecord) -> dict[str, Any]:
        return _shown(batch, await self._host.counts(batch), str(request.base_url).rstrip("/"))


def _translated(body: bytes) -> tuple[list[bytes], int]:
    """The lines of the Batch that answers *body*, and how many requests they hold."""
    try:
        wanted = msgspec.json.decode(body, type=_Create).requests
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"requests: {error}") from error
    if not 1 <= len(wanted) <= _MOST_REQUESTS:
        raise ApiError(400, f"requests: give 1 to {_MOST_REQUESTS:,} requests, not {len(wanted):,}")
    seen: dict[str, int] = {}
    lines: list[bytes] = []
    for place, item in enumerate(wanted):
        at = f"requests.{place}"
        if not _CUSTOM_ID.fullmatch(item.custom_id):
            message = f"{at}.custom_id: String should have 1 to 64 characters of a-z, A-Z, 0-9, _ and -"
            raise ApiError(400, message, param=f"{at}.custom_id")
        earlier = seen.setdefault(item.custom_id, place)
        if earlier != place:
            message = f"{at}.custom_id: repeats requests.{earlier}; each request needs its own"
            raise ApiError(400, message, param=f"{at}.custom_id")
        if item.params.get("stream"):
            raise ApiError(400, f"{at}.params.stream: a batch does not stream; leave it out")
        try:
            chat = to_chat(item.params)
        except ApiError as wrong:
            raise ApiError(wrong.status, f"{at}.params.{wrong.message}", param=wrong.param) from wrong
        line = {"custom_id": item.custom_id, "method": "POST", "url": Endpoint.CHAT.value, "body": chat}
        lines.append(msgspec.json.encode(line) + b"\n")
    return lines, len(lines)


def _result(line: dict[str, Any]) -> dict[str, Any]:
    """A line of a Batch's files as a line of results."""
    custom_id, response, error = line["custom_id"], line["response"], line["error"]
    if response is not None and response["status_code"] == 200:
        body = response["body"]
        message = to_message(body, f"msg_{line['id']}", body.get("model") or "")
        return {"custom_id": custom_id, "result": {"type": "succeeded", "message": message}}
    if error is not None and error["code"] in {"batch_cancelled", "batch_expired"}:
        kind = "canceled" if error["code"] == "batch_cancelled" else "expired"
        return {"custom_id": custom_id, "result": {"type": kind}}
    if error is not None:
        kind, words = "api_error", error["message"]
    else:
        status = response["status_code"]
        kind = "invalid_request_error" if status < 500 else "api_error"
        kind = "not_found_error" if status == 404 else kind
        words = ((response["body"] or {}).get("error") or {}).get("message") or f"HTTP {status}"
    envelope = {"type": "error", "error": {"type": kind, "message": words}, "request_id": None}
    return {"custom_id": custom_id, "result": {"type": "errored", "error": envelope}}


def _shown(batch: BatchRecord, counts: BatchCounts, base_url: str) -> dict[str, Any]:
    status = Status(batch.status)
    total = batch.settings["total"]
    ended = status in TERMINAL
    shown = {"processing": total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if ended:
        never_ran = "expired" if status is Status.EXPIRED else "canceled"
        succeeded, errored = counts.completed, counts.failed
        if status is Status.FAILED:
            errored = total
        shown |= {"processing": 0, "succeeded": succeeded, "errored": errored}
        shown[never_ran] = total - succeeded - errored
    processing = "ended" if ended else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "canceling" if status is Status.CANCELLING else processing,
        "request_counts": shown,
        "created_at": _rfc3339(batch.created_at),
        "expires_at": _rfc3339(batch.deadline_at),
        "ended_at": _rfc3339(batch.ended_at),
        "cancel_initiated_at": _rfc3339(batch.cancelling_at),
        "archived_at": None,
        "results_url": f"{base_url}/v1/messages/batches/{batch.id}/results" if ended else None,
    }


def _rfc3339(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
