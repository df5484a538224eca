"""Floor 3. The only module of this engine that knows the HTTP client.

`Transport` is all that the engine asks for. A connection that was never made is told apart from one that
broke, since the first sent nothing.
"""

from __future__ import annotations

import io
import urllib.request
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

#: Beyond this the client wants a file, or it warns that the loop may be held up.
_LARGE_BODY_BYTES = 1024 * 1024


class Unreachable(Exception):  # noqa: N818 - names what failed
    """No connection was made; nothing was sent."""


class Broken(Exception):  # noqa: N818 - names what failed
    """The connection ended before the reply was whole."""


class Garbled(Exception):  # noqa: N818 - names what failed
    """What came back is no HTTP."""


class TooLarge(Exception):  # noqa: N818 - names what failed
    """The reply is larger than the cap."""


#: Status, headers and a piece of the body, once for each piece.
Pieces = AsyncGenerator[tuple[int, Mapping[str, str], bytes]]


class Transport(Protocol):
    """One upstream, reached over HTTP. A cancelled call closes its connection."""

    async def call(self, method: str, path: str, body: bytes | None) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and the whole body of one exchange."""
        ...

    def stream(self, path: str, body: bytes) -> Pieces:
        """The same with the body in pieces as they come, and at least one, perhaps empty."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class AiohttpTransport:
    """A `Transport` on aiohttp: one session, headers prepared once, no timer for each request."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        connect_timeout_s: float,
        max_connections: int,
        max_answer_bytes: int,
    ) -> None:
        self._base_url = base_url
        self._max_answer_bytes = max_answer_bytes
        self._urls: dict[str, URL] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=30, ttl_dns_cache=60),
            headers=headers,
            skip_auto_headers=("Accept-Encoding",),
            cookie_jar=aiohttp.DummyCookieJar(),
            # The engine watches the whole call; only connecting has a limit of its own here.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            proxy=_proxy_for(base_url),
            requote_redirect_url=False,
        )

    async def call(self, method: str, path: str, body: bytes | None) -> tuple[int, Mapping[str, str], bytes]:
        try:
            async with self._session.request(
                method, self._url(path), data=_payload(body), allow_redirects=False
            ) as reply:
                return reply.status, reply.headers, await self._read(reply)
        except (aiohttp.ClientError, OSError) as error:
            raise _mapped(error) from error

    async def stream(self, path: str, body: bytes) -> Pieces:
        try:
            async with self._session.post(
                self._url(path), data=_payload(body), allow_redirects=False
            ) as reply:
                yield reply.status, reply.headers, b""
                async for piece in reply.content.iter_any():
                    yield reply.status, reply.headers, piece
        except (aiohttp.ClientError, OSError) as error:
            raise _mapped(error) from error

    async def close(self) -> None:
        await self._session.close()

    def _url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self._base_url + path)
        return url

    async def _read(self, reply: aiohttp.ClientResponse) -> bytes:
        length = reply.content_length
        if (
            length is not None
            and length <= self._max_answer_bytes
            and "Content-Encoding" not in reply.headers
        ):
            return await reply.read()
        pieces, size = [], 0
        async for piece in reply.content.iter_any():
            size += len(piece)
            if size > self._max_answer_bytes:
                reply.close()
                raise TooLarge(f"larger than {self._max_answer_bytes:,} bytes")
            pieces.append(piece)
        return b"".join(pieces)


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    return io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY_BYTES else body


def _proxy_for(base_url: str) -> str | None:
    """The proxy that the environment names for this upstream, looked up once rather than for each call.

    This machine's own addresses are never reached through one.
    """
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    if host in ("localhost", "::1") or host.startswith("127.") or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def _mapped(error: Exception) -> Exception:
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return Unreachable(f"its TLS certificate is not trusted ({error.certificate_error})")
        case aiohttp.ClientConnectorDNSError():
            return Unreachable("the host name is not known")
        case aiohttp.ClientConnectorError():
            return Unreachable(_os_reason(error.os_error))
        case aiohttp.ConnectionTimeoutError():
            return Unreachable("connecting took too long")
        case aiohttp.ClientHttpProxyError():
            return Unreachable(f"the proxy answered {error.status}")
        case aiohttp.ClientResponseError():
            return Garbled(error.message or type(error).__name__)
        case _:
            return Broken(str(error) or type(error).__name__)


def _os_reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return (error.strerror or str(error) or type(error).__name__).lower()
