"""What a call of a jitted function costs the host, and that its arrays stay on the GPU: checks against PyTorch, counts
of memory copies, streams, donation, and microseconds per call beside PyTorch's own.

    python -m benchmarks.gpu_calls [FILE]

Needs a GPU, pycuda and PyTorch; CuPy and JAX are checked where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import tessera as ts
from tessera.core.errors import TesseraError

BURST, ROUNDS = 64, 40
COUNTS = (1, 2, 5, 10, 20, 40)  # kernels of a program


def layer(x: Any, w: Any) -> Any:
    """A product and a softmax."""
    return ts.softmax(x @ w + 1.0)


jitted_layer = ts.jit(layer, target="ptx")


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same by PyTorch."""
    return torch.softmax(x @ w + 1.0, -1)


def check_chain() -> dict[str, Any]:
    """A chain of three calls on PyTorch's tensors: its results, and the memory copies that the profiler sees."""
    x, w = torch.randn(64, 128, device="cuda"), torch.randn(128, 128, device="cuda") / 8
    run = lambda: torch.from_dlpack(jitted_layer(jitted_layer(jitted_layer(x, w), w), w))  # noqa: E731
    want = reference(reference(reference(x, w), w), w)
    error = max((run() - want).abs().max().item() for _ in range(4))
    assert error < 1e-4, error
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(20):
            run()
        torch.cuda.synchronize()
    names = [e.key for e in seen.key_averages() for _ in range(e.count)]
    copies = sum("memcpy" in n.lower() for n in names)
    assert copies == 0 and names, names[:5]
    y = jitted_layer(x, w)
    assert torch.from_dlpack(y).data_ptr() == y.data.address and y.device == "cuda:0"
    assert torch.as_tensor(y, device="cuda").data_ptr() == y.data.address  # the CUDA array interface
    return {"error": error, "memory copies in 60 calls": copies, "kernels seen": len(names)}


def check_streams() -> dict[str, Any]:
    """Calls on PyTorch's side streams follow the work before them, and PyTorch's work follows them."""
    grow = ts.jit(lambda x: x * 2.0 + 1.0, target="ptx")
    streams = [torch.cuda.Stream() for _ in range(2)]
    for k in range(100):
        with torch.cuda.stream(streams[k % 2]):
            x = torch.full((1 << 20,), float(k), device="cuda")
            for _ in range(3):
                x = x + 1
            y = grow(grow(x))
            z = torch.from_dlpack(y) + 0.5
            x.fill_(-1.0)  # after the calls on this stream
        streams[k % 2].synchronize()
        assert bool((z == 4.0 * (k + 3) + 3.5).all()), k
    first = grow(torch.ones(1 << 20, device="cuda"))  # on the default stream
    with torch.cuda.stream(streams[0]):
        second = grow(first)
    assert second.numpy()[0] == 7.0 and second.data.stream == streams[0].cuda_stream
    return {"rounds": 100}


def check_libraries() -> dict[str, Any]:
    """Arrays of CuPy and JAX go in and come out in place."""
    found, double = {}, ts.jit(lambda x: x * 2.0, target="ptx")
    if importlib.util.find_spec("cupy"):
        import cupy

        x = cupy.arange(4096, dtype=cupy.float32)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            y = cupy.from_dlpack(double(x + 1)) + 1
            stream.synchronize()
        assert bool((y == 2 * (x + 1) + 1).all())
        found["cupy"] = cupy.__version__
    if importlib.util.find_spec("jax"):
        import jax

        if jax.default_backend() == "gpu":
            for k in range(20):
                x = jax.numpy.arange(4096, dtype=jax.numpy.float32) + k
                y = jax.dlpack.from_dlpack(double(x))
                del x
                assert bool((y == 2 * (jax.numpy.arange(4096, dtype=jax.numpy.float32) + k)).all())
            found["jax"] = jax.__version__
    return found


def check_donation() -> dict[str, Any]:
    """A donated tensor's memory holds the result; memory in use does not grow."""
    step = ts.jit(lambda p, g: p - 0.5 * g, target="ptx", donate=("p",))
    p, g = ts.tensor(np.ones((1 << 20,), np.float32), device="cuda:0"), torch.ones(1 << 20, device="cuda")
    place, old = p.data.address, p
    for _ in range(10):
        p = step(p, g)
    assert p.data.address == place and p.numpy()[-1] == -4.0
    try:
        old.numpy()
        raise AssertionError("a donated tensor was read")
    except TesseraError as error:
        assert "donated to the call of" in str(error)
    grow = ts.jit(lambda x: x + 1.0, target="ptx")
    for _ in range(8):
        x = grow(grow(g))
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(500):
        x = grow(grow(g))
    torch.cuda.synchronize()
    taken = before - torch.cuda.mem_get_info()[0]
    assert x.numpy()[0] == 3.0 and taken < 1 << 25, taken  # CUDA graphs take some; 1000 results would be 4 GiB
    return {"in place": True, "bytes more after 1000 calls": taken}


def check_language() -> dict[str, Any]:
    """What else runs on the device: kernels, ops outside of a trace, random numbers, checked indices, loops."""
    x = torch.randn(256, device="cuda")
    out = torch.empty_like(x)

    @ts.kernel
    def axpy(x, y, a, out):  # type: ignore[no-untyped-def]
        i = ts.tile.program_id(0)
        out[i] = a * x[i] + y[i]

    for _ in range(3):
        axpy[256](x, x, 2.0, out)
    assert torch.allclose(out, 3 * x, rtol=1e-6)
    d = ts.from_dlpack(x)
    assert np.allclose((d + d).sum().numpy(), 2 * x.sum().item(), rtol=1e-4)
    draw = ts.jit(lambda x: x * 0.0 + ts.rand((256,)), target="ptx")
    ts.manual_seed(1)
    first = draw(x).numpy()
    ts.manual_seed(1)
    assert np.array_equal(first, draw(x).numpy()) and not np.array_equal(first, draw(x).numpy())
    pick = ts.jit(lambda x, i: ts.take(x, i, axis=0), target="ptx")
    assert pick(x, np.array([3, 5])).numpy()[1] == x[5].item()
    try:
        pick(x, np.array([3, 999]))
        raise AssertionError("an index out of bounds was not found")
    except TesseraError as error:
        named = type(error).__name__
    loop = ts.jit(lambda x: ts.while_loop(lambda v: ts.sum(v) < 1e4, lambda v: v * 2.0, ts.abs(x)), target="ptx")
    assert loop(x).numpy().sum() >= 1e4
    grad = ts.jit(ts.grad(lambda w, a: ts.sum(ts.tanh(a @ w))), target="ptx")
    w, a = torch.randn(64, 64, device="cuda", requires_grad=True), torch.randn(64, 64, device="cuda")
    torch.tanh(a @ w).sum().backward()
    error = (torch.from_dlpack(grad(w.detach(), a)) - w.grad).abs().max().item()
    assert error < 2e-2, error
    return {"out of bounds": named, "gradient error": error}


def make_program(kernels: int) -> Callable[..., Any]:
    """A function whose program has this many kernels: each reduction ends one."""

    def stages(x: Any) -> Any:
        for _ in range(kernels):
            x = x - ts.roll(x, 1, 0) * 0.5 + ts.mean(x, axis=1, keepdims=True)
        return x

    return stages


def microseconds(run: Callable[[], Any]) -> float:
    """What one call costs the host: the median of bursts that the GPU's queue takes."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(BURST):
            run()
        times.append((time.perf_counter() - start) / BURST * 1e6)
    return statistics.median(times)


def measure_calls() -> list[dict[str, Any]]:
    """Microseconds of a call on the host, by the number of kernels and the kind of arguments."""
    found = []
    x = torch.randn(32, 64, device="cuda")
    y = torch.randn_like(x)
    one = ts.jit(lambda a, b: a + b, target="ptx")
    own, other = ts.from_dlpack(x.clone()), ts.from_dlpack(y.clone())
    found.append({"name": "a + b, tensors of tessera", "us": microseconds(lambda: one(own, other))})
    found.append({"name": "a + b, tensors of PyTorch", "us": microseconds(lambda: one(x, y))})
    found.append({"name": "a + b by PyTorch", "us": microseconds(lambda: x + y)})
    found.append({"name": "a + b to PyTorch and back", "us": microseconds(lambda: torch.from_dlpack(one(x, y)))})
    tree = ts.jit(lambda p, s: p["a"] + p["b"] * s, target="ptx")
    found.append({"name": "dict of tensors and a float", "us": microseconds(lambda: tree({"a": own, "b": other}, 0.5))})
    for kernels in COUNTS:
        run = ts.jit(make_program(kernels), target="ptx")
        run(own)
        found.append({"name": f"{kernels} kernels", "us": microseconds(lambda f=run: f(own))})
    return found


def measure_parts() -> list[dict[str, Any]]:
    """What the parts of a call cost: the driver's launch, the walk over the arguments, the allocation."""
    import ctypes

    from tessera.codegen.ptx.runtime.device_memory import get_device_memory
    from tessera.codegen.ptx.runtime.driver_api import find_driver_call
    from tessera.frontend.jit.call_keys import walk_call

    memory = get_device_memory()
    one = ts.jit(lambda a: a * 2.0, target="ptx")
    x = ts.tensor(np.ones((32, 64), np.float32), device="cuda:0")
    for _ in range(3):
        one(x)
    run = next(iter(one._known.values())).run
    call, resident = run, run.__self__
    bound = next(iter(resident._bound.values()))
    many = ts.jit(make_program(20), target="ptx")
    for _ in range(3):
        many(x)
    graph = next(iter(next(iter(many._known.values())).run.__self__._bound.values()))
    version, query = ctypes.c_int(), find_driver_call("cuDriverGetVersion")

    def walk() -> None:
        (walk_call((x,), {}, frozenset(), frozenset())[0], *one._ambient_key())

    parts = {
        "cuLaunchKernelEx": bound, "cuGraphLaunch of 20 stages": graph, "resident call": lambda: call([x.data]),
        "walk and key": walk, "empty": lambda: memory.empty((32, 64), np.dtype(np.float32), 0),
        "stream": memory.find_stream, "a ctypes call": lambda: query(ctypes.byref(version)),
    }  # fmt: skip
    return [{"name": name, "us": microseconds(part)} for name, part in parts.items()]


# The profiler, which slows launches, comes last.
SECTIONS = (
    measure_calls, measure_parts, check_streams, check_libraries, check_donation, check_language, check_chain,
)  # fmt: skip


def measure() -> list[dict[str, Any]]:
    """The figures of benchmarks.gpu."""
    check_chain()
    return measure_calls()


def main(path: str | None) -> int:
    """Run every section; one that fails does not end the others."""
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    failed = 0
    for section in SECTIONS:
        try:
            results[section.__name__] = section()
        except Exception:  # each is shown
            failed += 1
            results[section.__name__] = traceback.format_exc()
        print(section.__name__, json.dumps(results[section.__name__], indent=1), flush=True)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
