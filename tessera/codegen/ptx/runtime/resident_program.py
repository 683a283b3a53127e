"""Resident calls: a program called with arrays of the device gives arrays of the device; nothing passes the host.

A call finds the addresses of its arguments and results. Launches with these addresses are laid out once and kept: from
the second time on, a program of more than four kernels is one CUDA graph.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from threading import Lock
from typing import Any

import numpy as np

from tessera.codegen.plan_execution import PlanParameter
from tessera.core.device import array_address
from tessera.core.device_array import DeviceArray, DeviceMemory
from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.types import as_dtype
from tessera.ir.array_interchange import READERS, import_device_array, is_on_device

MAX_BOUND = 64  # sets of addresses whose launches are kept
# Results of at most so many bytes share a block where there are as many: blocks that are freed and taken again in
# another order give other addresses, and launches are laid out anew for each set of them.
SMALL_RESULT, MIN_SHARED, SHARED_ALIGN = 1 << 15, 8, 256
BYTE = np.dtype(np.uint8)
BIT_FORMATS = {"bool": "B", "f16": "H", "bf16": "H"}  # scalars that are passed as their bits
# bind(given, stream, repeated) gives what runs the program on a stream; `given` has an address or number each.
Bind = Callable[[Sequence[Any], int, bool], Callable[[], None]]
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class ResidentProgram:
    """The calls of one program with arrays of a device.

    Arguments are arrays of the device, of Tessera or another library, which are used in place, or arrays of the host,
    which are copied to the device. Results are new arrays of the device, or those whose memory the plan reuses.
    """

    def __init__(self, plan: Mapping[str, Any], memory: DeviceMemory, bind: Bind) -> None:
        params = [PlanParameter(p) for p in plan["params"]]
        self.memory, self._bind = memory, bind
        self._inputs = [p for p in params if not p.output]
        self._reused: dict[int, int] = {result: argument for result, argument in plan.get("reused", ())}
        zeroed, first = set(plan["read"]), len(self._inputs)
        self._outputs = [(i, p, i in zeroed) for i, p in enumerate(params[first:], first)]
        self._types = [(p.shape, p.dtype.numpy) for p in self._inputs]
        self._places, self._shared = _share_block([p for i, p, _ in self._outputs if i not in self._reused])
        self._results = [
            (p.shape, p.dtype.numpy, z, self._reused.get(i), self._places.get(p)) for i, p, z in self._outputs
        ]
        # Where all results are new arrays of their own: what makes them, for each stream.
        self._own = not self._shared and not self._reused and not zeroed.intersection(range(first, len(params)))
        self._makers: dict[int, list[Callable[[], DeviceArray]]] = {}
        self._written = frozenset(i for i in plan["written"] if i < first and i not in self._reused.values())
        self._bound: dict[tuple[Any, ...], Callable[[], None]] = {}
        self._seen: dict[tuple[Any, ...], None] = {}
        self._constants: dict[int, _Constant] = {}
        # For each input the kind of another library's array that was found to match.
        self._kinds: list[Any] = [None] * len(self._inputs)
        self._imported: list[DeviceArray] = []
        # Ranks of one process meet in the host's calls of a program: one must not keep the others out.
        self._lock: Any = nullcontext() if plan.get("calls") else Lock()

    def call(self, arrays: Sequence[Any], constants: range = range(0)) -> list[DeviceArray]:
        """The results; `constants` are the places of arrays of the host that seldom change: their copies are kept.

        Raises:
            ShapeError, DTypeError, ArgumentError: the arrays do not match the parameters.
            ResourceError, ExecutionError: the device's memory is exhausted, or a kernel failed.
        """
        stream = self.memory.find_stream()
        if len(arrays) != len(self._types):
            return self._call_any(arrays, constants, stream)
        key: list[Any] = [stream]
        held: Any = arrays
        for x, (shape, dtype) in zip(arrays, self._types):  # noqa: B905  # of the same length
            if type(x) is DeviceArray and x.stream == stream and x.shape == shape and x.dtype is dtype:
                key.append(x.address)
                continue
            i = len(key) - 1
            if type(x) is not np.ndarray or self._inputs[i].scalar:
                return self._call_any(held, constants, stream)
            held = [*arrays] if held is arrays else held
            held[i] = self._place(i, x, stream, constants)
            key.append(held[i].address)
        results = self._make_results(held, stream)
        for made in results:
            key.append(made.address)
        self._run(tuple(key), stream)
        return results

    def list_results(self) -> list[tuple[tuple[int, ...], np.dtype, bool, int | None]]:
        """Of each result the shape, the dtype, whether its memory holds zeros first, and whose memory it takes."""
        return [(shape, dtype, zeroed, source) for shape, dtype, zeroed, source, _ in self._results]

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Run on memory of the caller: addresses of the arguments, then of the results, multiples of 16 bytes.

        Shapes and dtypes are not checked.

        Raises:
            ExecutionError, OutOfBoundsError: an earlier call failed.
        """
        self._run((stream, *addresses), stream)

    def _run(self, key: tuple[Any, ...], stream: int) -> None:
        with self._lock:
            (self._bound.get(key) or self._find(key, stream))()

    def _call_any(self, arrays: Sequence[Any], constants: range, stream: int) -> list[DeviceArray]:
        """As `call`, for arrays of any kind."""
        memory = self.memory
        if len(arrays) != len(self._inputs):
            raise ArgumentError("wrong number of arguments", expected=len(self._inputs), received=len(arrays))
        held = list(arrays)
        key: list[Any] = [stream]
        for i, (x, param) in enumerate(zip(arrays, self._inputs, strict=True)):
            if x.__class__ is DeviceArray:
                if x.stream != stream:
                    memory.order(x, stream)
                _check_type(param, x)
                key.append(x.address)
            elif (reader := READERS.get(x.__class__)) is not None and (kind := reader.kind(x)) is not None:
                if self._kinds[i] != kind:
                    _check_type(param, import_device_array(x, stream))
                    self._kinds[i] = kind
                key.append(reader.address(x))
            elif param.scalar:
                key.append(pack_scalar(x, param.dtype.name))
            else:
                held[i] = self._place(i, x, stream, constants)
                key.append(held[i].address)
        results = self._make_results(held, stream)
        self._run((*key, *[r.address for r in results]), stream)
        if self._imported:
            memory.keep_until_done([self._imported.pop() for _ in range(len(self._imported))], stream)
        return results

    def _make_results(self, arrays: Sequence[Any], stream: int) -> list[DeviceArray]:
        """New arrays for the results, some of them in one block, and the arguments that the caller gave up."""
        if self._own:
            return [make() for make in self._makers.get(stream) or self._prepare(stream)]
        memory, results = self.memory, []
        shared = memory.empty((self._shared,), BYTE, stream) if self._shared else None
        for shape, dtype, zeroed, source, place in self._results:
            if source is not None:
                results.append(arrays[source])
                continue
            if place is None or shared is None:
                made = memory.empty(shape, dtype, stream)
            else:
                made = DeviceArray(shared.address + place, shape, dtype, shared, memory, stream)
            results.append(made)
            if zeroed:
                memory.clear(made, stream)
        return results

    def _prepare(self, stream: int) -> list[Callable[[], DeviceArray]]:
        """What makes the results of calls on a stream."""
        made = self._makers[stream] = [self.memory.prepare(shape, dtype, stream) for shape, dtype, *_ in self._results]
        return made

    def _find(self, key: tuple[Any, ...], stream: int) -> Callable[[], None]:
        """What runs the program on these addresses; what comes a second time is kept."""
        repeated = key in self._seen
        run = self._bind(key[1:], stream, repeated)
        kept = self._bound if repeated else self._seen
        if len(kept) >= MAX_BOUND:
            del kept[next(iter(kept))]
        if repeated:
            self._bound[key] = run
        else:
            self._seen[key] = None
        return run

    def _place(self, i: int, x: Any, stream: int, constants: range) -> DeviceArray:
        """An argument of another kind as an array of the device."""
        param = self._inputs[i]
        if is_on_device(x):
            found = import_device_array(x, stream)
            _check_type(param, found)
            self._imported.append(found)
            return found
        if i in self._written:
            raise ArgumentError(
                f"argument {param.name} is written by a kernel on {self.memory.name}, and lies in host memory",
                expected=f"an array on {self.memory.name}", suggestion=f'{param.name}.to("{self.memory.name}")',
            )  # fmt: skip
        array = param.convert(x)
        if i not in constants:
            return self.memory.copy_in(array, stream)
        known = self._constants.get(i)
        if known is None or not known.holds(array):
            known = self._constants[i] = _Constant(array, self.memory.copy_in(array, stream))
        if known.placed.stream != stream:
            self.memory.order(known.placed, stream)
        return known.placed


def _share_block(results: Sequence[PlanParameter]) -> tuple[dict[PlanParameter, int], int]:
    """The places of small results in a block that they share, and its size; nothing where there are few."""
    places, size = dict[PlanParameter, int](), 0
    small = [p for p in results if 0 < math.prod(p.shape) * p.dtype.numpy.itemsize <= SMALL_RESULT]
    for param in small if len(small) >= MIN_SHARED else ():
        places[param] = size
        size += -(-math.prod(param.shape) * param.dtype.numpy.itemsize // SHARED_ALIGN) * SHARED_ALIGN
    return places, size


class _Constant:
    """An array of the host with its copy on the device, which is valid as long as the array's elements are the same."""

    def __init__(self, array: np.ndarray, placed: DeviceArray) -> None:
        self.array, self.placed = array, placed
        self.before = array if _is_frozen(array) else np.array(array, order="C")

    def holds(self, array: np.ndarray) -> bool:
        """Whether the copy has the elements of an array."""
        if array is not self.array:
            return False
        if self.before is array or not array.nbytes:
            return True
        current = np.ascontiguousarray(array)
        return _memcmp(array_address(current), array_address(self.before), current.nbytes) == 0


def _is_frozen(array: np.ndarray) -> bool:
    """Whether nothing can write the elements."""
    return not array.flags.writeable and array.base is None


def _check_type(param: PlanParameter, found: DeviceArray) -> None:
    if found.shape != param.shape:
        raise ShapeError(f"argument {param.name} has the wrong shape", expected=param.shape, received=found.shape)
    if found.dtype != param.dtype.numpy:
        raise DTypeError(f"argument {param.name} has the wrong dtype", expected=param.dtype, received=found.dtype)


def pack_scalar(array: Any, dtype: str) -> int | float:
    """A scalar argument of a prepared launch."""
    value = np.asarray(array, as_dtype(dtype).numpy)
    if dtype in BIT_FORMATS:
        return int(value.view(f"u{value.dtype.itemsize}")[()])
    return value.item()
