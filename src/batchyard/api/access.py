"""Floor 8. Who is asking, and what for? From the API key of a request to its tenant and rights."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from batchyard.api.errors import ApiError
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.keys import Scope, may_use
from batchyard.stores.protocol import KeyRecord

#: Whose everything is where no keys are asked for.
ONLY_TENANT = "default"
#: A key that was good may be believed for so long, in seconds; a revoked one is refused after that.
_BELIEVED_S = 0.5
_MOST_BELIEVED = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    tenant: str
    #: None where no keys are asked for.
    key: KeyRecord | None = None

    @property
    def key_id(self) -> str | None:
        """The id of the key."""
        return None if self.key is None else self.key.id

    def may_use(self, model: str) -> bool:
        """Whether the key may use *model*."""
        return self.key is None or may_use(self.key, model)


class _Bucket:
    """Tokens that come back evenly: a burst of a minute's worth, then the rate."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self.tokens = float(per_minute)
        self._at = now

    def take(self, now: float) -> float:
        """0 if there was one; else in how many seconds there will be."""
        self.tokens = min(self.tokens + (now - self._at) * self.per_minute / 60, float(self.per_minute))
        self._at = now
        if self.tokens >= 1:
            self.tokens -= 1
            return 0.0
        return (1 - self.tokens) * 60 / self.per_minute


class Access:
    """Checks keys.

    Args:
        open_access: let everybody in, as one tenant, as long as nobody has made a key.
    """

    def __init__(self, host: Host, *, open_access: bool) -> None:
        self._host = host
        self._open = open_access
        self._good: dict[str, tuple[float, KeyRecord]] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._open_until = 0.0

    async def caller(self, request: Request, *scopes: Scope) -> Caller:
        """Whose request this is; any one of *scopes* opens the door.

        Raises:
            ApiError: there is no key, it does not hold, is not for this, or is used too fast.
        """
        if self._open and await self._no_key_was_made():
            return Caller(ONLY_TENANT)
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not key:
            message = "You didn't provide an API key. Send it as: Authorization: Bearer YOUR_KEY."
            raise ApiError(401, message, code="missing_api_key", headers=_CHALLENGE)
        record = await self._record(key)
        if record is None:
            message = f"Incorrect API key provided (it ends in {key[-4:]!r}), or it was revoked."
            raise ApiError(401, message, code="invalid_api_key", headers=_CHALLENGE)
        if record.scopes is not None and not set(scopes) & set(record.scopes):
            needed = " or ".join(one.value for one in scopes)
            message = f"This key is not made for this: it would need the scope {needed}."
            raise ApiError(403, message, kind="permission_error", code="insufficient_scope")
        if record.requests_per_minute is not None:
            self._count(record, record.requests_per_minute)
        return Caller(record.tenant, record)

    async def still_holds(self, caller: Caller) -> bool:
        """Whether a caller who was let in before would be let in now."""
        key = caller.key
        if key is None:
            return True
        found = (await self._host.kept(lambda: self._host.keys.standing([key.id]))).get(key.id)
        return found is not None and found.revoked_at is None and found.scopes == key.scopes

    def _count(self, key: KeyRecord, per_minute: int) -> None:
        now = self._host.clock.monotonic()
        bucket = self._buckets.get(key.id)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[key.id] = _Bucket(per_minute, now)
        wait_s = bucket.take(now)
        if wait_s:
            message = f"This key may send {per_minute:,} requests a minute. Try again in {wait_s:.1f} s."
            headers = {
                "retry-after": str(int(wait_s) + 1),
                "retry-after-ms": str(int(wait_s * 1000) + 1),
                "x-ratelimit-limit-requests": str(per_minute),
                "x-ratelimit-remaining-requests": "0",
            }
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)

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
