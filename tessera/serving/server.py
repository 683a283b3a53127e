"""The server: an application under uvicorn, with structured logs, and a drain on SIGTERM and Ctrl-C."""

from __future__ import annotations

import logging
import math
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError, user_location
from tessera.monitoring.structured_logs import JSONFormatter
from tessera.serving.application import check_installed, create_app
from tessera.serving.language_models import ServedLanguageModel
from tessera.serving.options import ServerOptions

LOG = logging.getLogger("tessera.serving")
BACKLOG = 2048
KEEP_ALIVE = 75  # seconds: longer than clients keep idle connections, which otherwise send to one that just closes


def run_server(
    models: Mapping[str, Any], host: str = "127.0.0.1", port: int = 8000, options: ServerOptions | None = None
) -> None:
    """Serve models until SIGTERM or Ctrl-C; then requests in work are finished, and new ones refused.

    `models` are those of `create_app`. Port 0 is any free port; the log names it.

    Raises:
        ArgumentError: the port is none.
        DeviceUnavailable: the packages of the extra are not installed, or the address is taken.
    """
    check_installed()
    options = options or ServerOptions()
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
        raise ArgumentError(f"port {port!r}", location=user_location(), expected="0 to 65535")
    listener = _listen(host, port)
    set_up_logs()
    app = create_app(models, options)
    for name, model in app.app.state.served.items():
        if isinstance(model, ServedLanguageModel):
            LOG.info("compiling", extra={"fields": {"model": name}})
            model.engine.warm_up()
    _make_server(app, options).run([listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        raise DeviceUnavailable(f"the address {host}:{port} cannot be served", location=user_location(),
                                received=str(error), suggestion="choose another port or host") from None  # fmt: skip
    return made


def _make_server(app: Any, options: ServerOptions) -> Any:
    import uvicorn

    class DrainingServer(uvicorn.Server):
        """A server that refuses new requests as soon as a signal comes."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            LOG.info("draining", extra={"fields": {"signal": sig, "open": app.open}})
            app.drain()
            super().handle_exit(sig, frame)

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for each in sockets or ():
                host, port = each.getsockname()[:2]
                LOG.info("serving", extra={"fields": {"host": host, "port": port}})

    seconds = max(1, math.ceil(options.drain_timeout))
    return DrainingServer(uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=seconds, server_header=False, lifespan="on",
        ws="none", timeout_keep_alive=KEEP_ALIVE,
    ))  # fmt: skip


def set_up_logs(level: int = logging.INFO) -> None:
    """Write the logs of the server as lines of JSON to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter())
    for name in ("tessera", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "tessera" else logging.WARNING)


def read_api_keys(path: str | Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and those that begin with # are none.

    Raises:
        FileError: the file is missing, is no text, or has no key.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        raise FileError(f"the file of API keys {path} cannot be read", location=user_location(),
                        received=str(error)) from None  # fmt: skip
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise FileError(f"the file of API keys {path} has no key", location=user_location())
    return found


def name_models(paths: list[str]) -> dict[str, Path]:
    """The models of a command line: `NAME=PATH`, or a path whose last part names the model.

    >>> sorted(name_models(["build/mlp", "chat=models/SmolLM2.gguf"]))
    ['chat', 'mlp']

    Raises:
        ArgumentError: two have one name, or a path is empty.
    """
    found: dict[str, Path] = {}
    for text in paths:
        name, separator, rest = text.partition("=")
        if not (rest if separator else text):
            raise ArgumentError(f"{text!r} names no file", location=user_location(), expected="[NAME=]PATH")
        path = Path(rest if separator else text)
        name = name if separator else re.sub(r"[^A-Za-z0-9._-]", "-", path.resolve().stem)
        if name in found:
            raise ArgumentError(f"two models are called {name}", location=user_location(), suggestion="NAME=PATH")
        found[name] = path
    return found
