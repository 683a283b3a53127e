"""Window views: stacks of slices are strided views where the plan says so, and the results are those of PyTorch."""

from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from tessera.ir.core import Module
from tessera.lower.pipeline import lower
from tessera.ops.tensor import shape
from tests.lower.levels import SMALL, agree, traced

torch = pytest.importorskip("torch")


def draw(*sizes):
    return np.random.default_rng(sum(sizes)).standard_normal(sizes).astype("f4")


X, W = draw(2, 3, 9, 8), draw(4, 3, 3, 2)


def convolve(x, w):
    return ts.conv2d(x, w, stride=(2, 1), padding=1, dilation=(1, 2))


def count_ops(function, arrays, plan):
    module = next(
        m for name, m in lower(Module("graph", (traced(function, *arrays)[0],)), plan) if name == "window views"
    )
    ops = [n.op for n in module.main.body.walk()]
    return ops.count(shape.strided_view), ops.count(shape.concatenate)


@pytest.mark.parametrize("stack_views", [True, False])
def test_windows_of_a_convolution(stack_views):
    plan = replace(SMALL, stack_views=stack_views)
    assert count_ops(convolve, (X, W), plan) == ((1, 0) if stack_views else (0, 1))
    (ours,) = agree(convolve, X, W, plans={"small": plan})
    want = torch.conv2d(torch.tensor(X), torch.tensor(W), stride=(2, 1), padding=1, dilation=(1, 2))
    np.testing.assert_allclose(ours, want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stack_views", [True, False])
def test_flips_are_views_in_any_case(stack_views):
    plan = replace(SMALL, stack_views=stack_views)
    assert count_ops(lambda x: ts.flip(x, 3), (X,), plan) == (1, 0)
    (ours,) = agree(lambda x: ts.flip(x, 3), X, plans={"small": plan})
    np.testing.assert_array_equal(ours, X[..., ::-1])


def stack_taps(x):
    return ts.stack([x[..., a : a + 5] for a in (0, 1, 2)], axis=2)


STACKS = {  # what reads a stack, and whether a product is among it
    "itself": (lambda s: s, False),
    "pointwise ops": (lambda s: s * 2.0 - s, False),
    "a reduction": (lambda s: ts.argmax(s, axis=2), False),
    "a product": (lambda s: ts.matmul(s, ts.ones((5, 2))), True),
    "a product of another shape": (lambda s: ts.matmul(s.reshape((6, 27, 5)), ts.ones((5, 2))), True),
    "a product of another type": (
        lambda s: ts.matmul(s.permute(0, 1, 3, 4, 2).to("f16"), ts.ones((3, 2), "f16")),
        True,
    ),
    "a product of what is computed": (lambda s: ts.matmul(ts.exp(s), ts.ones((5, 2))), False),
    "a product and others": (lambda s: (s + 1.0, ts.matmul(s, ts.ones((5, 2)))), True),
}


@pytest.mark.parametrize("name", STACKS)
def test_only_products_read_stacks_from_memory_of_their_own(name):
    read, by_product = STACKS[name]
    program = lambda x: read(stack_taps(x))  # noqa: E731
    for stack_views in (True, False):
        plan = replace(SMALL, stack_views=stack_views)
        assert count_ops(program, (X,), plan) == ((0, 1) if by_product and not stack_views else (1, 0))
        agree(program, X, plans={"small": plan})


def test_slices_at_no_even_distance_stay_a_stack():
    def program(x):
        return ts.stack([x[..., a : a + 3] for a in (0, 1, 3)], axis=0) * 2

    assert count_ops(program, (X,), SMALL) == (0, 1)
    (ours,) = agree(program, X, plans={"small": SMALL})
    np.testing.assert_array_equal(ours, 2 * np.stack([X[..., a : a + 3] for a in (0, 1, 3)]))
