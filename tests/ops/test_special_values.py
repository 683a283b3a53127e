"""Scalar ops at ±0, infinities, NaN, huge and subnormal numbers: eagerly and in every target's text."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.types import f32
from tessera.errors import UnsupportedOpError
from tessera.ir.numerics.error_model import find_ulp_bound
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f
from tessera.runtime.program import prepare

SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 3.4e38, 1e-40, -1e-40, 1e-45, 0.5, 1.0, -1.0, 2.0, -3.0],
    np.float32,
)
LEFT, RIGHT = (each.ravel() for each in np.meshgrid(SPECIAL, SPECIAL))
UNARY = (
    e.exp, e.exp2, e.log, e.log2, e.sqrt, e.rsqrt, e.tanh, e.erf, e.erfc, e.sin, e.cos, e.floor, e.ceil, e.round, e.abs,
    e.neg, f.expm1, f.log1p, f.atan,
)  # fmt: skip
BINARY = (
    e.add, e.sub, e.mul, e.div, e.pow, e.maximum, e.minimum, e.remainder, e.floor_divide,
)  # fmt: skip


def find_units(op):
    """How many units in the last place a result may be off; 0 where it is exact."""
    try:
        return find_ulp_bound(op, f32)
    except UnsupportedOpError:
        return 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("target", ["llvm", "ptx", "csl"])
@pytest.mark.parametrize("op", [*UNARY, *BINARY], ids=lambda op: op.name)
def test_special_values_are_numpys(op, target):
    inputs = (SPECIAL,) if op in UNARY else (LEFT, RIGHT)
    want = op(*map(ts.Tensor, inputs)).numpy()
    program = prepare(ts.jit(lambda *x: op(*x)), inputs, target)
    for level in ("device", "target") if target == "llvm" else ("target",):
        found = np.asarray(program.run(level, target)[0])
        near = np.abs(found - want) <= find_units(op) * np.spacing(np.abs(want))
        same = (found == want) & (np.signbit(found) == np.signbit(want)) | (np.isnan(found) & np.isnan(want))
        good = same | near & (want != 0)
        assert good.all(), [(*(x[i] for x in inputs), found[i], want[i]) for i in np.flatnonzero(~good)[:6]]
