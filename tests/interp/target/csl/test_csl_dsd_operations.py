"""DSD operations agree with NumPy for every form of their operands; DSD updates; DSRs; `@map`."""

import numpy as np
import pytest
from csl_harness import run

from tessera.interp.target.csl.pe.dsd_operations import _apply_to_vectors, execute_operation, forget_views
from tessera.interp.target.csl.pe.dsd_table import DSD_OPS
from tessera.interp.target.csl.pe.microthreads import ring_positions
from tessera.interp.target.csl.sema.values import Circular, Mem1d
from tessera.interp.target.csl.text.diagnostics import CslFault

A, B, SCALAR = [1.5, -2.25, 3.0, 0.5, -4.0, 100.0], [2.0, 0.25, -1.0, 8.0, 3.0, -2.0], 3.0
I, J, WORD = [1, 0x8001, 300, 5, 0xFFFF, 0x00F0], [1, 3, 2, 15, 4, 8], 2


def wide(f):
    return lambda *args: f(*(np.float64(x) for x in args))


WANT = {
    **{
        f"f{name}{size}": wide(f)
        for size in "hs"
        for name, f in {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul": lambda a, b: a * b,
            "max": max,
            "abs": abs,
            "neg": lambda a: -a,
            "mov": lambda a: a,
            "mac": lambda a, b, c: a + b * c,
        }.items()
    },
    "faddhs": wide(lambda a, b: a + b),
    "fmachs": wide(lambda a, b, c: a + b * c),
    "fh2s": wide(lambda a: a),
    "fs2h": wide(lambda a: a),
    "fh2xp16": lambda a: round(float(a)),
    "fs2xp16": lambda a: round(float(a)),
    "xp162fh": lambda a: float(np.int16(np.uint16(a))),
    "xp162fs": lambda a: float(np.int16(np.uint16(a))),
    "mov16": lambda a: a,
    "mov32": lambda a: a,
    "add16": lambda a, b: a + b,
    "addc16": lambda a, b: a + b,
    "sub16": lambda a, b: a - b,
    "and16": lambda a, b: a & b,
    "or16": lambda a, b: a | b,
    "xor16": lambda a, b: a ^ b,
    "sll16": lambda a, b: a << b if b < 16 else 0,
    "slr16": lambda a, b: a >> b if b < 16 else 0,
    "sar16": lambda a, b: int(np.int16(np.uint16(a))) >> min(b, 15),
    "clz": lambda a: 16 - a.bit_length(),
    "ctz": lambda a: (a & -a).bit_length() - 1 if a else 16,
    "popcnt": lambda a: a.bit_count(),
}
CASES = [(name, form) for name, op in DSD_OPS.items() for form in op.forms if form[0] == "D"]


def spelled(type_, values):
    text = ", ".join(str(type_.wrap(v) if hasattr(type_, "wrap") else float(v)) for v in values)
    return f"[{len(values)}]{type_} {{ {text} }}"


@pytest.mark.parametrize(("name", "form"), CASES)
def test_operation(name, form, tmp_path):
    op = DSD_OPS[name]
    lines, operands, rows = [f"export var out = @zeros([6]{op.result});"], ["view_out"], []
    for k, (kind, type_) in enumerate(zip(form[1:], op.sources, strict=True)):
        whole = hasattr(type_, "wrap")
        values = (I if k == 0 else J) if whole else (A, B, A)[k]
        if kind == "S":
            values = [WORD if whole else SCALAR] * 6
            operands.append(f"@as({op.scalars[0] if whole and op.scalars else type_}, {values[0]})")
            if name == "faddhs":
                operands[-1] = f"@as(f16, {SCALAR})"
        else:
            lines.append(f"var s{k} = {spelled(type_, values)};")
            lines.append(f"const v{k} = @get_dsd(mem1d_dsd, .{{ .tensor_access = |i|{{6}} -> s{k}[i] }});")
            operands.append(f"v{k}")
        rows.append(values)
    lines.append("const view_out = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{6} -> out[i] });")
    lines.append(f"export fn main() void {{ @{name}({', '.join(operands)}); }}")
    found = run(tmp_path, "\n".join(lines)).get_variable("out")
    want = np.array([WANT[name](*args) for args in zip(*rows, strict=True)])
    want = (want.astype(np.int64) & 0xFFFFFFFF if found.dtype.kind in "iu" else want).astype(found.dtype)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    ("call", "type_", "want"),
    [
        ("@fadds(&out, @as(f32, 10.0), v)", "f32", 10 + 1.5 - 2.25 + 3.0),
        ("@faddh(&out, @as(f16, 10.0), v)", "f16", 10 + 1.5 - 2.25 + 3.0),
        ("@faddhs(&out, @as(f32, 10.0), v)", "f16", 10 + 1.5 - 2.25 + 3.0),
        ("@fmaxs(&out, @as(f32, -9.0), v)", "f32", 3.0),
        ("@fmuls(&out, @as(f32, 2.0), v)", "f32", 2 * 1.5 * -2.25 * 3.0),
        ("@fsubs(&out, @as(f32, 2.0), v)", "f32", 2 - 1.5 + 2.25 - 3.0),
        ("@fmovs(&out, v)", "f32", 3.0),
        ("@fnorms(&out, @as(f32, 12.0))", "f32", 1.5),
        ("@fscales(&out, @as(f32, 1.5), @as(i16, 3))", "f32", 12.0),
    ],
)
def test_into_a_pointer(call, type_, want, tmp_path):
    result = "f16" if "@faddh(" in call else "f32"
    text = f"""var a = [3]{type_} {{ 1.5, -2.25, 3.0 }}; export var out: {result};
      const v = @get_dsd(mem1d_dsd, .{{ .tensor_access = |i|{{3}} -> a[i] }});
      export fn main() void {{ {call}; }}"""
    assert run(tmp_path, text).get_variable("out")[0] == want


HEAD = """export var out = @zeros([12]f32); var a = @zeros([12]f32);
  var d = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{3} -> out[i] });
  const v = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{3} -> a[i] });
  fn fill() void { for (@range(i16, 12)) |i| { a[i] = @as(f32, i + 1); } }
"""


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("@fmovs(@increment_dsd_offset(d, 2, f32), v);", [0, 0, 1, 2, 3, 0]),
        ("@fmovs(@set_dsd_stride(d, 2), v);", [1, 0, 2, 0, 3, 0]),
        ("@fmovs(@set_dsd_stride(@increment_dsd_offset(d, 4, f32), -2), v);", [3, 0, 2, 0, 1, 0]),
        ("@fmovs(d, @set_dsd_length(v, 5));", [1, 2, 3, 4, 5, 0]),
        ("@fmovs(d, @set_dsd_base_addr(v, &a[6]));", [7, 8, 9, 0, 0, 0]),
        ("@fmovs(@set_dsd_length(d, 4), @as(f32, 2.5));", [2.5, 2.5, 2.5, 2.5, 0, 0]),
        ("@fmovs(d, @get_dsd(mem1d_dsd, .{ .base_address = &a, .extent = 3, .stride = 3, .offset = 1 }));", [2, 5, 8]),
        ("@fmovs(d, @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> a[11 - 2 * i] }));", [12, 10, 8, 6, 0]),
        (
            "@fmovs(d, @get_dsd(mem4d_dsd, .{ .tensor_access = |i, j|{2, 3} -> a[6 * i + 2 * j] }));",
            [1, 3, 5, 7, 9, 11],
        ),
        # Hardware strides: back by 4, then on to the next row.
        (
            "@fmovs(d, @get_dsd(mem4d_dsd, .{ .base_address = &a, .offset = 1, .stride = .{ 1, 4 },"
            " .extent = .{ 2, 3 } }));",
            [2, 3, 4, 8, 9, 10],
        ),
        # Repeated additions to one cell, and a value that propagates along the vector: both execute in order.
        ("const s = @set_dsd_length(@set_dsd_stride(d, 0), 6); @fadds(s, s, @set_dsd_length(v, 6));", [21, 0]),
        ("out[0] = 1.0; const n = @increment_dsd_offset(d, 1, f32); @fadds(n, d, d);", [1, 2, 4, 8, 0]),
        (
            "const m = @get_dsd(mem4d_dsd, .{ .tensor_access = |i, j|{3, 2} -> out[j] });"
            "@fadds(m, m, @set_dsd_length(v, 6));",
            [9, 12, 0],
        ),
    ],
)
def test_descriptors(body, want, tmp_path):
    found = run(tmp_path, HEAD + f"export fn main() void {{ fill(); {body} }}").get_variable("out")
    assert found[: len(want)].tolist() == want


@pytest.mark.parametrize(("first", "want"), [(0, [1, 2, 3]), (10, [11, 12, 1])])
def test_a_circular_buffer_begins_at_its_address_and_goes_on_at_the_front(first, want, tmp_path):
    ring = f"@get_dsd(circbuf_dsd, .{{ .base_address = &a[{first}], .extent = 12 }})"
    text = HEAD + f"export fn main() void {{ fill(); @fmovs(d, {ring}); }}"
    assert run(tmp_path, text).get_variable("out")[:3].tolist() == want


def test_parts_of_a_circular_buffer_follow_each_other():
    ring = Circular(np.zeros(6, "f4"), 8, 6)
    assert [ring_positions(ring, np.dtype("f4"), start, 2).tolist() for start in (0, 2, 4)] == [[2, 3], [4, 5], [0, 1]]


def test_fmacs_rounds_the_product_and_the_sum(tmp_path):
    x = np.float32(1 + 2**-12)
    text = HEAD + f"export fn main() void {{ out[0] = -1.0; a[0] = {float(x)!r}; @fmacs(d, d, v, {float(x)!r}); }}"
    assert run(tmp_path, text).get_variable("out")[0] == x * x - np.float32(1)


@pytest.mark.parametrize(("name", "want"), [("f16", 2.001953125), ("bf16", 2.0)])
def test_sixteen_bit_operations_use_the_selected_format(name, want, tmp_path):
    text = """var a = [2]@fp16() { 1.0, 1.0 }; export var out: [2]f32; var half: [2]@fp16();
      const va = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> a[i] });
      const vh = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> half[i] });
      const vo = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> out[i] });
      export fn main() void { @faddh(vh, va, @as(@fp16(), 1.001953125)); @fh2s(vo, vh); }"""
    assert run(tmp_path, text, fp16_format=name).get_variable("out").tolist() == [want, want]


def test_products_of_16_bit_floats_are_rounded_with_their_sum(tmp_path):
    """As a public probe on the vendor's simulator finds; 32-bit floats are rounded twice, as a public stencil needs."""
    text = """var h: [2]f16; var s: [2]f32;
      var a = [2]f16 { 1.0009765625, 3.0 }; var c = [2]f16 { -1.001953125, 0.5 };
      var wa = [2]f32 { 1.00000011920928955078125, 3.0 }; var wc = [2]f32 { -1.0000002384185791015625, 0.5 };
      const vh = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> h[i] });
      const va = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> a[i] });
      const vc = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> c[i] });
      const vs = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> s[i] });
      const vwa = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> wa[i] });
      const vwc = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> wc[i] });
      export fn main() void { @fmach(vh, vc, va, @as(f16, 1.0009765625));
                              @fmacs(vs, vwc, vwa, @as(f32, 1.00000011920928955078125)); }"""
    pe = run(tmp_path, text)
    assert pe.get_variable("h").tolist() == [2.0**-20, 3.50390625]
    assert pe.get_variable("s")[0] == 0.0


def test_mov32_moves_bits(tmp_path):
    text = """export var out: [2]u32; var a = [4]f16 { 1.0, 2.0, 3.0, 4.0 };
      const d = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> out[i] });
      const v = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> a[i] });
      export fn main() void { @mov32(d, v); }"""
    want = np.array([1, 2, 3, 4], np.float16).view(np.uint32)
    assert run(tmp_path, text).get_variable("out").tolist() == want.tolist()


def test_dsr_keeps_its_address(tmp_path):
    text = (
        HEAD
        + """const r = @get_dsr(dsr_dest, 1); const q = @get_dsr(dsr_src1, 1);
      export fn main() void { fill(); @load_to_dsr(r, d, .{ .save_address = true }); @load_to_dsr(q, v);
        @fmovs(r, q); @fmovs(r, q); }"""
    )
    assert run(tmp_path, text).get_variable("out")[:7].tolist() == [1, 2, 3, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("@map(square, v, d);", [1, 4, 9, 0]),
        ("@map(sum, v, &total, &total); out[0] = total;", [6, 0]),
        ("@map(note, v);", [6, 0]),
        ("twice(); twice(); out[1] = total;", [0, 12, 0]),
        ("@map(math.sqrt_f32, @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{2} -> a[3 + 5 * i] }), d);", [2, 3, 0]),
    ],
)
def test_map(body, want, tmp_path):
    text = (
        HEAD
        + """const math = @import_module("<math>"); var total: f32 = 0.0;
      fn square(x: f32) f32 { return x * x; }
      fn twice() void { @map(sum, v, &total, &total); }
      fn sum(x: f32, t: *f32) f32 { return t.* + x; }
      fn note(x: f32) void { out[0] += x; }
      export fn main() void { fill(); %s }"""
    )
    assert run(tmp_path, text % body).get_variable("out")[: len(want)].tolist() == want


def test_out_of_bounds(tmp_path):
    with pytest.raises(CslFault, match="accesses elements 10 to 12 of an array of 12") as caught:
        run(tmp_path, HEAD + "export fn main() void {\n  @fmovs(@increment_dsd_offset(d, 10, f32), v);\n}")
    assert caught.value.location.line == 6


def test_dsr_before_load(tmp_path):
    with pytest.raises(CslFault, match="dsr_dest 3 is used before '@load_to_dsr'"):
        run(tmp_path, HEAD + "export fn main() void { @fmovs(@get_dsr(dsr_dest, 3), v); }")


@pytest.mark.parametrize(("arch", "cycles"), [("wse2", 32), ("wse3", 16)])
def test_simd_width(arch, cycles, tmp_path):
    text = """var a: [64]f32; const v = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{64} -> a[i] });
      const none = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{0} -> a[i] });
      export fn main(n: i16) void { if (n == 0) { @fadds(none, none, none); } else { @fadds(v, v, v); } }"""
    assert run(tmp_path, text, "main", 1, arch=arch).clock - run(tmp_path, text, "main", 0, arch=arch).clock == cycles


@pytest.mark.parametrize(
    "name", ["fmacs", "fadds", "fsubs", "fmuls", "fmaxs", "faddh", "fmach", "add16", "xor16", "fmovs"]
)
def test_vectors_at_once_equal_elements_in_order(name):
    """Overlapping and strided vectors of two variables."""
    op, rng = DSD_OPS[name], np.random.default_rng(7)
    at_once = 0
    for _ in range(150):
        memory = [rng.integers(1, 9, 12).astype(np.float32 if name[0] == "f" else np.uint16) for _ in range(2)]
        if name.endswith("h"):
            memory = [m.astype(np.float16) for m in memory]
        expected = [m.copy() for m in memory]
        count, places = int(rng.integers(0, 5)), []
        for _ in range(len(op.sources) + 1):
            stride = int(rng.choice([1, 1, 2, -1, 0]))
            first = int(rng.integers(4, 8)) if stride < 0 else int(rng.integers(0, 4))
            places.append((int(rng.integers(0, 2)), first, stride))
        if rng.random() < 0.3:
            places[1] = places[0]  # accumulates in place
        operands = [Mem1d(memory[v], i * memory[v].itemsize, stride, count) for v, i, stride in places]
        if len(operands) == 4:
            operands[3] = op.dtype.type(2)
        if _apply_to_vectors(op, operands) is None:
            execute_operation(op, tuple(operands))
        else:
            at_once += 1
        for i in range(count):
            args = [expected[v][first + i * stride] for v, first, stride in places[1:]][: len(op.sources)]
            if len(operands) == 4:
                args[2] = op.dtype.type(2)
            v, first, stride = places[0]
            expected[v][first + i * stride] = op.compute(*args)
        assert all(np.array_equal(m, e) for m, e in zip(memory, expected, strict=True)), (places, count)
    assert 20 < at_once < 130  # both ways are tried
    forget_views()


def test_an_operation_on_halves_of_words_keeps_the_stride_of_the_words(tmp_path):
    """A public program adds 16-bit indices to an array of 32-bit words, and then reads the words."""
    text = """
      export var w = [4]u32 { 1, 2, 3, 0x10004 }; var h = [4]u16 { 10, 20, 30, 40 };
      const vw = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> w[i] });
      const vh = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{4} -> h[i] });
      export fn main() void { @add16(vw, vw, vh); }"""
    assert run(tmp_path, text).get_variable("w").tolist() == [11, 22, 33, 0x1002C]
