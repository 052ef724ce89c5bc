"""The routes as an OpenAPI document, and the version of this server."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from rollout_engine.serve.route import Access, Asked, Reply, Route
from rollout_engine.serve.served import Served

_REFERENCE = "#/components/schemas/{name}"
_KEY = {"bearer": {"type": "http", "scheme": "bearer"}}


async def get_version(served: Served, asked: Asked) -> Reply:
    """The version of rollout-engine."""
    return Reply({"version": version("rollout-engine")})


async def openapi(served: Served, asked: Asked) -> Reply:
    """This table as an OpenAPI document."""
    return Reply(document(served.routes))


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI document of a table of routes."""
    bodies = list(dict.fromkeys(row.body for row in routes if row.body is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
    of_body = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in routes:
        for method in row.methods:
            operation: dict[str, Any] = {
                "operationId": f"{method.lower()}_{row.path.strip('/').replace('/', '_')}",
                "summary": row.help,
                "tags": [row.dialect],
                "responses": {"200": {"description": "Done."}, "default": {"description": "An error."}},
            }
            if row.access is not Access.ANYONE:
                operation["security"] = [{"bearer": []}]
            if row.body is not None and method != "GET":
                operation["requestBody"] = {"content": {"application/json": {"schema": of_body[row.body]}}}
            paths.setdefault(row.path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout-engine", "version": version("rollout-engine")},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _KEY},
    }
