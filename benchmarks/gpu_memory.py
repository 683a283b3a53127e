"""Kernels that move memory: softmax, norms and elementwise chains against PyTorch, inductor, Triton and a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import tessera as ts
from benchmarks import triton_kernels as kernels
from benchmarks.gpu import bound, compiled, in_pairs, result
from tessera.core.types import as_dtype

ELEMENTS = 1 << 26
COLUMNS = (1024, 4096, 16384, 32768)
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@ts.jit
def softmax(x):
    """Softmax of each row."""
    return ts.softmax(x, axis=-1)


@ts.jit
def layer_norm(x, weight, bias):
    """Layer normalisation of each row."""
    return ts.layer_norm(x, None, weight, bias)


@ts.jit
def rms_norm(x, weight):
    """Root mean square normalisation of each row."""
    return ts.rms_norm(x, weight)


@ts.jit
def gate(x, y):
    """A chain of elementwise ops."""
    return ts.tanh(x) * y + x


def _gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * y + x


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


# Ours, PyTorch's, Triton's, and how many weights there are.
Peers = tuple[Any, Callable[..., torch.Tensor], Callable[..., Callable[[], Any]]]
ROWS: dict[str, tuple[Peers, int]] = {
    "softmax": ((softmax, _softmax, kernels.rows(kernels.softmax_rows)), 0),
    "layer_norm": ((layer_norm, _layer_norm, kernels.rows(kernels.layer_norm_rows)), 2),
    "rms_norm": ((rms_norm, _rms_norm, kernels.rows(kernels.rms_norm_rows)), 1),
}


def measure() -> list[dict[str, Any]]:
    """Every figure."""
    return [*_rows(), *_elementwise()]


def _rows() -> Iterator[dict[str, Any]]:
    for name, (peers, weights) in ROWS.items():
        for dtype, kind in TYPES.items():
            for columns in COLUMNS:
                shape = (ELEMENTS // columns, columns)
                yield _one(f"{name} {dtype} {columns}", peers, kind, [shape, *[(columns,)] * weights])


def _elementwise() -> Iterator[dict[str, Any]]:
    for dtype, kind in TYPES.items():
        yield _one(f"elementwise {dtype} 2^28", (gate, _gate, kernels.chain), kind, [(1 << 28,), (1 << 28,)])


def _one(name: str, entries: Peers, kind: torch.dtype, shapes: list[Any]) -> dict[str, Any]:
    entry, peer, in_triton = entries
    inputs = [torch.randn(s, device="cuda", dtype=kind) for s in shapes]
    out, copy, other = torch.full_like(inputs[0], float("nan")), *(torch.empty_like(inputs[0]) for _ in range(2))
    element = as_dtype(str(kind).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")).numpy
    program = compiled(entry, [np.lib.stride_tricks.as_strided(np.zeros(1, element), s, (0,) * len(s)) for s in shapes])
    ours = bound(program, *inputs, out)
    ours()
    want = peer(*[x.double() for x in inputs]) if inputs[0].numel() <= ELEMENTS else peer(*inputs).double()
    error = ((out.double() - want).norm() / want.norm()).item()
    assert error < (1e-5 if kind == torch.float32 else 6e-3), f"{name}: error {error}"
    del want
    fused = torch.compile(peer, dynamic=False)
    peers = {
        "PyTorch": lambda: peer(*inputs),
        "inductor": lambda: fused(*inputs),
        "Triton": in_triton(*inputs, other),
        "copy": lambda: copy.copy_(inputs[0]),
    }
    times = in_pairs(ours, peers)
    copied = times.pop("copy")
    moved = (sum(x.numel() for x in inputs) + out.numel()) * out.element_size()
    found = result(name, times, bytes_moved=moved)
    peak = 2 * copy.numel() * copy.element_size() / copied * 1e-9
    return {**found, "error": error, "copy_terabytes_per_second": peak, "of_copy": found["terabytes_per_second"] / peak}
