"""Floor 8. `/v1/messages/batches`: create, retrieve, list, cancel, delete, results.

Each request is translated when it is taken, each result when it is read; in between it is a Batch like any
other. Formats as Anthropic's SDK (2.15) defines them: three states, and counts that stay zero, but for
`processing`, until the Batch has ended.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from batchyard.api.access import Caller
from batchyard.api.anthropic.envelope import in_words
from batchyard.api.anthropic.shapes import (
    AnthropicError,
    CreateMessageBatch,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchCounts,
    MessageBatchList,
)
from batchyard.api.anthropic.translate import to_chat, to_message
from batchyard.api.errors import ApiError, json_response
from batchyard.api.operations import CHANGES, READS, Handler, Operation, Query
from batchyard.api.reading import page_limit, read_body
from batchyard.errors import BatchNotFound
from batchyard.service.hosting.host import Host, NewBatch
from batchyard.service.hosting.reader import BatchCounts
from batchyard.service.lifecycle import TERMINAL, Status
from batchyard.stores.blobs import BlobNotFound
from batchyard.stores.protocol import BatchRecord
from batchyard.types import Endpoint

_MAX_BODY = 256 << 20
_MOST_REQUESTS = 100_000
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_WINDOW_S = 86_400.0
DIALECT = "anthropic"


class _Item(msgspec.Struct):
    custom_id: str
    params: dict[str, Any]


class _Create(msgspec.Struct):
    requests: list[_Item]


class MessageBatchesApi:
    """Message batches of a tenant.

    Args:
        public_url: what clients reach the server by, if not what they name as its host.
    """

    def __init__(self, host: Host, public_url: str | None = None) -> None:
        self._host = host
        self._public_url = public_url

    def operations(self) -> list[Operation]:
        """What it answers to."""
        base = "/v1/messages/batches"
        one = base + "/{id}"
        limit = {"type": "integer", "minimum": 1, "maximum": 1_000, "default": 20}
        listing = (
            Query("limit", "How many at most; 1 to 1,000.", limit),
            Query("after_id", "Give what comes after this one."),
            Query("before_id", "Give what comes right before this one."),
        )

        def row(method: str, path: str, answer: Handler, summary: str, **more: Any) -> Operation:
            scopes = READS if method == "GET" else CHANGES
            more = {"gives": MessageBatch} | more
            return Operation(
                method, path, answer, summary, scopes, wrap=in_words, error=AnthropicError, **more
            )

        return [
            row("POST", base, self.create, "Create a message batch", body=CreateMessageBatch),
            row("GET", base, self.list, "List message batches", query=listing, gives=MessageBatchList),
            row("GET", one, self.get, "Look at a message batch"),
            row("DELETE", one, self.delete, "Delete a message batch", gives=DeletedMessageBatch),
            row("POST", one + "/cancel", self.cancel, "Cancel a message batch"),
            row(
                "GET",
                one + "/results",
                self.results,
                "Read the results of a message batch",
                gives=None,
                media_type="application/x-jsonl",
            ),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        """A new batch of inline requests, which may name different models."""
        body = await read_body(request, _MAX_BODY)
        lines, total = await asyncio.to_thread(_translated, body)
        incoming = self._host.files.begin()
        try:
            for line in lines:
                incoming.write(line)
            wanted = NewBatch(
                source=incoming,
                input_file_id="",
                endpoint=Endpoint.CHAT,
                completion_window="24h",
                window_s=_WINDOW_S,
                dialect=DIALECT,
                several_models=True,
                total=total,
                key_id=caller.key_id,
            )
            batch = await self._host.create(caller.tenant, wanted)
        finally:
            incoming.discard()
        return json_response(await self._shown(request, batch))

    async def get(self, request: Request, caller: Caller) -> Response:
        """Where a batch stands."""
        return json_response(await self._shown(request, await self._asked_for(request, caller)))

    async def list(self, request: Request, caller: Caller) -> Response:
        """A page of batches, newest first."""
        limit = page_limit(request, 20, 1_000)
        query = request.query_params
        after = await self._named(caller, query.get("after_id"), "after_id")
        before = await self._named(caller, query.get("before_id"), "before_id")
        page = self._host.page
        found = await page(caller.tenant, limit + 1, dialect=DIALECT, after=after, before=before)
        more = len(found) > limit
        found = found[:limit] if before is None else found[-limit:]
        data = [await self._shown(request, one) for one in found]
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return json_response(MessageBatchList(data=data, has_more=more, first_id=first, last_id=last))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """Stop a batch; what is finished is kept."""
        batch = await self._asked_for(request, caller)
        if Status(batch.status) not in TERMINAL:
            batch = await self._host.acts.cancel(batch.tenant, batch.id, DIALECT)
        return json_response(await self._shown(request, batch))

    async def delete(self, request: Request, caller: Caller) -> Response:
        """Forget a batch that has ended."""
        batch = await self._asked_for(request, caller)
        if Status(batch.status) not in TERMINAL:
            raise ApiError(400, f"Batch {batch.id} has not ended. Cancel it first.")
        await self._host.acts.delete(batch.tenant, batch.id, DIALECT)
        return json_response(DeletedMessageBatch(id=batch.id))

    async def results(self, request: Request, caller: Caller) -> Response:
        """One line for each request, as the batch's files hold them."""
        batch = await self._asked_for(request, caller)
        if Status(batch.status) not in TERMINAL:
            raise ApiError(400, f"Batch {batch.id} has no results yet: it has not ended.")
        files = []
        try:
            for file_id in (batch.output_file_id, batch.error_file_id):
                if file_id is not None:
                    path = await asyncio.to_thread(self._host.files.path, file_id)
                    files.append(await asyncio.to_thread(path.open, "rb"))
        except (BlobNotFound, FileNotFoundError):
            for file in files:
                file.close()
            raise ApiError(404, f"The results of batch {batch.id} have been deleted.") from None
        return StreamingResponse(_lines(files), media_type="application/x-jsonl")

    async def _asked_for(self, request: Request, caller: Caller) -> BatchRecord:
        return await self._host.get(caller.tenant, request.path_params["id"], DIALECT)

    async def _named(self, caller: Caller, batch_id: str | None, param: str) -> BatchRecord | None:
        if not batch_id:
            return None
        try:
            return await self._host.get(caller.tenant, batch_id, DIALECT)
        except BatchNotFound:
            raise ApiError(404, f"{param}: there is no batch with this id", param=param) from None

    async def _shown(self, request: Request, batch: BatchRecord) -> MessageBatch:
        base_url = self._public_url or str(request.base_url)
        return _shown(batch, await self._host.counts(batch), base_url.rstrip("/"))


def _lines(files: Sequence[BinaryIO]) -> Iterator[bytes]:
    try:
        for file in files:
            for line in file:
                yield msgspec.json.encode(_result(msgspec.json.decode(line))) + b"\n"
    finally:
        for file in files:
            file.close()


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


def _shown(batch: BatchRecord, counts: BatchCounts, base_url: str) -> MessageBatch:
    status = Status(batch.status)
    total = batch.settings["total"]
    ended = status in TERMINAL
    shown = MessageBatchCounts(processing=total, succeeded=0, errored=0, canceled=0, expired=0)
    if ended:
        errored = total if status is Status.FAILED else counts.failed
        never_ran = total - counts.completed - errored
        is_expired = status is Status.EXPIRED
        shown = MessageBatchCounts(
            processing=0,
            succeeded=counts.completed,
            errored=errored,
            canceled=0 if is_expired else never_ran,
            expired=never_ran if is_expired else 0,
        )
    return MessageBatch(
        id=batch.id,
        processing_status=(
            "ended" if ended else "canceling" if status is Status.CANCELLING else "in_progress"
        ),
        request_counts=shown,
        created_at=_rfc3339(batch.created_at),
        expires_at=_rfc3339(batch.deadline_at or batch.created_at),
        ended_at=None if batch.ended_at is None else _rfc3339(batch.ended_at),
        cancel_initiated_at=None if batch.cancelling_at is None else _rfc3339(batch.cancelling_at),
        results_url=f"{base_url}/v1/messages/batches/{batch.id}/results" if ended else None,
    )


def _rfc3339(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
