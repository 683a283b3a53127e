"""Dynamic batching: requests that arrive within a short time are concatenated and run together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.ir.tensor import Tensor
from tessera.serving.requests import ALONE, InferenceRequest

PADDING = ("left", "right", None)
BUSY_SECONDS = 0.05  # between two looks at whether the replicas are busy, where none has said that it is idle
Run = Callable[[dict[str, np.ndarray]], Awaitable[Any]]


class RequestBatch:
    """Requests that run together: their inputs concatenated along the first axis."""

    def __init__(self, padding: str | None = None, padding_value: float = 0) -> None:
        self.requests: list[InferenceRequest] = []
        self.rows = 0
        self._padding = padding, padding_value
        self._result: asyncio.Future[Any] | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def inputs(self) -> dict[str, np.ndarray]:
        """The inputs of all requests, one after the other."""
        names = self.requests[0].arrays
        return {name: self._join([r.arrays[name] for r in self.requests]) for name in names}

    def _join(self, arrays: list[np.ndarray]) -> np.ndarray:
        side, value = self._padding
        if side is not None and arrays[0].ndim > 1:
            longest = max(a.shape[1] for a in arrays)
            arrays = [pad_sequence(a, longest, side, value) for a in arrays]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    async def run(self, function: Run, index: int) -> Any:
        """The rows of one request in the result of `function`, which is called once for the batch."""
        if self._result is None:
            self._result = asyncio.ensure_future(function(self.inputs()))
            self._result.add_done_callback(_note_failure)
        whole = await asyncio.shield(self._result)  # a request that is cancelled leaves the others their result
        start = sum(r.rows for r in self.requests[:index])
        return take_rows(whole, start, self.requests[index].rows, self.rows)


def _note_failure(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # each request that waits raises it; asyncio need not log it when none does


def pad_sequence(array: np.ndarray, length: int, side: str, value: float = 0) -> np.ndarray:
    """An array [rows, n, ...] padded along axis 1 to a length.

    >>> pad_sequence(np.array([[1, 2]]), 4, "left").tolist()
    [[0, 0, 1, 2]]
    """
    missing = length - array.shape[1]
    if not missing:
        return array
    widths = [(0, 0)] * array.ndim
    widths[1] = (missing, 0) if side == "left" else (0, missing)
    return np.pad(array, widths, constant_values=value)


def take_rows(result: Any, start: int, rows: int, total: int) -> Any:
    """The rows of a request in a result: an array, or arrays in a dict, list or tuple.

    Raises:
        ShapeError: an array does not have the rows of the batch.
    """
    if isinstance(result, Mapping):
        return {k: take_rows(v, start, rows, total) for k, v in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)([take_rows(v, start, rows, total) for v in result])
    held = result.numpy() if isinstance(result, Tensor) else np.asarray(result)
    if held.ndim == 0 or held.shape[0] != total:
        raise ShapeError("a result does not have the rows of its batch", expected=f"{total} along axis 0",
                         received=str(held.shape),
                         suggestion="serve the model without batching: max_batch_size=1")  # fmt: skip
    return held if rows == total else held[start : start + rows]


class BatchSlot:
    """The place of a request in a batch; `replica.infer(slot)` runs the batch once, and gives the request's result."""

    def __init__(self, batch: RequestBatch, index: int) -> None:
        self.batch, self.index = batch, index

    @property
    def request(self) -> InferenceRequest:
        """The request."""
        return self.batch.requests[self.index]

    def hash(self) -> str:
        """The hash of the request's content."""
        return self.request.hash()

    async def run(self, function: Run) -> Any:
        """The result of the request, by a function of the batch's inputs."""
        return await self.batch.run(function, self.index)


class DynamicBatcher:
    """Collects requests into batches of up to `max_batch_size` rows, for at most `timeout_ms` milliseconds.

    While `is_busy()` is true a batch that is not full waits on and grows: nothing could run it yet.

    Requests of a batch have the same model, and inputs of the same names, types and shapes after the first axis. With
    `padding_strategy` "left" or "right", sequences of different lengths along axis 1 share a batch, and are padded
    with `padding_value` on that side; the model must ignore the padding, by a mask among its inputs. A request with
    more rows than a batch runs alone.

    >>> async def serve(batcher, x):
    ...     slot = await batcher.add(InferenceRequest([[x]]))
    ...     async def double(inputs):
    ...         return 2 * inputs["input"]
    ...     return len(slot.batch.requests), (await slot.run(double)).tolist()
    >>> async def main():
    ...     batcher = DynamicBatcher(max_batch_size=4, timeout_ms=20)
    ...     return await asyncio.gather(*(serve(batcher, x) for x in (1, 2, 3)))
    >>> asyncio.run(main())
    [(3, [[2]]), (3, [[4]]), (3, [[6]])]

    Raises:
        ArgumentError: a number is out of its range, or the padding unknown.
    """

    def __init__(
        self, max_batch_size: int = 8, timeout_ms: float = 2.0, padding_strategy: str | None = None,
        padding_value: float = 0, is_busy: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, (int, np.integer)) or max_batch_size < 1:
            raise ArgumentError(f"max_batch_size is {max_batch_size!r}", location=user_location(),
                                expected="a positive integer")  # fmt: skip
        if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, (int, float)) or not 0 <= timeout_ms < math.inf:
            raise ArgumentError(f"timeout_ms is {timeout_ms!r}", location=user_location(),
                                expected="milliseconds, 0 or more")  # fmt: skip
        if padding_strategy not in PADDING:
            raise ArgumentError(f"the padding strategy {padding_strategy!r} is unknown", location=user_location(),
                                expected='"left", "right" or None')  # fmt: skip
        self.max_batch_size, self.timeout_ms = int(max_batch_size), timeout_ms
        self.padding_strategy, self.padding_value = padding_strategy, padding_value
        self._open: dict[Any, RequestBatch] = {}
        self._is_busy = is_busy or (lambda: False)
        self._due: list[tuple[Any, RequestBatch]] = []  # whose time is over

    async def add(self, request: Any) -> BatchSlot:
        """The place of a request in a batch, when the batch is complete; arrays become an `InferenceRequest`."""
        held = request if isinstance(request, InferenceRequest) else InferenceRequest(request)
        key = self._key(held)
        batch = self._open.get(key)
        if batch is not None and batch.rows + held.rows > self.max_batch_size:
            self._close(key, batch)
            batch = None
        if batch is None:
            batch = self._open[key] = RequestBatch(self.padding_strategy, self.padding_value)
            asyncio.get_running_loop().call_later(self.timeout_ms / 1000, self._close_unless_busy, key, batch)
        batch.requests.append(held)
        batch.rows += held.rows
        slot = BatchSlot(batch, len(batch.requests) - 1)
        if batch.rows >= self.max_batch_size:
            self._close(key, batch)
        await asyncio.shield(batch.closed)
        return slot

    def _close_unless_busy(self, key: Any, batch: RequestBatch) -> None:
        if batch.closed.done() or not self._is_busy():
            self._close(key, batch)
            return
        if not any(held is batch for _, held in self._due):
            self._due.append((key, batch))
        asyncio.get_running_loop().call_later(BUSY_SECONDS, self._close_unless_busy, key, batch)

    def release(self) -> None:
        """A replica is idle: run the batch that has waited longest beyond its time."""
        while self._due:
            key, batch = self._due.pop(0)
            if not batch.closed.done():
                self._close(key, batch)
                return

    def _close(self, key: Any, batch: RequestBatch) -> None:
        if self._open.get(key) is batch:
            del self._open[key]
        if not batch.closed.done():
            batch.closed.set_result(None)

    def _key(self, request: InferenceRequest) -> Any:
        free = 1 if self.padding_strategy is None else 2
        return id(request.model), tuple(
            (name, a.dtype.str, a.dtype.name, a.ndim, a.shape[free:]) for name, a in sorted(request.arrays.items())
        )


def unwrap_inputs(inputs: Mapping[str, np.ndarray]) -> Any:
    """The inputs as a function of the user takes them: the array itself where it has no name."""
    return inputs[ALONE] if set(inputs) == {ALONE} else dict(inputs)
