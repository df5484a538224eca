"""Floor 8. The server as an ASGI application: routes, and what every request has in common."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchyard._version import __version__
from batchyard.api.access import Access
from batchyard.api.anthropic.batches import MessageBatchesApi
from batchyard.api.anthropic.envelope import refused
from batchyard.api.anthropic.messages import MessagesApi
from batchyard.api.errors import HANDLERS, ApiError, error_response, json_response
from batchyard.api.openai.batch_requests import BatchRequestsApi
from batchyard.api.openai.batches import BatchesApi
from batchyard.api.openai.files import FilesApi
from batchyard.api.openai.live import LiveApi
from batchyard.api.openai.models import ModelsApi
from batchyard.api.openai.planning import PlanningApi
from batchyard.api.openai.uploads import UploadsApi
from batchyard.api.openai.webhooks import WebhooksApi
from batchyard.api.operations import Operation, describe
from batchyard.service.hosting.host import Host

#: Names and values of all headers of a request together, in bytes.
_MAX_HEADERS = 65_536


def every_operation(host: Host, access: Access, public_url: str | None = None) -> list[Operation]:
    """Everything that clients can ask for."""
    # Routes are tried one after the other: those that are asked most often come first.
    return [
        *LiveApi(host).operations(),
        *MessagesApi(host).operations(),
        *FilesApi(host).operations(),
        *UploadsApi(host).operations(),
        *BatchesApi(host).operations(),
        *BatchRequestsApi(host, access).operations(),
        *PlanningApi(host).operations(),
        *WebhooksApi(host).operations(),
        *ModelsApi(host).operations(),
        *MessageBatchesApi(host, public_url).operations(),
    ]


def make_app(host: Host, *, open_access: bool = False, public_url: str | None = None) -> Starlette:
    """The application over *host*, which it opens at its start and closes at its end.

    Args:
        host: the Batches, files, keys and models.
        open_access: ask for no key while none has been made; everything belongs to one tenant then.
        public_url: what clients reach the server by, where it stands behind a proxy.
    """
    access = Access(host, open_access=open_access)
    ready = False

    async def healthz(_: Request) -> Response:
        return json_response({"status": "ok", "version": __version__})

    async def readyz(_: Request) -> Response:
        return json_response({"status": "ready" if ready else "starting"}, 200 if ready else 503)

    async def openapi(_: Request) -> Response:
        return Response(document, media_type="application/json")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        nonlocal ready
        await host.open()
        ready = True
        try:
            yield
        finally:
            ready = False
            await host.close()

    operations = every_operation(host, access, public_url)
    document = msgspec.json.encode(describe(operations))
    routes: list[BaseRoute] = [
        *(one.route(access) for one in operations),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/openapi.json", openapi),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False
    app.add_middleware(_RequestIds)
    return app


def _refused(scope: Scope, error: ApiError) -> Response:
    """*error* in the words of the dialect that is spoken."""
    if scope["path"].startswith("/v1/messages"):
        return refused(error, scope["state"]["request_id"])
    return error_response(error)


class _RequestIds:
    """Gives each response the id under which the server speaks of it, and how long it took."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        app = self._app
        if sum(len(name) + len(value) for name, value in scope["headers"]) > _MAX_HEADERS:
            message = f"The headers of your request are larger than {_MAX_HEADERS:,} bytes."
            app = _refused(scope, ApiError(431, message, code="headers_too_large"))
        elif b"%00" in scope["raw_path"] or b"%00" in scope["query_string"]:
            # No name holds a NUL, and not every database can look for one.
            message = "The URL of your request holds a NUL character. Leave it out."
            app = _refused(scope, ApiError(400, message, code="invalid_value"))
        begun = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                took_ms = int((time.perf_counter() - begun) * 1000)
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (b"openai-processing-ms", str(took_ms).encode()),
                ]
            await send(message)

        await app(scope, receive, send_with_id)
