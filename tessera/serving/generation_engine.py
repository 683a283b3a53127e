"""Generation engine: a thread that steps a scheduler, and streams of tokens for coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, ExecutionError, ResourceError, user_location
from tessera.llm.generation import LanguageModel
from tessera.llm.sampling import GREEDY, Sampling
from tessera.llm.scheduling import Generation, GenerationScheduler, GivenToken


class QueueFullError(ResourceError):
    """There are as many requests as a server takes at once."""


class GenerationTicket:
    """A request of a coroutine: where its tokens go."""

    def __init__(self, request: Generation | None = None) -> None:
        self.request, self.loop = request, asyncio.get_running_loop()
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item: Any) -> None:
        """Deliver a token or an error, from the thread of the engine."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class GenerationEngine:
    """Steps a `GenerationScheduler` in a thread while there are requests; `max_queue` of them wait at most.

    Raises:
        ArgumentError: `max_queue` is not positive.
    """

    def __init__(self, scheduler: GenerationScheduler, max_queue: int = 256) -> None:
        if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 1:
            raise ArgumentError(f"max_queue is {max_queue!r}", location=user_location(), expected="a positive integer")
        self.scheduler, self.max_queue = scheduler, max_queue
        self._tickets: dict[int, GenerationTicket] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="tessera-generation", daemon=True)
        self._thread.start()

    @property
    def open(self) -> int:
        """The requests that wait or run."""
        return len(self._tickets)

    def warm_up(self) -> None:
        """Compile the programs before the first request."""
        self.scheduler.warm_up()  # the engine has no request yet, and does not step

    def check(self, prompt: Any, max_tokens: int, sampling: Sampling = GREEDY) -> None:
        """Check a request without starting it.

        Raises:
            ArgumentError, OutOfBoundsError: as `GenerationScheduler.submit`.
        """
        self.scheduler.make_request(prompt, max_tokens, sampling)

    async def stream(
        self, prompt: Any, max_tokens: int = 128, sampling: Sampling = GREEDY
    ) -> AsyncIterator[tuple[int, str]]:
        """The tokens of a prompt (a list of tokens) as they come, with the reason of the end at the last, else "".

        A stream that is closed early ends its request.

        Raises:
            ArgumentError, OutOfBoundsError: the request is not valid.
            ExecutionError: the model failed.
            QueueFullError: there are too many requests.
        """
        request = self.scheduler.make_request(prompt, max_tokens, sampling)
        with self._wake:
            if self._closed:
                raise ExecutionError("the engine is closed")
            if len(self._tickets) >= self.max_queue + self.scheduler.slots:
                raise QueueFullError("the queue of requests is full", expected=f"up to {self.max_queue} that wait")
            ticket = self._tickets[request.number] = GenerationTicket(request)
            self._order(lambda: self.scheduler.enqueue(request))
        try:
            reason = ""
            while not reason:
                item = await ticket.queue.get()
                if isinstance(item, BaseException):
                    raise item
                token, reason = item
                yield token, reason
        finally:
            with self._wake:
                if self._tickets.pop(request.number, None) is not None:
                    self._order(lambda: self.scheduler.cancel(request))

    def _order(self, order: Callable[[], None]) -> None:
        """Let the thread do something between two steps."""
        self._orders.append(order)
        self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._orders or self.scheduler.busy or self._closed):
                    self._wake.wait()
                if self._closed:
                    return
                orders = list(self._orders)
                self._orders.clear()
            for order in orders:
                order()
            try:
                self._deliver(self.scheduler.step())
            except Exception as error:
                self._fail(error)

    def _deliver(self, given: Sequence[GivenToken]) -> None:
        for request, token, reason in given:
            ticket = self._tickets.get(request.number)
            if ticket is not None:
                ticket.put((token, reason))
                if reason:
                    with self._wake:
                        self._tickets.pop(request.number, None)

    def _fail(self, error: Exception) -> None:
        """End all requests with an error: after a failed step the cache holds nothing of use."""
        with self._wake:
            lost, self._tickets = list(self._tickets.values()), {}
            self._orders.clear()
        for ticket in lost:
            made = ExecutionError("generation failed", received=f"{type(error).__name__}: {error}"[:400])
            ticket.put(made)
        self.scheduler.reset()

    def close(self) -> None:
        """End the thread after its step; open requests fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        self._fail(ExecutionError("the engine is closed"))


class ContinuousBatchingServer:
    """Generation for many coroutines at once from one model: each stream has the tokens of its prompt alone.

    `options` are those of `GenerationScheduler`.

    >>> import tessera as ts
    >>> config = ts.llm.DecoderConfig(vocabulary=50, width=16, layers=1, heads=2, kv_heads=1, head_size=8, hidden=16,
    ...                               context=64)
    >>> model = ts.llm.LanguageModel(config, ts.llm.draw_weights(config, seed=0), target="interp")
    >>> async def main(server):
    ...     return [token async for token in server.generate_stream([3, 1, 4], max_length=3)]
    >>> with ts.serving.ContinuousBatchingServer(model, slots=2) as server:
    ...     asyncio.run(main(server)) == model.generate([3, 1, 4], 3).tokens
    True
    """

    def __init__(self, model: LanguageModel, max_queue: int = 256, **options: Any) -> None:
        if not isinstance(model, LanguageModel):
            raise ArgumentError("this is no language model", location=user_location(), received=type(model).__name__,
                                suggestion="ts.llm.load reads one")  # fmt: skip
        self.model = model
        self.engine = GenerationEngine(GenerationScheduler(model, **options), max_queue)

    async def generate_stream(
        self, prompt: Any, max_length: int = 128, sampling: Sampling = GREEDY
    ) -> AsyncIterator[int]:
        """The up to `max_length` new tokens of a prompt, a text or a list of tokens, without the end token."""
        tokens = self.model._encode(prompt, "the prompt")
        stream = self.engine.stream(tokens, max_length, sampling)
        try:
            async for token, _ in stream:
                if token not in self.model.config.end_tokens:
                    yield token
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    def __enter__(self) -> ContinuousBatchingServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
