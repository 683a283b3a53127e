"""OpenAPI page: the endpoints of a server as `/openapi.json` (version 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tessera.serving.completion_requests import MAX_CHOICES, MAX_PROMPTS, MAX_STOPS
from tessera.serving.language_models import ServedLanguageModel
from tessera.serving.options import ServerOptions
from tessera.serving.served_models import ServedModel
from tessera.serving.tensor_protocol import ELEMENT_TYPES, MAX_RANK, MAX_TENSORS

JSON = "application/json"
ANY: dict[str, Any] = {}


def describe_api(
    models: Mapping[str, ServedModel], language: Mapping[str, ServedLanguageModel], options: ServerOptions
) -> dict[str, Any]:
    """The page for the models of a server."""
    paths: dict[str, Any] = {
        "/v2": _get("The server"), "/v2/health/live": _get("Whether the process runs"),
        "/v2/health/ready": _get("Whether requests are taken", 503), "/metrics": _get("Metrics", media="text/plain"),
        "/v1/models": _get("The language models"), "/v1/models/{model}": _get("A language model", 404, model=language),
    }  # fmt: skip
    if models:
        paths |= {
            "/v2/models/{model}": _get("The inputs and outputs of a model", 404, model=models),
            "/v2/models/{model}/ready": _get("Whether a model takes requests", 404, 503, model=models),
            "/v2/models/{model}/infer": _post("Inference", _describe_infer(), models),
        }
    if language:
        paths["/v1/completions"] = _post("A completion", _describe_completion(language, "prompt"))
        paths["/v1/chat/completions"] = _post("An answer", _describe_completion(language, "messages"))
    page: dict[str, Any] = {
        "openapi": "3.1.0", "info": {"title": "Tessera", "version": find_version()}, "paths": paths,
    }  # fmt: skip
    if options.api_keys:
        page["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        page["security"] = [{"key": []}]
    return page


def find_version() -> str:
    """The version of the package."""
    return str(import_module("tessera").__version__)


def _answers(media: str, statuses: tuple[int, ...]) -> dict[str, Any]:
    error = {"description": "Error", "content": {JSON: {"schema": {"type": "object", "required": ["error"]}}}}
    found: dict[str, Any] = {"200": {"description": "OK", "content": {media: {"schema": ANY}}}}
    return found | {str(s): error for s in (401, *statuses)}


def _get(text: str, *statuses: int, media: str = JSON, model: Mapping[str, Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"summary": text, "responses": _answers(media, statuses)}
    if 503 in statuses:
        made["responses"]["503"] = {"description": "Not ready", "content": {JSON: {"schema": ANY}}}
    if model is not None:
        made["parameters"] = [_describe_path(model)]
    return {"get": made}


def _describe_path(models: Mapping[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 1}
    if models:
        schema["enum"] = list(models)
    return {"name": "model", "in": "path", "required": True, "schema": schema}


def _post(text: str, schema: dict[str, Any], models: Mapping[str, Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "summary": text, "requestBody": {"required": True, "content": {JSON: {"schema": schema}}},
        "responses": _answers(JSON, (400, 404, 408, 413, 415, 422, 429, 500, 503)),
    }  # fmt: skip
    made["responses"]["200"]["content"] |= {"application/octet-stream": {}, "text/event-stream": {}}
    if models is not None:
        made["parameters"] = [_describe_path(models)]
    return {"post": made}


def _describe_infer() -> dict[str, Any]:
    tensor = {
        "type": "object", "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"type": "string", "minLength": 1}, "datatype": {"enum": list(ELEMENT_TYPES)},
            "shape": {"type": "array", "maxItems": MAX_RANK, "items": {"type": "integer", "minimum": 0}},
            "data": {"type": "array"}, "parameters": {"type": "object"},
        },
    }  # fmt: skip
    listed = {"type": "array", "maxItems": MAX_TENSORS}
    return {
        "type": "object", "required": ["inputs"],
        "properties": {
            "id": {"type": "string"}, "inputs": {**listed, "items": tensor}, "parameters": {"type": "object"},
            "outputs": {**listed, "items": {"type": "object", "required": ["name"]}},
        },
    }  # fmt: skip


def _describe_completion(models: Mapping[str, Any], main: str) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1, "maxLength": 1000}
    roles = {"enum": ["system", "user", "assistant"]}
    message = {"type": "object", "required": ["role", "content"],
               "properties": {"role": roles, "content": {"type": "string"}}}  # fmt: skip
    tokens = {"type": "array", "minItems": 1, "items": {"type": "integer"}}
    prompt = {"anyOf": [{"type": "string"}, tokens,
                        {"type": "array", "maxItems": MAX_PROMPTS, "items": {"type": "string"}}]}  # fmt: skip
    fields: dict[str, Any] = {
        "model": {"enum": list(models)}, "stream": {"type": "boolean"}, "seed": {"type": "integer"},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2}, "n": _count(MAX_CHOICES),
        "top_p": {"type": "number", "minimum": 0, "maximum": 1}, "max_tokens": _count(64),
        "stop": {"anyOf": [text, {"type": "array", "maxItems": MAX_STOPS, "items": text}]},
        main: prompt if main == "prompt" else {"type": "array", "minItems": 1, "items": message},
    }  # fmt: skip
    return {"type": "object", "required": ["model", main], "properties": fields, "additionalProperties": False}


def _count(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most}
