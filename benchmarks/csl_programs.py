"""One-PE CSL programs for the simulator's benchmark: scalar SAXPY, scalar GEMM, softmax, one @fmacs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.simulation import Simulation

LAYOUT = """
const memcpy = @import_module("<memcpy/get_params>", .{ .width = 1, .height = 1 });
layout {
  @set_rectangle(1, 1);
  @set_tile_code(0, 0, "pe.csl", .{ .memcpy_params = memcpy.get_params(0) });
  @export_name("a", [*]f32, true);
  @export_name("b", [*]f32, true);
  @export_name("c", [*]f32, true);
  @export_name("f", fn()void);
}
"""
PE = """
param memcpy_params;
const sys = @import_module("<memcpy/memcpy>", memcpy_params);
const math = @import_module("<math>");
const n: i16 = SIZE;
var a = @zeros([COUNT]f32);
var b = @zeros([COUNT]f32);
var c = @zeros([COUNT]f32);
var a_ptr: [*]f32 = &a;
var b_ptr: [*]f32 = &b;
var c_ptr: [*]f32 = &c;
fn f() void {
  BODY
  sys.unblock_cmd_stream();
}
comptime {
  @export_symbol(a_ptr, "a");
  @export_symbol(b_ptr, "b");
  @export_symbol(c_ptr, "c");
  @export_symbol(f);
}
"""
SAXPY = "for (@range(i16, n)) |i| { c[i] = 2.0 * a[i] + b[i]; }"
GEMM = """
  for (@range(i16, n)) |i| {
    for (@range(i16, n)) |j| {
      var sum: f32 = 0.0;
      for (@range(i16, n)) |k| { sum += a[i * n + k] * b[k * n + j]; }
      c[i * n + j] = sum;
    }
  }
"""
SOFTMAX = """
  var most: f32 = a[0];
  for (@range(i16, n)) |i| { if (a[i] > most) { most = a[i]; } }
  var sum: f32 = 0.0;
  for (@range(i16, n)) |i| { c[i] = math.exp(a[i] - most); sum += c[i]; }
  for (@range(i16, n)) |i| { c[i] = c[i] / sum; }
"""
FMACS = """
  const c_dsd = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{n} -> c[i] });
  const a_dsd = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{n} -> a[i] });
  @fmacs(c_dsd, c_dsd, a_dsd, 2.0);
"""


@dataclass(frozen=True)
class Kernel:
    """A program, what it computes, and the published cycles of its launch (0: none)."""

    name: str
    body: str
    size: int
    count: int
    published: int
    reference: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.reshape(16, 16) @ b.reshape(16, 16)).ravel()


def _softmax(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    e = np.exp(a - a.max())
    return e / e.sum()


KERNELS = (
    Kernel("saxpy 512, scalar", SAXPY, 512, 512, 11276, lambda a, b: 2 * a + b),
    Kernel("gemm 16^3, scalar", GEMM, 16, 256, 119197, _product),
    Kernel("softmax 256", SOFTMAX, 256, 256, 35681, _softmax),
    Kernel("softmax 128 (one row of two)", SOFTMAX, 128, 128, 17714, _softmax),
    Kernel("fmacs 1024", FMACS, 1024, 1024, 0, lambda a, b: 2 * a),
)


def run_kernel(kernel: Kernel, rng: np.random.Generator) -> int:
    """Run it on random inputs and check it; the cycles of its launch."""
    pe = PE.replace("SIZE", str(kernel.size)).replace("COUNT", str(kernel.count)).replace("BODY", kernel.body)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "layout.csl").write_text(LAYOUT)
        (Path(folder) / "pe.csl").write_text(pe)
        layout = compile_program(
            str(Path(folder) / "layout.csl"), arch="wse3", fabric_dims=(8, 3), fabric_offsets=(4, 1)
        )
    run = Simulation(layout)
    run.boot()
    a, b, c = (rng.random(kernel.count, np.float32) for _ in range(3))
    run.copy_in("a", {(0, 0): a})
    run.copy_in("b", {(0, 0): b})
    launch = run.launch("f")
    run.wait(run.copy_out("c", {(0, 0): c}))
    np.testing.assert_allclose(c, kernel.reference(a, b), rtol=1e-4)
    assert launch.started is not None
    return launch.ended - launch.started
