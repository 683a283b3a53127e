"""Replicas: copies of a model in threads or processes, and the choice of one for each request.

Inference has no state, so that a request whose replica dies runs again on another: no accepted request is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DeviceUnavailable, ExecutionError, TesseraError, user_location
from tessera.serving.batching import BatchSlot, unwrap_inputs
from tessera.serving.requests import InferenceRequest

STRATEGIES = ("least_connections", "round_robin")
ATTEMPTS = 3  # replicas that a request may lose before it fails
START_SECONDS = 120.0


class ReplicaLostError(ExecutionError):
    """The process of a replica ended while it served a request, or before (`started` is False)."""

    started = True


def start_worker(name: str, module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a module as a process with a connection to it, whose descriptor is its first argument.

    Raises:
        ExecutionError: the process does not start.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", module, str(theirs.fileno()), *arguments]
    try:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ExecutionError(f"the process of {name} does not start", received=str(error)) from None
    finally:
        theirs.close()
    return process, Connection(ours.detach())


class ThreadReplica:
    """A replica in a thread of this process: it calls `model` with the inputs, one request at a time.

    `model` takes a dict of arrays, or the array itself where the request does not name it. Without a model, a replica
    calls that of the request.
    """

    def __init__(self, model: Callable[[Any], Any] | None = None, name: str = "replica") -> None:
        if model is not None and not callable(model):
            raise ArgumentError("the model of a replica is no function", location=user_location(),
                                received=type(model).__name__)  # fmt: skip
        self.model, self.name, self.active, self.served = model, name, 0, 0
        self.ready, self.balancer = True, None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"tessera-{name}")

    async def infer(self, request: Any) -> Any:
        """The result of a request, or of the place of one in a batch, which runs once."""
        if isinstance(request, BatchSlot):
            model = request.request.model
            return await request.run(lambda inputs: self._dispatch(inputs, model))
        held = request if isinstance(request, InferenceRequest) else InferenceRequest(request)
        return await self._dispatch(held.arrays, held.model)

    async def _dispatch(self, inputs: Mapping[str, np.ndarray], model: Any) -> Any:
        balancer: Any = self.balancer
        if balancer is not None:
            return await balancer.run(inputs, model, self)
        return await self.execute(inputs, model)

    async def execute(self, inputs: Mapping[str, np.ndarray], model: Any = None) -> Any:
        """The result of inputs on this replica alone.

        Raises:
            ReplicaLostError: the process of the replica ended.
        """
        self.active += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._call, inputs, model)
        finally:
            self.active -= 1
            self.served += 1
            if self.balancer is not None:
                self.balancer.on_idle()  # type: ignore[unreachable]

    def _call(self, inputs: Mapping[str, np.ndarray], model: Any) -> Any:
        function = self.model if self.model is not None else model
        if function is None:
            raise ArgumentError("neither the replica nor the request has a model",
                                suggestion="pass model= to the LoadBalancer or the InferenceRequest")  # fmt: skip
        return function(unwrap_inputs(inputs))

    def close(self) -> None:
        """End the thread when it is done."""
        self._pool.shutdown(wait=False)


class ProcessReplica(ThreadReplica):
    """A replica in a process of its own that loads a model from a path (`ts.load`).

    Where the process ends, the request raises `ReplicaLostError`, and a new process is started.

    Raises:
        ExecutionError: the process does not start, or cannot load the model.
    """

    def __init__(self, path: str | Path, name: str = "replica") -> None:
        super().__init__(None, name)
        self.path, self.restarts = Path(path), 0
        self._lock, self._closed = threading.Lock(), False
        self._start()

    def _start(self) -> None:
        self._process, self._connection = start_worker(self.name, "tessera.serving.worker", str(self.path))
        answer = self._receive(START_SECONDS)
        if answer != ("ready",):
            self._stop()
            raise ExecutionError(f"{self.name} cannot load {self.path}", received=str(answer[1:])[:400])
        self.ready = True

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def _receive(self, seconds: float | None) -> Any:
        try:
            if seconds is not None and not self._connection.poll(seconds):
                return "error", "", f"no answer in {seconds:.0f} s"
            return self._connection.recv()
        except (EOFError, OSError):
            return "error", "", f"the process ended with status {self._process.poll()}"

    def _call(self, inputs: Mapping[str, np.ndarray], model: Any) -> Any:
        lost = ReplicaLostError(f"the process of {self.name} ended")
        lost.started = self.ready
        if not self.ready:
            raise lost
        try:
            self._connection.send(dict(inputs))
            status, found = self._connection.recv()
        except (EOFError, OSError):
            self.ready = False
            with contextlib.suppress(RuntimeError):  # the replica is closed
                self._pool.submit(self._restart)  # in the thread of the requests: none finds a half-made connection
            raise lost from None
        if status == "error":
            raise found
        return found

    def _restart(self) -> None:
        with self._lock:
            if self._closed or self.ready:
                return
            self._stop()
            self.restarts += 1
            try:
                self._start()
            except TesseraError:
                self.ready = False

    def _stop(self) -> None:
        self._connection.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and the thread."""
        super().close()
        with self._lock:
            self._closed, self.ready = True, False
            self._stop()


class LoadBalancer:
    """Chooses a replica for each request: the one with the fewest open requests, or each in turn.

    `replicas` is a number, for threads that call `model` (or that of a request), or a list of replicas.

    >>> balancer = LoadBalancer(replicas=2, strategy="least_connections", model=lambda x: x + 1)
    >>> asyncio.run(balancer.infer([[1.0]])).tolist()
    [[2.0]]

    Raises:
        ArgumentError: there is no replica, or the strategy is unknown.
    """

    def __init__(
        self, replicas: int | Sequence[ThreadReplica] = 1, strategy: str = "least_connections", model: Any = None
    ) -> None:
        if strategy not in STRATEGIES:
            raise ArgumentError(f"the strategy {strategy!r} is unknown", location=user_location(),
                                expected=", ".join(STRATEGIES))  # fmt: skip
        if isinstance(replicas, int) and not isinstance(replicas, bool):
            replicas = [ThreadReplica(model, f"replica {i}") for i in range(replicas)]
        if not isinstance(replicas, (list, tuple)) or not replicas:
            raise ArgumentError("a load balancer without replicas", location=user_location(),
                                expected="a positive number, or a list of replicas")  # fmt: skip
        if not all(isinstance(r, ThreadReplica) for r in replicas):
            raise ArgumentError("one of the replicas is none", location=user_location(),
                                expected="ThreadReplica or ProcessReplica")  # fmt: skip
        self.replicas, self.strategy, self._next = list(replicas), strategy, 0
        self.on_idle: Callable[[], None] = lambda: None  # called when a replica has ended a request
        for each in self.replicas:
            each.balancer = self  # type: ignore[assignment]

    @property
    def busy(self) -> bool:
        """Whether every replica that is ready runs a request; false where none is ready."""
        open_ = [r for r in self.replicas if r.ready]
        return bool(open_) and all(r.active for r in open_)

    def select(self, without: Sequence[ThreadReplica] = ()) -> ThreadReplica:
        """A replica that is ready, and not among `without`.

        Raises:
            DeviceUnavailable: there is none.
        """
        open_ = [r for r in self.replicas if r.ready and r not in without]
        if not open_:
            raise DeviceUnavailable("no replica is ready", suggestion="try again")
        self._next += 1
        if self.strategy == "round_robin":
            return open_[self._next % len(open_)]
        least = min(r.active for r in open_)
        idle = [r for r in open_ if r.active == least]
        return idle[self._next % len(idle)]

    async def infer(self, request: Any) -> Any:
        """The result of a request, or of the place of one in a batch, by the replica that `select` gives."""
        return await self._select_or_wait_sync().infer(request)

    def _select_or_wait_sync(self) -> ThreadReplica:
        """A replica whose `infer` may wait: also one that is being started again."""
        open_ = [r for r in self.replicas if r.ready]
        return self.select() if open_ else self.replicas[0]

    async def run(self, inputs: Mapping[str, np.ndarray], model: Any = None, first: ThreadReplica | None = None) -> Any:
        """The result of inputs, by `first` or another replica; where its process ends, by the next.

        Raises:
            ReplicaLostError: the request ended the processes of several replicas.
        """
        lost: ReplicaLostError | None = None
        attempts = 0
        while attempts < ATTEMPTS:
            replica = first if first is not None and first.ready else await self._wait_for_replica()
            first = None
            try:
                return await replica.execute(inputs, model)
            except ReplicaLostError as error:
                lost, attempts = error, attempts + error.started
        assert lost is not None
        raise lost

    async def _wait_for_replica(self) -> ThreadReplica:
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while True:
            try:
                return self.select()
            except DeviceUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.05)

    def close(self) -> None:
        """End all replicas."""
        for each in self.replicas:
            each.close()
