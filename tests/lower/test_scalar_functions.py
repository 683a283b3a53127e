"""Decompositions of scalar functions, evaluated with NumPy: no target is involved."""

import mpmath
import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import DTypeError
from tessera.core.types import TensorType, f32, f64, int32, int64, uint32
from tessera.ir.builder import evaluate_block
from tessera.lower.scalar_functions import double_precision, single_precision
from tessera.lower.scalar_functions import small_floats as small
from tessera.lower.scalar_functions.decomposition import SHARED
from tessera.ops.dialects import arith
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f

assert single_precision and double_precision  # fill the table
UNARY = (e.exp, e.exp2, e.log, e.log2, e.tanh, e.erf, e.erfc, e.sin, e.cos, f.expm1, f.log1p, f.atan)
BINARY = (e.pow, e.remainder, e.floor_divide)


def run(function, *arrays):
    def meaning(node, operands, walk):
        return node.op.execute(node.types, node.result_types, node.attrs, operands)

    return evaluate_block(function.body, arrays, meaning)[0]


@pytest.mark.parametrize("dtype", (f32, f64), ids=str)
@pytest.mark.parametrize("op", (*UNARY, *BINARY), ids=lambda op: op.name)
def test_agrees_with_the_op(op, dtype):
    x = np.concatenate([np.linspace(0.01, 9, 500), np.geomspace(1e-6, 40, 500)]).astype(dtype.numpy)
    operands = (x,) if op in UNARY else (x, np.flip(x) - dtype.numpy.type(3))
    with np.errstate(all="ignore"):
        want = np.asarray(op.ref(*operands))
    np.testing.assert_allclose(
        run(SHARED.find(op, dtype), *operands), want, rtol=2e-6 if dtype == f32 else 1e-14, atol=1e-12
    )


def test_only_arithmetic_is_left():
    functions = {op for op in SHARED.ops()}
    for op in SHARED.ops():
        for dtype in (f32, f64):
            assert not functions & {node.op for node in SHARED.find(op, dtype).body.nodes}, op.name


def test_native_functions_are_kept():
    table = SHARED.without(lambda op, dtype: op is e.exp)
    assert (e.exp, f32) not in table and e.exp in {n.op for n in table.find(e.tanh, f32).body.nodes}


@pytest.mark.parametrize("dtype", list(small.SMALL_FLOAT_FORMATS), ids=str)
def test_codec(dtype):
    codes = np.arange(1 << dtype.bits, dtype=np.uint8)
    values = codes.view(dtype.numpy).astype(np.float32)
    number = ~np.isnan(values)
    found = run(small.build_decoder(dtype), codes.astype(np.uint32) << small.decode_shift(dtype))
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(run(small.build_exact_encoder(dtype), values)[number], codes[number])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", list(small.SMALL_FLOAT_FORMATS), ids=str)
def test_rounding(dtype):
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, 20000, np.uint32).view(np.float32)
    x = np.concatenate([bits, random.normal(size=20000) * np.exp(random.normal(size=20000) * 4)]).astype(np.float32)
    x = x[~np.isnan(x)]
    want = x.astype(dtype.numpy)
    number = ~np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(run(small.build_rounding(dtype), x), want.astype(np.float32))
    codes = run(small.build_rounding_encoder(dtype), x)
    np.testing.assert_array_equal(codes[number], want.view(np.uint8)[number])


@pytest.mark.parametrize("source, to", [(f32, uint32), (f32, int32), (f64, int64)], ids=str)
def test_bitcast_is_a_view(source, to):
    x = np.random.default_rng(0).normal(size=5).astype(source.numpy)
    found = arith.bitcast(ts.Tensor(x), dtype=to).numpy()
    np.testing.assert_array_equal(found, x.view(to.numpy))
    np.testing.assert_array_equal(arith.bitcast(ts.Tensor(found), dtype=source).numpy(), x)


@pytest.mark.parametrize("source, to", [(f32, int64), (ts.bf16, ts.int16)], ids=str)
def test_bitcast_keeps_the_width(source, to):
    with pytest.raises(DTypeError, match="bitcast keeps the width"):
        arith.bitcast.infer(TensorType((), source), dtype=to)


@pytest.mark.parametrize("dtype", (f32, f64), ids=str)
def test_log1p_at_the_ends(dtype):
    x = np.array([-1, 0, np.inf, -2, np.nan, -0.5], dtype.numpy)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(run(SHARED.find(f.log1p, dtype), x), np.log1p(x), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("op", (e.sin, e.cos), ids=lambda op: op.name)
def test_angles_of_every_size(op):
    exponents = np.random.default_rng(0).uniform(0, 1024, 300)
    x = np.concatenate([2.0**exponents, -(2.0**exponents), [6381956970095103 * 2.0**797, 2.0**30, 1e22]])
    with mpmath.workprec(1200):
        want = [float(getattr(mpmath, op.__name__)(mpmath.mpf(each))) for each in x]
    np.testing.assert_allclose(run(SHARED.find(op, f64), x), want, rtol=4e-16, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fma_rounds_once():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 500)) * 10.0 ** random.uniform(-150, 150, (2, 500))
    z = -(x * y) * random.choice([1, 1 + 2**-52, 1 + 2**-20, 2, 1e-20, 1e20, 0], 500)
    with mpmath.workprec(2500):
        want = [float(mpmath.mpf(a) * mpmath.mpf(b) + mpmath.mpf(c)) for a, b, c in zip(x, y, z, strict=True)]
    np.testing.assert_allclose(arith.fma.ref(x, y, z), want, rtol=2.3e-16, atol=1e-320)
    ends = np.array([np.inf, np.nan, 1e308])
    np.testing.assert_array_equal(arith.fma.ref(ends, np.full(3, 2.0), np.zeros(3)), [np.inf, np.nan, np.inf])
    np.testing.assert_array_equal(arith.fma.ref(np.ones(1), np.ones(1), -ends[:1]), [-np.inf])


def test_multiply_high():
    x, y = np.random.default_rng(0).integers(0, 2**64, (2, 200), np.uint64)
    x[:3], y[:2] = 2**64 - 1, (2**64 - 1, 0)
    want = [int(a) * int(b) >> 64 for a, b in zip(x, y, strict=True)]
    np.testing.assert_array_equal(arith.multiply_high.ref(x, y), np.array(want, np.uint64))
