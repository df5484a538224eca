"""Floor 6. Webhook endpoints of tenants: who wants to be told of what, and how it is signed.

Formats follow the OpenAI webhooks API, which signs as Standard Webhooks do. An event is remembered in the
transaction that makes it true, and forgotten once its endpoint has answered 2xx (`courier` sends it).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import replace

from batchyard.clock import Clock
from batchyard.service.lifecycle import Status
from batchyard.stores.protocol import DeliveryRecord, WebhookRecord
from batchyard.stores.webhooks import WebhookTable

#: What can be told; the last is ours: a canary held its Batch, or its permission was withdrawn.
EVENT_TYPES = ("batch.completed", "batch.failed", "batch.cancelled", "batch.expired", "batch.paused")
#: For how long an old secret may sign beside the new one.
_OVERLAP_S = 86_400.0
_SECRET_PREFIX = "whsec_"  # noqa: S105 - what every secret begins with


class Webhooks:
    """The webhook endpoints of one server."""

    def __init__(self, table: WebhookTable, clock: Clock) -> None:
        self.table = table
        self._clock = clock

    def create(self, tenant: str, *, name: str, url: str, event_types: Sequence[str]) -> WebhookRecord:
        """A new endpoint. Its secret is shown now and never again."""
        now = self._clock.wall()
        record = WebhookRecord(
            f"we_{uuid.uuid4().hex[:24]}", tenant, name, url, list(event_types), now, now, _new_secret()
        )
        self.table.add(record)
        return record

    def get(self, tenant: str, webhook_id: str) -> WebhookRecord | None:
        """The endpoint of *tenant* with this id, if there is one."""
        return self.table.get(tenant, webhook_id)

    def page(self, tenant: str, limit: int, after: WebhookRecord | None = None) -> list[WebhookRecord]:
        """Up to *limit* endpoints that come after *after*, newest first."""
        return self.table.page(tenant, limit, after)

    def change(
        self, record: WebhookRecord, *, name: str | None, url: str | None, event_types: Sequence[str] | None
    ) -> WebhookRecord:
        """The endpoint with what is not None changed."""
        changed = replace(
            record,
            name=record.name if name is None else name,
            url=record.url if url is None else url,
            event_types=record.event_types if event_types is None else list(event_types),
            updated_at=self._clock.wall(),
        )
        self.table.change(
            record.id,
            name=changed.name,
            url=changed.url,
            event_types=changed.event_types,
            updated_at=changed.updated_at,
        )
        return changed

    def rotate(self, record: WebhookRecord, *, keep_old: bool) -> WebhookRecord:
        """The endpoint with a new secret; the old one may sign too for another day."""
        now = self._clock.wall()
        changed = replace(
            record,
            secret=_new_secret(),
            old_secret=record.secret if keep_old else None,
            old_secret_until=now + _OVERLAP_S if keep_old else None,
            updated_at=now,
        )
        self.table.change(
            record.id,
            secret=changed.secret,
            old_secret=changed.old_secret,
            old_secret_until=changed.old_secret_until,
            updated_at=now,
        )
        return changed

    def delete(self, record: WebhookRecord) -> None:
        """Forget an endpoint and what it has not been told."""
        self.table.remove(record.id)

    def deliveries_for(self, tenant: str, batch_id: str, status: Status) -> list[DeliveryRecord]:
        """What is to be sent, and to whom, when a Batch reaches *status*."""
        return self.deliveries(tenant, f"batch.{status.value}", {"id": batch_id})

    def deliveries(self, tenant: str, event_type: str, data: dict[str, str]) -> list[DeliveryRecord]:
        """One delivery for each endpoint of *tenant* that wants *event_type*."""
        if event_type not in EVENT_TYPES:
            return []
        wanting = [one for one in self.table.page(tenant, 1_000) if event_type in one.event_types]
        return [self.event(one, event_type, data) for one in wanting]

    def event(self, to: WebhookRecord, event_type: str, data: dict[str, str]) -> DeliveryRecord:
        """An event for one endpoint."""
        now = self._clock.wall()
        event = {
            "object": "event",
            "id": f"evt_{uuid.uuid4().hex[:24]}",
            "type": event_type,
            "created_at": int(now),
            "data": data,
        }
        return DeliveryRecord(f"wh_{uuid.uuid4().hex[:24]}", to.id, json.dumps(event), now, now)

    def headers(self, to: WebhookRecord, delivery: DeliveryRecord) -> dict[str, str]:
        """The headers that prove where a delivery comes from: signed anew at each attempt."""
        now = self._clock.wall()
        keys = [to.secret]
        if to.old_secret is not None and (to.old_secret_until or 0.0) > now:
            keys.append(to.old_secret)
        signatures = [_sign(key, delivery.id, int(now), delivery.body) for key in keys]
        return {
            "content-type": "application/json",
            "user-agent": "Batchyard-Webhooks/1",
            "webhook-id": delivery.id,
            "webhook-timestamp": str(int(now)),
            "webhook-signature": " ".join(f"v1,{one}" for one in signatures),
        }


def _new_secret() -> str:
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def _sign(secret: str, delivery_id: str, timestamp: int, body: str) -> str:
    key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    signed = f"{delivery_id}.{timestamp}.{body}".encode()
    return base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
