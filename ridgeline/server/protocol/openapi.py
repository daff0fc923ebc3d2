"""The OpenAPI document, made from the models that check the requests, and the list of models.

openapi_document("0.1.0")["paths"]["/v1/chat/completions"]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic.json_schema import models_json_schema

from ridgeline.server.protocol.requests.asked import Route
from ridgeline.server.protocol.requests.fields import Body
from ridgeline.server.protocol.requests.parsing import REQUESTS, check_model

PATHS: dict[Route, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "embeddings": "/v1/embeddings",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
SUMMARIES: dict[Route, str] = {
    "chat": "The next message of a conversation",
    "completions": "Text that goes on from prompts",
    "responses": "A response to an input, with text and function calls",
    "messages": "The next message of a conversation, as Anthropic's API has it",
    "count_tokens": "How many tokens such a conversation has",
    "embeddings": "Texts as unit vectors",
    "tokenize": "Token ids of a text or a conversation",
    "detokenize": "The text of token ids",
}
STREAMED: tuple[Route, ...] = ("chat", "completions", "responses", "messages")
# What each answer has in any case.
ANSWERS: dict[Route, list[str]] = {
    "chat": ["id", "object", "created", "model", "choices", "usage"],
    "completions": ["id", "object", "created", "model", "choices", "usage"],
    "responses": ["id", "object", "created_at", "model", "output", "status", "usage"],
    "messages": ["id", "type", "role", "content", "model", "stop_reason", "usage"],
    "count_tokens": ["input_tokens"],
    "embeddings": ["object", "data", "model", "usage"],
    "tokenize": ["tokens", "count"],
    "detokenize": ["prompt"],
}
ERRORS = {
    400: "A field that is missing, wrong or not supported; `param` names it",
    401: "No API key, or a wrong one",
    404: "No such model or page",
    408: "The deadline of the request passed",
    413: "The body is too large",
    429: "Too many requests; Retry-After says when to try again",
    503: "The server cannot answer now, and says why",
}
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

MESSAGES_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}


def openapi_document(
    version: str, *, has_key: bool = False, models: Sequence[str] = ()
) -> dict[str, Any]:
    """OpenAPI 3.1; `has_key` where requests need an API key, `models` are those that are served."""
    pairs: list[Any] = [(kind, "validation") for kind in REQUESTS.values()]
    refs, definitions = models_json_schema(pairs, ref_template="#/components/schemas/{model}")
    errors = {"Error": ERROR_SCHEMA, "MessagesError": MESSAGES_ERROR_SCHEMA}
    schemas = {**definitions["$defs"], **errors}
    for kind in REQUESTS.values():
        _add_not_done(schemas[kind.__name__], kind)
        if models:
            may_miss = not kind.model_fields["model"].is_required()
            names = [*models, None] if may_miss else list(models)
            schemas[kind.__name__]["properties"]["model"] = {"enum": names}
    paths: dict[str, Any] = {}
    for route, path in PATHS.items():
        schema = refs[REQUESTS[route], "validation"]
        paths[path] = {"post": _operation(route, schema)}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Ridgeline", "version": version},
        "paths": {**paths, **_model_paths(), **_state_paths()},
        "components": {"schemas": schemas},
    }
    if has_key:
        keys = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["components"]["securitySchemes"] = keys
        document["security"] = [{name: []} for name in keys]
        document["paths"]["/health"]["get"]["security"] = []
    return document


def _add_not_done(schema: dict[str, Any], kind: type[Body]) -> None:
    """Fields that are refused, but for null."""
    for name, advice in kind.not_done.items():
        refused = {"type": "null", "description": f"not supported; {advice}"}
        schema["properties"][name] = refused


def models_body(models: Sequence[str], created: float, max_context: int) -> bytes:
    """The answer of GET /v1/models, in the words of OpenAI's API and of Anthropic's."""
    entries = [_model(name, created, max_context) for name in models]
    page = {"has_more": False, "first_id": models[0], "last_id": models[-1]}
    return json.dumps({"object": "list", "data": entries, **page}).encode()


def model_body(name: str, models: Sequence[str], created: float, max_context: int) -> bytes:
    """The answer of GET /v1/models/{name}. Raises ApiError (404) for one that is not served."""
    check_model(name, tuple(models))
    return json.dumps(_model(name, created, max_context)).encode()


def _model(name: str, created: float, max_context: int) -> dict[str, Any]:
    at = datetime.fromtimestamp(int(created), UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": "ridgeline",
        "max_model_len": max_context,
        # The same as Anthropic's clients read it.
        "type": "model",
        "display_name": name,
        "created_at": at,
        "max_input_tokens": max_context,
    }


def _operation(route: Route, schema: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": _answer(ANSWERS[route])}}
    if route in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "operationId": route,
        "summary": SUMMARIES[route],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The answer", "content": content},
            **_errors(*ERRORS, content=error_content(PATHS[route])),
        },
    }


def error_content(path: str) -> dict[str, Any]:
    """What an error on a path looks like."""
    name = "MessagesError" if path.startswith(PATHS["messages"]) else "Error"
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _model_paths() -> dict[str, Any]:
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    listed = _json_answer(["object", "data"])
    one = _json_answer(["id", "object", "created", "owned_by"])
    return {
        "/v1/models": {"get": _get("models", "The models served", listed, 401)},
        "/v1/models/{model}": {
            "get": {**_get("model", "One of them", one, 401, 404), "parameters": [name]}
        },
    }


def _state_paths() -> dict[str, Any]:
    plain = {"text/plain": {"schema": {"type": "string"}}}
    status = _json_answer(["status"])
    health = _get("health", "Whether the process is alive", status)
    ready = _get("ready", "Whether the engine makes progress", status, 401)
    for operation in (health, ready):
        operation["responses"]["503"] = {"description": "It is not, and why", "content": status}
    metrics = _get("metrics", "Prometheus metrics", plain, 401)
    version = _get("version", "The server's version", _json_answer(["version"]), 401)
    return {
        "/health": {"get": health},
        "/ready": {"get": ready},
        "/metrics": {"get": metrics},
        "/version": {"get": version},
    }


def _get(name: str, summary: str, content: Any, *errors: int) -> dict[str, Any]:
    answer = {"description": summary, "content": content}
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": answer, **_errors(*errors)},
    }


def _json_answer(required: list[str]) -> dict[str, Any]:
    return {"application/json": {"schema": _answer(required)}}


def _answer(required: list[str]) -> dict[str, Any]:
    return {"type": "object", "required": required}


def _errors(*statuses: int, content: dict[str, Any] | None = None) -> dict[str, Any]:
    content = error_content("") if content is None else content
    return {str(status): {"description": ERRORS[status], "content": content} for status in statuses}
