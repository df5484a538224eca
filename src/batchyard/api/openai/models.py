"""Floor 8. `/v1/models`: what may be asked here."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from batchyard.api.access import Caller
from batchyard.api.errors import ApiError, json_response
from batchyard.api.openai.shapes import ModelList, ModelObject
from batchyard.api.operations import READS, Operation
from batchyard.service.hosting.host import Host
from batchyard.service.hosting.keys import Scope
from batchyard.service.hosting.served import Served

_SCOPES = (Scope.LIVE, *READS)


class ModelsApi:
    """The models of the host, as far as a key may use them."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def operations(self) -> list[Operation]:
        """What it answers to."""
        one = "/v1/models/{model:path}"
        return [
            Operation("GET", "/v1/models", self.list, "List models", _SCOPES, gives=ModelList),
            Operation("GET", one, self.get, "Look at a model", _SCOPES, gives=ModelObject),
        ]

    async def list(self, _: Request, caller: Caller) -> Response:
        """All models."""
        models = [one for one in self._host.models.values() if caller.may_use(one.name)]
        return json_response(ModelList(data=[_shown(one) for one in models]))

    async def get(self, request: Request, caller: Caller) -> Response:
        """One model."""
        return json_response(_shown(served_to(caller, self._host, request.path_params["model"])))


def served_to(caller: Caller, host: Host, name: str) -> Served:
    """The model of this name, if it is served and the caller may use it.

    Raises:
        ApiError: it is not.
    """
    served = host.models.get(name)
    if served is None or not caller.may_use(name):
        known = ", ".join(one for one in sorted(host.models) if caller.may_use(one))
        message = f"The model {name[:200]!r} does not exist here. Use one of: {known}."
        raise ApiError(404, message, code="model_not_found", param="model")
    return served


def _shown(served: Served) -> ModelObject:
    return ModelObject(
        id=served.name,
        created=int(served.created_at),
        owned_by=f"batchyard-{served.engine.name}",
        endpoints=sorted(served.engine.capabilities.endpoints),
    )
