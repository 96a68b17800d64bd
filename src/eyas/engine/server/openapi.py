"""The OpenAPI description, made from the models that requests are checked by."""

from typing import Any

from pydantic.json_schema import models_json_schema

from eyas import __version__
from eyas.engine.server.protocol import ChatRequest, CompletionRequest
from eyas.engine.server.service import Service

Json = dict[str, Any]
ERROR = {"$ref": "#/components/schemas/Error"}
NUMBER = {"type": "number"}
TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}


def description(service: Service) -> Json:
    """OpenAPI 3.1."""
    _, schemas = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")], ref_template="#/components/schemas/{model}"
    )
    parts = dict(schemas["$defs"])
    parts["Error"] = _object(
        error=_object(message=TEXT, type=TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
    )
    usage = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
    head: Json = {"id": TEXT, "created": COUNT, "model": TEXT}
    ending: Json = {"index": COUNT, "finish_reason": {"enum": ["stop", "length"]}, "meta_info": {"type": "object"}}
    message = _object(role={"const": "assistant"}, content=TEXT)
    for name, kind, choice in (
        ("ChatCompletion", "chat.completion", _object(**ending, message=message)),
        ("Completion", "text_completion", _object(**ending, text=TEXT)),
    ):
        choices = {"type": "array", "items": choice}
        parts[name] = _object(**head, object={"const": kind}, choices=choices, usage=usage)
    parts["Model"] = _object(
        id=TEXT, object={"const": "model"}, created=COUNT, owned_by={"const": "eyas"}, max_model_len=COUNT
    )
    parts["Models"] = _object(object={"const": "list"}, data={"type": "array", "items": _ref("Model")})
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Eyas: {service.name}", "version": __version__},
        "paths": _paths(),
        "components": {"schemas": parts, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        **({"security": [{"key": []}]} if service.api_key is not None else {}),
    }


def _paths() -> Json:
    plain: Json = {"200": _content("text/plain", TEXT)}
    name = {"name": "name", "in": "path", "required": True, "schema": TEXT}
    return {
        "/health": {"get": _operation("Whether a request would be served now.", {**plain, "503": plain["200"]})},
        "/metrics": {"get": _operation("Prometheus's text format.", plain)},
        "/version": {"get": _operation("Of Eyas.", {"200": _json(_object(version=TEXT))})},
        "/v1/models": {"get": _operation("The one model.", {"200": _json(_ref("Models")), **_errors(401)})},
        "/v1/models/{name}": {
            "get": {
                **_operation("One model.", {"200": _json(_ref("Model")), **_errors(401, 404)}),
                "parameters": [name],
            }
        },
        "/v1/chat/completions": {"post": _generation("ChatRequest", "ChatCompletion", "Answer a conversation.")},
        "/v1/completions": {"post": _generation("CompletionRequest", "Completion", "Continue texts.")},
    }


def _generation(request: str, answer: str, summary: str) -> Json:
    content = {"application/json": {"schema": _ref(answer)}, "text/event-stream": {"schema": _object(data=TEXT)}}
    answers = {"200": {"description": "The answer, whole or streamed.", "content": content}}
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    return {**_operation(summary, answers | _errors(400, 401, 404, 408, 413, 429, 500, 503)), "requestBody": body}


def _operation(summary: str, responses: Json) -> Json:
    return {"summary": summary, "responses": responses}


def _errors(*statuses: int) -> Json:
    return {str(status): _json(ERROR) for status in statuses}


def _json(schema: Json) -> Json:
    return _content("application/json", schema)


def _content(kind: str, schema: Json) -> Json:
    return {"description": kind, "content": {kind: {"schema": schema}}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}
