"""Replicas of a language model: processes that generate, the choice of one for each request, and its move to another.

A token depends on the prompt, the seed and its position alone. A request whose replica ends is therefore generated
again on another, which gives the same tokens: those that were delivered are passed over, and the stream goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import DeviceUnavailable, ExecutionError, TesseraError
from tessera.llm.sampling import GREEDY, Sampling
from tessera.llm.scheduling import GenerationScheduler
from tessera.serving.generation_engine import GenerationTicket, QueueFullError
from tessera.serving.options import ServerOptions
from tessera.serving.replicas import ATTEMPTS, START_SECONDS, ReplicaLostError, start_worker

MOST_MOVES = 3 * ATTEMPTS  # of a request from replica to replica
COMPILE_SECONDS = 600.0  # a worker compiles the model's programs before it is ready


class GenerationReplica:
    """A process that loads a language model from a path and generates for many requests at once.

    Raises:
        ExecutionError: the process does not start, or cannot load the model.
    """

    def __init__(self, path: str | Path, name: str, options: dict[str, Any]) -> None:
        self.path, self.name, self.options = Path(path), name, options
        self.ready, self.restarts, self._closed = False, 0, False
        self._tickets: dict[int, GenerationTicket] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._start()
        self._thread = threading.Thread(target=self._read, name=f"tessera-{name}", daemon=True)
        self._thread.start()

    @property
    def open(self) -> int:
        """The requests that wait or run here."""
        return len(self._tickets)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def _start(self) -> None:
        arguments = (str(self.path), json.dumps(self.options))
        process, connection = start_worker(self.name, "tessera.serving.generation_worker", *arguments)
        self._process, self._connection = process, connection
        try:
            answer = connection.recv() if connection.poll(COMPILE_SECONDS) else ("error", "no answer")
        except (EOFError, OSError):
            answer = ("error", f"the process ended with status {process.poll()}")
        if answer != ("ready",):
            self._stop()
            raise ExecutionError(f"{self.name} cannot load {self.path}", received=str(answer[1:])[:400])
        self.ready = True

    def _stop(self) -> None:
        self._connection.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        """Deliver tokens until the replica is closed; a process that ended is started again."""
        while not self._closed:
            try:
                kind, content = self._connection.recv()
            except (EOFError, OSError):
                self._recover()
                continue
            if kind == "tokens":
                for number, token, reason in content:
                    self._deliver(number, (token, reason))
            else:
                self._fail(ExecutionError("generation failed", received=str(content)[:400]))

    def _deliver(self, number: int, item: tuple[int, str]) -> None:
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.put(item)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            lost, self._tickets = list(self._tickets.values()), {}
        for ticket in lost:
            ticket.put(error)

    def _recover(self) -> None:
        """End the open requests, and start the process again."""
        with self._lock:
            self.ready = False
        self._fail(ReplicaLostError(f"the process of {self.name} ended"))
        if self._closed:
            return
        self._stop()
        self.restarts += 1
        with contextlib.suppress(TesseraError):
            self._start()
        if not self.ready:
            threading.Event().wait(1.0)

    def _order(self, *order: Any) -> None:
        with self._lock:
            if not self.ready:
                raise ReplicaLostError(f"the process of {self.name} ended")
            try:
                self._connection.send(order)
            except (OSError, ValueError):
                raise ReplicaLostError(f"the process of {self.name} ended") from None

    async def stream(self, prompt: Any, max_tokens: int, sampling: Sampling) -> AsyncIterator[tuple[int, str]]:
        """The tokens of a prompt as they come, with the reason of the end at the last, else "".

        Raises:
            ReplicaLostError: the process ended. ExecutionError: the model failed.
        """
        number, ticket, reason = next(self._numbers), GenerationTicket(), ""
        self._tickets[number] = ticket
        try:
            tokens = np.asarray(prompt).tolist()
            await asyncio.to_thread(self._order, "submit", number, tokens, max_tokens, asdict(sampling))
            while not reason:
                item = await ticket.queue.get()
                if isinstance(item, BaseException):
                    raise item
                token, reason = item
                yield token, reason
        finally:
            if self._tickets.pop(number, None) is not None and not reason:
                with contextlib.suppress(ReplicaLostError):
                    self._order("cancel", number)

    def close(self) -> None:
        """End the process and the thread."""
        self._closed = True
        with self._lock:
            self.ready = False
        self._process.kill()
        self._thread.join()
        self._stop()


class ReplicatedGeneration:
    """An engine of several processes: each request goes to the replica with the fewest, and moves if that one ends.

    It has the interface of `GenerationEngine`; `scheduler` checks requests, and generates nothing.
    """

    def __init__(self, path: str | Path, scheduler: GenerationScheduler, options: ServerOptions, name: str) -> None:
        self.scheduler, self.max_queue, self.open = scheduler, options.max_queue, 0
        held = {"slots": options.slots, "longest": options.longest, "pages": options.pages,
                "share_prefixes": options.share_prefixes}  # fmt: skip
        self.replicas = [GenerationReplica(path, f"{name} {i}", held) for i in range(options.replicas)]

    def warm_up(self) -> None:
        """Nothing: the processes compile before they are ready."""

    def check(self, prompt: Any, max_tokens: int, sampling: Sampling = GREEDY) -> None:
        """Check a request without starting it.

        Raises:
            ArgumentError, OutOfBoundsError: as `GenerationScheduler.submit`.
        """
        self.scheduler.make_request(prompt, max_tokens, sampling)

    async def stream(
        self, prompt: Any, max_tokens: int = 128, sampling: Sampling = GREEDY
    ) -> AsyncIterator[tuple[int, str]]:
        """The tokens of a prompt, as `GenerationEngine.stream`; a replica that ends is replaced by another.

        Raises:
            ArgumentError, OutOfBoundsError: the request is not valid.
            QueueFullError: there are too many requests.
            ReplicaLostError: the request lost several replicas. DeviceUnavailable: none is ready for a long time.
        """
        self.check(prompt, max_tokens, sampling)
        if self.open >= self.max_queue + self.scheduler.slots * len(self.replicas):
            raise QueueFullError("the queue of requests is full", expected=f"up to {self.max_queue} that wait")
        self.open += 1
        try:
            async for item in self._stream_on_replicas(prompt, max_tokens, sampling):
                yield item
        finally:
            self.open -= 1

    async def _stream_on_replicas(
        self, prompt: Any, max_tokens: int, sampling: Sampling
    ) -> AsyncIterator[tuple[int, str]]:
        delivered = moves = lost = 0
        while True:
            stream = (await self._wait_for_replica()).stream(prompt, max_tokens, sampling)
            passed = 0
            try:
                async for token, reason in stream:
                    passed += 1
                    if passed > delivered:
                        delivered = passed
                        yield token, reason
                return
            except ReplicaLostError:
                moves, lost = moves + 1, lost + (passed == 0)  # one that gave tokens has hardly ended for the prompt
                if lost == ATTEMPTS or moves == MOST_MOVES:
                    raise
            finally:
                await stream.aclose()  # type: ignore[attr-defined]

    async def _wait_for_replica(self) -> GenerationReplica:
        """The ready replica with the fewest requests."""
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while not (ready := [r for r in self.replicas if r.ready]):
            if asyncio.get_running_loop().time() > deadline:
                raise DeviceUnavailable("no replica is ready", suggestion="try again")
            await asyncio.sleep(0.05)
        return min(ready, key=lambda r: r.open)

    def close(self) -> None:
        """End all replicas; open requests fail."""
        for each in self.replicas:
            each.close()
