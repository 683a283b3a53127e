"""Asynchronous copies between host, disk and device, prefetching, and copy pipelines that overlap with computation."""

from __future__ import annotations

import functools
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future as _Task
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as _TooLate
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tessera.core.device import default_device, shares_host_memory
from tessera.core.effects import perform_effects
from tessera.core.errors import ArgumentError, AsyncCopyError, ExecutionError, Location, ShapeError, user_location
from tessera.core.pytree import flatten
from tessera.core.types import GLOBAL, REGISTER, SHARED
from tessera.interp.sanitizer.report import ACTIVE_CHECKS
from tessera.ir.tensor import Tensor, wrap_array
from tessera.runtime.storage import DISK, HOST
from tessera.runtime.storage.memory_spaces import Resident, flush, on_disk, space_of

CACHE_LINE_BYTES = 64  # bytes of a cache line
_WORKERS = 2


class Future:
    """A copy under way; `wait()` gives what it made. Until then its source may not change.

    Under debug mode (`ts.debug.checked()`) a source that changed is reported as an AsyncCopyError.
    """

    def __init__(self, task: _Task[Any], source: np.ndarray | None, place: Location | None) -> None:
        self._task, self._place = task, place
        self._source = source if source is not None and ACTIVE_CHECKS.get() is not None else None
        self._sum = _checksum(self._source)

    def done(self) -> bool:
        """Whether it is at its end, so that `wait` does not wait."""
        return self._task.done()

    def wait(self, timeout: float | None = None) -> Any:
        """The copy, once it is made; `timeout` in seconds.

        Raises:
            ExecutionError: it takes longer than `timeout`.
            TesseraError: the copy failed.
            AsyncCopyError: in debug mode, the source was written meanwhile.
        """
        try:
            made = self._task.result(timeout)
        except _TooLate:
            raise ExecutionError(f"the copy is not done after {timeout} s", location=self._place) from None
        if _checksum(self._source) != self._sum:
            raise AsyncCopyError(
                "the source of a copy was written before its wait", location=user_location(),
                received=f"a copy begun at {self._place}", suggestion="wait() first",
            )  # fmt: skip
        self._source, self._sum = None, 0
        return made

    result = wait


def async_copy(src: Any, dst: Any = None, *, to: str | None = None, path: str | Path | None = None) -> Future:
    """Begin to copy a tensor into another, or `to` a memory: "host", "disk" (a file at `path`), "global" or "cuda:0".

    The copy runs beside the program; `future.wait()` gives the copied tensor (a Resident in a GPU's memory). In a
    traced program it gives the value itself. A copy into a tensor has the effect "memory".

    Raises:
        ArgumentError: no such memory, or it is not said where to.
        ShapeError: `dst` has another shape or element type.
        DeviceUnavailable: there is no such device.

    >>> import tessera as ts
    >>> future = ts.memory.async_copy(ts.ones((2, 2)), to="host")
    >>> future.wait()
    Tensor([[1., 1.],
            [1., 1.]], f32)
    """
    if (dst is None) == (to is None):
        raise ArgumentError(
            "a copy goes into a tensor or to a memory", location=user_location(), expected="dst, or to=..."
        )
    if isinstance(src, Tensor) and src.is_traced and dst is None:  # where its elements lie is for the schedule to say
        _check_space(str(to))
        return run_async(lambda: src)
    if dst is not None:
        perform_effects(["memory"])
    source = src.data if isinstance(src, Tensor) else src
    run = _make_copy_into(src, dst) if dst is not None else _make_copy_to(src, str(to), path)
    return Future(_get_workers().submit(run), source if isinstance(source, np.ndarray) else None, user_location())


def run_async(make: Callable[[], Any]) -> Future:
    """What a function gives, called beside the program."""
    return Future(_get_workers().submit(make), None, user_location())


def _make_copy_into(src: Any, dst: Any) -> Callable[[], Any]:
    source = src if isinstance(src, Resident) else _as_array(src)
    target = dst if isinstance(dst, Resident) else _as_array(dst)
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ShapeError(
            "the two sides of a copy differ", location=user_location(), expected=f"{target.shape} {target.dtype}",
            received=f"{source.shape} {source.dtype}",
        )  # fmt: skip

    def run() -> Any:
        elements = source.numpy() if isinstance(source, Resident) else source
        if isinstance(target, Resident):
            return target.fill(elements)
        np.copyto(target, elements)
        return dst

    return run


def _make_copy_to(src: Any, space: str, path: str | Path | None) -> Callable[[], Any]:
    """What makes a copy in a memory."""
    device = default_device() if space == GLOBAL else space
    if space == DISK:
        if path is None:
            raise ArgumentError("a copy on disk needs a file", location=user_location(), expected='path="x.npy"')
        return lambda: _copy_to_disk(_get_elements(src), path)
    _check_space(space)
    if space == HOST or shares_host_memory(device):
        return lambda: _copy_to_host(_get_elements(src), src)
    elements = _get_elements(src)
    room = Resident.empty(elements.shape, Tensor(elements).dtype, device)  # here, so that what is missing is said here
    return lambda: room.fill(elements)


def _check_space(space: str) -> None:
    """Refuse a name that is no memory."""
    if space not in (HOST, DISK, GLOBAL, "cpu", "interp", "llvm") and shares_host_memory(space):
        expected = "host, disk, global, or a device such as cuda:0"
        raise ArgumentError(f'"{space}" is not a memory to copy to', location=user_location(), expected=expected)


def _copy_to_disk(elements: np.ndarray, path: str | Path) -> Tensor:
    made = on_disk(path, elements.shape, Tensor(elements).dtype)
    np.copyto(made.data, elements)
    flush(made)
    return made


def _copy_to_host(elements: np.ndarray, src: Any) -> Tensor:
    """In memory of its own, with the type of a tensor it comes from."""
    copy = np.array(elements, copy=True, subok=False)
    return wrap_array(copy, src.type) if isinstance(src, Tensor) else Tensor(copy)


def _get_elements(src: Any) -> np.ndarray:
    return src.numpy() if isinstance(src, Resident) else _as_array(src)


def _as_array(x: Any) -> np.ndarray:
    found = x.numpy() if isinstance(x, Tensor) else x
    if not isinstance(found, np.ndarray):
        raise ArgumentError(
            f"{type(x).__name__} is not copied", location=user_location(), expected="a tensor or an array"
        )
    return found


@contextmanager
def near(x: Any, to: str) -> Iterator[Any]:
    """For the body of a `with` outside of kernels, a tensor brought near: what it is changes no value.

    To "host" (of a tensor on disk) and "global" its elements are copied there, and the name after `as` is the copy.
    "shared", "register", "L1" and "L2" hold nothing from one launch to the next: for them the elements are read once,
    into the caches of the processor.

    Raises:
        ArgumentError: there is no such memory.
    """
    if to not in (HOST, GLOBAL, SHARED, REGISTER, *_CACHE_NAMES):
        expected = ", ".join((HOST, GLOBAL, SHARED, REGISTER, *_CACHE_NAMES))
        raise ArgumentError(f'"{to}" is not a memory to prefetch into', location=user_location(), expected=expected)
    if isinstance(x, Tensor) and x.is_traced:
        yield x
    elif to in (HOST, GLOBAL):
        yield async_copy(x, to=to).wait()
    else:
        prefetch_to_l2(x)
        yield x


_CACHE_NAMES = ("L1", "L2", "L2_cache")


def prefetch_to_l2(x: Tensor) -> None:
    """Read from each cache line of a tensor, so that the caches hold what fits. It has the effect "memory"."""
    perform_effects(["memory"])
    if isinstance(x, Tensor) and not x.is_traced and x.data.size:
        bits = np.ascontiguousarray(x.data).view(np.uint8).reshape(-1)
        np.bitwise_or.reduce(bits[::CACHE_LINE_BYTES])


def _checksum(array: np.ndarray | None) -> int:
    return 0 if array is None else zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


@cache
def _get_workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_WORKERS, thread_name_prefix="tessera-copy")


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_get_workers.cache_clear)


# Copy pipelines: functions whose loads and stores of batches overlap with computation (programming model, 13.2).


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

    >>> from tessera.runtime.storage.async_copies import async_load, async_store, pipelined
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
