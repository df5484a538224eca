"""Floor 8. `/v1/files`: upload, list, retrieve, content, delete."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from batchyard.api.access import Access
from batchyard.api.errors import ApiError, json_response
from batchyard.api.reading import Form, missing, page_limit, seconds
from batchyard.service.hosting.files import Incoming
from batchyard.service.hosting.host import Host
from batchyard.stores.protocol import FileRecord

_PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
_LEAST_S, _MOST_S = 3_600, 2_592_000
#: How much of a batch file is looked at before it is taken.
_LOOK_BYTES = 1 << 20


class FilesApi:
    """The files of a tenant."""

    def __init__(self, host: Host, access: Access) -> None:
        self._host = host
        self._access = access

    def routes(self) -> list[BaseRoute]:
        """What it answers to."""
        return [
            Route("/v1/files", self.list, methods=["GET"]),
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files/{id}", self.get, methods=["GET"]),
            Route("/v1/files/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self.content, methods=["GET"]),
        ]

    async def upload(self, request: Request) -> Response:
        """Take a file, streamed to the disk whatever the order of the form's parts."""
        tenant = await self._access.tenant(request)
        limits = self._host.limits
        incoming = self._host.files.begin()

        def take(piece: bytes) -> None:
            if incoming.size + len(piece) > limits.max_file_bytes:
                raise _too_large(limits.max_file_bytes)
            incoming.write(piece)

        try:
            form = Form("file", take)
            await form.read(request)
            purpose, expires_s = self._checked(form, incoming)
            record = await self._host.kept(
                lambda: self._host.files.keep(
                    incoming, tenant, purpose=purpose, filename=form.filename or "", expires_s=expires_s
                )
            )
        finally:
            incoming.discard()
        return json_response(shown(record))

    def _checked(self, form: Form, incoming: Incoming) -> tuple[str, float | None]:
        """The purpose of an upload that may be kept, and after how many seconds it expires."""
        purpose = form.fields.get("purpose")
        if not purpose:
            raise missing("purpose")
        if purpose not in _PURPOSES:
            known = ", ".join(repr(one) for one in _PURPOSES)
            message = f"Invalid value: {purpose[:64]!r}. Supported values are: {known}."
            raise ApiError(400, message, code="invalid_value", param="purpose")
        if form.filename is None:
            raise missing("file")
        limits = self._host.limits
        expires_s: float | None = None
        anchor = form.fields.get("expires_after[anchor]")
        after = form.fields.get("expires_after[seconds]")
        if anchor is not None or after is not None:
            number: Any = int(after) if after and after.isascii() and after.isdigit() else after
            expires_s = seconds({"anchor": anchor, "seconds": number}, "expires_after", _LEAST_S, _MOST_S)
        if purpose == "batch":
            if incoming.size > limits.max_batch_file_bytes:
                raise _too_large(limits.max_batch_file_bytes)
            if not form.filename.lower().endswith(".jsonl") or not _looks_like_jsonl(incoming):
                raise ApiError(400, "Invalid file format for Batch API. Must be .jsonl")
            expires_s = expires_s or limits.batch_file_expires_s
        return purpose, expires_s

    async def list(self, request: Request) -> Response:
        """A page of files."""
        tenant = await self._access.tenant(request)
        limit = page_limit(request, 10_000, 10_000)
        query = request.query_params
        order = query.get("order", "desc")
        if order not in {"asc", "desc"}:
            message = f"Invalid value: {order[:64]!r}. Supported values are: 'asc', 'desc'."
            raise ApiError(400, message, code="invalid_value", param="order")
        after = None
        if query.get("after"):
            after = await self._find(tenant, query["after"])
            if after is None:
                raise ApiError(404, "Resource not found.", param="after")
        found = await self._host.kept(
            lambda: self._host.files.page(
                tenant,
                limit + 1,
                after=after,
                purpose=query.get("purpose") or None,
                oldest_first=order == "asc",
            )
        )
        return json_response(listed([shown(one) for one in found[:limit]], has_more=len(found) > limit))

    async def get(self, request: Request) -> Response:
        """One file's record."""
        return json_response(shown(await self._asked_for(request)))

    async def delete(self, request: Request) -> Response:
        """Forget a file. A Batch that was made of it goes on."""
        record = await self._asked_for(request)
        await self._host.kept(lambda: self._host.files.delete(record))
        return json_response({"id": record.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """The bytes of a file; ranges are served."""
        record = await self._asked_for(request)
        path = self._host.files.path(record.id)
        if not await asyncio.to_thread(path.exists):
            raise _no_such_file(record.id)
        return FileResponse(path, media_type="application/octet-stream")

    async def _asked_for(self, request: Request) -> FileRecord:
        tenant = await self._access.tenant(request)
        file_id = request.path_params["id"]
        record = await self._find(tenant, file_id)
        if record is None:
            raise _no_such_file(file_id)
        return record

    async def _find(self, tenant: str, file_id: str) -> FileRecord | None:
        return await self._host.kept(lambda: self._host.files.get(tenant, file_id))


def shown(record: FileRecord) -> dict[str, Any]:
    """A file as the API shows it."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": int(record.created_at),
        "expires_at": None if record.expires_at is None else int(record.expires_at),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def listed(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of a list."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _looks_like_jsonl(incoming: Incoming) -> bool:
    """Whether the first line that is not blank could be a JSON object; each line is checked later."""
    incoming.handle.flush()
    with incoming.path.open("rb") as file:
        head = file.read(_LOOK_BYTES)
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"


def _too_large(most: int) -> ApiError:
    return ApiError(400, f"File is too large. It may have {most:,} bytes.", param="file")


def _no_such_file(file_id: str) -> ApiError:
    return ApiError(404, f"No such File object: {file_id[:200]}", param="id")
