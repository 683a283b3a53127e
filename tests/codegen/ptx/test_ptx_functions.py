"""The scalar functions lie within their bounds over their whole range, special values among them."""

import mpmath
import numpy as np
import pytest
from ptxcheck import emit_checked
from tilekernels import Kernel

from tessera.codegen.ptx import BACKEND
from tessera.core.types import f32, f64
from tessera.ir.numerics.error_model import find_ulp_bound
from tessera.ir.numerics.reference_kernels import compute_erf
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f

SPREAD = np.concatenate([np.linspace(-12, 12, 997), np.geomspace(1e-30, 80, 499), -np.geomspace(1e-30, 80, 499)])
POSITIVE = np.concatenate([np.geomspace(1e-37, 1e37, 1500), np.linspace(0.5, 2.0, 499)])
SPECIAL = np.array([0.0, np.inf, -np.inf, np.nan])
CASES = {
    e.exp: (np.exp, SPREAD), e.exp2: (np.exp2, SPREAD), e.log: (np.log, POSITIVE), e.log2: (np.log2, POSITIVE),
    e.tanh: (np.tanh, SPREAD), e.erf: (compute_erf, SPREAD), e.sin: (np.sin, SPREAD), e.cos: (np.cos, SPREAD),
    f.expm1: (np.expm1, SPREAD), f.log1p: (np.log1p, np.abs(SPREAD)), f.atan: (np.arctan, SPREAD),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", (f32, f64), ids=str)
@pytest.mark.parametrize("op", CASES, ids=lambda op: op.name)
def test_within_the_bound(op, dtype):
    reference, spread = CASES[op]
    x = np.concatenate([spread, [] if op in (e.sin, e.cos) else SPECIAL]).astype(dtype.numpy)
    k = Kernel(x, x)
    k.store(k.params[1], k(op, k.load(k.params[0])))
    found = [x, np.empty_like(x)]
    BACKEND.interpreter(emit_checked(k.module()))(found)
    want = reference(x.astype(np.longdouble if dtype == f64 and op is not e.erf else np.float64))
    unit = np.spacing(np.abs(want.astype(dtype.numpy)))
    with np.errstate(all="ignore"):
        off = np.abs(found[1].astype(np.longdouble) - want) / unit
    wrong = ~((off <= find_ulp_bound(op, dtype)) | (found[1] == want) | (np.isnan(found[1]) & np.isnan(want)))
    assert not wrong.any(), f"{x[wrong][:5]}: {found[1][wrong][:5]}, not {want[wrong][:5]}"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", (f32, f64), ids=str)
def test_powers_lie_within_the_bound(dtype):
    random, element = np.random.default_rng(0), dtype.numpy
    top = 30 if dtype == f32 else 300
    x = np.concatenate(
        [10 ** random.uniform(-top, top, 600), random.uniform(0.5, 2, 600), np.abs(SPECIAL), [5e-324, 3]]
    )
    y = np.concatenate([random.uniform(-1, 1, 600), random.uniform(-50, 50, 600), [0.0, 2.0, -1.0, 1.0, 0.5, -3.0]])
    x, y = np.concatenate([x, -x]).astype(element), np.concatenate([y, np.rint(y)]).astype(element)
    k = Kernel(x, y, x)
    k.store(k.params[2], k(e.pow, k.load(k.params[0]), k.load(k.params[1])))
    found = np.empty_like(x)
    BACKEND.interpreter(emit_checked(k.module()))([x, y, found])
    want = np.power(x.astype(np.longdouble), y.astype(np.longdouble))
    off = np.abs(found.astype(np.longdouble) - want) / np.spacing(np.abs(want.astype(element)))
    wrong = ~(
        (off <= find_ulp_bound(e.pow, dtype)) | (found == want.astype(element)) | (np.isnan(found) & np.isnan(want))
    )
    assert not wrong.any(), f"{x[wrong][:5]} to {y[wrong][:5]}: {found[wrong][:5]}, not {want[wrong][:5]}"


def run_on_emulator(op, *inputs):
    k = Kernel(*inputs, inputs[0])
    k.store(k.params[-1], k(op, *[k.load(p) for p in k.params[:-1]]))
    found = np.empty_like(inputs[0])
    BACKEND.interpreter(emit_checked(k.module()))([*inputs, found])
    return found


@pytest.mark.parametrize("dtype", (f32, f64), ids=str)
@pytest.mark.parametrize("op", (e.sin, e.cos), ids=lambda op: op.name)
def test_angles_of_every_size_lie_within_the_bound(op, dtype):
    """Whole numbers of quarter turns are left out to the last digit, also where nearly nothing else is left."""
    bits = np.random.default_rng(0).integers(0, 2**dtype.bits, 1000, np.uint64 if dtype == f64 else np.uint32)
    limit = np.finfo(dtype.numpy).max
    edges = [6381956970095103 * 2.0**797, 5.319372648326541e255, 2.0**30, 2.0**28, 1e22, 1e5, 16367173 * 2.0**72]
    edges = np.clip([*edges, np.inf, -np.inf, 0.0, -0.0], -limit, limit)
    x = np.concatenate([bits.view(dtype.numpy), edges.astype(dtype.numpy)])
    x = x[np.isfinite(x)]
    found = run_on_emulator(op, x)
    with mpmath.workprec(1200):
        want = [getattr(mpmath, op.__name__)(mpmath.mpf(float(each))) for each in x]
        off = [float(abs(mpmath.mpf(float(a)) - b)) for a, b in zip(found, want, strict=True)]
    off /= np.spacing(np.abs(np.array(want, np.float64).astype(dtype.numpy))).astype(np.float64)
    wrong = off > find_ulp_bound(op, dtype)
    assert not wrong.any(), f"{x[wrong][:5]}: {found[wrong][:5]}, {off[wrong][:5]} ulp"
    ends = run_on_emulator(op, np.array([np.inf, -np.inf, np.nan], dtype.numpy))
    assert np.isnan(ends).all()


@pytest.mark.parametrize("dtype", (f32, f64), ids=str)
def test_remainders_of_any_two_numbers(dtype):
    """The quotient may lie beyond the largest number: it is taken away in parts, and that ends."""
    least, most = np.finfo(dtype.numpy).smallest_subnormal, np.finfo(dtype.numpy).max
    ends = [least, 3 * least, 1e-310, 1e-40, 1e-3, 0.7, 1.0, 3.0, 1e30, most / 3, most, np.nextafter(most, 0)]
    ends = np.array([*ends, *np.negative(ends)]).astype(dtype.numpy)
    x, y = (each.ravel() for each in np.meshgrid(ends, ends[ends != 0]))
    np.testing.assert_array_equal(run_on_emulator(e.remainder, x, y), np.remainder(x, y))
