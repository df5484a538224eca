"""Floor 8. Who is asking? From the API key of a request to its tenant."""

from __future__ import annotations

from starlette.requests import Request

from batchyard.api.errors import ApiError
from batchyard.service.hosting.host import Host
from batchyard.stores.protocol import KeyRecord

#: Whose everything is where no keys are asked for.
ONLY_TENANT = "default"
#: A key that was good may be believed for so long, in seconds; a revoked one is refused after that.
_BELIEVED_S = 0.5
_MOST_BELIEVED = 10_000


class Access:
    """Checks keys.

    Args:
        open_access: let everybody in, as one tenant, as long as nobody has made a key.
    """

    def __init__(self, host: Host, *, open_access: bool) -> None:
        self._host = host
        self._open = open_access
        self._good: dict[str, tuple[float, KeyRecord]] = {}
        self._open_until = 0.0

    async def tenant(self, request: Request) -> str:
        """Whose request this is.

        Raises:
            ApiError: there is no key, or it does not hold.
        """
        if self._open and await self._no_key_was_made():
            return ONLY_TENANT
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not key:
            message = "You didn't provide an API key. Send it as: Authorization: Bearer YOUR_KEY."
            raise ApiError(401, message, code="missing_api_key", headers=_CHALLENGE)
        record = await self._record(key)
        if record is None:
            message = f"Incorrect API key provided (it ends in {key[-4:]!r}), or it was revoked."
            raise ApiError(401, message, code="invalid_api_key", headers=_CHALLENGE)
        return record.tenant

    async def _no_key_was_made(self) -> bool:
        now = self._host.clock.monotonic()
        if now < self._open_until:
            return True
        if await self._host.kept(self._host.keys.all):
            self._open = False
            return False
        self._open_until = now + _BELIEVED_S
        return True

    async def _record(self, key: str) -> KeyRecord | None:
        now = self._host.clock.monotonic()
        found = self._good.get(key)
        if found is not None and now - found[0] < _BELIEVED_S:
            return found[1]
        record = await self._host.kept(lambda: self._host.keys.check(key))
        if record is None:
            self._good.pop(key, None)
        else:
            if len(self._good) >= _MOST_BELIEVED:
                self._good.clear()
            self._good[key] = (now, record)
        return record


_CHALLENGE = {"www-authenticate": "Bearer"}
