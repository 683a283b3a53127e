"""The application: an ASGI app of models and language models, with health, metadata, metrics and an OpenAPI page."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, DeviceUnavailable, user_location
from tessera.llm.generation import LanguageModel
from tessera.serving.json_bodies import ProtocolError
from tessera.serving.language_models import ServedLanguageModel
from tessera.serving.options import ServerOptions
from tessera.serving.served_models import ServedModel

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


def create_app(models: Mapping[str, Any], options: ServerOptions | None = None) -> Any:
    """An ASGI application that serves models by name.

    A model is the path of an artifact, a bundle, a GGUF file or a folder of safetensors, a loaded artifact, a
    `LanguageModel`, a `ServedModel` or a `ServedLanguageModel`. The result is a `Guard`: its `drain()` ends the taking
    of requests. Models are closed when the application shuts down.

    Raises:
        ArgumentError: there is no model, a name is not valid, or something is no model.
        DeviceUnavailable: the packages of the extra `serve` are not installed.
    """
    check_installed()
    from starlette.applications import Starlette

    from tessera.serving.guards import Guard
    from tessera.serving.service_metrics import ServiceMetrics

    options = options or ServerOptions()
    if not isinstance(models, Mapping) or not models:
        raise ArgumentError("there is no model to serve", location=user_location(), expected="a dict, name to model")
    for name in models:
        if not isinstance(name, str) or not NAME.match(name):
            raise ArgumentError(f"{name!r} is no name of a model", location=user_location(),
                                expected="letters, digits, . _ and -")  # fmt: skip
    served = {name: make_served(name, model, options) for name, model in models.items()}
    metrics = ServiceMetrics()
    guard: Guard | None = None

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        assert guard is not None
        guard.drain()
        await guard.drained()
        for each in served.values():
            each.close()

    app = Starlette(
        routes=_list_routes(served, options, metrics, lambda: guard is not None and not guard.draining),
        lifespan=lifespan,
        exception_handlers={ProtocolError: _answer_error, 404: _answer_missing, 405: _answer_missing},
    )  # fmt: skip
    app.state.served = served
    _add_gauges(served, metrics)
    guard = Guard(app, options, metrics)
    return guard


def check_installed() -> None:
    """Check that the packages of the extra are there.

    Raises:
        DeviceUnavailable: one is not.
    """
    for package in ("starlette", "uvicorn", "prometheus_client"):
        try:
            import_module(package)
        except ImportError:
            raise DeviceUnavailable(f"the package {package} is not installed", location=user_location(),
                                    suggestion="pip install tessera[serve]") from None  # fmt: skip


def make_served(name: str, model: Any, options: ServerOptions) -> ServedModel | ServedLanguageModel:
    """A model as the application holds it; a path is read."""
    if isinstance(model, (ServedModel, ServedLanguageModel)):
        model.name = name
        return model
    path = model if isinstance(model, (str, Path)) else None
    if path is not None and is_language_model(Path(path)):
        from tessera.llm.loading import load

        model = load(path, target="llvm")
    if isinstance(model, LanguageModel):
        return ServedLanguageModel(name, model, options, path)
    return ServedModel(name, model, options)


def is_language_model(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder with a configuration and safetensors."""
    return path.suffix == ".gguf" or (path.is_dir() and (path / "config.json").is_file()
                                      and not (path / "manifest.json").is_file())  # fmt: skip


def _list_routes(served: dict[str, Any], options: ServerOptions, metrics: Any, ready: Any) -> list[Any]:
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from tessera.serving.completion_routes import CompletionRoutes
    from tessera.serving.inference_routes import InferenceRoutes
    from tessera.serving.openapi import describe_api

    language = {n: m for n, m in served.items() if isinstance(m, ServedLanguageModel)}
    plain = {n: m for n, m in served.items() if isinstance(m, ServedModel)}
    tensors = InferenceRoutes(plain, options.max_json_bytes, metrics, ready)
    texts = CompletionRoutes(language, options.max_json_bytes, metrics)
    created = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "tessera"}

    async def list_models(request: Any) -> Any:
        return JSONResponse({"object": "list", "data": [describe(n) for n in language]})

    async def show_model(request: Any) -> Any:
        name = request.path_params["model"]
        if name not in language:
            raise ProtocolError(404, f"there is no model {name[:80]!r}", parameter="model")
        return JSONResponse(describe(name))

    async def show_metrics(request: Any) -> Any:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    async def show_api(request: Any) -> Any:
        return JSONResponse(describe_api(plain, language, options))

    get: dict[str, Any] = {"methods": ["GET"]}
    post: dict[str, Any] = {"methods": ["POST"]}
    found = [
        Route("/v2", tensors.describe_server, **get), Route("/v2/health/live", tensors.is_live, **get),
        Route("/v2/health/ready", tensors.is_ready, **get), Route("/metrics", show_metrics, **get),
        Route("/openapi.json", show_api, **get), Route("/v1/models", list_models, **get),
        Route("/v1/models/{model}", show_model, **get), Route("/v1/completions", texts.complete, **post),
        Route("/v1/chat/completions", texts.chat, **post),
    ]  # fmt: skip
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [Route(path, tensors.describe_model, **get), Route(f"{path}/ready", tensors.is_model_ready, **get),
                  Route(f"{path}/infer", tensors.infer, **post)]  # fmt: skip
    return found


def _add_gauges(served: dict[str, Any], metrics: Any) -> None:
    for name, model in served.items():
        if isinstance(model, ServedLanguageModel):
            scheduler, engine = model.engine.scheduler, model.engine
            metrics.gauge("open_generations", "Generations that wait or run.", name, lambda e=engine: e.open)
            if hasattr(engine, "replicas"):
                metrics.gauge("ready_replicas", "Replicas that are ready.", name,
                              lambda e=engine: sum(r.ready for r in e.replicas))  # fmt: skip
                continue
            metrics.gauge("available_pages", "Pages of the cache that can be taken.", name,
                          lambda s=scheduler: s.pages.available)  # fmt: skip
            metrics.gauge("preemptions", "Requests that gave their pages back so far.", name,
                          lambda s=scheduler: s.counts.preemptions)  # fmt: skip
            metrics.gauge("shared_pages", "Pages of prompts that were not computed again so far.", name,
                          lambda s=scheduler: s.counts.shared_pages)  # fmt: skip
        else:
            metrics.gauge("cache_hits", "Responses from the cache so far.", name, lambda m=model: m.cache.hits)
            metrics.gauge("ready_replicas", "Replicas that are ready.", name,
                          lambda m=model: sum(r.ready for r in m.balancer.replicas))  # fmt: skip


async def _answer_error(request: Any, error: Any) -> Any:
    from starlette.responses import JSONResponse

    from tessera.serving.guards import describe_error

    return JSONResponse(describe_error(request.url.path, error), status_code=error.status, headers=error.headers)


async def _answer_missing(request: Any, error: Any) -> Any:
    headers = dict(error.headers or {})
    return await _answer_error(request, ProtocolError(error.status_code, str(error.detail), headers))
