"""The same text through LLVM's own JIT, as an engine that owes this interpreter nothing."""

from __future__ import annotations

import ctypes
from functools import cache

import llvmlite.binding as llvm
import numpy as np

from tessera.interp.target.llvm import Module

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


@cache
def _engine(text: str) -> llvm.ExecutionEngine:
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=0)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def run_native(text: str, name: str, arrays: list[np.ndarray]) -> None:
    """Call a function of pointers."""
    address = _engine(text).get_function_address(name)
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(arrays))(address)(*[a.ctypes.data for a in arrays])


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that any vector access is content with."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def agree(text: str, *arrays: np.ndarray, name: str = "f") -> None:
    """Both engines leave the same bits in every array; NaNs need only both be NaN."""
    ours, theirs = [aligned(a) for a in arrays], [aligned(a) for a in arrays]
    Module(text).call(name, ours)
    run_native(text, name, theirs)
    for got, want in zip(ours, theirs, strict=True):
        same = got.view(f"u{got.dtype.itemsize}") == want.view(f"u{want.dtype.itemsize}")
        if got.dtype.kind not in "iub":
            same |= np.isnan(got) & np.isnan(want)
        assert same.all(), f"{got[~same][:8]} is not {want[~same][:8]} at {np.argwhere(~same)[:8].tolist()}"
