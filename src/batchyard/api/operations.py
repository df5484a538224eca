"""Floor 8. Operations: one row says a path, who may call it, what it takes and gives, and what answers it.

Routes and `/openapi.json` are made of the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from batchyard._version import __version__
from batchyard.api.access import Access, Caller
from batchyard.service.hosting.keys import Scope

Handler = Callable[[Request, Caller], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]

#: Who may read what Batches are made of and give; who may change it.
READS = (Scope.READ, Scope.BATCHES)
CHANGES = (Scope.BATCHES,)
_PARAMETER = re.compile(r"{(\w+)(?::path)?}")


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter."""

    name: str
    description: str
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that a client can ask for."""

    method: str
    path: str
    answer: Handler
    summary: str
    scopes: tuple[Scope, ...]
    #: The type of the JSON body, where there is one.
    body: Any = None
    #: The schema of a multipart form instead.
    form: Mapping[str, Any] | None = None
    query: tuple[Query, ...] = ()
    #: The type of the JSON answer; or the media type of another.
    gives: Any = None
    media_type: str = "application/json"
    #: Other media types that it may answer with.
    also: tuple[str, ...] = ()
    #: Wraps the whole, as for another dialect's errors.
    wrap: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint
    #: The type of the body of every error.
    error: Any = None

    def route(self, access: Access) -> BaseRoute:
        """The route that answers it."""

        async def endpoint(request: Request) -> Response:
            return await self.answer(request, await access.caller(request, *self.scopes))

        return Route(self.path, self.wrap(endpoint), methods=[self.method])


class Error(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every error."""

    error: Error


def page_query(default: int, most: int, after: str) -> tuple[Query, Query]:
    """The parameters of every list."""
    limit = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return (
        Query("limit", f"How many at most; 1 to {most:,}.", limit),
        Query("after", f"Give what comes after this one: {after}."),
    )


def describe(operations: Iterable[Operation]) -> dict[str, Any]:
    """The operations as an OpenAPI 3.1 document."""
    operations = list(operations)
    types = [ErrorBody, *(one.body for one in operations), *(one.gives for one in operations)]
    types += [one.error for one in operations]
    named = [one for one in types if one is not None]
    schemas, components = msgspec.json.schema_components(named, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(id, named), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        path = _PARAMETER.sub(r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _described(one, schema_of, _links(one, operations))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Batchyard",
            "version": __version__,
            "description": "The batching layer for AI inference, in the dialects of OpenAI and Anthropic.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _id_of(one: Operation) -> str:
    return f"{one.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', one.path.lower()).strip('_')}"


def _links(maker: Operation, operations: Iterable[Operation]) -> dict[str, Any]:
    """What may be asked about the thing that *maker* makes, by its `id`."""
    if maker.method != "POST" or "{" in maker.path or maker.gives is None:
        return {}
    about = f"{maker.path}/{{id}}"
    return {
        _id_of(one): {"operationId": _id_of(one), "parameters": {"id": "$response.body#/id"}}
        for one in operations
        if one.path == about or one.path.startswith(about + "/")
    }


def _described(one: Operation, schema_of: Mapping[int, Any], links: Mapping[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(one.path)
    ]
    parameters += [
        {"name": query.name, "in": "query", "schema": query.schema, "description": query.description}
        for query in one.query
    ]
    schema = {} if one.gives is None else schema_of[id(one.gives)]
    content = {
        media: {"schema": schema if media == "application/json" else {}}
        for media in (one.media_type, *one.also)
    }
    error = {"application/json": {"schema": schema_of[id(one.error or ErrorBody)]}}
    described: dict[str, Any] = {
        "summary": one.summary,
        "operationId": _id_of(one),
        "parameters": parameters,
        "responses": {
            "200": {"description": "As asked.", "content": content, "links": links},
            "4XX": {"description": "The request is at fault, and how.", "content": error},
            "5XX": {"description": "The server or an engine cannot answer now.", "content": error},
        },
        "x-scopes": [scope.value for scope in one.scopes],
    }
    if one.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[id(one.body)]}},
        }
    if one.form is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": one.form}},
        }
    return described
