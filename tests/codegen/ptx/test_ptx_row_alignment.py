"""Row alignment: misaligned rows after the pass and in the emulator, and the vectors that they are read in."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.generator import TEXT_FILE
from tessera.interp.tile import interpreter
from tessera.runtime import driver

# Rows of more elements are walked in blocks, by one program each.
SHORT = {"row_limit": 1024, "row_tile": 1024, "rows": 1024, "shares_rows": False}
FUNCTIONS = {
    "log_softmax": lambda x: ts.log_softmax(x, axis=-1),
    "wider results": lambda x: ts.softmax(x.astype(ts.f32), axis=-1),
    "norm": lambda x: ts.layer_norm(x),
    "rows and numbers": lambda x: (ts.softmax(x, axis=-1) * 2.0, x.max(axis=-1)),
    "numbers": lambda x: ts.logsumexp(x, axis=-1),
}


@ts.kernel
def scale_blocks(x, out, *, N: int, B: int):
    """The rows of `x` in blocks, each of which is divided by its maximum, and what is left doubled."""
    r = tile.program_id(0)
    for i in range(0, N // B * B, B):
        block = tile.cast(x[r, i : i + B], ts.f32)
        most = tile.max(block)
        if most > 0.0:
            most = most + 1.0
        out[r, i : i + B] = tile.cast(block / most, ts.f16)
    out[r, N // B * B : N] = x[r, N // B * B : N] * 2.0


def draw(*shape):
    x = (np.random.default_rng(0).standard_normal(shape) * 3).astype("f2")
    rows = x.reshape(-1, shape[-1])
    rows[1, 0] = rows[2, -1] = 60  # maxima at the ends, beside those of other rows
    rows[3, :3] = -np.inf
    return x


def lower(function, x):
    return driver.lower(ts.jit(function).trace(x).function, "ptx", SHORT)["tile"]


def run_pass(module):
    """The module after the pass, and whether it changed."""
    for each in BACKEND.passes(module, {"arch": "sm_90a"}):
        before, module = module, each.run(module)
        if each.name == "row alignment":
            return module, module.functions[1:] != before.functions[1:]
    raise AssertionError


@pytest.mark.parametrize("size", [2057, 2062, 9001])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_aligned_rows_are_those_of_the_program(name, size):
    x = draw(5, size) if name != "norm" else np.nan_to_num(draw(5, size), neginf=0)
    module = lower(FUNCTIONS[name], x)
    wanted, (aligned, changed) = interpreter.run(module, [x]), run_pass(module)
    artifact = BACKEND.emit(module, {"arch": "sm_90a"})
    assert changed and "ld.global.v" in artifact.text(TEXT_FILE)
    for found in (interpreter.run(aligned, [x]), BACKEND.sanitized(artifact)([x])):
        for ours, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(ours, "f8"), want.astype("f8"), rtol=2e-3, atol=2e-5)


def test_rows_of_two_leading_axes():
    x = draw(2, 3, 2061)
    module = lower(FUNCTIONS["log_softmax"], x)
    aligned, changed = run_pass(module)
    assert changed
    np.testing.assert_allclose(interpreter.run(aligned, [x])[0], interpreter.run(module, [x])[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (FUNCTIONS["log_softmax"], draw(5, 2048)),  # aligned
        (FUNCTIONS["log_softmax"], draw(5, 1001)),  # one block
        (FUNCTIONS["log_softmax"], draw(5, 2051)),  # less is left than may lie before a vector
        (FUNCTIONS["log_softmax"], draw(5, 2061).astype("f8")),  # loads of single elements are as fast
        (lambda x: ts.argmax(x, axis=-1), draw(5, 2061)),  # which counts elements
        (lambda x: ts.softmax(x + ts.Tensor(np.ones(2061, "f2")), axis=-1), draw(5, 2061)),  # a vector beside the rows
    ],
    ids=["aligned", "short", "little left", "f64", "argmax", "vector"],
)
def test_other_rows_stay(function, x):
    assert not run_pass(lower(function, x))[1]


def test_blocks_of_a_kernel_of_the_user_stay():
    x = draw(5, 2061)
    traced = ts.jit(lambda x: ts.launch(scale_blocks, (5,), x, ts.like(x), N=2061, B=1024)).trace(x)
    module = driver.lower(traced.function, "ptx")["tile"]
    (wanted,), (aligned, changed) = interpreter.run(module, [x]), run_pass(module)
    assert not changed
    np.testing.assert_allclose(interpreter.run(aligned, [x])[0].astype("f4"), wanted.astype("f4"), rtol=1e-3)
