"""Floor 8. `/v1/batches`: create, look, list, cancel; beyond OpenAI: change, amend, pause, resume, retry."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from batchyard.api.access import Caller
from batchyard.api.bodies import missing, read_as
from batchyard.api.errors import NO_RETRY, ApiError, json_response
from batchyard.api.openai.batch_shown import show
from batchyard.api.openai.files import ends, too_large
from batchyard.api.openai.models import served_to
from batchyard.api.openai.shapes import (
    AmendBatch,
    BatchList,
    BatchObject,
    CreateBatch,
    RetryBatch,
    UpdateBatch,
)
from batchyard.api.operations import CHANGES, READS, Operation, Query, page_query
from batchyard.api.reading import page_limit, query_number, read_body
from batchyard.errors import BatchNotFound
from batchyard.service.hosting.acts import Update
from batchyard.service.hosting.amendments import Amendment
from batchyard.service.hosting.files import Incoming
from batchyard.service.hosting.host import Host, IdempotencyConflict, NewBatch
from batchyard.service.lifecycle import TERMINAL, Status
from batchyard.stores.protocol import BatchFilter, BatchRecord

#: Inline requests come in the body; files of any size do not.
_MAX_BODY = 64 << 20
_UNITS_S = {"m": 60, "h": 3_600, "d": 86_400}
_LONGEST_S = 7 * 86_400
_STATUSES = ", ".join(one.value for one in Status)
_TIME = {"type": "integer", "minimum": 0, "maximum": 2**40}


class BatchesApi:
    """The Batches of a tenant."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def operations(self) -> list[Operation]:
        """What it answers to."""
        base = "/v1/batches"
        one = base + "/{id}"
        listing = (
            *page_query(20, 100, "the id of a batch"),
            Query("status", f"Only these, with commas between: {_STATUSES}."),
            Query("model", "Only batches of this model."),
            Query("created_after", "Only batches created at or after this Unix time.", _TIME),
            Query("created_before", "Only batches created before this Unix time.", _TIME),
        )

        def act(name: str, answer: Any, summary: str, body: Any = None) -> Operation:
            return Operation("POST", f"{one}/{name}", answer, summary, CHANGES, body=body, gives=BatchObject)

        return [
            Operation("GET", base, self.list, "List batches", READS, query=listing, gives=BatchList),
            Operation(
                "POST", base, self.create, "Create a batch", CHANGES, body=CreateBatch, gives=BatchObject
            ),
            Operation("GET", one, self.get, "Look at a batch", READS, gives=BatchObject),
            Operation(
                "POST", one, self.update, "Change a batch", CHANGES, body=UpdateBatch, gives=BatchObject
            ),
            act("cancel", self.cancel, "Cancel a batch"),
            act("pause", self.pause, "Hold a batch"),
            act("resume", self.resume, "Go on with a held batch"),
            act("amend", self.amend, "Change the requests that have not run", AmendBatch),
            act("retry", self.retry, "Run the failed requests again, as a new batch", RetryBatch),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        """A new Batch. A repeat with the same `Idempotency-Key` returns the first."""
        wanted = read_as(await read_body(request, _MAX_BODY), CreateBatch)
        batch = new_batch(wanted, caller)
        key = request.headers.get("idempotency-key")
        host = self._host
        if wanted.requests is None:
            file_id = batch.input_file_id
            file = await host.kept(lambda: host.files.get(caller.tenant, file_id))
            if file is not None and file.purpose != "batch":
                message = f"File {file.id} has the purpose '{file.purpose}'; a batch takes one of 'batch'."
                raise ApiError(400, message, code="invalid_value", param="input_file_id")
            batch = replace(batch, source=None if file is None else file.id)
            return json_response(await show(host, await self._made(caller, batch, key)))
        incoming = host.files.begin()
        try:
            digest = await asyncio.to_thread(write_inline, wanted, incoming)
            if incoming.size > host.limits.max_batch_file_bytes:
                raise too_large(host.limits.max_batch_file_bytes)
            await asyncio.to_thread(host.files.store, incoming)
            file = await host.kept(
                lambda: host.files.enter(
                    incoming,
                    caller.tenant,
                    purpose="batch",
                    filename="inline.jsonl",
                    expires_s=host.limits.batch_file_expires_s,
                )
            )
        finally:
            incoming.discard()
        batch = replace(batch, source=file.id, input_file_id=file.id, content=digest)
        made = None
        try:
            made = await self._made(caller, batch, key)
        finally:
            if made is None or made.settings["input_file_id"] != file.id:
                # It was refused, or had been made before of the same requests.
                await host.kept(lambda: host.files.delete(file))
        return json_response(await show(host, made))

    async def _made(self, caller: Caller, wanted: NewBatch, key: str | None) -> BatchRecord:
        try:
            return await self._host.create(caller.tenant, wanted, idempotency_key=key)
        except IdempotencyConflict:
            message = "This Idempotency-Key was used with other parameters. Use a new key for a new batch."
            raise ApiError(409, message, code="idempotency_conflict", headers=NO_RETRY) from None

    async def get(self, request: Request, caller: Caller) -> Response:
        """Where a Batch stands. Changes nothing."""
        return json_response(await show(self._host, await self._asked_for(request, caller)))

    async def list(self, request: Request, caller: Caller) -> Response:
        """A page of Batches, newest first."""
        limit = page_limit(request, 20, 100)
        query = request.query_params
        after = None
        if query.get("after"):
            try:
                after = await self._host.get(caller.tenant, query["after"])
            except BatchNotFound:
                raise ApiError(404, "No batch found with the id given as after.", param="after") from None
        found = await self._host.page(caller.tenant, limit + 1, after=after, wanted=_filter(request))
        data = [await show(self._host, one) for one in found[:limit]]
        first, last = ends(data)
        more = len(found) > limit
        return json_response(BatchList(data=data, has_more=more, first_id=first, last_id=last))

    async def update(self, request: Request, caller: Caller) -> Response:
        """Change the priority, the window or the metadata."""
        batch = await self._asked_for(request, caller)
        wanted = read_as(await read_body(request, 1 << 16), UpdateBatch)
        window = wanted.completion_window
        update = Update(
            wanted.priority, window, None if window is None else window_s(window), wanted.metadata
        )
        changed = await self._host.acts.update(caller.tenant, batch.id, update)
        return json_response(await show(self._host, changed))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """Stop a Batch; what is finished is kept."""
        batch = await self._asked_for(request, caller)
        if Status(batch.status) in TERMINAL - {Status.CANCELLED}:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise ApiError(409, message, headers=NO_RETRY)
        return json_response(await show(self._host, await self._host.acts.cancel(caller.tenant, batch.id)))

    async def pause(self, request: Request, caller: Caller) -> Response:
        """Dispatch nothing more of a Batch until it is resumed."""
        paused = await self._host.acts.pause(caller.tenant, request.path_params["id"])
        return json_response(await show(self._host, paused))

    async def resume(self, request: Request, caller: Caller) -> Response:
        """Go on with a paused Batch, from now on as one of the caller's key."""
        resumed = await self._host.acts.resume(caller.tenant, request.path_params["id"], caller.key_id)
        return json_response(await show(self._host, resumed))

    async def amend(self, request: Request, caller: Caller) -> Response:
        """Change what is asked by the requests that have not run yet."""
        batch = await self._asked_for(request, caller)
        wanted = read_as(await read_body(request, 1 << 20), AmendBatch)
        if "model" in wanted.body:
            message = "Give another model as 'model', beside 'body'."
            raise ApiError(400, message, code="invalid_value", param="body.model")
        if wanted.body.get("stream"):
            message = "Streaming is not supported in a batch."
            raise ApiError(400, message, code="invalid_value", param="body.stream")
        amendment = Amendment(
            wanted.body, wanted.model, [(one.find, one.with_) for one in wanted.replace_text]
        )
        if not amendment.record():
            raise missing("body")
        if wanted.model is not None:
            served = served_to(caller, self._host, wanted.model)
            if batch.settings["endpoint"] not in served.engine.capabilities.endpoints:
                message = f"The model {wanted.model!r} does not answer {batch.settings['endpoint']}."
                raise ApiError(400, message, code="unsupported_endpoint", param="model")
        changed = await self._host.acts.amend(caller.tenant, batch.id, amendment)
        return json_response(await show(self._host, changed))

    async def retry(self, request: Request, caller: Caller) -> Response:
        """A new Batch of the requests that failed or never ran."""
        batch = await self._asked_for(request, caller)
        body = await read_body(request, 1 << 20)
        wanted = read_as(body, RetryBatch) if body else RetryBatch()
        settings = batch.settings
        window = wanted.completion_window or settings["completion_window"]
        new = NewBatch(
            source=None,
            input_file_id="",
            endpoint=settings["endpoint"],
            completion_window=window,
            window_s=window_s(window),
            metadata=settings["metadata"] if wanted.metadata is None else wanted.metadata,
            output_expires_s=settings["output_expires_s"],
            several_models=settings["several_models"],
            priority=batch.priority,
            retry_of=batch.id,
            key_id=caller.key_id,
        )
        kinds = wanted.kinds
        made = await self._host.retry(batch, new, lambda kind: kinds is None or kind in kinds)
        if made is None:
            message = f"No request of batch {batch.id} failed" + (" in these ways." if kinds else ".")
            raise ApiError(409, message, code="nothing_to_retry", headers=NO_RETRY)
        return json_response(await show(self._host, made))

    async def _asked_for(self, request: Request, caller: Caller) -> BatchRecord:
        return await self._host.get(caller.tenant, request.path_params["id"])


def new_batch(wanted: CreateBatch, caller: Caller) -> NewBatch:
    """What a body asks for, without its source.

    Raises:
        ApiError: it asks for no input, for two, or for an impossible window.
    """
    if wanted.requests is not None and wanted.input_file_id is not None:
        message = "Give either 'input_file_id' or 'requests', not both."
        raise ApiError(400, message, code="invalid_value", param="requests")
    if wanted.requests is None and wanted.input_file_id is None:
        raise missing("input_file_id")
    canary = wanted.canary
    return NewBatch(
        source=None,
        input_file_id=wanted.input_file_id or "",
        endpoint=wanted.endpoint.value,
        completion_window=wanted.completion_window,
        window_s=window_s(wanted.completion_window),
        metadata=wanted.metadata,
        output_expires_s=None if wanted.output_expires_after is None else wanted.output_expires_after.seconds,
        several_models=wanted.several_models,
        priority=wanted.priority,
        canary=None
        if canary is None
        else {"first": canary.first, "max_failed_share": canary.max_failed_share},
        key_id=caller.key_id,
        work_order=wanted.work_order.value,
        dedupe=wanted.dedupe,
    )


def write_inline(wanted: CreateBatch, target: Incoming) -> str:
    """Write inline requests as the lines of an input file; the SHA-256 of these."""
    digest = hashlib.sha256()
    for one in wanted.requests or ():
        line = {"custom_id": one.custom_id, "method": "POST", "url": wanted.endpoint.value, "body": one.body}
        data = msgspec.json.encode(line) + b"\n"
        digest.update(data)
        target.write(data)
    return digest.hexdigest()


def window_s(window: str) -> float:
    """A completion window in seconds.

    Raises:
        ApiError: it is longer than a week.
    """
    length_s = int(window[:-1]) * _UNITS_S[window[-1]]
    if length_s > _LONGEST_S:
        message = f"Invalid value: {window!r}. completion_window goes from '1m' to '7d', such as '24h'."
        raise ApiError(400, message, code="invalid_value", param="completion_window")
    return length_s


def _filter(request: Request) -> BatchFilter:
    query = request.query_params
    statuses = [one for one in query.get("status", "").split(",") if one]
    for one in statuses:
        if one not in set(Status):
            message = f"Invalid value: {one[:64]!r}. Supported values are: {_STATUSES}."
            raise ApiError(400, message, code="invalid_value", param="status")
    metadata = {
        key.removeprefix("metadata[").removesuffix("]"): value
        for key, value in query.items()
        if key.startswith("metadata[") and key.endswith("]")
    }
    return BatchFilter(
        statuses,
        query.get("model") or None,
        metadata,
        query_number(request, "created_after"),
        query_number(request, "created_before"),
    )
