"""WebAssembly modules: linked by wasm-ld, run in wasmtime, compared with NumPy."""

import numpy as np
import pytest

import tessera as ts
from tessera import deploy
from tessera.codegen.llvm.webassembly import define_web_functions
from tessera.core.errors import (
    ArgumentError,
    ArtifactError,
    DeviceUnavailable,
    DTypeError,
    ExecutionError,
    FileError,
    ResourceError,
    ShapeError,
    UnsupportedOpError,
)
from tessera.deploy import webassembly

wasmtime = pytest.importorskip("wasmtime")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 7)).astype(np.float32)
W = RNG.standard_normal((7, 9)).astype(np.float32)


def has_linker():
    try:
        return bool(webassembly.find_linker())
    except DeviceUnavailable:
        return False


needs_linker = pytest.mark.skipif(not has_linker(), reason="needs wasm-ld: of the package ziglang, or of lld")


def build(folder, entry, *args, **options):
    """A program as a module in wasmtime."""
    deploy.standalone(entry, *args, out=folder, machine="wasm32", **options)
    return deploy.WebModule.load(folder)


@ts.jit
def layer(x, w):
    return ts.softmax(ts.relu(x @ w) + 0.5, axis=-1)


@needs_linker
@pytest.mark.parametrize("weights", [(), ("w",)])
def test_a_layer_with_and_without_its_weights_inside(tmp_path, weights):
    hidden = np.maximum(X.astype(np.float64) @ W, 0) + 0.5
    want = np.exp(hidden) / np.exp(hidden).sum(-1, keepdims=True)
    module = build(tmp_path, layer, X, W, weights=weights)
    found = module(X) if weights else module(X, W)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, want, rtol=2e-6)


@needs_linker
def test_halves_are_rounded_to_nearest_even(tmp_path):
    """NumPy converts the same numbers: subnormals, ties, the largest, infinity and NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    module = build(tmp_path / "up", ts.jit(lambda x: ts.cast(x, ts.f32)), bits)
    np.testing.assert_array_equal(module(bits), bits.astype(np.float32))
    finite = bits[np.isfinite(bits)].astype(np.float32)
    near = np.concatenate([finite * np.float32(1 + d) for d in (0, 2**-12, 2**-11, 2**-13, -(2**-12), -(2**-11))])
    near = np.concatenate(
        [near, np.float32([65519.99, 65520, 2**-25, 2**-25 * 1.001, -(2**-24) * 1.5, np.inf, np.nan])]
    )
    module = build(tmp_path / "down", ts.jit(lambda x: ts.cast(x, ts.f16)), near)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(module(near), near.astype(np.float16))


@needs_linker
def test_constants_of_halves(tmp_path):
    @ts.kernel
    def shift(x: ts.Tensor["N", ts.f16], y: ts.Tensor["N", ts.f16], n: ts.int32):
        i = ts.tile.program_id(0)
        v = ts.tile.load(x[i + n], mask=i + n < 6)
        total = ts.tile.cast(0.25, ts.f16)
        for _ in ts.tile.range(i):
            total = ts.tile.cast(ts.tile.cast(total, ts.f32) + 1.0, ts.f16)
        y[i] = ts.tile.cast(ts.tile.cast(v, ts.f32) + ts.tile.cast(total, ts.f32), ts.f16)

    x, i = np.arange(8).astype(np.float16), np.arange(8)
    module = build(tmp_path / "shift", shift, x, np.zeros_like(x), np.int32(2), grid=(8,))
    np.testing.assert_array_equal(module(x, np.zeros_like(x), np.int32(2)), np.where(i < 4, i + 2, 0) + 0.25 + i)
    text = define_web_functions("  %r = phi half [ 0xBFF8000000000000, %a ], [ 0x7FF0000000000000, %b ]\n")
    bits = np.array([-1.5, np.inf], np.float16).view(np.uint16)
    assert f"%r = phi i16 [ {bits[0]}, %a ], [ {bits[1]}, %b ]" in text


@needs_linker
def test_loops_and_branches_of_the_plan(tmp_path):
    @ts.jit
    def steps(x):
        y = ts.fori_loop(0, 5, lambda i, y: y * 1.5 - 0.25, x)
        y = ts.while_loop(lambda y: ts.max(y) > 1.0, lambda y: y * 0.5, y)
        return ts.cond(ts.sum(y) > 0, lambda y: y + 10.0, lambda y: -y, y)

    module = build(tmp_path, steps, X)
    for x in (X, -np.abs(X)):
        np.testing.assert_allclose(module(x), np.asarray(steps(x)), rtol=1e-6)


@needs_linker
@pytest.mark.parametrize("reverse", [False, True])
def test_each_step_of_a_scan_has_its_own_row(tmp_path, reverse):
    scan = ts.jit(lambda x: ts.scan(lambda c, row: (c * 0.5 + row, c + row), ts.zeros((7,)), x, reverse=reverse))
    carry, want = np.zeros(7, np.float32), np.empty_like(X)
    for i in range(5)[:: -1 if reverse else 1]:
        want[i] = carry + X[i]
        carry = carry * np.float32(0.5) + X[i]
    last, rows = build(tmp_path, scan, X)(X)
    np.testing.assert_allclose(rows, want, rtol=1e-6)
    np.testing.assert_allclose(last, carry, rtol=1e-6)


@needs_linker
def test_a_kernel_that_writes_in_place_and_takes_a_number(tmp_path):
    @ts.kernel
    def scale(x, factor: ts.f32, *, BLOCK: int = 4):
        i = ts.tile.program_id(0) * BLOCK
        x[i : i + BLOCK] = x[i : i + BLOCK] * factor

    x = np.arange(8, dtype=np.float32)
    module = build(tmp_path, scale[(2,)], x, np.float32(2))
    np.testing.assert_array_equal(module(x, np.float32(2.5)), x * 2.5)
    np.testing.assert_array_equal(module(x, 3.0), x * 3)


@needs_linker
def test_functions_of_math_and_fused_arithmetic(tmp_path):
    """f64 takes functions of the host; a fused multiply-add in a function of f64 is exact, so that erfc is accurate."""
    x = np.linspace(-9, 9, 37)
    module = build(tmp_path / "a", ts.jit(lambda x: (ts.exp(x), ts.sin(x * 1e3), ts.log1p(ts.abs(x)), x % 0.7)), x)
    for found, want in zip(module(x), (np.exp(x), np.sin(x * 1e3), np.log1p(np.abs(x)), x % 0.7), strict=True):
        np.testing.assert_allclose(found, want, rtol=4e-16, atol=1e-17)
    big = np.float32([0.5, 1e5, 3e9, -7e30])
    module = build(tmp_path / "b", ts.jit(lambda x: (ts.sin(x), ts.tanh(x), ts.exp(-ts.abs(x)))), big)
    for found, f in zip(module(big), (np.sin, np.tanh, lambda v: np.exp(-np.abs(v))), strict=True):
        np.testing.assert_allclose(found, f(big.astype(np.float64)), rtol=3e-7, atol=1e-38)


@pytest.mark.parametrize("bits", [32, 64])
def test_the_fused_multiply_add_rounds_once(bits):
    """The text of both is run by this machine's processor and compared with exact fractions."""
    import ctypes
    from fractions import Fraction

    from tessera.codegen.llvm.runtime.jit import MachineCode
    from tessera.codegen.llvm.webassembly import define_web_functions

    t, kind, c = ("float", np.float32, ctypes.c_float) if bits == 32 else ("double", np.float64, ctypes.c_double)
    call = f"  %r = call {t} @llvm.fma.f{bits}({t} %x, {t} %y, {t} %z)\n  ret {t} %r\n}}\n"
    text = define_web_functions(f"define {t} @f({t} %x, {t} %y, {t} %z) {{\nentry:\n{call}")
    assert "@llvm.fma." not in text
    code = MachineCode(text)  # holds the memory of the function
    function = ctypes.CFUNCTYPE(c, c, c, c)(code.address("f"))
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(300).astype(kind) for _ in range(2))
    z = np.concatenate([-(x * y)[:200], rng.standard_normal(100).astype(kind) * kind(1e-7)])
    # Products halfway between two floats, which a summand of another magnitude decides.
    p, q = (2**12 + 1, 2**12 + 1) if bits == 32 else (2**26 + 1, 2**27 + 1)
    tiny = [s * 2.0**-n for s in (-1, 1) for n in (40, 60)]
    x, y, z = (np.concatenate([v, np.array(more, kind)]) for v, more in ((x, [p, -p] * 4), (y, [q] * 8), (z, tiny * 2)))
    for a, b, d in zip(x, y, z, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(d))
        want = kind(exact.numerator / exact.denominator)  # Python's division of integers rounds once, to f64
        if bits == 32:  # through f64 it may round twice: take the nearer of the neighbours
            near = [np.nextafter(want, kind(s * np.inf)) for s in (-1, 1)] + [want]
            want = min(near, key=lambda v: abs(Fraction(float(v)) - exact))
        assert function(a, b, d) == want
    assert np.isnan(function(np.inf, 0, 1)) and function(np.inf, 1, 1) == np.inf
    assert np.signbit(function(-0.0, 1.0, -0.0)) and not np.signbit(function(1.0, 1.0, -1.0))


@needs_linker
def test_failures_of_a_program_are_errors_with_their_line(tmp_path):
    @ts.kernel
    def positive(x, y):
        i = ts.tile.program_id(0)
        assert x[i] > 0, "not positive"
        y[i] = x[i]

    x = np.ones(3, np.float32)
    module = build(tmp_path / "a", positive[(3,)], x, x)
    np.testing.assert_array_equal(module(x * 2, x), x * 2)
    with pytest.raises(ExecutionError, match=r"test_webassembly.py:\d+: not positive"):
        module(-x, x)
    np.testing.assert_array_equal(module(x * 3, x), x * 3)
    module = build(tmp_path / "b", ts.jit(lambda t, i: t[i]), X, np.array([0, -1]))
    np.testing.assert_array_equal(module(X, np.array([4, -5])), X[[4, -5]])
    with pytest.raises(ExecutionError, match="out of bounds"):
        module(X, np.array([0, 5]))


@needs_linker
def test_wrong_arguments_and_broken_folders(tmp_path):
    module = build(tmp_path, layer, X, W)
    with pytest.raises(ArgumentError, match="wrong number"):
        module(X)
    with pytest.raises(ShapeError, match="argument w"):
        module(X, W.T)
    with pytest.raises(DTypeError, match="argument x"):
        module(X.astype(np.float64), W)
    (tmp_path / "layer.wasm").write_bytes((tmp_path / "layer.wasm").read_bytes()[:100])
    with pytest.raises(ArtifactError, match="no WebAssembly module"):
        deploy.WebModule.load(tmp_path)
    (tmp_path / "program.json").write_text("{")
    with pytest.raises(FileError, match="no folder of a WebAssembly module"):
        deploy.WebModule.load(tmp_path)


def test_what_a_module_cannot_have_is_refused(tmp_path, monkeypatch):
    options = {"out": tmp_path, "machine": "wasm32"}
    with pytest.raises(UnsupportedOpError, match="needs the value of each size"):
        deploy.standalone(layer, X, W, dynamic={"x": {0: "B"}}, **options)
    with pytest.raises(ArgumentError, match="runs on one thread"):
        deploy.standalone(layer, X, W, threads=True, **options)
    with pytest.raises(UnsupportedOpError, match="prints"):
        deploy.standalone(printing[(1,)], X, **options)
    monkeypatch.setattr("tessera.codegen.llvm.webassembly.MAX_BYTES", 1000)
    with pytest.raises(ResourceError, match="bytes of memory"):
        deploy.standalone(layer, X, W, **options)
    monkeypatch.setattr(webassembly, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceUnavailable, match="(?s)no wasm-ld.*ziglang"):
        webassembly.link_module(b"", 0)
    monkeypatch.setenv("WASM_LD", "/bin/false")
    with pytest.raises(ArgumentError, match="did not link"):
        webassembly.link_module(b"", 0)
    monkeypatch.setenv("WASM_LD", "/no/such/linker")
    with pytest.raises(DeviceUnavailable, match="/no/such/linker does not start"):
        webassembly.link_module(b"", 0)


@ts.kernel
def printing(x):
    ts.tile.print("x", ts.tile.program_id(0))


@needs_linker
def test_a_function_that_nothing_has_is_refused(tmp_path):
    with pytest.raises(UnsupportedOpError, match="has no function erf"):
        deploy.standalone(ts.jit(lambda x: ts.erf(x)), np.ones(3), out=tmp_path, machine="wasm32")


@needs_linker
def test_the_same_bytes_each_time_and_sizes_of_none(tmp_path):
    for name in "ab":
        deploy.standalone(layer, X, W, out=tmp_path / name, machine="wasm32")
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == ["kernels.o", "layer.wasm", "program.json"]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    empty = np.zeros((0, 3), np.float32)
    module = build(tmp_path / "c", ts.jit(lambda x: (x * 2, ts.sum(x))), empty)
    assert module(empty)[0].shape == (0, 3) and module(empty)[1] == 0
