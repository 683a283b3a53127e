"""Matrix products of any size, type, orientation and epilogue, on both architectures, against NumPy in f64."""

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ptxcheck import emit_checked

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.core.types import bf16, f16, f32, fp8_e4m3, fp8_e5m2, int8
from tessera.frontend.kernel import kernel
from tessera.runtime.program import prepare

EPILOGUES = {
    "none": lambda x, bias: x,
    "bias": lambda x, bias: x + bias,
    "relu": lambda x, bias: np.maximum(x + bias, 0),
    "tanh": lambda x, bias: np.tanh(x + bias),
}
# The type of the sides, of the result, and the relative error of one rounding to the latter.
TYPES = {
    "bf16": (bf16, bf16, 2.0**-8), "f16": (f16, f16, 2.0**-10), "f32": (f32, f32, 2.0**-20),
    "e4m3": (fp8_e4m3, f32, 2.0**-12), "e5m2": (fp8_e5m2, f32, 2.0**-12), "int8": (int8, f32, 2.0**-22),
}  # fmt: skip


@kernel
def product(a, b, bias, out, *, BM: int, BN: int, BK: int, left_turned: bool, right_turned: bool, after: str):
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), a.type.accumulate)
    for k in tile.range(0, a.shape[0] if left_turned else a.shape[1], BK):
        if left_turned:
            left = tile.transpose(tile.load(a[k : k + BK, m : m + BM], edge="clip"))
        else:
            left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        if right_turned:
            right = tile.transpose(tile.load(b[n : n + BN, k : k + BK], edge="clip"))
        else:
            right = tile.load(b[k : k + BK, n : n + BN], edge="clip")
        acc += tile.dot(left, right)
    x = tile.cast(acc, ts.f32)
    if after != "none":
        x = x + tile.load(bias[n : n + BN], edge="clip")[None, :]
    if after == "relu":
        x = tile.maximum(x, 0.0)
    if after == "tanh":
        x = tile.tanh(x)
    tile.store(out[m : m + BM, n : n + BN], tile.cast(x, out.dtype), edge="clip")


sizes = st.one_of(st.integers(1, 700), st.sampled_from([1, 8, 16, 64, 128, 200, 256, 512]))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.tuples(sizes, sizes, sizes), st.sampled_from(list(TYPES)), st.booleans(), st.booleans(),
    st.sampled_from(list(EPILOGUES)), st.sampled_from(["sm_80", "sm_90a"]),
)  # fmt: skip
def test_any_product(shape, name, left_turned, right_turned, after, arch):
    (m, n, k), (side, result, rounding) = shape, TYPES[name]
    random = np.random.default_rng(m * 700 + n)
    scale = 30 if side == int8 else 1 / np.sqrt(k)
    a, b = ((random.standard_normal(s) * scale).astype(side.numpy) for s in ((m, k), (k, n)))
    bias, out = random.standard_normal(n).astype(np.float32), np.zeros((m, n), result.numpy)
    sides = [np.ascontiguousarray(x.T) if t else x for x, t in ((a, left_turned), (b, right_turned))]
    depth = 128 if side.bits == 8 else 64
    arguments = {"a": sides[0], "b": sides[1], "bias": bias, "out": out, "BM": 64, "BN": 64, "BK": depth}
    arguments |= {"left_turned": left_turned, "right_turned": right_turned, "after": after}
    program = prepare(product, arguments, "ptx", (-(-m // 64), -(-n // 64)))
    BACKEND.interpreter(emit_checked(program.levels["tile"], arch))([*sides, bias, out])
    x, y = a.astype(np.float64), b.astype(np.float64)
    want = EPILOGUES[after](x @ y, bias.astype(np.float64))
    bound = rounding * np.abs(want) + 2.0**-20 * (np.abs(x) @ np.abs(y) + 1) + 2.0**-12 * (name[0] == "e")
    assert (np.abs(out.astype(np.float64) - want) <= bound).all()


small = st.integers(1, 66)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.tuples(small, small, small), st.sampled_from([f32, ts.f64, ts.int32, bf16, f16, int8]))
@example((17, 9, 65), bf16)
@example((8, 33, 16), bf16)
@example((17, 9, 65), ts.f64)
@example((3, 18, 12), f32)
@example((17, 9, 65), int8)
@example((5, 40, 33), int8)
def test_small_products_read_what_they_stored(shape, side):
    """Blocks that are no multiple of an access or of a matrix, in the emulator's debug mode."""
    m, n, k = shape
    a, b = (
        (np.arange(rows * columns) % 5).reshape(rows, columns).astype(side.numpy) for rows, columns in ((m, k), (k, n))
    )
    program = prepare(ts.jit(lambda x, y: x @ y), [a, b], "ptx")
    (got,) = BACKEND.sanitized(emit_checked(program.levels["tile"], "sm_90a"))([a, b])
    want = np.matmul(a.astype(np.float64), b.astype(np.float64))  # of int8 in int32
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2.0**-8 if side.is_float else 0)
