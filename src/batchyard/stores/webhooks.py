"""Floor 3. Webhook endpoints, and the events that they have not acknowledged yet, in the database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import and_, delete, insert, or_, select, update

from batchyard.stores.database import Database
from batchyard.stores.protocol import DeliveryRecord, WebhookRecord
from batchyard.stores.schema import deliveries, webhooks


class WebhookTable:
    """The endpoints of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, record: WebhookRecord) -> None:
        """Remember an endpoint."""
        values: dict[str, Any] = {column.name: getattr(record, column.name) for column in webhooks.columns}
        values["event_types"] = list(record.event_types)
        with self._database.writing() as connection:
            connection.execute(insert(webhooks).values(**values))

    def get(self, tenant: str, webhook_id: str) -> WebhookRecord | None:
        """The endpoint of *tenant* with this id, if there is one."""
        wanted = select(webhooks).where(webhooks.c.tenant == tenant, webhooks.c.id == webhook_id)
        with self._database.reading() as connection:
            row = connection.execute(wanted).one_or_none()
        return None if row is None else WebhookRecord(**row._mapping)  # noqa: SLF001 - a row's public mapping

    def page(self, tenant: str, limit: int, after: WebhookRecord | None = None) -> list[WebhookRecord]:
        """Up to *limit* endpoints of *tenant* that come after *after*, newest first."""
        at, key = webhooks.c.created_at, webhooks.c.id
        wanted = webhooks.c.tenant == tenant
        if after is not None:
            wanted = and_(wanted, or_(at < after.created_at, and_(at == after.created_at, key > after.id)))
        rows = select(webhooks).where(wanted).order_by(at.desc(), key).limit(limit)
        with self._database.reading() as connection:
            return [WebhookRecord(**row._mapping) for row in connection.execute(rows)]  # noqa: SLF001

    def change(self, webhook_id: str, **changes: Any) -> None:
        """Set columns of an endpoint."""
        with self._database.writing() as connection:
            connection.execute(update(webhooks).where(webhooks.c.id == webhook_id).values(**changes))

    def remove(self, webhook_id: str) -> None:
        """Forget an endpoint and what it has not been told."""
        with self._database.writing() as connection:
            connection.execute(delete(deliveries).where(deliveries.c.webhook_id == webhook_id))
            connection.execute(delete(webhooks).where(webhooks.c.id == webhook_id))

    def take_due(
        self, now: float, until: float, limit: int
    ) -> list[tuple[DeliveryRecord, WebhookRecord | None]]:
        """Up to *limit* events that are due, each with its endpoint; nobody else gets them before *until*."""
        due = select(deliveries).where(deliveries.c.next_at <= now).order_by(deliveries.c.next_at)
        with self._database.writing() as connection:
            rows = connection.execute(due.limit(limit).with_for_update(skip_locked=True)).all()
            found = [DeliveryRecord(**row._mapping) for row in rows]  # noqa: SLF001
            ids = [one.id for one in found]
            connection.execute(update(deliveries).where(deliveries.c.id.in_(ids)).values(next_at=until))
            of = select(webhooks).where(webhooks.c.id.in_({one.webhook_id for one in found}))
            known = {row.id: WebhookRecord(**row._mapping) for row in connection.execute(of)}  # noqa: SLF001
        return [(one, known.get(one.webhook_id)) for one in found]

    def put_off(self, delivery_id: str, attempts: int, next_at: float) -> None:
        """Try again at *next_at*."""
        later = update(deliveries).where(deliveries.c.id == delivery_id)
        with self._database.writing() as connection:
            connection.execute(later.values(attempts=attempts, next_at=next_at))

    def done(self, delivery_id: str) -> None:
        """Forget an event: it was acknowledged, or given up."""
        with self._database.writing() as connection:
            connection.execute(delete(deliveries).where(deliveries.c.id == delivery_id))
