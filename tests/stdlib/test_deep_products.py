"""Products of few results and a long contraction on a processor, cut along it: values, bits, and what is not cut."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.llvm import BACKEND
from tessera.runtime import driver

RNG = np.random.default_rng(0)
TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def lower(function, *arrays):
    return driver.lower(ts.jit(function).trace(*arrays).function, "llvm")["tile"]


def is_cut(module):
    return any(f.name.startswith("multiply_chunks") for f in module.functions)


def multiply(turned_a, turned_b, **options):
    return lambda a, b: ts.matmul(a.T if turned_a else a, b.T if turned_b else b, **options)


def draw(m, k, n, turned_a, turned_b, dtype):
    a, b = RNG.normal(size=(m, k)), RNG.normal(size=(k, n))
    return tuple(np.ascontiguousarray(x.T if t else x).astype(TYPES[dtype]) for x, t in ((a, turned_a), (b, turned_b)))


@pytest.mark.in_turn("dtype")
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(48, 2048, 40), (77, 3333, 50), (256, 5000, 37), (300, 2100, 33)])
def test_values(m, k, n, dtype, turned):
    a, b = draw(m, k, n, *turned, dtype)
    module = lower(multiply(*turned), a, b)
    assert is_cut(module)
    (found,) = driver.compile_tile(module, "llvm")([a, b])
    left, right = (x.T if t else x for x, t in zip((a.astype("f8"), b.astype("f8")), turned, strict=True))
    eps = {"bf16": 2**-8, "f16": 2**-11, "f32": 2e-6}[dtype]
    assert found.dtype == TYPES[dtype]
    np.testing.assert_allclose(
        found.astype("f8"), left @ right, rtol=eps, atol=2e-6 * (np.abs(left) @ np.abs(right)).max()
    )


def test_the_bits_are_those_of_one_thread():
    a, b = draw(64, 9000, 48, False, False, "bf16")
    artifact = BACKEND.emit(lower(multiply(False, False), a, b), {})
    one, *others = (BACKEND.runtime(artifact, threads).run([a, b])[0] for threads in (1, 2, 3))
    for other in others:
        np.testing.assert_array_equal(one, other)


def test_the_interpreter_agrees():
    a, b = draw(48, 2048, 33, False, True, "f32")
    lowered = driver.lower(ts.jit(multiply(False, True)).trace(a, b).function, "llvm")
    assert is_cut(lowered["tile"])
    one, other = (driver.run_level(lowered, level, [a, b], "llvm")[0] for level in ("tile", "target"))
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_what_follows_reads_the_sum():
    a, b = draw(64, 4096, 64, False, False, "bf16")
    bias = RNG.normal(size=64).astype(TYPES["bf16"])
    module = lower(lambda a, b, c: ts.relu(a @ b + c), a, b, bias)
    assert is_cut(module) and len(module.functions) == 3
    (found,) = driver.compile_tile(module, "llvm")([a, b, bias])
    wanted = np.maximum((a.astype("f4") @ b.astype("f4")).astype(TYPES["bf16"]) + bias, 0)
    np.testing.assert_allclose(found.astype("f4"), wanted.astype("f4"), rtol=2e-2, atol=0.5)


@pytest.mark.parametrize(
    ("m", "k", "n", "dtype"),
    [(48, 1024, 40, "bf16"), (16, 9000, 40, "bf16"), (130, 2100, 130, "bf16"), (1024, 4096, 1024, "bf16"),
     (64, 4096, 64, "f32"), (300, 3000, 200, "f32")],
)  # fmt: skip
def test_others_stay_whole(m, k, n, dtype):
    """Short contractions, few rows, blocks that pad much, and many blocks; columns of f32 that are whole registers."""
    assert not is_cut(lower(multiply(False, False), *draw(m, k, n, False, False, dtype)))


def test_what_is_computed_is_not_written_first():
    a, b = draw(64, 4096, 48, False, False, "bf16")
    assert not is_cut(lower(lambda a, b: ts.exp(a) @ b, a, b))
