"""Floor 6. The courier: brings events to webhook endpoints, again and again until one answers 2xx.

Addresses in private networks are refused unless they are allowed: an endpoint must not be a way to reach
what only this machine can reach. The check is made on the address that is connected to, so that a name
that changes its mind between check and use gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from batchyard.clock import Clock
from batchyard.errors import StoreError
from batchyard.service.hosting.webhooks import Webhooks
from batchyard.stores.protocol import DeliveryRecord, WebhookRecord

_POLL_S = 1.0
_TIMEOUT_S = 15.0
#: After this long an event that nobody took is given up.
_GIVE_UP_S = 72 * 3_600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 4 * 3_600.0
_AT_ONCE = 16


class Courier:
    """Sends what is due.

    Args:
        kept: runs a call in the thread that may touch the store.
        allow_private: deliver to loopback and private networks too, and over plain HTTP.
    """

    def __init__(
        self,
        webhooks: Webhooks,
        kept: Callable[[Callable[[], Any]], Awaitable[Any]],
        clock: Clock,
        *,
        allow_private: bool,
    ) -> None:
        self._webhooks = webhooks
        self._kept = kept
        self._clock = clock
        self.allow_private = allow_private
        self._session: aiohttp.ClientSession | None = None
        self._there_is_more = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Courier [{'private addresses too' if self.allow_private else 'public addresses only'}]>"

    def nudge(self) -> None:
        """There is something to send now."""
        self._there_is_more.set()

    async def run(self) -> None:
        """Send what is due until cancelled."""
        try:
            while True:
                self._there_is_more.clear()
                sent = 0
                # The store may be gone for a while; so are the events then.
                with suppress(StoreError):
                    sent = await self._round()
                if not sent:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._there_is_more.wait(), _POLL_S)
        finally:
            if self._session is not None:
                await self._session.close()

    async def _round(self) -> int:
        now = self._clock.wall()
        table = self._webhooks.table
        # Whoever dies with them in hand lets them go after a while.
        taken = await self._kept(lambda: table.take_due(now, now + 4 * _TIMEOUT_S, _AT_ONCE))
        await asyncio.gather(*(self._bring(delivery, to) for delivery, to in taken))
        return len(taken)

    async def _bring(self, delivery: DeliveryRecord, to: WebhookRecord | None) -> None:
        table = self._webhooks.table
        if to is None or 200 <= await self.send(to, delivery) < 300:
            await self._kept(lambda: table.done(delivery.id))
            return
        now = self._clock.wall()
        attempts = delivery.attempts + 1
        if now - delivery.created_at >= _GIVE_UP_S:
            await self._kept(lambda: table.done(delivery.id))
            return
        pause_s = min(_FIRST_PAUSE_S * 2**delivery.attempts, _LONGEST_PAUSE_S) * random.uniform(0.8, 1.2)
        await self._kept(lambda: table.put_off(delivery.id, attempts, now + pause_s))

    async def send(self, to: WebhookRecord, delivery: DeliveryRecord) -> int:
        """One attempt; the status that the endpoint answered, 0 where it gave none."""
        if self._session is None:
            resolver = _Public() if not self.allow_private else ThreadedResolver()
            connector = aiohttp.TCPConnector(resolver=resolver, limit=_AT_ONCE)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)
            )
        try:
            check_url(to.url, allow_private=self.allow_private)
            async with self._session.post(
                to.url,
                data=delivery.body.encode(),
                headers=self._webhooks.headers(to, delivery),
                # A redirect is a failure: it could lead anywhere.
                allow_redirects=False,
            ) as response:
                return response.status
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
            return 0


class _Public(AbstractResolver):
    """Resolves names, and leaves out the addresses that only this machine can reach."""

    def __init__(self) -> None:
        self._names = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._names.resolve(host, port, family)
        public = [one for one in found if is_public(one["host"])]
        if not public:
            raise OSError(f"{host} has no public address")
        return public

    async def close(self) -> None:
        await self._names.close()


def is_public(address: str) -> bool:
    """Whether everybody can reach this IP address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and (inner := found.ipv4_mapped or found.sixtofour):
        found = inner
    return found.is_global and not found.is_multicast


def check_url(url: str, *, allow_private: bool) -> None:
    """Make sure that *url* is one that events may be sent to.

    Raises:
        ValueError: it is not, and why.
    """
    parts = urlsplit(url)
    if parts.scheme not in ({"http", "https"} if allow_private else {"https"}):
        raise ValueError("it must begin with https://")
    if not parts.hostname:
        raise ValueError("it names no host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("it must hold no user and password")
    _ = parts.port
    if allow_private:
        return
    try:
        literal = ipaddress.ip_address(parts.hostname)
    except ValueError:
        # A name: looked up when an event is sent. What never has a public address is refused now.
        if parts.hostname == "localhost" or parts.hostname.endswith((".localhost", ".local", ".internal")):
            raise ValueError("it names a host that only this network reaches") from None
        return
    if not is_public(str(literal)):
        raise ValueError("it names an address that only this network reaches")
