"""Stores of a Schedule kernel that are no blocks of memory: no element past the end of a dim is written."""

import numpy as np
import pytest

from tessera.codegen.contract import emit_artifact, get_backend
from tessera.interp import schedule
from tessera.interp.tile import interpreter
from tessera.ir.parser import parse_module
from tessera.ir.verify import verify
from tessera.lower.schedule_to_tile.lowering import to_tile

ROWS, COLUMNS, PLACES = 5, 3, 28
BLOCK, MEMORY = f"!tile.ref<{ROWS}x{COLUMNS}xf32, global>", f"!tile.ref<{PLACES}xf32, global>"
DIMS = f'dims = [["i", {ROWS} : i64, "parallel"], ["j", {COLUMNS} : i64, "parallel"]]'
# The place of element [i, j] in memory; the tile of 4 x 2 covers 8 x 4.
STORES = {"by columns": (1, ROWS, 0), "every second": (2 * COLUMNS - 1, 2, 1), "a part": (4, 1, 3)}


def make_module(row_stride, column_stride, start):
    return verify(parse_module(f'''"builtin.module"() ({{
  "ts.func"() ({{
  ^bb0(%0: {BLOCK}, %1: {MEMORY}):
    "schedule.kernel"(%0, %1) ({{
    ^bb0(%2: {BLOCK}, %3: {MEMORY}):
      %4 = "schedule.index"() {{dim = 0 : i64}} : () -> tensor<i64>
      %5 = "schedule.index"() {{dim = 1 : i64}} : () -> tensor<i64>
      %6 = "schedule.load"(%2, %4, %5) : ({BLOCK}, tensor<i64>, tensor<i64>) -> tensor<f32>
      %7 = "ts.full"() {{dtype = i64, shape = [], value = {row_stride} : i64}} : () -> tensor<i64>
      %8 = "ts.full"() {{dtype = i64, shape = [], value = {column_stride} : i64}} : () -> tensor<i64>
      %9 = "ts.full"() {{dtype = i64, shape = [], value = {start} : i64}} : () -> tensor<i64>
      %10 = "ts.mul"(%4, %7) : (tensor<i64>, tensor<i64>) -> tensor<i64>
      %11 = "ts.mul"(%5, %8) : (tensor<i64>, tensor<i64>) -> tensor<i64>
      %12 = "ts.add"(%10, %11) : (tensor<i64>, tensor<i64>) -> tensor<i64>
      %13 = "ts.add"(%12, %9) : (tensor<i64>, tensor<i64>) -> tensor<i64>
      "schedule.store"(%3, %6, %13) : ({MEMORY}, tensor<f32>, tensor<i64>) -> ()
      "ts.yield"() : () -> ()
    }}) {{{DIMS}, schedule = {{loop = [], tile = [4 : i64, 2 : i64]}}}} : ({BLOCK}, {MEMORY}) -> ()
    "ts.return"() : () -> ()
  }}) {{outputs = 0 : i64, sym_name = "spread", workspace = 0 : i64}} : () -> ()
}}) {{ts.level = "schedule"}} : () -> ()
'''))  # fmt: skip


@pytest.mark.parametrize("store", STORES)
def test_no_element_past_the_end_is_written(store):
    row_stride, column_stride, start = STORES[store]
    module = make_module(*STORES[store])
    x = np.arange(1, 1 + ROWS * COLUMNS, dtype="f4").reshape(ROWS, COLUMNS)
    want = np.full(PLACES, -1, "f4")
    for i, j in np.ndindex(ROWS, COLUMNS):
        want[i * row_stride + j * column_stride + start] = x[i, j]
    lowered = to_tile(module)
    runs = {
        "schedule": lambda arrays: schedule.run(module, arrays),
        "tile": lambda arrays: interpreter.run(verify(lowered), arrays, debug=True),
        "llvm": get_backend("llvm").interpreter(emit_artifact(get_backend("llvm"), lowered, {})),
        "ptx": get_backend("ptx").sanitized(emit_artifact(get_backend("ptx"), lowered, {})),
    }
    for name, run in runs.items():
        out = np.full(PLACES, -1, "f4")
        run([x, out])
        np.testing.assert_array_equal(out, want, err_msg=name)
