"""Floor 9. A server from outside: calls of its API, and what may be wrong with them, in words."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import aiohttp
import typer

from batchyard.errors import UsageError

DEFAULT_SERVER = "http://127.0.0.1:8000/v1"
_KEY_ENVS = ("BATCHYARD_API_KEY", "OPENAI_API_KEY")
_BLOCK = 1 << 18

ServerOption = Annotated[
    str, typer.Option(envvar="BATCHYARD_SERVER", help="The server's address, such as http://host:8000/v1.")
]
KeyEnvOption = Annotated[
    str | None,
    typer.Option(
        help=f"The environment variable that holds your key. Default: {' or '.join(_KEY_ENVS)}, if set."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, as the API gives it.")]


class Unreachable(UsageError):  # noqa: N818 - names what failed
    """The server does not answer."""


class Refused(UsageError):  # noqa: N818 - names what failed
    """The server answered with an error.

    Args:
        status: the HTTP status.
        message: the server's own words.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Remote:
    """A session with one server; use `async with`."""

    def __init__(self, server: str, key_env: str | None) -> None:
        self.server = server.rstrip("/")
        if not self.server.startswith(("http://", "https://")):
            raise UsageError(f"--server {server!r} is no address. Write for example {DEFAULT_SERVER}.")
        if key_env is not None and not os.environ.get(key_env):
            raise UsageError(f"The environment variable {key_env} is not set. Put your key there.")
        names = _KEY_ENVS if key_env is None else (key_env,)
        key = next((os.environ[name] for name in names if os.environ.get(name)), None)
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(
        self, method: str, path: str, body: Any = None, params: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The JSON that the server answers.

        Raises:
            Refused: it answered with an error.
            Unreachable: it did not answer.
        """
        try:
            async with self._session.request(
                method, self.server + path, json=body, params=params
            ) as response:
                return await _answer(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    async def upload(self, path: Path) -> dict[str, Any]:
        """Send a file as the input of a Batch, streamed.

        Raises:
            Refused: the server does not take it.
            Unreachable: it did not answer.
            UsageError: the file cannot be read.
        """
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        try:
            file = path.open("rb")
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}. Check the path.") from error
        with file:
            form.add_field("file", file, filename=f"{path.stem}.jsonl")
            try:
                async with self._session.post(f"{self.server}/files", data=form) as response:
                    return await _answer(response)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise self._unreachable(error) from error

    async def download(self, file_id: str) -> AsyncIterator[bytes]:
        """The content of a file, block by block.

        Raises:
            Refused: there is none.
            Unreachable: the server did not answer.
        """
        try:
            async with self._session.get(f"{self.server}/files/{file_id}/content") as response:
                if response.status != 200:
                    await _answer(response)
                async for block in response.content.iter_chunked(_BLOCK):
                    yield block
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    async def events(self, path: str, last_id: str) -> AsyncIterator[tuple[str, str, str]]:
        """Server-sent events from *path*: name, data, and the id to go on from.

        Raises:
            Refused: the server does not send any.
            Unreachable: it did not answer, or the stream broke.
        """
        headers = {"last-event-id": last_id} if last_id else {}
        try:
            async with self._session.get(self.server + path, headers=headers) as response:
                if response.status != 200:
                    await _answer(response)
                name = data = ""
                # Lines may be long: they are put together here, not by the client's line reader.
                rest = b""
                async for block in response.content.iter_any():
                    *lines, rest = (rest + block).split(b"\n")
                    for line in lines:
                        key, _, value = line.decode().partition(": ")
                        if key == "event":
                            name = value
                        elif key == "data":
                            data = value
                        elif key == "id":
                            last_id = value
                        elif not line and name:
                            yield name, data, last_id
                            name = ""
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> Unreachable:
        cause = str(error) or type(error).__name__
        return Unreachable(
            f"The server {self.server} does not answer ({cause}). Start it with `batchyard serve`, or name "
            "another with --server."
        )


async def _answer(response: aiohttp.ClientResponse) -> dict[str, Any]:
    raw = await response.read()
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = None
    if response.status == 200 and isinstance(answer, dict):
        return answer
    try:
        message = str(answer["error"]["message"])
    except (KeyError, TypeError):
        message = f"The server answered {response.status}, which is no answer of its API. Check --server."
    raise Refused(response.status, message)
