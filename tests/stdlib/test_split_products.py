"""Split products: f32 products on tensor cores against NumPy, in all forms and with special values."""

import numpy as np
import pytest

import tessera as ts
from tessera.ir.rewrite import UseDef
from tessera.ops.tensor import contractions
from tessera.stdlib import split_products


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    monkeypatch.setattr(split_products, "F32_RATE", 1e9)
    monkeypatch.setattr(split_products, "LEAST_SIZE", 8)


def draw(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def bound(a, b):
    """Half a unit in the last place for each element and for the sums of 16, of the sum of magnitudes."""
    return (a.shape[-1] / 16 + 8) * 2.0**-23 * np.matmul(abs(a).astype("f8"), abs(b).astype("f8"))


CASES = {
    "whole": (lambda a, b: a @ b, (64, 48), (48, 72)), "odd": (lambda a, b: a @ b, (33, 37), (37, 51)),
    "turned right": (lambda a, b: a @ b.T, (33, 37), (51, 37)),
    "turned left": (lambda a, b: a.T @ b, (37, 33), (37, 51)),
    "batch": (lambda a, b: a @ b, (3, 17, 24), (3, 24, 40)), "shared": (lambda a, b: a @ b, (2, 3, 17, 21), (21, 24)),
    "shared, turned": (lambda a, b: a @ b.T, (3, 17, 24), (40, 24)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_split_product_is_within_the_bound_of_its_sums(name):
    function, *shapes = CASES[name]
    a, b = (draw(*s) for s in shapes)
    left, right = (a.T if "turned left" in name else a), (b.T if "turned right" in name or ", turned" in name else b)
    got = np.asarray(ts.jit(function, target="ptx")(a, b))
    assert (abs(got - np.matmul(left.astype("f8"), right.astype("f8"))) <= bound(left, right)).all()


def test_long_contractions_are_cut(monkeypatch):
    monkeypatch.setattr(split_products, "MAX_DEPTH", 16)
    a, b = draw(9, 64), draw(64, 24)
    assert split_products.match_split_product(*_operands(a, b)).chunks == 4
    got = np.asarray(ts.jit(lambda a, b: a @ b, target="ptx")(a, b))
    assert (abs(got - a.astype("f8") @ b.astype("f8")) <= bound(a, b)).all()


def test_products_of_few_blocks_are_cut_until_they_fill_the_gpu():
    a, b = np.zeros((128, 1024), np.float32), np.zeros((1024, 1024), np.float32)
    assert split_products.match_split_product(*_operands(a, b)).chunks == 8  # 16 blocks of 64 x 128
    assert split_products.match_split_product(*_operands(np.zeros((1024, 1024), np.float32), b)).chunks == 1


def _operands(a, b):
    function = ts.jit(lambda a, b: a @ b).trace(a, b).function
    (node,) = [n for n in function.body.walk() if n.op is contractions.dot]
    return UseDef(function), *node.args


@pytest.mark.filterwarnings("ignore:.*encountered in matmul")
def test_what_three_parts_cannot_represent_is_computed_in_f32():
    a, b = draw(33, 37), draw(37, 24)
    a[3, 4], a[5, 6], a[7], a[8], b[2, 2] = np.inf, np.nan, 1e-42, 0, -np.inf
    a[8, 1], b[1], a[9] = 3.3e38, 0.5, 2.0**-112
    got, want = np.asarray(ts.jit(lambda a, b: a @ b, target="ptx")(a, b)), a @ b
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[[7, 9]], want[[7, 9]], rtol=1e-4, atol=1e-43)  # tiny results have digits, too


def test_gradients_are_split_products_too():
    a, b = draw(33, 64), draw(64, 24)
    ga, gb = ts.jit(ts.grad(lambda a, b: ts.sum((a @ b) ** 2), argnums=(0, 1)), target="ptx")(a, b)
    y = 2 * (a.astype("f8") @ b)
    np.testing.assert_allclose(np.asarray(ga), y @ b.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(gb), a.T @ y, rtol=1e-4, atol=1e-4)


def test_only_where_it_pays(monkeypatch):
    a, b = draw(33, 37), draw(37, 24)
    assert split_products.match_split_product(*_operands(a, b)) is not None
    monkeypatch.undo()
    assert split_products.match_split_product(*_operands(a, b)) is None  # 59 kflop


@pytest.mark.parametrize("turned", [False, True])
def test_a_contraction_that_divides_into_no_even_parts_is_padded(turned, monkeypatch):
    monkeypatch.setattr(split_products, "MAX_DEPTH", 16)
    a, b = draw(9, 37), draw(37, 24)
    found = split_products.match_split_product(*_operands(a, b))
    assert (found.chunks, found.depth) == (3, 48)
    arrays = (a.T.copy(), b.T.copy()) if turned else (a, b)
    function = (lambda a, b: a.T @ b.T) if turned else (lambda a, b: a @ b)
    got = np.asarray(ts.jit(function, target="ptx")(*arrays))
    assert (abs(got - a.astype("f8") @ b.astype("f8")) <= bound(a, b)).all()
