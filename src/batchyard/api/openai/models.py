"""Floor 8. `/v1/models`: what may be asked for."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from batchyard.api.access import Access
from batchyard.api.errors import ApiError, json_response
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.slots import Served


class ModelsApi:
    """The models of the host."""

    def __init__(self, host: Host, access: Access) -> None:
        self._host = host
        self._access = access

    def routes(self) -> list[BaseRoute]:
        """What it answers to."""
        return [Route("/v1/models", self.list), Route("/v1/models/{model:path}", self.get)]

    async def list(self, request: Request) -> Response:
        """All models."""
        await self._access.tenant(request)
        return json_response({"object": "list", "data": [_shown(one) for one in self._host.models.values()]})

    async def get(self, request: Request) -> Response:
        """One model."""
        await self._access.tenant(request)
        name = request.path_params["model"]
        served = self._host.models.get(name)
        if served is None:
            raise no_such_model(name, self._host)
        return json_response(_shown(served))


def no_such_model(name: str, host: Host) -> ApiError:
    """The error of a model that is not served."""
    known = ", ".join(sorted(host.models))
    message = f"The model {name[:200]!r} does not exist here. Use one of: {known}."
    return ApiError(404, message, code="model_not_found", param="model")


def _shown(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": int(served.created_at),
        "owned_by": f"batchyard-{served.engine.name}",
        "endpoints": sorted(served.engine.capabilities.endpoints),
    }
