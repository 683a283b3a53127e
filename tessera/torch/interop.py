"""Interoperation with PyTorch: programs that run on the memory of its tensors.

Nothing is copied but tensors whose elements are not contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from tessera.codegen.contract import get_backend
from tessera.codegen.donation import find_loose_reads, overwrite_arguments
from tessera.codegen.plan_execution import ArgumentBinder
from tessera.core.device import INTERP, count_gpus
from tessera.core.errors import ArgumentError, user_location
from tessera.core.types import TensorType, as_dtype
from tessera.frontend.jit.tracing import TracedFunction
from tessera.interp.sanitizer.report import ACTIVE_CHECKS, Checks
from tessera.ir.array_interchange import POINTER_ALIGN
from tessera.ir.tensor import Tensor
from tessera.runtime import driver
from tessera.torch.tensors import find_dtype, find_torch_dtype, from_torch, to_torch

if TYPE_CHECKING:
    from tessera.codegen.ptx.runtime.gpu_program import GpuProgram, SizedGpuProgram
    from tessera.codegen.ptx.runtime.resident_program import ResidentProgram


def describe_tensor(tensor: torch.Tensor) -> TensorType:
    """The type of a PyTorch tensor of concrete sizes.

    >>> describe_tensor(torch.zeros(2, dtype=torch.bfloat16))
    TensorType(shape=(2,), dtype=ts.bf16, policy=None)

    Raises:
        DTypeError: its dtype has no element type here.
    """
    return TensorType(tuple(int(n) for n in tensor.shape), find_dtype(tensor.dtype))


class SliceInUseError(Exception):
    """A program cannot write a slice of a tensor in place, since it reads the tensor in another order."""


DEVICE_TARGETS = {"cpu": "llvm", "cuda": "ptx"}
MAX_KNOWN = 32  # sizes of a program for which it is known how results are allocated
Allocation = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]  # what makes a result, and its arguments
RunOnTensors = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class ProgramOptions:
    """How a program runs: on a target ("llvm", "ptx"), or in the interpreter of a level ("graph", "schedule", "tile").

    `debug`: in the Graph interpreter, which reports the first NaN or infinity that finite numbers give.
    """

    target: str = "llvm"
    level: str | None = None
    debug: bool = False


def choose_target(tensors: Iterable[torch.Tensor], target: str | None = None) -> str:
    """The target for tensors: the one given, else that of their device.

    Raises:
        ArgumentError: the tensors are on different devices, or on one that no target serves.
    """
    devices = {t.device.type for t in tensors if t.dim() or t.device.type != "cpu"} or {"cpu"}
    if len(devices) > 1 or not devices <= DEVICE_TARGETS.keys():
        raise ArgumentError(
            f"tensors on {' and '.join(sorted(devices))}", location=user_location(),
            expected="tensors on one device: " + " or ".join(DEVICE_TARGETS),
        )  # fmt: skip
    return target or DEVICE_TARGETS[devices.pop()]


@dataclass(frozen=True)
class TensorProgram:
    """A compiled program: a function from tensors to PyTorch tensors.

    `loose`: the tensors, by number, of which it may read elements that its function does not use.
    """

    run: RunOnTensors
    loose: frozenset[int] = frozenset()


def compile_for_tensors(traced: TracedFunction, options: ProgramOptions) -> RunOnTensors:
    """Compile a traced function: a function from its tensors to PyTorch tensors, which are new and contiguous.

    A program that draws random numbers draws a seed from PyTorch's generator in each call, so `torch.manual_seed`
    sets them.

    Raises:
        ArgumentError: the function seeds Tessera's default generator.
    """
    return compile_in_place(traced, options).run


def compile_in_place(
    traced: TracedFunction,
    options: ProgramOptions,
    overwritten: Mapping[int, int] = MappingProxyType({}),
    in_place: Container[int] = (),
    parts: Collection[int] = (),
) -> TensorProgram:
    """As `compile_for_tensors`, for a program that uses the memory of its tensors.

    `overwritten`: results, by number, that may take the memory of a tensor, by its number. Where they do, and the
    tensor is contiguous, what is returned for them shares its memory. `in_place`: tensors, by number, that are read
    where they lie, whatever their strides are: the function takes the array that begins there
    (`tessera.torch.input_layouts`), so `reads_in_place` must hold. `parts`: results among the `overwritten` that are
    such an array with another slice (`ts.update_slice`), which alone is written.

    Raises:
        ArgumentError: the function seeds Tessera's default generator.
        SliceInUseError: one of the `parts` cannot be written where the tensor lies.
    """
    check_seedless(traced)
    program = _compile(traced, options, overwritten, in_place, parts)
    run = program.run
    constants = [to_torch(Tensor(a)) for a in traced.captures]
    device = "cuda" if options.target == "ptx" and reads_in_place(options) else "cpu"
    constants = [c.to(device) for c in constants]
    if traced.random is None:
        return replace(program, run=lambda tensors: run([*tensors, *constants])) if constants else program

    first = torch.zeros((), dtype=torch.int64, device=device)

    def draw(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        seed = torch.randint(-(1 << 63), (1 << 63) - 1, (), device=device)
        return run([*tensors, *constants, seed, first])

    return replace(program, run=draw)


def reads_in_place(options: ProgramOptions) -> bool:
    """Whether programs get the memory of tensors, and no copies as arrays."""
    compiled = options.level is None and not options.debug
    return compiled and (options.target == "llvm" or (options.target == "ptx" and count_gpus() > 0))


def _compile(
    traced: TracedFunction,
    options: ProgramOptions,
    overwritten: Mapping[int, int],
    in_place: Container[int],
    parts: Collection[int],
) -> TensorProgram:
    function = traced.function
    if options.debug or options.level == "graph":
        run = _run_on_arrays(driver.compile_graph(function, INTERP))
        return TensorProgram(_check_values(run) if options.debug else run)
    gives = bool(overwritten) and options.level is None and get_backend(options.target).capabilities.donation
    levels = driver.lower(function, options.target, {"donated": frozenset(overwritten.values())} if gives else {})
    if options.level is not None:
        return TensorProgram(_run_on_arrays(driver.compile_level(levels, options.level, options.target)))
    module = levels["tile"]
    if gives:
        module = overwrite_arguments(module, overwritten, parts)
    first = len(module.main.params) - int(module.main.attrs["outputs"])
    if not {first + r for r in parts} <= dict(module.main.attrs.get("reused", ())).keys():
        raise SliceInUseError("a kernel reads other elements of what it overwrites")
    runtime = driver.make_runtime(module, options.target)
    loose = find_loose_reads(module) if in_place else frozenset()
    if options.target == "ptx" and count_gpus():
        return TensorProgram(_run_on_gpu(cast("GpuProgram | SizedGpuProgram", runtime), in_place), loose)
    if options.target == "llvm":
        return TensorProgram(_run_on_host(runtime, in_place), loose)
    return TensorProgram(_run_on_arrays(runtime.run))


def _check_values(run: RunOnTensors) -> RunOnTensors:
    """A program whose first NaN or infinity of finite operands is an error."""

    def checked(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        token = ACTIVE_CHECKS.set(Checks(nan=True))
        try:
            return run(tensors)
        finally:
            ACTIVE_CHECKS.reset(token)

    return checked


def check_seedless(traced: TracedFunction) -> None:
    """Refuse a function that seeds the default generator: PyTorch's generator seeds it in each call.

    Raises:
        ArgumentError: it calls `ts.manual_seed`.
    """
    if traced.random is not None and traced.random.seed is not None:
        raise ArgumentError(
            f"{traced.function.name} seeds the default generator", location=traced.function.loc,
            expected="a function whose random numbers torch.manual_seed sets",
            suggestion="draw with a generator of its own: generator=ts.Generator(seed)",
        )  # fmt: skip


def _run_on_arrays(compiled: Callable[[Sequence[Any]], list[np.ndarray]]) -> RunOnTensors:
    """A program that takes and returns arrays; tensors of a GPU are copied to the host, and results back."""

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        device = next((t.device for t in tensors if t.dim()), torch.device("cpu"))
        arrays = [from_torch(t).numpy() for t in tensors]
        return [to_torch(Tensor(_own(r, arrays))).to(device) for r in compiled(arrays)]

    return run


def _own(result: np.ndarray, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """A result in memory of its own: an interpreter may return a view of an argument, or one array twice."""
    shared = result.base is not None or any(result is a for a in arrays)
    return np.array(result, order="C") if shared or not result.flags.c_contiguous else result


def _run_on_host(runtime: Any, in_place: Container[int]) -> RunOnTensors:
    """A program of the llvm target on the memory of the tensors: PyTorch allocates the results."""
    known: dict[Any, tuple[list[Allocation | int], Callable[..., Any], Any]] = {}  # by the program of known sizes

    def prepare(bound: Any) -> tuple[list[Allocation | int], Callable[..., Any], Any]:
        if len(known) >= MAX_KNOWN:
            known.clear()
        direct = runtime.launch_directly(bound, OTHER)
        function = _run_otherwise if direct is None else direct.run
        known[bound] = _list_allocations(bound.arguments), function, direct  # which keeps what the function reads
        return known[bound]

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        held = [
            t if i in in_place or (t.is_contiguous() and not t.is_neg()) else t.resolve_neg().contiguous()
            for i, t in enumerate(tensors)
        ]
        bound = runtime.find_bound(held)
        allocations, launch, _ = known.get(bound) or prepare(bound)
        outputs = [held[a] if isinstance(a, int) else a[0](*a[1]) for a in allocations]
        addresses = [t.data_ptr() for t in held + outputs]
        if launch(*addresses) is OTHER:
            runtime.launch(bound, addresses)
        return outputs

    return run


OTHER = object()  # what a direct launch gives where it leaves the call to the general way


def _run_otherwise(*addresses: int) -> object:
    return OTHER


def _list_allocations(arguments: ArgumentBinder) -> list[Allocation | int]:
    """How PyTorch allocates each result of a program, or the argument whose memory the result takes."""
    return [
        arguments.reused[i]
        if i in arguments.reused
        else _allocate(i in arguments.zeroed, p.shape, find_torch_dtype(p.dtype), "cpu")
        for i, p in enumerate(arguments.params)
        if p.output
    ]


def _allocate(zeroed: bool, shape: Sequence[int], dtype: torch.dtype, device: str) -> Allocation:
    """How a contiguous tensor is made: `torch.empty` parses its arguments, which takes longer than the rest of it."""
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
    if zeroed or device != "cpu" or quick is None:
        return partial(torch.zeros if zeroed else torch.empty, dtype=dtype, device=device), (tuple(shape),)
    strides = [math.prod(max(n, 1) for n in shape[a + 1 :]) for a in range(len(shape))]
    return quick, (tuple(shape), tuple(strides), dtype)


def _run_on_gpu(runtime: GpuProgram | SizedGpuProgram, in_place: Container[int]) -> RunOnTensors:
    """A program on the memory of a GPU's tensors, on PyTorch's current stream; repeated calls are CUDA graphs.

    PyTorch allocates the results. A call does not wait for its kernels: a later one raises that an index was out of
    bounds (`core.queued_failures`).
    """
    from tessera.codegen.ptx.runtime.device_memory import get_device_memory
    from tessera.codegen.ptx.runtime.driver_api import get_gpu

    memory, gpu = get_device_memory(), get_gpu()
    known: dict[Any, list[Allocation | int]] = {}  # by the program of known sizes

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        held = [t if i in in_place or _is_plain(t) else _place(t) for i, t in enumerate(tensors)]
        program = runtime.find_resident(held)
        allocations = known.get(program)
        if allocations is None:
            if len(known) >= MAX_KNOWN:
                known.clear()
            allocations = known[program] = _list_gpu_allocations(program)
        outputs = [held[a] if isinstance(a, int) else a[0](*a[1]) for a in allocations]
        try:
            program.launch([t.data_ptr() for t in (*held, *outputs)], memory.find_stream())
        finally:
            gpu.leave_thread()  # a backward pass runs on a thread of PyTorch
        return outputs

    return run


def _list_gpu_allocations(program: ResidentProgram) -> list[Allocation | int]:
    """As `_list_allocations`, for a program on a GPU."""
    return [
        _allocate(zeroed, shape, find_torch_dtype(as_dtype(dtype)), "cuda") if source is None else source
        for shape, dtype, zeroed, source in program.list_results()
    ]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory on a GPU holds its elements in order, where kernels can read it."""
    plain = tensor.is_cuda and tensor.is_contiguous() and not tensor.is_neg()
    return plain and not tensor.data_ptr() % POINTER_ALIGN


def _place(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's elements on the GPU, in order."""
    made = tensor.detach().resolve_neg().cuda().contiguous()
    return made.clone() if made.data_ptr() % POINTER_ALIGN else made
