"""Floor 8. `/v1/uploads`: a large file in parts."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from batchyard.api.access import Caller
from batchyard.api.bodies import missing, read_as
from batchyard.api.errors import NO_RETRY, ApiError, json_response
from batchyard.api.openai.files import check_batch_file, shown, too_large
from batchyard.api.openai.shapes import CompleteUpload, CreateUpload, FileObject, PartObject, UploadObject
from batchyard.api.operations import CHANGES, Operation
from batchyard.api.reading import Form, read_body
from batchyard.errors import UsageError
from batchyard.service.hosting.host import Host
from batchyard.stores.blobs import BlobNotFound
from batchyard.stores.protocol import UploadRecord

_MAX_BODY = 1 << 20
_MAX_PART = 64 << 20
_FORM = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "contentMediaType": "application/octet-stream"}},
}


class UploadsApi:
    """The uploads of a tenant."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def operations(self) -> list[Operation]:
        """What it answers to."""
        base = "/v1/uploads"
        one = base + "/{id}"
        return [
            Operation(
                "POST", base, self.create, "Begin an upload", CHANGES, body=CreateUpload, gives=UploadObject
            ),
            Operation(
                "POST", one + "/parts", self.part, "Send a part", CHANGES, form=_FORM, gives=PartObject
            ),
            Operation(
                "POST",
                one + "/complete",
                self.complete,
                "Make the parts a file",
                CHANGES,
                body=CompleteUpload,
                gives=UploadObject,
            ),
            Operation("POST", one + "/cancel", self.cancel, "Cancel an upload", CHANGES, gives=UploadObject),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        """A new upload."""
        wanted = read_as(await read_body(request, _MAX_BODY), CreateUpload)
        limits = self._host.limits
        is_batch = wanted.purpose == "batch"
        most = limits.max_batch_file_bytes if is_batch else limits.max_upload_bytes
        if wanted.bytes > most:
            raise too_large(most)
        if is_batch and not wanted.filename.lower().endswith(".jsonl"):
            raise ApiError(400, "Invalid file format for Batch API. Must be .jsonl", param="filename")
        expires_s = None if wanted.expires_after is None else float(wanted.expires_after.seconds)
        if is_batch and expires_s is None:
            expires_s = limits.batch_file_expires_s
        upload = await self._host.kept(
            lambda: self._host.uploads.create(
                caller.tenant,
                purpose=wanted.purpose,
                filename=wanted.filename,
                size=wanted.bytes,
                file_expires_s=expires_s,
            )
        )
        return json_response(self._shown(upload))

    async def part(self, request: Request, caller: Caller) -> Response:
        """Take a part, streamed to the disk."""
        uploads = self._host.uploads
        upload = await self._pending(request, caller)
        most = min(_MAX_PART, upload.bytes)
        incoming = uploads.begin_part()

        def take(piece: bytes) -> None:
            if incoming.size + len(piece) > most:
                message = f"The part is too large. It may have {most:,} bytes."
                raise ApiError(400, message, code="part_too_large", param="data")
            incoming.write(piece)

        try:
            form = Form("data", take)
            await form.read(request)
            if form.filename is None:
                raise missing("data")
            await asyncio.to_thread(uploads.store_part, incoming)
            part = await self._host.kept(lambda: uploads.enter_part(upload, incoming))
        finally:
            incoming.discard()
        if part is None:
            raise _has_ended(upload)
        return json_response(
            PartObject(id=part.id, created_at=int(part.created_at), upload_id=part.upload_id)
        )

    async def complete(self, request: Request, caller: Caller) -> Response:
        """Make the parts, in the order given, one file."""
        uploads, files = self._host.uploads, self._host.files
        upload = await self._pending(request, caller)
        wanted = read_as(await read_body(request, _MAX_BODY), CompleteUpload)
        parts = await self._host.kept(lambda: uploads.parts(upload))
        for place, part_id in enumerate(wanted.part_ids):
            if part_id not in parts:
                message = f"This upload has no part {part_id[:100]!r}."
                raise ApiError(400, message, code="invalid_part", param=f"part_ids.{place}")
        if len(set(wanted.part_ids)) < len(wanted.part_ids):
            raise ApiError(400, "A part is named twice.", code="invalid_part", param="part_ids")
        size = sum(parts[one].bytes for one in wanted.part_ids)
        if size != upload.bytes:
            message = f"The parts have {size:,} bytes together; the upload was to have {upload.bytes:,}."
            raise ApiError(400, message, code="invalid_size", param="part_ids")
        try:
            incoming = await asyncio.to_thread(uploads.assemble, upload, wanted.part_ids, wanted.md5)
        except UsageError as error:
            raise ApiError(400, str(error), code="md5_mismatch", param="md5") from error
        except BlobNotFound:
            raise _has_ended(upload) from None
        try:
            if upload.purpose == "batch":
                check_batch_file(upload.filename, incoming, self._host.limits)
            await asyncio.to_thread(files.store, incoming)
            record = await self._host.kept(lambda: uploads.complete(upload, incoming))
        finally:
            incoming.discard()
        if record is None:
            raise _has_ended(upload)
        return json_response(self._shown(upload, "completed", shown(record)))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """Forget the parts."""
        upload = await self._pending(request, caller)
        if not await self._host.kept(lambda: self._host.uploads.cancel(upload)):
            raise _has_ended(upload)
        return json_response(self._shown(upload, "cancelled"))

    async def _pending(self, request: Request, caller: Caller) -> UploadRecord:
        upload_id = request.path_params["id"]
        found = await self._host.kept(lambda: self._host.uploads.get(caller.tenant, upload_id))
        if found is None:
            raise ApiError(404, f"No such Upload object: {upload_id[:200]}", param="id")
        if not self._host.uploads.is_pending(found):
            raise _has_ended(found)
        return found

    def _shown(
        self, upload: UploadRecord, status: str | None = None, file: FileObject | None = None
    ) -> UploadObject:
        return UploadObject(
            id=upload.id,
            bytes=upload.bytes,
            created_at=int(upload.created_at),
            expires_at=int(upload.expires_at),
            filename=upload.filename,
            purpose=upload.purpose,
            status=status or upload.status,  # type: ignore[arg-type]  # the store holds no other
            file=file,
        )


def _has_ended(upload: UploadRecord) -> ApiError:
    word = "expired" if upload.status == "pending" else upload.status
    message = f"Upload {upload.id} takes nothing any more: it is {word} or has just ended."
    return ApiError(409, message, code="upload_ended", headers=NO_RETRY)
