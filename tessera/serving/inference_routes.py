"""Routes of the Open Inference Protocol v2 over HTTP: health, metadata and inference, with binary tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera.core.errors import TesseraError
from tessera.monitoring.monitor import span
from tessera.serving.completion_routes import to_protocol_error
from tessera.serving.json_bodies import ProtocolError
from tessera.serving.openapi import find_version
from tessera.serving.served_models import ServedModel
from tessera.serving.service_metrics import ServiceMetrics
from tessera.serving.tensor_protocol import describe_tensor, read_call, write_response

LENGTH_HEADER = "Inference-Header-Content-Length"
LOG = logging.getLogger("tessera.serving")


class InferenceRoutes:
    """The endpoints under `/v2` for models by name; `ready` says whether the server takes requests."""

    def __init__(
        self, models: dict[str, ServedModel], max_json: int, metrics: ServiceMetrics, ready: Callable[[], bool]
    ) -> None:
        self.models, self.max_json, self.metrics, self.ready = models, max_json, metrics, ready

    async def describe_server(self, request: Request) -> Response:
        """The name, the version and the extensions of the server."""
        return JSONResponse({"name": "tessera", "version": find_version(), "extensions": ["binary_tensor_data"]})

    async def is_live(self, request: Request) -> Response:
        """200 while the process runs."""
        return JSONResponse({"live": True})

    async def is_ready(self, request: Request) -> Response:
        """200 while requests are taken, else 503."""
        return JSONResponse({"ready": self.ready()}, status_code=200 if self.ready() else 503)

    async def is_model_ready(self, request: Request) -> Response:
        """200 while requests for a model are taken, else 503."""
        model = self._find(request)
        ready = self.ready() and any(r.ready for r in model.balancer.replicas)
        return JSONResponse({"name": model.name, "ready": ready}, status_code=200 if ready else 503)

    async def describe_model(self, request: Request) -> Response:
        """The inputs and outputs of a model."""
        model = self._find(request)
        return JSONResponse({
            "name": model.name, "versions": [model.version], "platform": model.platform,
            "inputs": [describe_tensor(s) for s in model.accepted],
            "outputs": [describe_tensor(s) for s in model.outputs],
        })  # fmt: skip

    async def infer(self, request: Request) -> Response:
        """The outputs of a model for the inputs in the body."""
        model = self._find(request)
        call = read_call(await request.body(), request.headers.get(LENGTH_HEADER), self.max_json)
        start = time.perf_counter()
        with span("inference", {"tessera.model": model.name, "request.id": call.id[:200]}):
            outputs = await self._run(model, call.inputs)
        self.metrics.infer_seconds.labels(model.name).observe(time.perf_counter() - start)
        body, length = write_response(call, outputs, model.outputs, model.name, model.version)
        if length is None:
            return Response(body, media_type="application/json")
        return Response(body, media_type="application/octet-stream", headers={LENGTH_HEADER: str(length)})

    @staticmethod
    async def _run(model: ServedModel, inputs: dict[str, Any]) -> dict[str, Any]:
        try:
            return await model.infer(inputs)
        except TesseraError as error:
            made = to_protocol_error(error)
            if made.status >= 500:
                LOG.error("model %s failed", model.name, exc_info=error)
            raise made from None

    def _find(self, request: Request) -> ServedModel:
        name, version = request.path_params["model"], request.path_params.get("version")
        model = self.models.get(name)
        if model is None:
            raise ProtocolError(404, f"there is no model {name[:80]!r}")
        if version is not None and version != model.version:
            raise ProtocolError(404, f"model {name} has no version {version[:40]!r}: expected {model.version}")
        return model
