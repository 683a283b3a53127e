"""fp8 in pairs: casts by the instruction of two numbers, at the limits of the formats, against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from ptxcheck import emit_checked

import tessera as ts
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.types import f32, fp8_e4m3, fp8_e5m2
from tessera.runtime.program import prepare

FORMATS = {fp8_e4m3: (ml_dtypes.float8_e4m3fn, "e4m3x2"), fp8_e5m2: (ml_dtypes.float8_e5m2, "e5m2x2")}
LIMITS = (
    464, 464.1, 448, 465, 480, 500, -464, -465, np.inf, -np.inf, np.nan, 57344, 61439, 61440, 61441, -61440, 1e30, 0,
    -0.0, 2**-9, 2**-10, 2**-17, 3 * 2**-17,
)  # fmt: skip


def emit(dtype, arch):
    x = np.zeros(64, np.float32)
    module = prepare(ts.jit(lambda x: ts.cast(x, dtype)), (x,), "ptx").levels["tile"]
    return emit_checked(module, arch).text(TEXT_FILE)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_instruction_is_emitted_where_the_architecture_has_it(dtype):
    form = f"cvt.rn.satfinite.{FORMATS[dtype][1]}.f32"
    assert form in emit(dtype, "sm_90a") and form not in emit(dtype, "sm_80")


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("count", [1, 3, 37, 4099])
def test_numbers_and_codes(dtype, count):
    kind = FORMATS[dtype][0]
    random = np.random.default_rng(count)
    x = (random.standard_normal(count) * 2.0 ** random.integers(-20, 20, count)).astype("f4")
    x[-len(LIMITS) :] = np.array(LIMITS, "f4")[-count:]
    want = x.astype(kind)
    got = ts.jit(lambda x: ts.cast(x, dtype), target="ptx")(x).numpy()
    numbers = ~np.isnan(want.astype("f4"))
    np.testing.assert_array_equal(got.view("u1")[numbers], want.view("u1")[numbers])
    assert np.isnan(got.astype("f4"))[~numbers].all()
    np.testing.assert_array_equal(ts.jit(lambda x: ts.cast(x, f32), target="ptx")(want).numpy(), want.astype("f4"))
    again = ts.jit(lambda x: ts.cast(ts.cast(x, dtype), f32) + 1, target="ptx")(x).numpy()
    np.testing.assert_array_equal(again, want.astype("f4") + 1)
