"""Floor 8. Reads what clients send: JSON bodies under a cap, query parameters, multipart forms.

Whatever is wrong with them is an `ApiError` that names the parameter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from batchyard.api.errors import ApiError

#: The longest name or value of a form field, in bytes.
_MAX_FIELD = 16_384
_MAX_FIELDS = 64
#: How long a body may make no headway before its request is given up.
STALL_S = 60.0


async def read_body(request: Request, most: int) -> bytes:
    """The whole body, of at most *most* bytes.

    Raises:
        ApiError: it is larger, or came to an end early.
    """
    parts: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    with _in_words():
        async with asyncio.timeout(STALL_S) as patience:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    message = f"The body is larger than {most:,} bytes. Send less at once."
                    raise ApiError(413, message, code="request_too_large")
                parts.append(part)
                patience.reschedule(loop.time() + STALL_S)
    return b"".join(parts)


def page_limit(request: Request, default: int, most: int) -> int:
    """The query parameter `limit`.

    Raises:
        ApiError: it is no number between 1 and *most*.
    """
    raw = request.query_params.get("limit")
    if raw is None or raw == "":
        return default
    if not raw.isascii() or not raw.isdigit() or len(raw) > 9 or not 1 <= int(raw) <= most:
        raise ApiError(400, f"limit must be between 1 and {most}.", param="limit")
    return int(raw)


def query_number(request: Request, name: str) -> int | None:
    """The query parameter *name* as a number that is not negative; None where it is not given.

    Raises:
        ApiError: it is none.
    """
    raw = request.query_params.get(name)
    if raw is None or raw == "":
        return None
    if not raw.isascii() or not raw.isdigit() or len(raw) > 13:
        message = f"Invalid value: {raw[:64]!r}. {name} is a whole number that is not negative."
        raise ApiError(400, message, code="invalid_value", param=name)
    return int(raw)


def query_flag(request: Request, name: str) -> bool:
    """The query parameter *name* as yes or no; no where it is not given.

    Raises:
        ApiError: it is neither.
    """
    raw = request.query_params.get(name, "")
    if raw.lower() in {"", "false", "0"}:
        return False
    if raw.lower() in {"true", "1"}:
        return True
    message = f"Invalid value: {raw[:64]!r}. Supported values are: 'true', 'false'."
    raise ApiError(400, message, code="invalid_value", param=name)


class Form:
    """A multipart form, read as it comes: small fields are kept, the one file goes to *take*.

    Args:
        file_field: the name of the field that is the file.
        take: gets the file's content, piece by piece.
    """

    def __init__(self, file_field: str, take: Callable[[bytes], None]) -> None:
        self.fields: dict[str, str] = {}
        #: None until the file's part has begun.
        self.filename: str | None = None
        self.ended = False
        self._file_field = file_field
        self._take = take
        self._header = bytearray()
        self._value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._content = bytearray()
        self._in_file = False

    async def read(self, request: Request) -> None:
        """Read the whole form.

        Raises:
            ApiError: it is none, or is damaged.
        """
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            message = "Send the file as multipart/form-data with a boundary, as the SDKs do."
            raise ApiError(400, message, code="invalid_content_type")
        try:
            parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
            async for block in _blocks(request):
                parser.write(block)
            parser.finalize()
        except FormParserError as error:
            raise ApiError(400, f"The multipart form is damaged: {error}.") from error
        if not self.ended:
            raise ApiError(400, "The multipart form came to an end early. Send it again.")

    def _on_part_begin(self) -> None:
        self._headers, self._name, self._in_file = {}, "", False
        self._content.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", errors="replace")
        if self._name == self._file_field:
            if self.filename is not None:
                raise ApiError(400, f"The form holds '{self._file_field}' twice.", param=self._file_field)
            self._in_file = True
            self.filename = options.get(b"filename", b"").decode("utf-8", errors="replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._in_file:
            self._take(piece)
            return
        self._content += piece
        if len(self._content) > _MAX_FIELD:
            raise ApiError(400, f"The form field '{self._name[:64]}' is too long.", param=self._name[:64])

    def _on_part_end(self) -> None:
        if not self._in_file:
            if len(self.fields) >= _MAX_FIELDS:
                raise ApiError(400, f"The form has more than {_MAX_FIELDS} fields.")
            self.fields[self._name] = bytes(self._content).decode("utf-8", errors="replace")

    def _on_end(self) -> None:
        self.ended = True


async def _blocks(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes; a client that sends nothing for too long is given up."""
    stream = request.stream()
    while True:
        with _in_words():
            async with asyncio.timeout(STALL_S):
                block = await anext(stream, None)
        if block is None:
            return
        if block:
            yield block


@contextmanager
def _in_words() -> Iterator[None]:
    """A body that ends early or comes to a halt, as an error for its client."""
    try:
        yield
    except ClientDisconnect:
        raise ApiError(400, "The body came to an end early. Send it again.") from None
    except TimeoutError:
        message = f"Nothing of the body came for {STALL_S:g} seconds. Send it again."
        raise ApiError(408, message, code="request_timeout") from None
