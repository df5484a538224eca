"""Floor 8. `/v1/files`: upload, list, retrieve, content, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from batchyard.api.access import Caller
from batchyard.api.bodies import explained, missing
from batchyard.api.errors import ApiError, json_response
from batchyard.api.openai.shapes import Deleted, ExpiresAfter, FileList, FileObject, Purpose
from batchyard.api.operations import CHANGES, READS, Operation, Query, page_query
from batchyard.api.reading import Form, page_limit
from batchyard.service.hosting.files import Incoming
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.shelf import Limits
from batchyard.stores.blobs import BlobNotFound
from batchyard.stores.protocol import FileRecord

_PURPOSES = get_args(Purpose)
#: How much of a batch file is looked at before it is taken.
_LOOK_BYTES = 1 << 20
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"type": "string", "enum": list(_PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3_600, "maximum": 2_592_000},
    },
}
_ORDER = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}


class FilesApi:
    """The files of a tenant."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def operations(self) -> list[Operation]:
        """What it answers to."""
        one = "/v1/files/{id}"
        listing = (
            *page_query(10_000, 10_000, "the id of a file"),
            Query("order", "By when they were created.", _ORDER),
            Query("purpose", "Only files of this purpose."),
        )
        return [
            Operation("GET", "/v1/files", self.list, "List files", READS, query=listing, gives=FileList),
            Operation(
                "POST", "/v1/files", self.upload, "Upload a file", CHANGES, form=_FORM, gives=FileObject
            ),
            Operation("GET", one, self.get, "Look at a file", READS, gives=FileObject),
            Operation("DELETE", one, self.delete, "Delete a file", CHANGES, gives=Deleted),
            Operation(
                "GET",
                one + "/content",
                self.content,
                "Read a file's content",
                READS,
                media_type="application/octet-stream",
            ),
        ]

    async def upload(self, request: Request, caller: Caller) -> Response:
        """Take a file, streamed to the disk whatever the order of the form's parts."""
        host, limits = self._host, self._host.limits
        incoming = host.files.begin()

        def take(piece: bytes) -> None:
            if incoming.size + len(piece) > limits.max_file_bytes:
                raise too_large(limits.max_file_bytes)
            incoming.write(piece)

        try:
            form = Form("file", take)
            await form.read(request)
            purpose, expires_s = _checked(form, incoming, limits)
            await asyncio.to_thread(host.files.store, incoming)
            name = form.filename or ""
            record = await host.kept(
                lambda: host.files.enter(
                    incoming, caller.tenant, purpose=purpose, filename=name, expires_s=expires_s
                )
            )
        finally:
            incoming.discard()
        return json_response(shown(record))

    async def list(self, request: Request, caller: Caller) -> Response:
        """A page of files."""
        limit = page_limit(request, 10_000, 10_000)
        query = request.query_params
        order = query.get("order", "desc")
        if order not in {"asc", "desc"}:
            message = f"Invalid value: {order[:64]!r}. Supported values are: 'asc', 'desc'."
            raise ApiError(400, message, code="invalid_value", param="order")
        after = None
        if query.get("after"):
            after = await self._find(caller, query["after"])
            if after is None:
                raise ApiError(404, "Resource not found.", param="after")
        found = await self._host.kept(
            lambda: self._host.files.page(
                caller.tenant,
                limit + 1,
                after=after,
                purpose=query.get("purpose") or None,
                oldest_first=order == "asc",
            )
        )
        data = [shown(one) for one in found[:limit]]
        first, last = ends(data)
        more = len(found) > limit
        return json_response(FileList(data=data, has_more=more, first_id=first, last_id=last))

    async def get(self, request: Request, caller: Caller) -> Response:
        """One file's record."""
        return json_response(shown(await self._asked_for(request, caller)))

    async def delete(self, request: Request, caller: Caller) -> Response:
        """Forget a file. A Batch that was made of it goes on."""
        record = await self._asked_for(request, caller)
        await self._host.kept(lambda: self._host.files.delete(record))
        return json_response(Deleted(id=record.id, object="file"))

    async def content(self, request: Request, caller: Caller) -> Response:
        """The bytes of a file; ranges are served."""
        record = await self._asked_for(request, caller)
        try:
            path = await asyncio.to_thread(self._host.files.path, record.id)
        except BlobNotFound as error:
            raise no_such_file(record.id) from error
        return FileResponse(path, media_type="application/octet-stream")

    async def _asked_for(self, request: Request, caller: Caller) -> FileRecord:
        file_id = request.path_params["id"]
        record = await self._find(caller, file_id)
        if record is None:
            raise no_such_file(file_id)
        return record

    async def _find(self, caller: Caller, file_id: str) -> FileRecord | None:
        return await self._host.kept(lambda: self._host.files.get(caller.tenant, file_id))


def _checked(form: Form, incoming: Incoming, limits: Limits) -> tuple[str, float | None]:
    """The purpose of a file that may be kept, and after how many seconds it expires."""
    purpose = form.fields.get("purpose")
    if not purpose:
        raise missing("purpose")
    if purpose not in _PURPOSES:
        known = ", ".join(repr(one) for one in _PURPOSES)
        message = f"Invalid value: {purpose[:64]!r}. Supported values are: {known}."
        raise ApiError(400, message, code="invalid_value", param="purpose")
    if form.filename is None:
        raise missing("file")
    expires_s: float | None = None
    anchor = form.fields.get("expires_after[anchor]")
    after = form.fields.get("expires_after[seconds]")
    if anchor is not None or after is not None:
        number: Any = (
            int(after) if after and after.isascii() and after.isdigit() and len(after) < 10 else after
        )
        asked = {"anchor": anchor, "seconds": number}
        try:
            expires_s = msgspec.convert(asked, ExpiresAfter).seconds
        except msgspec.ValidationError as error:
            wrong = explained(str(error), asked, ExpiresAfter)
            raise ApiError(
                400, wrong.message, code=wrong.code, param=f"expires_after.{wrong.param}"
            ) from error
    if purpose == "batch":
        check_batch_file(form.filename, incoming, limits)
        expires_s = expires_s or limits.batch_file_expires_s
    return purpose, expires_s


def check_batch_file(filename: str, incoming: Incoming, limits: Limits) -> None:
    """Make sure that *incoming* may be the input of a Batch.

    Raises:
        ApiError: it may not.
    """
    if incoming.size > limits.max_batch_file_bytes:
        raise too_large(limits.max_batch_file_bytes)
    if not filename.lower().endswith(".jsonl") or not _looks_like_jsonl(incoming):
        raise ApiError(400, "Invalid file format for Batch API. Must be .jsonl")


def shown(record: FileRecord) -> FileObject:
    """A file as the API shows it."""
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.created_at),
        expires_at=None if record.expires_at is None else int(record.expires_at),
        filename=record.filename,
        purpose=record.purpose,
    )


def ends(data: Sequence[Any]) -> tuple[str | None, str | None]:
    """The first and the last id of a page."""
    return (data[0].id, data[-1].id) if data else (None, None)


def _looks_like_jsonl(incoming: Incoming) -> bool:
    """Whether the first line that is not blank could be a JSON object; each line is checked later."""
    incoming.handle.flush()
    with incoming.path.open("rb") as file:
        head = file.read(_LOOK_BYTES)
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"


def too_large(most: int) -> ApiError:
    """The error of a file of more than *most* bytes."""
    return ApiError(400, f"File is too large. It may have {most:,} bytes.", param="file")


def no_such_file(file_id: str) -> ApiError:
    """The error of a file that is not there, or is another tenant's."""
    return ApiError(404, f"No such File object: {file_id[:200]}", param="id")
