"""The WGSL generator of plugins/tessera-wgsl: its text always, its results where wgpu finds an adapter."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from conformance.case import all_cases
from conformance.run import Engine, run_case, select_cases
from tessera.codegen import contract
from tessera.core.errors import (
    ArgumentError,
    DeviceUnavailable,
    OutOfBoundsError,
    ResourceError,
    UnsupportedOpError,
)
from tessera.runtime.program import CallArguments, prepare

PLUGIN = Path(__file__).parents[1] / "plugins" / "tessera-wgsl"
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 37)).astype(np.float32)


@pytest.fixture
def wgsl(monkeypatch):
    """The plugin's generator under the name that its package registers."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    import tessera_wgsl

    point = SimpleNamespace(name="wgsl", value="tessera_wgsl:BACKEND", load=lambda: tessera_wgsl.BACKEND)
    monkeypatch.setattr(contract, "entry_points", lambda group: [point])
    contract.get_backend.cache_clear()
    yield tessera_wgsl.BACKEND
    contract.get_backend.cache_clear()


@pytest.fixture
def device(wgsl):
    """The generator on a machine that has wgpu and an adapter."""
    pytest.importorskip("wgpu", reason="the package wgpu is not installed")
    try:
        wgsl.where()
    except DeviceUnavailable as error:
        pytest.skip(f"no adapter, such as that of mesa-vulkan-drivers: {error.received}")
    return wgsl


def emit(wgsl, function, *arrays):
    """The artifact of a function for these arrays."""
    program = prepare(ts.jit(function), CallArguments(arrays, {}), "wgsl")
    return contract.emit_artifact(wgsl, program.levels["tile"], {})


def run(function, *arrays):
    """The results of a function on the device."""
    return prepare(ts.jit(function), CallArguments(arrays, {}), "wgsl").run("device", "wgsl")


def test_each_op_has_a_row_or_a_reason(wgsl):
    assert wgsl.coverage.list_missing() == [] and wgsl.coverage.list_contradictions() == []


def test_the_text_of_a_softmax(wgsl):
    """One shader for each kernel, with one buffer, a guard for the last workgroup, and balanced braces."""
    artifact = emit(wgsl, lambda x: ts.softmax(x, axis=-1), X)
    assert [Path(name).suffix for name in artifact.files] == [".wgsl"]
    (text,) = artifact.files.values()
    assert text.count("@compute @workgroup_size(64)") == 1 and text.count("@group(0)") == 2
    assert "if (here >= args.words[1].x) { return; }" in text and text.count("{") == text.count("}")
    assert "fn ts_exp(" in text and "fn ts_tanh(" not in text
    names = re.findall(r"\b(?:let|var) (\w+)", text.partition("fn main")[2])
    assert len(names) == len(set(names)) and not {"i32", "f32", "u32"} & set(names)


def test_the_same_text_each_time(wgsl):
    first, second = (emit(wgsl, lambda x: ts.sum(ts.exp(x) @ x.T, axis=0), X) for _ in range(2))
    assert first.files == second.files and first.dump_manifest() == second.dump_manifest()


REFUSED = [
    (lambda x: x + 1.0, X.astype(np.float64), "ts.add|tile.load", "no element type f64"),
    (lambda x: x + x, np.arange(3, dtype=np.uint64), "tile.load", "no element type uint64"),
    (lambda x: ts.cast(x, ts.fp8_e4m3), X, "fp8", "no element type"),
    (lambda x: x * 3, np.arange(7), "ts.mul on int64", "no integers of 64 bits"),
    (lambda x: ts.sum(x), np.arange(7, dtype=np.int32), "ts.sum on int64", "no integers of 64 bits"),
    (lambda x: ts.sin(x), X, "ts.sin", "computes in f64"),
]


@pytest.mark.parametrize(("function", "array", "op", "reason"), REFUSED)
def test_what_wgsl_lacks_is_refused_with_op_target_and_line(wgsl, function, array, op, reason):
    with pytest.raises(UnsupportedOpError, match=reason) as caught:
        emit(wgsl, function, array)
    assert re.search(op, str(caught.value)) and "target wgsl" in str(caught.value)
    assert caught.value.location.file == __file__ and caught.value.location.line > 0


def test_other_refusals(wgsl):
    with pytest.raises(ArgumentError, match="no option speed"):
        wgsl.emit(prepare(ts.jit(lambda x: x + 1), CallArguments((X,), {}), "wgsl").levels["tile"], {"speed": 1})

    @ts.kernel
    def huge(x, y):
        block = ts.tile.load(x[0:600, 0:600])
        ts.tile.store(y[0:600, 0:600], block + block.T)

    big = np.zeros((600, 600), np.float32)
    with pytest.raises(ResourceError, match="bytes of blocks"):
        wgsl.emit(prepare(huge[(1,)], CallArguments((big, big), {}), "interp").levels["tile"], {})


SUITE = {
    "pointwise": ("graph/elementwise/add-f32 or elementwise/exp-f32 or elementwise/where or elementwise/log-f32", 4),
    "integers": ("elementwise/floor_divide-int or elementwise/remainder-u or elementwise/shift", 4),
    "reductions": ("reduce/sum-0-f32 or reduce/max--1 or reduce/arg or reduce/all", 5),
    "products": ("linalg/matmul-odd or linalg/matmul-square-f32 or linalg/matmul-vector", 3),
    "softmax": ("composites/softmax or composites/log_softmax", 6),
    "attention": ("composites/attention-masked or composites/attention-causal-f32", 2),
    "halves": ("elementwise/add-f16 or elementwise/div-bf16 or reduce/sum-0-f16 or linalg/matmul-odd-bf16", 3),
    "zeros": ("found/folded-f32-special or found/folded-f16-zeros", 2),
    "blocks": ("tile/memory/clipped or tile/memory/masked or tile/blocks", 8),
}


@pytest.mark.parametrize("part", SUITE)
def test_a_part_of_the_suite_passes(device, part):
    words, least = SUITE[part]
    cases = [c for c in select_cases(words, all_cases()) if c.rejects is None]
    outcomes = [o for c in cases for o in run_case(c, [Engine("wgsl", "device", "wgsl")])]
    counts = Counter(o.status for o in outcomes)
    assert not [f"{o.case}: {o.detail}" for o in outcomes if o.status == "fail"]
    assert counts["pass"] >= least, counts
    assert all("wgsl" in o.detail for o in outcomes if o.status == "unsupported")


def test_functions_agree_with_numpy(device):
    x = np.concatenate([X.ravel(), np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, -88.5])])
    with np.errstate(all="ignore"):
        for ours, theirs in ((ts.exp, np.exp), (ts.log, np.log), (ts.tanh, np.tanh), (ts.sqrt, np.sqrt)):
            (found,) = run(lambda x, f=ours: f(x), x)
            np.testing.assert_allclose(found, theirs(x.astype(np.float64)).astype(np.float32), rtol=1e-6, atol=1e-37)
        (found,) = run(lambda x: ts.maximum(x, 0.0), x)
    np.testing.assert_array_equal(found, np.maximum(x, 0))


@pytest.mark.parametrize(("dtype", "numpy"), [(ts.f16, np.float16), (ts.bf16, ml_dtypes.bfloat16)])
def test_conversions_of_16_bit_floats_are_those_of_numpy(device, dtype, numpy):
    """Every number, what is near a tie, subnormals, overflow, NaN; integers of 32 bits round once."""
    every = np.arange(1 << 16, dtype=np.uint16).view(numpy)
    wide = every.astype(np.float32)
    np.testing.assert_array_equal(run(lambda x: ts.cast(x, ts.f32), every)[0], wide)
    finite = wide[np.isfinite(wide)]
    shifts = [0, *(sign * 2.0**-n for n in (8, 9, 11, 12, 13) for sign in (1, -1))]
    edges = np.float32([65519.99, 65520, 2**-25, 2**-25 * 1.001, -(2**-24) * 1.5, np.inf, -np.inf, np.nan, 3.4e38])
    integers = np.concatenate([RNG.integers(-(2**31), 2**31, 4000), (1 << np.arange(31)) + 1, [-(2**31)]]).astype("i4")
    with np.errstate(over="ignore"):
        near = np.concatenate([*(finite * np.float32(1 + s) for s in shifts), edges])
        for x, want in ((near, near.astype(numpy)), (integers, integers.astype(np.float64).astype(numpy))):
            found = run(lambda x: ts.cast(x, dtype), x)[0]
            np.testing.assert_array_equal(found.astype(np.float32), want.astype(np.float32))
    bits = run(lambda x: ts.bitcast(x, ts.uint16), every)[0]
    np.testing.assert_array_equal(bits[~np.isnan(wide)], every.view(np.uint16)[~np.isnan(wide)])


def test_16_bit_floats_in_scalars_and_sums(device):
    x = RNG.standard_normal((9, 33)).astype(np.float16)
    (found,) = run(lambda x: ts.sum(x * ts.cast(1.5, ts.f16), axis=1), x)
    want = (x * np.float16(1.5)).astype(np.float64).sum(1)
    assert found.dtype == np.float16 and np.abs(found - want).max() <= 2.0**-11 * np.abs(want).max() + 1e-5

    @ts.kernel
    def scale(x: ts.Tensor["N", ts.f16], y: ts.Tensor["N", ts.f16], factor: ts.f16):
        i = ts.tile.program_id(0)
        y[i] = x[i] * factor

    x, y = x[0].copy(), np.zeros(33, np.float16)
    program = prepare(scale[(33,)], CallArguments((x, y, np.float16(0.3)), {}), "wgsl")
    np.testing.assert_array_equal(program.run("device", "wgsl")[0], x * np.float16(0.3))


def test_comparisons_with_nan(device):
    x, y = (a.ravel() for a in np.meshgrid(*[np.float32([0, -0.0, 1, np.inf, -np.inf, np.nan])] * 2))
    pairs = (
        (ts.not_equal, np.not_equal), (ts.equal, np.equal), (ts.less, np.less), (ts.less_equal, np.less_equal),
        (ts.greater, np.greater), (ts.greater_equal, np.greater_equal),
    )  # fmt: skip
    for ours, theirs in pairs:
        np.testing.assert_array_equal(run(lambda x, y, f=ours: f(x, y), x, y)[0], theirs(x, y))
    np.testing.assert_array_equal(run(lambda x: ts.isnan(x), x)[0], np.isnan(x))


def test_a_driver_that_ends_loops_early_is_an_error(device):
    """Mesa's driver for processors does so after 65,535 rounds; a GPU gives the sum."""
    (found,) = run(lambda x: ts.sum(x, axis=1), np.ones((2, 20_000), np.float32))
    assert found.tolist() == [20_000.0] * 2
    long = np.ones((2, 70_001), np.float32)
    if "llvmpipe" in device.where():
        with pytest.raises(ResourceError, match="ended the loops of a kernel before their end"):
            run(lambda x: ts.sum(x, axis=1), long)
    else:
        assert run(lambda x: ts.sum(x, axis=1), long)[0].tolist() == [70_001.0] * 2


def test_sums_are_not_reassociated(device):
    """Compilers of shaders may: (x + c) - c rounds x here, as in NumPy."""
    c = np.float32(12582912.0)
    (found,) = run(lambda x: (x + float(c)) - float(c), X)
    np.testing.assert_array_equal(found, (X + c) - c)


def test_types_of_8_16_and_64_bits(device):
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.bool_):
        x = RNG.integers(-100 if np.dtype(dtype).kind == "i" else 0, 2 if dtype == np.bool_ else 100, (3, 7)).astype(
            dtype
        )
        found = run(lambda x: (x | x, x.T), x) if dtype == np.bool_ else run(lambda x: (x * x + x, x.T), x)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(found[0], x if dtype == np.bool_ else x * x + x)
        np.testing.assert_array_equal(found[1], x.T)
        np.testing.assert_array_equal(run(lambda x: ts.cast(x, ts.f32), x)[0], x.astype(np.float32))
    table, ids = RNG.standard_normal((11, 3)).astype(np.float32), np.array([[0, -1], [10, 3]])
    np.testing.assert_array_equal(run(lambda t, i: t[i], table, ids)[0], table[ids])
    np.testing.assert_array_equal(run(lambda x: ts.argmax(x, axis=1), X)[0], X.argmax(1))
    with pytest.raises(OutOfBoundsError):
        run(lambda t, i: t[i], table, np.array([0, 11]))
    with pytest.raises(ResourceError, match="does not fit in 32 bits"):
        run(lambda t, i: t[i], table, np.array([0, 1 << 40]))


def test_grids_of_many_axes(device):
    @ts.kernel
    def fill(out):
        a, b, c, d = (ts.tile.program_id(n) for n in range(4))
        out[a, b, c, d] = 1000 * a + 100 * b + 10 * c + d + ts.tile.num_programs(3)

    out = np.zeros((2, 3, 4, 5), np.int32)
    want = sum(s * g for s, g in zip((1000, 100, 10, 1), np.indices(out.shape), strict=True)) + 5
    launch = lambda grid: prepare(fill[grid], CallArguments((out,), {}), "wgsl").run("device", "wgsl")  # noqa: E731
    np.testing.assert_array_equal(launch(out.shape)[0], want)
    with pytest.raises(UnsupportedOpError, match="its grid has 5 axes"):
        launch((*out.shape, 1))


def test_loops_of_the_host_and_of_kernels(device):
    def steps(x):
        y = ts.fori_loop(0, 5, lambda i, y: y * 1.5 - 0.25, x)
        y = ts.while_loop(lambda y: ts.max(y) > 1.0, lambda y: y * 0.5, y)
        return ts.cond(ts.sum(y) > 0, lambda y: y + 10.0, lambda y: -y, y)

    for x in (X, -np.abs(X)):
        np.testing.assert_allclose(run(steps, x)[0], np.asarray(ts.jit(steps)(x)), rtol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_each_step_of_a_scan_has_its_own_row(device, reverse):
    def scan(x):
        return ts.scan(lambda c, row: (c * 0.5 + row, c + row), ts.zeros((37,)), x, reverse=reverse)

    for found, want in zip(run(scan, X), ts.jit(scan)(X), strict=True):
        np.testing.assert_allclose(found, np.asarray(want), rtol=1e-6)


def test_programs_that_run_in_several_batches(device, monkeypatch):
    """The blocks of all programs together are larger than the memory for them."""
    from tessera_wgsl import runtime

    x = RNG.standard_normal((150, 70)).astype(np.float32)
    monkeypatch.setattr(runtime, "MAX_ARENA_BYTES", 40_000)
    dispatches = []
    dispatch = runtime.DeviceEngine._dispatch
    monkeypatch.setattr(
        runtime.DeviceEngine, "_dispatch", lambda self, *a: (dispatches.append(a[1:]), dispatch(self, *a))
    )
    want = np.exp(x - x.max(-1, keepdims=True))
    found = run(lambda x: ts.softmax(x, axis=-1), x)[0]
    np.testing.assert_allclose(found, want / want.sum(-1, keepdims=True), rtol=1e-5)
    assert len(dispatches) > 1


def test_sizes_of_none_and_one(device):
    for shape in ((1,), (1, 1), (0,), (3, 0)):
        x = np.ones(shape, np.float32)
        np.testing.assert_array_equal(run(lambda x: x * 2.0, x)[0], x * 2)
    np.testing.assert_array_equal(run(lambda x: ts.sum(x), np.zeros((0,), np.float32))[0], 0)
