"""Floor 8. `/v1/webhook_endpoints`: who is told when a Batch has ended."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from batchyard.api.access import Caller
from batchyard.api.bodies import read_as
from batchyard.api.errors import ApiError, json_response
from batchyard.api.openai.files import ends
from batchyard.api.openai.shapes import (
    CreateWebhook,
    Deleted,
    RotateSecret,
    TestWebhook,
    UpdateWebhook,
    WebhookList,
    WebhookObject,
    WebhookTested,
)
from batchyard.api.operations import Operation, page_query
from batchyard.api.reading import page_limit, read_body
from batchyard.service.hosting.courier import check_url
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.keys import Scope
from batchyard.stores.protocol import WebhookRecord

_MAX_BODY = 1 << 16
_MAX_ENDPOINTS = 100
_SCOPES = (Scope.WEBHOOKS,)


class WebhooksApi:
    """The webhook endpoints of a tenant."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def operations(self) -> list[Operation]:
        """What it answers to."""
        base = "/v1/webhook_endpoints"
        one = base + "/{id}"
        listing = page_query(20, 100, "the id of an endpoint")

        def row(method: str, path: str, answer: object, summary: str, **more: object) -> Operation:
            return Operation(method, path, answer, summary, _SCOPES, **more)  # type: ignore[arg-type]

        return [
            row("POST", base, self.create, "Add an endpoint", body=CreateWebhook, gives=WebhookObject),
            row("GET", base, self.list, "List endpoints", query=listing, gives=WebhookList),
            row("GET", one, self.get, "Look at an endpoint", gives=WebhookObject),
            row("POST", one, self.update, "Change an endpoint", body=UpdateWebhook, gives=WebhookObject),
            row("DELETE", one, self.delete, "Remove an endpoint", gives=Deleted),
            row(
                "POST",
                one + "/rotate_secret",
                self.rotate,
                "Make a new signing secret",
                body=RotateSecret,
                gives=WebhookObject,
            ),
            row("POST", one + "/test", self.test, "Send a test event", body=TestWebhook, gives=WebhookTested),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        """A new endpoint; the answer alone shows its secret."""
        wanted = read_as(await read_body(request, _MAX_BODY), CreateWebhook)
        self._check(wanted.url)
        host = self._host
        if len(await host.kept(lambda: host.webhooks.page(caller.tenant, _MAX_ENDPOINTS))) >= _MAX_ENDPOINTS:
            message = f"There are {_MAX_ENDPOINTS} endpoints already. Remove one first."
            raise ApiError(400, message, code="too_many_webhook_endpoints")
        made = await host.kept(
            lambda: host.webhooks.create(
                caller.tenant, name=wanted.name, url=wanted.url, event_types=wanted.event_types
            )
        )
        return json_response(_shown(made, secret=True))

    async def list(self, request: Request, caller: Caller) -> Response:
        """A page of endpoints, newest first."""
        limit = page_limit(request, 20, 100)
        after = None
        if name := request.query_params.get("after"):
            after = await self._host.kept(lambda: self._host.webhooks.get(caller.tenant, name))
            if after is None:
                raise ApiError(404, "No webhook endpoint found with the id given as after.", param="after")
        page = self._host.webhooks.page
        found = await self._host.kept(lambda: page(caller.tenant, limit + 1, after))
        data = [_shown(one) for one in found[:limit]]
        first, last = ends(data)
        more = len(found) > limit
        return json_response(WebhookList(data=data, has_more=more, first_id=first, last_id=last))

    async def get(self, request: Request, caller: Caller) -> Response:
        """One endpoint."""
        return json_response(_shown(await self._asked_for(request, caller)))

    async def update(self, request: Request, caller: Caller) -> Response:
        """Change an endpoint."""
        found = await self._asked_for(request, caller)
        wanted = read_as(await read_body(request, _MAX_BODY), UpdateWebhook)
        if wanted.url is not None:
            self._check(wanted.url)
        changed = await self._host.kept(
            lambda: self._host.webhooks.change(
                found, name=wanted.name, url=wanted.url, event_types=wanted.event_types
            )
        )
        return json_response(_shown(changed))

    async def delete(self, request: Request, caller: Caller) -> Response:
        """Forget an endpoint and what it has not been told."""
        found = await self._asked_for(request, caller)
        await self._host.kept(lambda: self._host.webhooks.delete(found))
        return json_response(Deleted(id=found.id, object="webhook_endpoint.deleted"))

    async def rotate(self, request: Request, caller: Caller) -> Response:
        """A new secret; the old one may sign beside it for a day."""
        found = await self._asked_for(request, caller)
        body = await read_body(request, _MAX_BODY)
        keep = read_as(body, RotateSecret).keep_old_secret_active_for_24_hours if body else False
        changed = await self._host.kept(lambda: self._host.webhooks.rotate(found, keep_old=keep))
        return json_response(_shown(changed, secret=True))

    async def test(self, request: Request, caller: Caller) -> Response:
        """Send an event of no Batch, once, and say what came back."""
        found = await self._asked_for(request, caller)
        wanted = read_as(await read_body(request, _MAX_BODY), TestWebhook)
        delivery = self._host.webhooks.event(found, wanted.event_type, {"id": "batch_test"})
        status = await self._host.courier.send(found, delivery)
        return json_response(
            WebhookTested(
                event_type=wanted.event_type,
                status_code=status,
                success=200 <= status < 300,
                webhook_endpoint_id=found.id,
            )
        )

    async def _asked_for(self, request: Request, caller: Caller) -> WebhookRecord:
        webhook_id = request.path_params["id"]
        found = await self._host.kept(lambda: self._host.webhooks.get(caller.tenant, webhook_id))
        if found is None:
            raise ApiError(404, "No webhook endpoint found with this id.", param="id")
        return found

    def _check(self, url: str) -> None:
        try:
            check_url(url, allow_private=self._host.courier.allow_private)
        except ValueError as error:
            message = f"Events cannot be sent to {url[:200]!r}: {error}."
            raise ApiError(400, message, code="invalid_url", param="url") from error


def _shown(record: WebhookRecord, *, secret: bool = False) -> WebhookObject:
    shown = WebhookObject(
        id=record.id,
        name=record.name,
        url=record.url,
        event_types=list(record.event_types),
        created_at=int(record.created_at),
        updated_at=int(record.updated_at),
        signing_secret_hint=record.secret[-4:],
    )
    if secret:
        shown.signing_secret = record.secret
    return shown
