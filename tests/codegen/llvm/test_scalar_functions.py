"""Scalar functions within the bounds of the OpenCL full profile, over every exponent."""

import numpy as np
import pytest
from tilekernels import Kernel, agree, both

import tessera as ts
from tessera.codegen.llvm import BACKEND
from tessera.codegen.llvm.runtime import jit
from tessera.codegen.llvm.table import scalar_functions
from tessera.codegen.llvm.text import power_scaling
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import bf16, f16
from tessera.frontend.jit.tracing import Jit
from tessera.ir.numerics.reference_kernels import compute_erf
from tessera.lower.scalar_functions.single_precision import ROUND_TO_INTEGER, split_exp, split_exp2
from tessera.ops.dialects import tile
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f
from tessera.runtime.program import prepare

BLOCK = 4096
LIMIT = {e.exp: 3, e.exp2: 3, e.log: 3, e.log2: 3, e.sin: 4, e.cos: 4, e.tanh: 5, e.erf: 16, e.rsqrt: 2, e.sqrt: 0.5}
LIMIT |= {f.expm1: 3, f.log1p: 2}
WIDE = {
    e.exp: np.exp, e.exp2: np.exp2, e.log: np.log, e.log2: np.log2, e.sin: np.sin, e.cos: np.cos, e.tanh: np.tanh,
    e.erf: compute_erf, e.rsqrt: lambda x: 1 / np.sqrt(x), e.sqrt: np.sqrt, f.expm1: np.expm1, f.log1p: np.log1p,
}  # fmt: skip


def samples():
    """Bit patterns spread over all floats, values spread over the ranges where functions bend, and the ends."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 40 * BLOCK, dtype=np.uint32).view(np.float32)
    near = [rng.uniform(-r, r, 8 * BLOCK).astype(np.float32) for r in (1e-3, 1, 2, 10, 100, 1e4)]
    one = np.nextafter(np.float32(1), np.float32([0, 2])).repeat(4)
    ends = [0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.17549435e-38, 3.4028235e38, 88.72284, 88.722839, -103.97]
    ends += [88.73, 89, -20, -17.5, 1e-8, -1e-8, 1e9, 1.1e9, -0.99999994]
    ends += [-87.336, 128, 127.99999, -149, -126, -150, 0.625, 9.01, 3.92, 0.5, 1, -1, 2, 2.0**28]
    values = np.concatenate([bits, *near, np.float32(ends), one])
    return np.resize(values, -(-len(values) // BLOCK) * BLOCK)


def applied(op, *inputs):
    out = np.zeros_like(inputs[0])
    k = Kernel(*inputs, out)
    at = k(e.mul, k(tile.program_id), BLOCK)
    blocks = [k.load(p, at, shape=(BLOCK,)) for p in k.params[:-1]]
    k.store(k.params[-1], k(op, *blocks), at)
    return k.module((len(out) // BLOCK,)), [*inputs, out]


def run(op, *inputs):
    from tessera.codegen.llvm import BACKEND

    module, arrays = applied(op, *inputs)
    BACKEND.runtime(BACKEND.emit(module, {})).run(arrays)
    return arrays[-1]


def ulps(got, want):
    """How far `got` lies from the exact `want`, in units of the last place of f32."""
    with np.errstate(all="ignore"):
        near = want.astype(np.float32)
        unit = np.spacing(np.maximum(np.abs(near), np.float32(1.2e-38))).astype(np.float64)
        same = (got == near) | (np.isnan(got) & np.isnan(want))
        return np.where(same, 0, np.abs(got.astype(np.float64) - want) / unit)


@pytest.mark.parametrize("op", list(LIMIT), ids=lambda o: o.name)
def test_ulps(op):
    x = samples()
    with np.errstate(all="ignore"):
        want = WIDE[op](x.astype(np.float64))
    got = run(op, x)
    error = ulps(got, want)
    worst = np.nanargmax(np.where(np.isnan(error), np.inf, error))
    assert error[worst] <= LIMIT[op], (x[worst], got[worst], want[worst], error[worst])
    assert (np.signbit(got) == np.signbit(want))[(want == 0) & (x == 0)].all()


@pytest.mark.parametrize("op", [e.exp, e.exp2, e.tanh, e.erf], ids=lambda o: o.name)
def test_processors_without_the_instruction_that_scales(op, monkeypatch, tmp_path):
    """The same text runs with the plain definition, within the same bounds; both keep subnormal results."""
    x = np.resize(np.linspace(-151, 130, 1 << 14, dtype=np.float32), 1 << 14)
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "can_scale_by_power", lambda: False)
    got = run(op, x)
    with np.errstate(all="ignore"):
        assert np.nanmax(ulps(got, WIDE[op](x.astype(np.float64)))) <= LIMIT[op]


@pytest.mark.parametrize("op", [e.exp, e.tanh], ids=lambda o: o.name)
def test_the_instruction_that_scales_replaces_the_definition(op):
    module, _ = applied(op, np.ones(BLOCK, np.float32))
    text = BACKEND.emit(module, {"vector_bytes": 64}).text("kernels.ll")
    native = text.replace("\n".join(power_scaling.DEFINITION), "\n".join(power_scaling.NATIVE))
    assert "scalef" not in text and f"define internal <16 x float> @{power_scaling.SCALE_BY_POWER}" in text
    assert "llvm.x86.avx512.mask.scalef.ps.512" in native and "ashr" not in native


@pytest.mark.parametrize("op", [e.exp, e.exp2], ids=lambda o: o.name)
def test_scaling_gives_the_same_numbers_where_results_underflow(op, monkeypatch, tmp_path):
    low, high = {e.exp: (-106, -87), e.exp2: (-153, -126)}[op]
    x = np.resize(np.linspace(low, high, 15 * BLOCK, dtype=np.float32), 16 * BLOCK)
    x[-4:] = -np.inf, -1e9, -3e38, np.nan
    native = run(op, x)
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "can_scale_by_power", lambda: False)
    np.testing.assert_array_equal(native, run(op, x))


@pytest.mark.parametrize("split", [split_exp, split_exp2])
@pytest.mark.parametrize("x", [-np.inf, -1e9, -153.0])
def test_results_of_zero_do_not_underflow(split, x):
    """Their power is replaced by minus infinity: an underflow takes a processor ten times as long as the function."""
    _, shifted = split(ts.Tensor(np.float32(x)))
    assert float(shifted) - ROUND_TO_INTEGER <= power_scaling.LEAST_POWER
    native = "\n".join(power_scaling.NATIVE)
    assert f"fcmp ole <16 x float> %f, splat (float {power_scaling.LEAST_POWER}.0)" in native
    assert "select <16 x i1> %tiny, <16 x float> splat (float 0xFFF0000000000000), <16 x float> %f" in native


def test_pow():
    rng = np.random.default_rng(0)
    x, y = np.abs(samples()), rng.permutation(samples())
    x[: 20 * BLOCK] = np.exp(rng.uniform(-5, 5, 20 * BLOCK))
    y[: 20 * BLOCK] = rng.uniform(-20, 20, 20 * BLOCK)
    x[:BLOCK] *= -1
    y[:BLOCK] = np.round(y[:BLOCK])
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), y.astype(np.float64))
    got = run(e.pow, x, y)
    error = ulps(got, want)
    worst = np.nanargmax(np.where(np.isnan(error), np.inf, error))
    assert error[worst] <= 16, (x[worst], y[worst], got[worst], want[worst])


def test_pow_corners():
    ends = np.float32([0, -0.0, 1, -1, 2, -2, 0.5, -0.5, 3, -3, np.inf, -np.inf, np.nan, 1e-45, 3e38, 2.5])
    x, y = (np.resize(a, BLOCK) for a in np.meshgrid(ends, ends))
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_max_ulp(run(e.pow, x, y)[np.isfinite(want)], want[np.isfinite(want)], 1)
    np.testing.assert_array_equal(run(e.pow, x, y)[~np.isfinite(want)], want[~np.isfinite(want)])


@pytest.mark.parametrize("op", [o for o in LIMIT if o is not e.rsqrt], ids=lambda o: o.name)
def test_f64(op):
    x = np.resize(np.float64([0.3, 1.7, -0.2, 12.5, 3.0, 0.01, 1e-3, 5, 7, 100, np.inf, 0]), BLOCK)
    agree(*applied(op, x), rtol=1e-14)


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("op", [e.exp, e.tanh, e.log], ids=lambda o: o.name)
def test_narrow(op, dtype):
    x = np.resize(np.linspace(0.1, 8, 1000), BLOCK).astype(dtype.numpy)
    (_, _), (ours, theirs) = both(*applied(op, x))
    assert np.mean(ours != theirs) < 0.01  # only where f32 lies at the middle between two


def test_a_function_without_a_definition_is_refused_at_its_line(monkeypatch):
    """As an op is to which a decomposition for f32 alone was added."""
    monkeypatch.setattr(scalar_functions, "INTRINSICS", ())
    program = prepare(Jit(lambda x: ts.exp(x)), (np.ones(9),), "llvm")
    with pytest.raises(UnsupportedOpError, match=r"the target llvm cannot emit ts\.exp of f64") as caught:
        BACKEND.emit(program.levels["tile"], {})
    assert caught.value.location.file == __file__ and "add a decomposition" in caught.value.suggestion
