"""Worker process of a language model's replica: steps a scheduler, and sends the tokens of each step to its server."""

from __future__ import annotations

import json
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from tessera.llm.loading import load
from tessera.llm.sampling import Sampling
from tessera.llm.scheduling import Generation, GenerationScheduler


def main(descriptor: int, path: str, options: str) -> int:
    """Generate until the server closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the server, which drains
    connection = Connection(descriptor)
    try:
        scheduler = GenerationScheduler(load(path, target="llvm"), **json.loads(options))
        scheduler.warm_up()
    except Exception as error:
        connection.send(("error", str(error)))
        return 1
    try:
        connection.send(("ready",))
        serve(connection, scheduler)
    except (EOFError, OSError):
        pass  # the server has gone
    return 0


def serve(connection: Connection, scheduler: GenerationScheduler) -> None:
    """Take orders between two steps, and wait for one where nothing runs."""
    requests: dict[int, Generation] = {}
    while True:
        while connection.poll(0 if scheduler.busy else None):
            _take_order(scheduler, requests, connection.recv())
        try:
            given = scheduler.step()
        except Exception as error:
            scheduler.reset()
            requests.clear()
            connection.send(("failed", f"{type(error).__name__}: {error}"[:400]))
            continue
        numbers = {id(request): number for number, request in requests.items()}
        found = [(numbers[id(g.request)], g.token, g.reason) for g in given if id(g.request) in numbers]
        for number, _, reason in found:
            if reason:
                del requests[number]
        if found:
            connection.send(("tokens", found))


def _take_order(scheduler: GenerationScheduler, requests: dict[int, Generation], order: tuple[Any, ...]) -> None:
    kind, number, *rest = order
    if kind == "submit":
        prompt, most, sampling = rest
        requests[number] = scheduler.submit(prompt, most, Sampling(**sampling))
    elif number in requests:
        scheduler.cancel(requests.pop(number))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
