"""Floor 8. Inside a Batch, beyond OpenAI: requests, results while it runs, what failed, single cancels."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from batchyard.api.access import Access, Caller
from batchyard.api.bodies import missing, read_as
from batchyard.api.errors import ApiError, envelope, json_response
from batchyard.api.openai.batch_shown import show
from batchyard.api.openai.shapes import (
    CancelledRequests,
    CancelRequests,
    FailureList,
    FailureObject,
    RequestFailure,
    RequestList,
    RequestObject,
    ResultList,
    ResultsShown,
)
from batchyard.api.operations import CHANGES, READS, Operation, Query, page_query
from batchyard.api.reading import page_limit, query_flag, read_body
from batchyard.errors import BatchyardError, InvalidTransition
from batchyard.service.hosting.cursor import Cursor
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.reader import RequestState
from batchyard.service.lifecycle import TERMINAL, Status
from batchyard.stores.protocol import BatchRecord

_STATES = ("queued", "running", "succeeded", "failed", "cancelled", "expired")
_LOOK_S = 0.25
#: A comment is sent after so long without a result, so that nobody in between takes the stream for dead.
_STILL_HERE_S = 15.0
_FOLLOW = {"type": "boolean", "default": False}


class BatchRequestsApi:
    """What is inside the Batches of a tenant."""

    def __init__(self, host: Host, access: Access) -> None:
        self._host = host
        self._access = access

    def operations(self) -> list[Operation]:
        """What it answers to."""
        one = "/v1/batches/{id}"
        requests = (
            *page_query(100, 1_000, "a request's id, or `next_after` of the page before"),
            Query("status", f"Only these, with commas between: {', '.join(_STATES)}."),
            Query("custom_id", "Only the request with this custom_id."),
        )
        results = (
            *page_query(1_000, 10_000, "`next_after` of the answer before"),
            Query(
                "stream", "Send results as they come, as server-sent events, until the batch ends.", _FOLLOW
            ),
        )
        return [
            Operation(
                "GET",
                one + "/requests",
                self.requests,
                "List requests",
                READS,
                query=requests,
                gives=RequestList,
            ),
            Operation(
                "POST",
                one + "/requests/cancel",
                self.cancel,
                "Cancel single requests",
                CHANGES,
                body=CancelRequests,
                gives=CancelledRequests,
            ),
            Operation(
                "GET",
                one + "/results",
                self.results,
                "Read results while the batch runs",
                READS,
                query=results,
                gives=ResultsShown,
                also=("text/event-stream",),
            ),
            Operation(
                "GET", one + "/errors", self.errors, "What failed, in groups", READS, gives=FailureList
            ),
        ]

    async def requests(self, request: Request, caller: Caller) -> Response:
        """A page of requests in input order, with where each stands."""
        batch = await self._asked_for(request, caller)
        query = request.query_params
        limit = page_limit(request, 100, 1_000)
        states = {one for one in query.get("status", "").split(",") if one}
        for one in states:
            if one not in _STATES:
                message = f"Invalid value: {one[:64]!r}. Supported values are: {', '.join(_STATES)}."
                raise ApiError(400, message, code="invalid_value", param="status")
        custom_id = query.get("custom_id")

        def wanted(state: RequestState) -> bool:
            return (not states or state.status in states) and custom_id in {None, state.custom_id}

        page = await self._host.reader.requests(batch, _index(batch, query.get("after")), limit, wanted)
        data = [_request(batch, one) for one in page.requests]
        more = page.next_after is not None
        following = _request_id(batch, page.next_after) if page.next_after is not None else None
        return json_response(RequestList(data=data, has_more=more, next_after=following))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """Cancel single requests; those that have their results keep them."""
        batch = await self._asked_for(request, caller)
        wanted = read_as(await read_body(request, 32 << 20), CancelRequests)
        if (wanted.custom_ids is None) is (wanted.custom_id_prefix is None):
            raise missing("custom_ids")
        if Status(batch.status) is Status.VALIDATING:
            raise InvalidTransition(f"Batch {batch.id} is still checked. Try again in a moment.")
        if Status(batch.status) in TERMINAL:
            raise InvalidTransition(f"Batch {batch.id} has ended: none of its requests can be cancelled.")
        left = set(wanted.custom_ids or ())
        prefix = wanted.custom_id_prefix

        def chosen(custom_id: str) -> bool:
            if prefix is not None:
                return custom_id.startswith(prefix)
            if custom_id in left:
                left.discard(custom_id)
                return True
            return False

        places = await self._host.reader.places(batch, chosen)
        await self._host.acts.withdraw(caller.tenant, batch.id, places)
        return json_response(
            CancelledRequests(batch_id=batch.id, matched=len(places), unknown=sorted(left)[:100])
        )

    async def results(self, request: Request, caller: Caller) -> Response:
        """Results that are there by now, or, streamed, as they come."""
        batch = await self._asked_for(request, caller)
        limit = page_limit(request, 1_000, 10_000)
        word = request.query_params.get("after") or request.headers.get("last-event-id") or ""
        try:
            cursor = Cursor.decode(word)
        except (ValueError, msgspec.MsgspecError):
            message = "Give as 'after' what an answer before gave as 'next_after', or nothing."
            raise ApiError(400, message, code="invalid_value", param="after") from None
        if query_flag(request, "stream"):
            return StreamingResponse(
                self._stream(batch, caller, cursor),
                media_type="text/event-stream",
                headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            )
        lines, more = await self._host.reader.results(batch, cursor, limit)
        return json_response(
            ResultList(
                data=[msgspec.Raw(one) for one in lines],
                has_more=more,
                next_after=cursor.encode(),
                ended=Status(batch.status) in TERMINAL,
            )
        )

    async def _stream(self, batch: BatchRecord, caller: Caller, cursor: Cursor) -> AsyncIterator[bytes]:
        """Events `result` (a line), `batch` (the Batch, each time that it changes) and `end`."""
        host, clock = self._host, self._host.clock
        shown = b""
        said_at = clock.monotonic()
        try:
            while True:
                if not await self._access.still_holds(caller):
                    message = "The key was revoked or changed."
                    yield _event("error", envelope(message, "permission_error", code="key_withdrawn"))
                    return
                batch = await host.get(caller.tenant, batch.id)
                known = host.reader.finished(batch.id)
                lines, more = await host.reader.results(batch, cursor, 1_000)
                events = [_event("result", line) for line in lines]
                if events:
                    events[-1] = f"id: {cursor.encode()}\n".encode() + events[-1]
                ended = Status(batch.status) in TERMINAL and not more
                now = msgspec.json.encode(await show(host, batch))
                if now != shown and (ended or not more):
                    shown = now
                    events.append(_event("batch", now))
                if ended:
                    events.append(_event("end", b"{}"))
                if events:
                    said_at = clock.monotonic()
                    yield b"".join(events)
                if ended:
                    return
                while not more:
                    await clock.sleep(_LOOK_S)
                    if clock.monotonic() - said_at > _STILL_HERE_S:
                        said_at = clock.monotonic()
                        yield b": still here\n\n"
                    if known is None or host.reader.finished(batch.id) != known:
                        break
        except BatchyardError as error:
            yield _event("error", envelope(str(error), "server_error", code="interrupted"))

    async def errors(self, request: Request, caller: Caller) -> Response:
        """What failed, the most frequent first."""
        batch = await self._asked_for(request, caller)
        groups = await self._host.reader.failures(batch)
        return json_response(
            FailureList(
                data=[
                    FailureObject(
                        code=one.kind,
                        count=one.count,
                        message=one.message,
                        example_custom_id=one.custom_id,
                    )
                    for one in groups
                ]
            )
        )

    async def _asked_for(self, request: Request, caller: Caller) -> BatchRecord:
        return await self._host.get(caller.tenant, request.path_params["id"])


def _request_id(batch: BatchRecord, index: int) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{index}"


def _index(batch: BatchRecord, after: str | None) -> int:
    if not after:
        return -1
    prefix, _, index = after.rpartition("_")
    known = prefix == f"batch_req_{batch.id.removeprefix('batch_')}"
    if not known or not index.isascii() or not index.isdigit() or len(index) > 12:
        raise ApiError(404, "No request of this batch has the id given as after.", param="after")
    return int(index)


def _request(batch: BatchRecord, state: RequestState) -> RequestObject:
    error = None
    if state.kind is not None:
        error = RequestFailure(code=state.kind, message=state.message or "")
    return RequestObject(
        id=_request_id(batch, state.index),
        custom_id=state.custom_id,
        index=state.index,
        status=state.status,  # type: ignore[arg-type]  # the reader gives no other
        attempts=state.attempts,
        error=error,
    )


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
