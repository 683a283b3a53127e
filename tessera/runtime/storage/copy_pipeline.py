"""Copy pipelines: functions whose loads and stores of batches overlap with computation (programming model, 13.2)."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from tessera.core.errors import ArgumentError, user_location
from tessera.core.pytree import flatten
from tessera.ir.tensor import Tensor
from tessera.runtime.storage import DISK, HOST
from tessera.runtime.storage.async_copies import Future, async_copy, run_async
from tessera.runtime.storage.memory_spaces import space_of

F = TypeVar("F", bound=Callable[..., Any])


class AsyncLoad:
    """A load under way; `wait()` gives what was loaded."""

    def __init__(self, futures: list[Future], build: Callable[[list[Any]], Any]) -> None:
        self._futures, self._build = futures, build

    def done(self) -> bool:
        """Whether `wait` does not wait."""
        return all(f.done() for f in self._futures)

    def wait(self, timeout: float | None = None) -> Any:
        """What was loaded; `timeout` in seconds.

        Raises:
            ExecutionError: it takes longer than `timeout`.
            Exception: the load failed.
        """
        return self._build([f.wait(timeout) for f in self._futures])

    result = wait


class AsyncStore:
    """A store under way; `wait()` gives what was stored, and puts it into its list."""

    def __init__(self, future: Future, into: list[Any] | None) -> None:
        self._future, self._into = future, into

    def done(self) -> bool:
        """Whether `wait` does not wait."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Any:
        """What was stored, once it is; `timeout` in seconds.

        Raises:
            ExecutionError: it takes longer than `timeout`.
            AsyncCopyError: in debug mode, what is stored was written meanwhile.
        """
        stored = self._future.wait(timeout)
        if self._into is not None:
            self._into.append(stored)
            self._into = None
        return stored

    result = wait


class CopyPipeline:
    """The loads and stores that a call has begun, oldest first; what was loaded of a stream, until it is asked for."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.under_way: deque[AsyncLoad | AsyncStore] = deque()
        self.loaded: dict[int, tuple[Any, AsyncLoad]] = {}

    def begin(self, start: Callable[[], Any]) -> Any:
        """Begin a copy, when fewer than `stages` are under way."""
        while len(self.under_way) >= self.stages:
            self.under_way.popleft().wait()
        started = start()
        self.under_way.append(started)
        return started

    def load(self, source: Any, start: Callable[[], AsyncLoad]) -> AsyncLoad:
        """Begin to load; of a batch that is being loaded already there is one load."""
        if id(source) not in self.loaded:
            self.loaded[id(source)] = (source, self.begin(start))
        return self.loaded[id(source)][1]

    def taken(self, source: Any) -> Any:
        """A batch of a stream: what was loaded of it, or itself."""
        _, loading = self.loaded.pop(id(source), (source, None))
        return source if loading is None else loading.wait()

    def finish(self) -> None:
        """Wait for everything; the first failure is raised when all have ended."""
        failed: list[BaseException] = []
        while self.under_way:
            try:
                self.under_way.popleft().wait()
            except Exception as error:  # what it was that failed is for the caller to see
                failed.append(error)
        if failed:
            raise failed[0]


ACTIVE_PIPELINE: ContextVar[CopyPipeline | None] = ContextVar("memory pipeline", default=None)


class _BatchStream(list[Any]):
    """A list of batches: going through it gives those that were loaded where they were loaded."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            pipeline = ACTIVE_PIPELINE.get()
            yield batch if pipeline is None else pipeline.taken(batch)


def pipelined(function: F, stages: int = 2) -> F:
    """A function that loads and stores beside what it computes, at most `stages` copies at a time.

    Its first argument, if that is a list or tuple, is a stream: going through it gives what `async_load(stream[i])` has
    loaded. When the call returns all stores are done; a copy that failed is raised.

    Raises:
        ArgumentError: `stages` is no number of at least 1.

    >>> from tessera.runtime.storage.copy_pipeline import async_load, async_store, pipelined
    >>> def doubled(batches, results):
    ...     for i, batch in enumerate(batches):
    ...         if i + 1 < len(batches):
    ...             async_load(batches[i + 1])
    ...         async_store(batch * 2.0, results)
    >>> results = []
    >>> pipelined(doubled, stages=3)([Tensor([1.0]), Tensor([2.0])], results)
    >>> results
    [Tensor([2.], f32), Tensor([4.], f32)]
    """
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise ArgumentError("stages is a number of copies", location=user_location(), expected="at least 1",
                            received=repr(stages))  # fmt: skip

    @functools.wraps(function)
    def staged(*args: Any, **named: Any) -> Any:
        pipeline = CopyPipeline(stages)
        token = ACTIVE_PIPELINE.set(pipeline)
        try:
            result = function(*map(_wrap_stream, args[:1]), *args[1:], **named)
        except BaseException:
            with suppress(Exception):
                pipeline.finish()
            raise
        finally:
            ACTIVE_PIPELINE.reset(token)
        pipeline.finish()
        return result

    return staged  # type: ignore[return-value]


def _wrap_stream(argument: Any) -> Any:
    return _BatchStream(argument) if type(argument) in (list, tuple) else argument


def async_load(source: Any, to: str = HOST) -> AsyncLoad:
    """Start to load a batch into a memory: a tensor, containers of tensors, or a function that returns them.

    `wait()` returns the batch in that memory. A batch that is already there is not copied. A traced tensor is not
    moved: the schedule determines its memory. In a function under `ts.memory.pipeline` iteration over its stream also
    returns the batch.

    Raises:
        ArgumentError: no such memory, or this is no tensor.

    >>> async_load(lambda: Tensor([1.0, 2.0])).wait()
    Tensor([1., 2.], f32)
    """
    pipeline = ACTIVE_PIPELINE.get()
    start = functools.partial(_begin_load, source, to)
    return start() if pipeline is None else pipeline.load(source, start)


def _begin_load(source: Any, to: str) -> AsyncLoad:
    if callable(source) and not isinstance(source, Tensor):
        return AsyncLoad([run_async(source)], lambda made: made[0])
    leaves, tree = flatten(source)
    return AsyncLoad([_load_leaf(leaf, to) for _, leaf in leaves], lambda made: tree.build(iter(made)))


def _load_leaf(leaf: Any, to: str) -> Future:
    traced = isinstance(leaf, Tensor) and leaf.is_traced
    return run_async(lambda: leaf) if not traced and to == HOST == space_of(leaf) else async_copy(leaf, to=to)


def async_store(value: Any, to: Any = None) -> AsyncStore:
    """Begin to write what was computed: into a tensor or array of its shape, a .npy file, or at the end of a list.

    A list gets a copy of its own, in the order of the stores: a pipeline's by its end, any other's at `wait()`. Without
    `to` it is `wait()` alone that gives the copy. A traced tensor goes only to a list.

    Raises:
        ArgumentError: a traced tensor is to be written elsewhere.
        ShapeError: the two sides differ.

    >>> held = []
    >>> async_store(Tensor([1.0]), held).wait()
    Tensor([1.], f32)
    >>> held
    [Tensor([1.], f32)]
    """
    start = functools.partial(_begin_store, value, to)
    pipeline = ACTIVE_PIPELINE.get()
    return start() if pipeline is None else pipeline.begin(start)  # type: ignore[no-any-return]


def _begin_store(value: Any, to: Any) -> AsyncStore:
    if isinstance(value, Tensor) and value.is_traced and to is not None and not isinstance(to, list):
        raise ArgumentError(
            "a value that is traced has no elements to store yet", location=user_location(), expected="a list",
            suggestion="return it, and store what the call gives",
        )  # fmt: skip
    if to is None or isinstance(to, list):
        return AsyncStore(async_copy(value, to=HOST), to)
    if isinstance(to, (str, Path)):
        return AsyncStore(async_copy(value, to=DISK, path=to), None)
    return AsyncStore(async_copy(value, to), None)
