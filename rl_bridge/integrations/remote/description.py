"""The OpenAPI description of a side-car: what FastAPI makes, with our problems and signatures."""

from typing import Any

from fastapi.openapi.utils import get_openapi

from rl_bridge.integrations.remote.problems import MEDIA_TYPE, STATUSES, Problem
from rl_bridge.integrations.remote.signing import SCHEME

__all__ = ["describe_app", "manifest_body"]

_ABOUT = (
    "Takes weight updates for the engine that it stands beside: import and verify, prepare, then "
    "commit or abort. The bytes do not come by HTTP: the manifest says where they are. Every "
    "request but those for /metrics and this description is signed."
)
_SIGNED = (
    f"`{SCHEME} time=SECONDS,nonce=NONCE,signature=SIGNATURE`: HMAC-SHA256, in hexadecimal digits, "
    "over the lines `rl_bridge.remote/1`, `request`, method, path with query, time, nonce and the "
    "SHA-256 of the body, joined by line feeds."
)


def manifest_body() -> dict[str, Any]:
    """The body of an update, for the description: it is read by us, and not by FastAPI."""
    fields = {
        "format": {"type": "string", "const": "rl_bridge.manifest/1"},
        "header": {"type": "object"},
        "layout": {"type": "object"},
    }
    schema = {"type": "object", "properties": fields, "required": ["format", "header"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_app(app: Any) -> dict[str, Any]:
    """Describe an application's routes.

    Args:
        app: FastAPI's, with all its routes.

    """
    document: dict[str, Any] = get_openapi(
        title=app.title, version=app.version, description=_ABOUT, routes=app.routes
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = Problem.model_json_schema()
    components["securitySchemes"] = {
        "signature": {
            "type": "apiKey",
            "in": "header",
            "name": "Authorization",
            "description": _SIGNED,
        }
    }
    problem = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status, meaning in STATUSES.items():
                operation["responses"][str(status)] = {"description": meaning, "content": problem}
            if path != "/metrics":
                operation["security"] = [{"signature": []}]
    return document
