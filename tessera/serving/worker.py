"""Worker process of a replica: loads a model, and answers requests of its server over a socket pair."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from tessera.core.errors import ExecutionError, TesseraError
from tessera.serving.served_models import load_function


def main(descriptor: int, path: str) -> int:
    """Answer requests until the server closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the server, which drains
    connection = Connection(descriptor)
    try:
        function = load_function(path)
    except Exception as error:
        connection.send(("error", str(error)))
        return 1
    connection.send(("ready",))
    while True:
        try:
            inputs = connection.recv()
        except (EOFError, OSError):
            return 0
        connection.send(_answer(function, inputs))


def _answer(function: Any, inputs: Any) -> tuple[str, Any]:
    try:
        return "result", function(inputs)
    except TesseraError as error:
        error.__traceback__ = None
        return "error", _rebuild(error)
    except Exception as error:
        return "error", ExecutionError("the model failed", received=f"{type(error).__name__}: {error}"[:400])


def _rebuild(error: TesseraError) -> TesseraError:
    """An error of the same class with text alone, which another process can read."""
    try:
        return type(error)(error.message, expected=_text(error.expected), received=_text(error.received),
                           suggestion=error.suggestion)  # fmt: skip
    except TypeError:
        return ExecutionError(error.message)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
