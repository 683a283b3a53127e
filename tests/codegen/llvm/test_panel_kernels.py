"""Panel kernels on AMX: names, and the text with tile registers against a model of the instructions, on any processor.

The model (Intel, Software Developer's Manual, chapter 18) takes the place of the intrinsics; it refuses tiles that
reach past the arrays.
"""

import ctypes
import itertools

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.codegen.llvm.runtime import jit
from tessera.codegen.llvm.text.pair_products import BF16, INT8_UINT8, UINT8_INT8
from tessera.codegen.llvm.text.panel_kernels import (
    DECLARATIONS,
    MatrixUnitText,
    PanelKernel,
    read_name,
    select_matrix_units,
)

PLAIN = ["  br label %done", "done:", "  ret void"]
ELEMENTS = {BF16: (ml_dtypes.bfloat16,) * 2, UINT8_INT8: (np.uint8, np.int8), INT8_UINT8: (np.int8, np.uint8)}
SIGNATURES = {
    "ldtilecfg": (ctypes.c_void_p,), "tilerelease": (), "tilezero": (ctypes.c_int8,),
    "tileloadd64": (ctypes.c_int8, ctypes.c_void_p, ctypes.c_int64),
    "tilestored64": (ctypes.c_int8, ctypes.c_void_p, ctypes.c_int64),
    **{name: (ctypes.c_int8,) * 3 for name in ("tdpbf16ps", "tdpbusd", "tdpbsud")},
}  # fmt: skip
NUMBERS = itertools.count()


class MatrixUnit:
    """Tile registers over the memory of some arrays, and of `buffer` bytes of the stack.

    Faults are noted, since a callback cannot raise.
    """

    def __init__(self, arrays, buffer):
        self.spans = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in arrays]
        self.buffer, self.beside = buffer, []
        self.tiles, self.shapes, self.faults = {}, None, []

    def ldtilecfg(self, place):
        data = ctypes.string_at(place, 64)
        widths = np.frombuffer(data[16:48], np.uint16)
        self.shapes = [(int(data[48 + n]), int(widths[n])) for n in range(8)]
        self.tiles = {n: np.zeros(s, np.uint8) for n, s in enumerate(self.shapes)}

    def tilerelease(self):
        self.shapes = None

    def tilezero(self, tile):
        self.tiles[tile] = np.zeros(self.shapes[tile], np.uint8)

    def rows(self, tile, place, stride):
        rows, width = self.shapes[tile]
        for row in range(rows):
            start = place + row * stride
            if not any(low <= start and start + width <= high for low, high in self.spans):
                self.beside += [start, start + width]
                if max(self.beside) - min(self.beside) > self.buffer:
                    self.faults.append((tile, row))
                    continue
            yield row, np.frombuffer((ctypes.c_uint8 * width).from_address(start), np.uint8)

    def tileloadd64(self, tile, place, stride):
        for row, data in self.rows(tile, place, stride):
            self.tiles[tile][row] = data

    def tilestored64(self, tile, place, stride):
        for row, data in self.rows(tile, place, stride):
            data[:] = self.tiles[tile][row]

    def multiply(self, c, a, b, left, right, parts, to):
        if self.shapes[a][1] // 4 != self.shapes[b][0] or self.shapes[c] != (self.shapes[a][0], self.shapes[b][1]):
            self.faults.append((c, a, b))
            return
        x = self.tiles[a].view(left).astype(np.float64)
        y = self.tiles[b].view(right).astype(np.float64).reshape(self.shapes[b][0], -1, parts)
        y = y.transpose(0, 2, 1).reshape(x.shape[1], -1)
        self.tiles[c] = (self.tiles[c].view(to) + x @ y).astype(to).view(np.uint8)

    def tdpbf16ps(self, c, a, b):
        self.multiply(c, a, b, *ELEMENTS[BF16], 2, np.float32)

    def tdpbusd(self, c, a, b):
        self.multiply(c, a, b, *ELEMENTS[UINT8_INT8], 4, np.int32)

    def tdpbsud(self, c, a, b):
        self.multiply(c, a, b, *ELEMENTS[INT8_UINT8], 4, np.int32)


def run_on_model(panel, arrays, more):
    """Run the definition for AMX, its intrinsics replaced by the model's functions."""
    buffer = 32 * panel.vectors * 64 if panel.add or panel.offset else 0
    unit, prefix, kept = MatrixUnit(arrays, buffer), f"matrix_unit_{next(NUMBERS)}_", []
    text = "\n".join([*MatrixUnitText(panel).text(PLAIN), *DECLARATIONS, "attributes #0 = { nounwind }"])
    text = text.replace(f"define internal void @{panel.name}(", f"define void @{prefix}run(")
    text = text.replace("llvm.x86.", prefix).replace(" immarg", "")
    for name, types in SIGNATURES.items():
        kept.append(ctypes.CFUNCTYPE(None, *types)(getattr(unit, name)))
        llvm.add_symbol(prefix + name, ctypes.cast(kept[-1], ctypes.c_void_p).value)
    engine = llvm.create_mcjit_compiler(jit._parse_text(text), jit._create_target_machine())
    engine.finalize_object()
    kind = ctypes.c_bool if panel.has_choice else ctypes.c_void_p
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *([kind] if more else []))
    function(engine.get_function_address(f"{prefix}run"))(*(x.ctypes.data for x in arrays[:3]), *more)
    assert not unit.faults and unit.shapes is None


def draw_arrays(panel, rng):
    """A, a panel of B, C and the numbers of the rows; and A and B as matrices of doubles."""
    left, right = ELEMENTS[panel.pair]
    parts, columns = panel.pair.parts, panel.vectors * 16
    a = np.zeros(panel.a_row * (panel.rows - 1) + panel.depth * parts, left)
    x = rng.integers(-100, 100, (panel.rows, panel.depth * parts)).astype(left)
    for row in range(panel.rows):
        a[row * panel.a_row :][: panel.depth * parts] = x[row]
    b = rng.integers(-100, 100, (panel.depth, panel.b_row, parts)).astype(right)
    y = b[:, :columns].astype(np.float64).transpose(0, 2, 1).reshape(panel.depth * parts, columns)
    to = np.float32 if panel.pair is BF16 else np.int32
    c = rng.integers(-9, 9, (panel.rows, panel.c_row)).astype(to)
    return [a, b, c, rng.integers(-9, 9, panel.rows).astype(np.int32)], x.astype(np.float64) @ y


sizes = {
    "rows": st.integers(1, 70),
    "vectors": st.integers(1, 4),
    "depth": st.integers(1, 40),
    "tile": st.integers(1, 14),
}
panels = st.builds(
    lambda pair, rows, vectors, depth, tile, more, add, offset: PanelKernel(
        pair, rows, vectors, depth, tile, (depth + more) * pair.parts, 16 * vectors + more, 16 * vectors + more,
        add, offset and pair is not BF16,
    ),
    st.sampled_from(list(ELEMENTS)), more=st.sampled_from([0, 3, 16]), add=st.booleans(), offset=st.booleans(), **sizes,
)  # fmt: skip


@settings(max_examples=30)
@given(panels)
def test_names_say_all_fields(panel):
    assert read_name(panel.name) == panel and read_name(panel.name + ".more") is None


@settings(max_examples=40)
@given(panels, st.integers(0, 99))
def test_any_panel(panel, seed):
    arrays, product = draw_arrays(panel, np.random.default_rng(seed))
    c, offset, columns = arrays[2], arrays[3], panel.vectors * 16
    want = c.astype(np.float64)
    start = want[:, :columns] if panel.add else 0
    want[:, :columns] = start + product + (offset[:, None] if panel.offset else 0)
    run_on_model(panel, arrays, [True] if panel.has_choice else [offset.ctypes.data] if panel.offset else [])
    np.testing.assert_array_equal(c, want)  # small integers: every order is exact


@pytest.mark.parametrize("pair", list(ELEMENTS), ids=lambda p: p.name)
def test_llvm_compiles_it_for_a_processor_with_the_unit(pair):
    panel = PanelKernel(pair, 45, 3, 21, 6, 128, 48, 64, True, pair is not BF16)
    lines = [*MatrixUnitText(panel).text(PLAIN), *DECLARATIONS, "attributes #0 = { nounwind }"]
    public = [line.replace("define internal", "define") for line in lines]
    code = jit.compile_for_machine("\n".join(public), "x86_64-unknown-linux-gnu", "sapphirerapids", "", panel.name)
    assert bytes.fromhex("c4e278 49c0".replace(" ", "")) in code  # tilerelease


@pytest.mark.parametrize(
    ("rows", "features", "used"), [(8, {"amx-bf16"}, True), (8, {"amx-int8"}, False), (3, {"amx-bf16"}, False)]
)
def test_the_unit_replaces_the_plain_definition(rows, features, used):
    panel = PanelKernel(BF16, rows, 1, 8, 6, 16, 16, 16, False, False)
    text = "\n".join([*panel.text([(0, 1, rows, "micro")]), ""])
    selected = select_matrix_units(text, features)
    assert ("tdpbf16ps" in selected) == used and (selected != text) == used
    assert "call void @micro" in selected  # for operands that have subnormal numbers


def test_the_environment_leaves_the_unit_unused(monkeypatch):
    monkeypatch.setenv("TESSERA_LLVM_AMX", "0")
    assert jit.find_matrix_units.__wrapped__() == frozenset()
