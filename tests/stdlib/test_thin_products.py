"""Thin products: f32 products of few rows or columns against NumPy, in all forms and with special values."""

import math
from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.ops import async_mma, fetched_block
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.interp.tile import interpreter
from tessera.ir.rewrite import UseDef
from tessera.ops.tensor import contractions
from tessera.runtime import driver
from tessera.stdlib import split_products, thin_products


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(split_products, "F32_RATE", 1e6)
    monkeypatch.setattr(split_products, "LEAST_SIZE", math.inf)
    monkeypatch.setattr(thin_products, "LEAST_ELEMENTS", 1)


def draw(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def multiply(a, b):
    return a @ b


CASES = {
    "wide right": (multiply, (5, 72), (72, 136)), "wide right, turned": (lambda a, b: a @ b.mT, (70, 72), (132, 72)),
    "wide left": (multiply, (132, 72), (72, 9)), "wide left, turned": (lambda a, b: a.mT @ b, (72, 132), (72, 9)),
    "both turned": (lambda a, b: a.mT @ b.mT, (72, 5), (136, 72)), "odd rows": (multiply, (5, 65), (65, 131)),
    "odd rows, turned": (lambda a, b: a @ b.mT, (130, 67), (131, 67)), "batch": (multiply, (3, 5, 64), (3, 64, 68)),
    "one wide": (multiply, (3, 5, 64), (1, 64, 136)), "one narrow": (multiply, (3, 132, 64), (1, 64, 9)),
    "shared wide": (multiply, (2, 5, 64), (64, 140)), "shared narrow": (lambda a, b: a @ b.mT, (2, 68, 64), (20, 64)),
}  # fmt: skip


def lower(function, *arrays):
    return driver.lower(ts.jit(function).trace(*arrays).function, "ptx")


def check(function, a, b, got):
    """Half a unit in the last place for each element and for the sums of 16, of the sum of magnitudes."""
    sums = function(abs(a).astype("f8"), abs(b).astype("f8"))
    assert (abs(got - function(a.astype("f8"), b.astype("f8"))) <= (max(a.shape) / 16 + 8) * 2.0**-23 * sums).all()


@pytest.mark.parametrize("name", CASES)
def test_a_thin_product_is_within_the_bound_of_its_sums(name, always):
    function, *shapes = CASES[name]
    a, b = (draw(*s) for s in shapes)
    levels = lower(function, a, b)
    artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
    text = artifact.text(TEXT_FILE)
    entry = text[text.index(".entry multiply_split") :]
    assert ".entry add_checked" not in text and "wgmma.mma_async" in entry and "mma.sync" not in entry
    check(function, a, b, BACKEND.sanitized(artifact)([a, b])[0])


def test_every_pass_keeps_the_product(always):
    a, b = draw(9, 72), draw(72, 136)
    module, names = lower(multiply, a, b)["tile"], set()
    for each in BACKEND.passes(module, {"arch": "sm_90a"}):
        module = each.run(module)
        check(multiply, a, b, interpreter.run(module, [a, b])[0])
        names |= {n.op for f in module.functions for n in f.body.walk()}
    assert {async_mma, fetched_block} <= names


@pytest.mark.parametrize("added", [16, 2], ids=["added by the check", "added before"])
def test_long_contractions_are_cut(added, always, monkeypatch):
    monkeypatch.setattr(thin_products, "MAX_DEPTH", 64)
    monkeypatch.setattr(split_products, "MOST_ADDED", added)
    a, b = draw(70, 200), draw(200, 132)
    assert find(70, 200, 132).chunks >= 4
    check(multiply, a, b, np.asarray(ts.jit(multiply, target="ptx")(a, b)))


def test_stages_of_the_ring_are_used_again(always, monkeypatch):
    monkeypatch.setattr(thin_products, "MOST_CHUNKS", 1)
    a, b = draw(5, 900), draw(900, 128)
    artifact = BACKEND.emit(lower(multiply, a, b)["tile"], {"arch": "sm_90a"})
    check(multiply, a, b, BACKEND.sanitized(artifact)([a, b])[0])


@pytest.mark.parametrize("depth", [64, 129, 257, 640, 1000, 1025, 4097])
def test_chunks_are_the_whole_contraction(depth, always):
    """All elements are in one, and none is empty."""
    found = find(70, depth, 132)
    tried = [replace(found, chunks=chunks) for _, chunks in thin_products._list_choices(depth, 70)]
    assert tried and all((each.chunks - 1) * each.depth < depth <= each.chunks * each.depth for each in tried)


@pytest.fixture(params=[64, 1024], ids=["two chunks", "one chunk"])
def chunks(request, always, monkeypatch):
    monkeypatch.setattr(thin_products, "MAX_DEPTH", request.param)
    return 2 if request.param == 64 else 1


@pytest.mark.filterwarnings("ignore:.*encountered in matmul")
def test_what_three_parts_cannot_represent_is_computed_in_f32(chunks):
    assert find(33, 72, 136).chunks == chunks
    a, b = draw(33, 72), draw(72, 136)
    a[3, 4], a[5, 6], a[7], a[8], b[2, 2] = np.inf, np.nan, 1e-42, 0, -np.inf
    a[8, 1], b[1], a[9], b[7, 100] = 3.3e38, 0.5, 2.0**-112, 1e-41
    got, want = np.asarray(ts.jit(multiply, target="ptx")(a, b)), a @ b
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[[7, 9]], want[[7, 9]], rtol=1e-4, atol=1e-43)  # tiny results have digits, too


@pytest.mark.filterwarnings("ignore:.*encountered in matmul")
@pytest.mark.parametrize(
    "name", ["wide right", "wide right, turned", "wide left", "both turned", "one wide", "shared narrow"]
)
def test_one_chunk_is_computed_again_where_it_is_not_finite(name, always):
    function, *shapes = CASES[name]
    a, b = (draw(*s) for s in shapes)
    a.reshape(-1)[3], b.reshape(-1)[-5] = np.inf, np.nan
    artifact = BACKEND.emit(lower(function, a, b)["tile"], {"arch": "sm_90a"})
    got, want = BACKEND.sanitized(artifact)([a, b])[0], function(a.astype("f8"), b.astype("f8")).astype("f4")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_pointwise_ops_follow_in_the_launch_that_checks(chunks):
    a, b, bias = draw(9, 72), draw(72, 136), draw(136)
    levels = lower(lambda a, b, bias: ts.relu(a @ b + bias), a, b, bias)
    name = "multiply_split" if chunks == 1 else "add_checked"
    assert [f.name for f in levels["tile"].functions[1:]][-1] == f"{name}_with_add_maximum"
    got = driver.run_level(levels, "target", [a, b, bias], "ptx")[0]
    np.testing.assert_allclose(got, np.maximum(a @ b + bias, 0), rtol=1e-5, atol=1e-5)


def find(m, k, n, function=multiply):
    a, b = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
    traced = ts.jit(function).trace(a, b).function
    (node,) = [n for n in traced.body.walk() if n.op is contractions.dot]
    return thin_products.match_thin_product(UseDef(traced), *node.args)


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [((128, 4096, 4096), 128), ((40, 4096, 4096), 64), ((4096, 4096, 200), 128), ((2, 4096, 4096), None),
     ((4096, 512, 4096), None), ((64, 256, 256), None), ((16384, 64, 16384), 128)],
)  # fmt: skip
def test_which_products_are_thin(sizes, columns):
    found = find(*sizes)
    assert (found and found.columns) == columns
