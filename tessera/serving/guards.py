"""Guard: an ASGI middleware with the limits of a server: keys, sizes, queue, draining, and metrics of each request."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tessera.monitoring.monitor import span
from tessera.serving.json_bodies import ProtocolError
from tessera.serving.options import ServerOptions
from tessera.serving.service_metrics import ServiceMetrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LOG = logging.getLogger("tessera.serving")
# Headers whose repetition has no meaning, or two.
SINGLE = frozenset(
    b"authorization content-encoding content-length content-type inference-header-content-length transfer-encoding "
    b"x-api-key".split()
)
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")


class Guard:
    """Refuses requests before the application sees them; reads bodies up to the limit.

    `open` is the number of requests in work. After `drain`, new ones are refused, and `drained` waits for the others.
    """

    def __init__(self, app: Application, options: ServerOptions, metrics: ServiceMetrics) -> None:
        self.app, self.options, self.metrics = app, options, metrics
        self.open, self.buffered, self.draining = 0, 0, False
        self._keys = [k.encode() for k in options.api_keys]

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    async def drained(self) -> bool:
        """Wait until no request is in work, or the time is over: whether none is."""
        deadline = time.monotonic() + self.options.drain_timeout
        while self.open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.open

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        watch = _Watch(send)
        start = time.perf_counter()
        try:
            with span("http request", {"http.request.method": scope["method"], "url.path": scope["path"][:200]}):
                await self._serve(scope, receive, watch)
        except ProtocolError as refused:
            await _send_error(scope, watch, refused)
        except Exception:  # a defect, or a function of the user: the client learns nothing of it
            LOG.exception("request failed", extra={"fields": {"path": scope["path"][:200]}})
            await _send_error(scope, watch, ProtocolError(500, "the server failed"))
        finally:
            self.metrics.observe(scope["method"], watch.status, time.perf_counter() - start)

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: _Watch) -> None:
        headers = check_headers(scope["headers"])
        if scope["path"] not in OPEN_PATHS:
            self._check_key(headers)
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        retry = {"Retry-After": str(max(1, math.ceil(self.options.retry_after)))}
        if self.draining:
            raise ProtocolError(503, "the server is shutting down", retry)
        if self.open >= self.options.max_queue:
            raise ProtocolError(429, f"the queue is full: {self.options.max_queue} requests are in work", retry)
        held = _HeldBody()
        self.open += 1
        self.metrics.set_open(self.open)
        try:
            await self._read_body(headers, receive, held)
            await self.app(scope, _replay(b"".join(held.parts), receive), send)
        finally:
            self.open -= 1
            self.buffered -= held.size
            self.metrics.set_open(self.open)

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        if not self._keys:
            return
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # All keys are compared, each in constant time.
        if not sum([hmac.compare_digest(given, key) for key in self._keys]):
            raise ProtocolError(401, "the API key is missing or wrong", {"WWW-Authenticate": "Bearer"})

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive, held: _HeldBody) -> None:
        most = self.options.max_body_bytes
        too_long = ProtocolError(413, f"the body is longer than {most} bytes", {"Connection": "close"})
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ProtocolError(415, "compressed bodies are not supported")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18:
            raise ProtocolError(400, "the Content-Length is no number")
        if int(length) > most:
            raise too_long
        more, deadline = True, asyncio.get_running_loop().time() + self.options.body_timeout
        while more:
            message = await _receive_until(deadline, receive)
            part = message.get("body", b"")
            held.parts.append(part)
            held.size += len(part)
            self.buffered += len(part)
            if held.size > most:
                raise too_long
            if self.buffered > self.options.max_buffered_bytes:
                raise ProtocolError(429, "the bodies of all requests are too long", {"Retry-After": "1"})
            more = message.get("more_body", False)


class _HeldBody:
    """The parts of a body so far, and their bytes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0


async def _receive_until(deadline: float, receive: Receive) -> Message:
    left = deadline - asyncio.get_running_loop().time()
    try:
        message = await asyncio.wait_for(receive(), max(left, 0.001))
    except asyncio.TimeoutError:
        raise ProtocolError(408, "the body did not arrive in time", {"Connection": "close"}) from None
    if message["type"] == "http.disconnect":
        raise ProtocolError(499, "the client is gone")
    return message


def check_headers(headers: Any) -> dict[bytes, bytes]:
    """The headers by name in lower case.

    Raises:
        ProtocolError: one is there twice that may be there once.
    """
    counts = Counter(name.lower() for name, _ in headers)
    if twice := [n for n in SINGLE if counts[n] > 1]:
        raise ProtocolError(400, f"the header {sorted(twice)[0].decode()} is there twice")
    return {name.lower(): value for name, value in headers}


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, and then waits for the client to go."""
    given = False

    async def receive_body() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return receive_body


class _Watch:
    """A `send` that notes the status of the response."""

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


async def _send_error(scope: MutableMapping[str, Any], send: _Watch, error: ProtocolError) -> None:
    if send.status:
        return
    body = json.dumps(describe_error(scope["path"], error)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(n.lower().encode(), v.encode()) for n, v in error.headers.items()]
    with contextlib.suppress(OSError):
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def describe_error(path: str, error: ProtocolError) -> dict[str, Any]:
    """An error as the clients of a path read it: of OpenAI under /v1, otherwise of the inference protocol."""
    if not path.startswith("/v1/"):
        return {"error": error.message}
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.parameter, "code": None}}
