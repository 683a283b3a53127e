"""Reference results: the same text run by LLVM's own JIT."""

from __future__ import annotations

import ctypes
from functools import cache

import llvmlite.binding as llvm
import numpy as np

from tessera.interp.target.llvm import LlvmModule

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

FEATURES = llvm.get_host_cpu_features()
# Without instructions for half, LLVM calls a support library that this process does not have.
HALF = bool(FEATURES.get("f16c") or FEATURES.get("fullfp16"))


@cache
def _engine(text: str) -> llvm.ExecutionEngine:
    module = llvm.parse_assembly(text)
    module.verify()
    host = {"cpu": llvm.get_host_cpu_name(), "features": FEATURES.flatten()}
    machine = llvm.Target.from_default_triple().create_target_machine(opt=0, **host)
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
    LlvmModule(text).call(name, ours)
    run_native(text, name, theirs)
    for got, want in zip(ours, theirs, strict=True):
        same = got.view(f"u{got.dtype.itemsize}") == want.view(f"u{want.dtype.itemsize}")
        if got.dtype.kind not in "iub":
            same |= np.isnan(got) & np.isnan(want)
        assert same.all(), f"{got[~same][:8]} is not {want[~same][:8]} at {np.argwhere(~same)[:8].tolist()}"


def elementwise(body: str, inputs: list[str], output: str, declare: str = "") -> str:
    """A function of pointers %p0 %p1 ... %o that computes %r from %x0 %x1 ... for every element.

    The number of elements comes last, behind a pointer.
    """
    parameters = "".join(f"ptr %p{k}, " for k in range(len(inputs)))
    loads = "\n".join(
        f"  %a{k} = getelementptr {t}, ptr %p{k}, i64 %i\n  %x{k} = load {t}, ptr %a{k}, align 1"
        for k, t in enumerate(inputs)
    )
    return f"""{declare}
define void @f({parameters}ptr %o, ptr %n) {{
entry:
  %count = load i64, ptr %n
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
{loads}
  {body}
  %ao = getelementptr {output}, ptr %o, i64 %i
  store {output} %r, ptr %ao, align 1
  %next = add nuw i64 %i, 1
  %more = icmp ult i64 %next, %count
  br i1 %more, label %loop, label %exit
exit:
  ret void
}}
"""


DTYPE = {"half": np.float16, "float": np.float32, "double": np.float64}
DTYPE |= {f"i{n}": np.dtype(f"i{n // 8}").type for n in (8, 16, 32, 64)}


def edges(type: str) -> np.ndarray:
    """Values where things go wrong."""
    dtype = np.dtype(DTYPE[type])
    if dtype.kind == "i":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return np.array([0, 1, 2, 3, 7, 100, -1, -2, -8, -77, low, low + 1, high, high - 1, high // 2], dtype)
    f = np.finfo(dtype)
    one = [0, 1, 1.5, 2.5, 3.1, f.max, f.tiny, f.smallest_subnormal, f.eps, 1e3 + 0.5, np.inf]
    return np.array([*one, *[-x for x in one], np.nan], dtype)


def pairs(type: str) -> tuple[np.ndarray, np.ndarray]:
    """Every edge value with every other."""
    e = edges(type)
    a, b = np.meshgrid(e, e)
    return a.reshape(-1).copy(), b.reshape(-1).copy()


def agree_on(body: str, types: list[str], output: str, *inputs: np.ndarray, declare: str = "") -> None:
    """Both engines compute the same from these inputs."""
    count = len(inputs[0])
    text = elementwise(body, types, output, declare)
    agree(text, *inputs, np.zeros(count, DTYPE[output]), np.array([count]))
