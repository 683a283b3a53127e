"""Split K: 16-bit products with few results, cut along the contraction, against NumPy."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.ir.rewrite import UseDef
from tessera.ops.tensor import contractions
from tessera.runtime import driver
from tessera.stdlib import split_k

FORMS = {
    "plain": (lambda a, b: a @ b, lambda a, b: (a, b)),
    "turned right": (lambda a, b: a @ b.mT, lambda a, b: (a, b.swapaxes(-1, -2).copy())),
    "turned left": (lambda a, b: a.mT @ b, lambda a, b: (a.swapaxes(-1, -2).copy(), b)),
}


@pytest.fixture
def small(monkeypatch):
    """Limits that small products exceed."""
    for name, value in {"LEAST_DEPTH": 64, "LEAST_ELEMENTS": 1, "LONG_DEPTH": 64, "COLUMNS": 64}.items():
        monkeypatch.setattr(split_k, name, value)


def draw(*shape, dtype=ml_dtypes.bfloat16):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def run(function, *arrays, arch="sm_90a"):
    """The kernels of a function for a GPU, and its results in the emulator."""
    levels = driver.lower(ts.jit(function).trace(*arrays).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": arch})
    return list(artifact.manifest["plan"]["entries"]), BACKEND.interpreter(artifact)(arrays)[0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(8, 256, 72), (80, 200, 72)])
def test_parts_add_up_to_the_product(form, sizes, arch, small):
    m, k, n = sizes
    a, b = draw(m, k), draw(k, n)
    function, arrange = FORMS[form]
    names, got = run(function, *arrange(a, b), arch=arch)
    assert any("multiply_chunks" in name for name in names)
    want = a.astype("f8") @ b.astype("f8")
    np.testing.assert_allclose(got.astype("f8"), want, rtol=2**-8, atol=2**-8)


def test_batches_types_and_what_follows(small):
    a, b, c = draw(3, 8, 128, dtype=np.float16), draw(3, 128, 64, dtype=np.float16), draw(64, dtype=np.float16)
    names, got = run(lambda a, b, c: ts.relu(a @ b + c), a, b, c)
    assert any("multiply_chunks" in name for name in names) and len(names) <= 2
    want = np.maximum(np.matmul(a.astype("f8"), b.astype("f8")).astype("f2") + c, 0)
    np.testing.assert_allclose(got.astype("f8"), want.astype("f8"), rtol=2**-9, atol=2**-6)


def match(m, k, n, turned=False, function=None, wave_blocks=False):
    a, b = (np.zeros(s, ml_dtypes.bfloat16) for s in ((m, k), (n, k) if turned else (k, n)))
    function = function or ((lambda a, b: a @ b.T) if turned else (lambda a, b: a @ b))
    traced = ts.jit(function).trace(a, b).function
    (node,) = [n for n in traced.body.walk() if n.op is contractions.dot]
    found = split_k.match_chunked_product(UseDef(traced), *node.args, wave_blocks=wave_blocks)
    return found and (found.rows, found.chunks)


def test_only_where_it_pays():
    assert match(2, 4096, 4096) == match(2, 4096, 4096, turned=True) == (64, 4)
    assert match(1, 4096, 4096) == (64, 4) and match(1, 4096, 4096, turned=True) is None  # the latter is a reduction
    assert match(512, 4096, 1024) == (128, 4) and match(8, 4096, 32768) == (64, 1)
    assert match(64, 1024, 1024) is None  # short
    assert match(4096, 4097, 1) is None  # a reduction
    assert match(4096, 4096, 4096) is None  # fills the GPU
    assert match(2, 4096, 4100) is None  # no tensor map has such rows, and copies cost more than the product
    assert match(1500, 2048, 8323) == (128, 1) and match(197, 262144, 197) == (128, 33)  # copies do not
    assert match(2, 4096, 4096, function=lambda a, b: a @ (b * 2)) is None  # computed where it is read


@pytest.fixture
def slow(small, monkeypatch):
    """A GPU on which products without tensor maps take so long that all operands that need it are copied."""
    monkeypatch.setattr(split_k, "UNMAPPED_RATE", 1.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(65, 67, 70), (130, 199, 264), (68, 77, 64)])
def test_operands_with_other_rows_are_copied(form, sizes, slow):
    m, k, n = sizes
    a, b = draw(m, k), draw(k, n)
    function, arrange = FORMS[form]
    names, got = run(function, *arrange(a, b))
    assert any("copy_rows" in name for name in names) and any("multiply_chunks" in name for name in names)
    want = a.astype("f8") @ b.astype("f8")
    np.testing.assert_allclose(got.astype("f8"), want, rtol=2**-8, atol=2**-6)


@pytest.mark.parametrize("form", ["plain", "turned left"])
@pytest.mark.parametrize("sizes", [(8, 72, 64, 49), (4, 136, 128, 70)])
def test_short_rows_of_a_batch_are_those_of_one_product(form, sizes, slow, monkeypatch):
    monkeypatch.setattr(split_k.JoinedProduct, "estimate_seconds", lambda self: 0.0)
    batch, m, k, n = sizes
    a, b, c = draw(m, k, dtype=np.float16), draw(batch, k, n, dtype=np.float16), draw(m, 1, dtype=np.float16)
    function = {"plain": lambda a, b, c: ts.relu(a @ b + c), "turned left": lambda a, b, c: ts.relu(a.mT @ b + c)}[form]
    names, got = run(function, a if form == "plain" else a.T.copy(), b, c)
    assert any("copy_side_by_side" in name for name in names)
    want = np.maximum(np.matmul(a.astype("f8"), b.astype("f8")).astype("f2") + c, 0)
    np.testing.assert_allclose(got.astype("f8"), want.astype("f8"), rtol=2**-9, atol=2**-6)


def test_where_a_batch_is_one_product():
    def match_batch(batch, n, both=False):
        a, b = np.zeros((batch, 1024, 1440) if both else (1024, 1440), "f2"), np.zeros((batch, 1440, n), "f2")
        traced = ts.jit(lambda a, b: a @ b).trace(a, b).function
        (node,) = [n for n in traced.body.walk() if n.op is contractions.dot]
        return isinstance(split_k.match_chunked_product(UseDef(traced), *node.args), split_k.JoinedProduct)

    assert match_batch(128, 49)
    assert not match_batch(128, 64)  # a tensor map loads such rows
    assert not match_batch(7, 49)  # nor 7 · 49 elements
    assert not match_batch(128, 49, both=True)


def test_the_copy_of_one_side_of_a_batch_with_a_bias(slow):
    a, b, c = draw(3, 70, 67, dtype=np.float16), draw(67, 72, dtype=np.float16), draw(72, dtype=np.float16)
    names, got = run(lambda a, b, c: ts.relu(a @ b + c), a, b, c)
    assert sum("copy_rows" in name for name in names) == 1
    want = np.maximum(np.matmul(a.astype("f8"), b.astype("f8")).astype("f2") + c, 0)
    np.testing.assert_allclose(got.astype("f8"), want.astype("f8"), rtol=2**-9, atol=2**-6)


@pytest.mark.in_turn("depth")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("depth", [344, 96])
def test_bytes_are_multiplied_along_the_contraction(form, dtype, depth, slow):
    rng = np.random.default_rng(1)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max + 1
    a, b = rng.integers(low, high, (70, depth), dtype), rng.integers(low, high, (depth, 72), dtype)
    _, arrange = FORMS[form]
    views = {
        "plain": lambda a, b: (a, b),
        "turned right": lambda a, b: (a, b.mT),
        "turned left": lambda a, b: (a.mT, b),
    }
    names, got = run(lambda a, b: ts.matmul(*views[form](a, b), dtype=ts.int32), *arrange(a, b))
    copied = form != "turned right" or depth % 16 != 0
    assert any("copy" in name for name in names) == any("multiply_chunks" in name for name in names) == copied
    np.testing.assert_array_equal(got, a.astype(np.int64) @ b.astype(np.int64))


def test_batches_of_bytes(slow):
    a, b = np.random.default_rng(2).integers(-128, 128, (2, 3, 66, 80), np.int8)
    names, got = run(lambda a, b: ts.matmul(a, b, dtype=ts.int32), a, b.swapaxes(-1, -2).copy())
    assert any("copy_turned" in name for name in names)
    np.testing.assert_array_equal(got, np.matmul(a.astype(np.int64), b.swapaxes(-1, -2)))


@pytest.mark.in_turn("dtype")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", [(3, 129, 70), (42, 200, 67), (70, 96, 5)])
def test_products_by_multiply_add_are_cut(form, dtype, sizes, monkeypatch):
    for name, value in {"SCALAR_DEPTH": 32, "LONG_SCALAR_DEPTH": 64, "LEAST_PARTS": 2}.items():
        monkeypatch.setattr(split_k, name, value)
    m, k, n = sizes
    a, b = draw(m, k, dtype=dtype), draw(k, n, dtype=dtype)
    function, arrange = FORMS[form]
    names, got = run(function, *arrange(a, b))
    assert any("multiply_chunks" in name for name in names) and not any("copy" in name for name in names)
    tolerance = 2e-5 if dtype == np.float32 else 1e-13
    np.testing.assert_allclose(got, a.astype("f8") @ b.astype("f8"), rtol=tolerance, atol=tolerance)


def test_long_products_by_multiply_add():
    def chunks(m, k, n, dtype=np.float32, function=lambda a, b: a @ b):
        traced = ts.jit(function).trace(np.zeros((m, k), dtype), np.zeros((k, n), dtype)).function
        (node,) = [n for n in traced.body.walk() if n.op is contractions.dot]
        found = split_k.match_chunked_product(UseDef(traced), *node.args)
        return found and (found.rows, found.columns, found.chunks)

    assert chunks(42, 10139, 22221) == (64, 128, 3)
    assert chunks(87, 1344, 64) == (64, 128, 10) and chunks(4, 4096, 4096) == (8, 256, 32)
    assert chunks(64, 4096, 64, np.float64) == (64, 128, 32)
    assert chunks(3711, 3879, 1822, np.float64) == (64, 128, 1) and chunks(63, 512, 512, np.float64) is None
    assert chunks(32, 512, 512) is None  # short
    assert chunks(4096, 4096, 4096) is None  # fills the GPU


def test_parts_that_fill_the_last_wave_of_programs():
    assert match(3072, 32768, 768) == match(768, 32768, 3072) == (128, 5)  # 72 blocks of 128 x 256 on 132 processors
    assert match(768, 8192, 768) == (128, 3) and match(2304, 8192, 768) is None
    assert match(768, 8192, 768, function=lambda a, b: a @ (b * 2)) == (
        128,
        3,
    )  # an operand of 16 bits is written first
    assert match(8192, 768, 50304) is None


def test_parts_where_blocks_are_chosen_by_waves():
    def parts(*sizes):
        return match(*sizes, wave_blocks=True)

    assert parts(3072, 8192, 768) is parts(768, 8192, 3072) is parts(8192, 50304, 768) is None  # 120 of 128 x 160
    assert parts(512, 4096, 1024) is parts(256, 4096, 1024) is parts(64, 4096, 4096) is None  # blocks of 64 x 64
    assert parts(4608, 32768, 256) == (128, 7) and parts(768, 8192, 768) == (128, 3)
    assert parts(64, 4096, 1024) == (64, 8) and parts(24, 4096, 4096) == (64, 4)


def test_products_of_casts_are_those_of_what_was_cast(monkeypatch):
    """f32 casts of f16, through moves of elements, as those of a convolution, whose rows no tensor map loads."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((256, 384), (2, 384, 7, 7)))
    monkeypatch.setattr(split_k, "_copies_pay", lambda product: True)

    def function(a, b):
        columns = ts.cast(b, ts.f32).reshape(2, 384, 49)
        return ts.cast(ts.cast(a, ts.f32)[None] @ columns, ts.f16)

    levels = driver.lower(ts.jit(function).trace(a, b).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
    assert [n for n in artifact.manifest["plan"]["entries"] if n.startswith("copy_rows")]
    want = np.einsum("mk,zkp->zmp", a.astype("f8"), b.reshape(2, 384, 49).astype("f8"))
    found = BACKEND.interpreter(artifact)((a, b))[0]
    np.testing.assert_allclose(found.astype("f8"), want, rtol=2**-10, atol=2e-2)


def test_gathered_operands_that_were_widened(slow):
    """Wide windows that overlap are gathered after a cast: the gather needs its indices, too."""
    a, b, places = draw(256, 576), draw(300, 72), np.random.default_rng(0).integers(0, 300, 576)

    def multiply(a, b, places):
        return ts.cast(a, ts.f32) @ ts.gather(ts.cast(b, ts.f32), places, axis=0)

    _, got = run(multiply, a, b, places)
    want = a.astype("f8") @ b.astype("f8")[places]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
