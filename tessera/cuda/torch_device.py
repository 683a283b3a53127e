"""PyTorch without CUDA: programs that name the device "cuda" run on CPU tensors while an emulated GPU is active.

Functions and methods of PyTorch that are asked for a CUDA device get the CPU, and `torch.cuda` answers for the emulated
GPU. Copies to and from the device are copies.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tessera.cuda.allocations import Allocations
from tessera.cuda.device import EmulatedDevice

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}


def _replace_device(value: Any) -> Any:
    """The CPU for a CUDA device."""
    import torch

    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


def _make_function_mode(allocations: Allocations) -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    def expose(tensor: Any) -> int:
        allocations.expose(tensor)
        return tensor.data_ptr()

    def backward(tensor: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False,
                 inputs: Any = None) -> None:  # fmt: skip
        with mode:  # the backward functions of the program ask for CUDA devices too
            torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    own: dict[Any, Callable[..., Any]] = {
        torch.Tensor.data_ptr: expose,
        torch.Tensor.is_cuda.__get__: lambda tensor: True,  # type: ignore[attr-defined]
        torch.Tensor.cuda: lambda tensor, *_, **__: tensor.clone(),
        torch.Tensor.cpu: lambda tensor, *_, **__: tensor.clone(),
        torch.Tensor.pin_memory: lambda tensor, *_, **__: tensor,
        torch.Tensor.record_stream: lambda tensor, *_: None,
        torch.Tensor.get_device: lambda tensor: 0,
        torch.Tensor.backward: backward,
    }

    class CudaOnCpu(TorchFunctionMode):
        """Replaces CUDA devices in the arguments of PyTorch's functions."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in own:
                return own[func](*args, **kwargs)
            new_args = tuple(_replace_device(a) for a in args)
            new_kwargs = {k: _replace_device(v) for k, v in kwargs.items()}
            moves = func is torch.Tensor.to and (new_args != args or new_kwargs != kwargs) if len(args) < 3 else False
            result = func(*new_args, **new_kwargs)
            return result.clone() if moves and result is args[0] else result

    mode = CudaOnCpu()
    return mode


def _make_initialisation_mode(allocations: Allocations) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class InitialisationMode(TorchDispatchMode):
        """Records which storages are allocated without values, and which are written since."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in _EMPTY:
                allocations.mark_uninitialised(result)
                return result
            for argument, value in zip(func._schema.arguments, args, strict=False):
                _mark_written(allocations, argument, value)
            for argument in func._schema.arguments:
                _mark_written(allocations, argument, (kwargs or {}).get(argument.name))
            return result

    return InitialisationMode()


def _mark_written(allocations: Allocations, argument: Any, value: Any) -> None:
    if argument.alias_info is None or not argument.alias_info.is_write:
        return
    for tensor in value if isinstance(value, list | tuple) else [value]:
        if hasattr(tensor, "untyped_storage"):
            allocations.mark_initialised(tensor)


class StreamStandIn:
    """A stream or an event: work is complete when it is issued."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> StreamStandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Nothing is pending."""

    wait = wait_event = wait_stream = synchronize = record

    def query(self) -> bool:
        """Whether the work is complete."""
        return True

    def elapsed_time(self, _: StreamStandIn) -> float:
        """No time: the emulator has no clock of a GPU."""
        return 0.0


def describe_device(device: EmulatedDevice) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` gives for the emulated GPU."""
    limits, (major, minor) = device.limits, device.capability
    return SimpleNamespace(
        name=f"{limits.name} (emulated)",
        major=major,
        minor=minor,
        multi_processor_count=limits.processors,
        total_memory=64 << 30,
        max_threads_per_multi_processor=limits.threads,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=limits.group_shared,
        shared_memory_per_multiprocessor=limits.shared,
        regs_per_multiprocessor=limits.registers,
        warp_size=32,
        L2_cache_size=50 << 20,
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def _list_stand_ins(device: EmulatedDevice) -> dict[str, Any]:
    """What replaces the names of `torch.cuda`."""
    import torch

    properties, stream = describe_device(device), StreamStandIn()
    zero = dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0)
    nothing = (
        "synchronize set_device empty_cache reset_peak_memory_stats set_stream init _lazy_init ipc_collect "
        "reset_max_memory_allocated"
    )
    values = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": device.capability,
              "get_device_properties": properties, "get_device_name": properties.name, "current_stream": stream,
              "default_stream": stream, "is_bf16_supported": True, "is_initialized": True,
              "is_current_stream_capturing": False, "mem_get_info": (64 << 30, 64 << 30), **zero,
              **dict.fromkeys(nothing.split())}  # fmt: skip
    found: dict[str, Any] = {name: lambda *_, value=value, **__: value for name, value in values.items()}
    found |= dict.fromkeys(("Stream", "Event", "device", "device_of"), StreamStandIn)
    found["stream"] = lambda *_: StreamStandIn()
    seed = torch.default_generator.manual_seed
    return found | {"manual_seed": seed, "manual_seed_all": seed}


@contextlib.contextmanager
def redirect_torch(device: EmulatedDevice, allocations: Allocations) -> Iterator[None]:
    """Run PyTorch's CUDA programs on the CPU; nothing where PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name, value in _list_stand_ins(device).items():
            if hasattr(torch.cuda, name):
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
        if device.debug:
            stack.enter_context(_make_initialisation_mode(allocations))
        stack.enter_context(_make_function_mode(allocations))
        yield


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of PyTorch; PyTorch is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@contextlib.contextmanager
def without_redirection() -> Iterator[None]:
    """PyTorch itself, for the code of this package: addresses that it asks for are not the program's."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with torch._C.DisableTorchFunction():
        yield
