"""Edge cases as in NumPy and PyTorch: bools in arithmetic, empty axes, scalars, attention with masks of bools."""

import operator

import numpy as np
import pytest

import tessera as ts
from tessera.errors import DTypeError
from tessera.ops.tensor import attention
from tessera.runtime.driver import run_level
from tessera.runtime.program import prepare

B, C = np.array([True, False, True, False]), np.array([True, True, False, False])
ARITHMETIC = {
    "add": operator.add, "mul": operator.mul, "floor_divide": operator.floordiv, "remainder": operator.mod,
    "pow": operator.pow, "matmul": operator.matmul, "with an int": lambda a, b: a + 1,
    "and a bool": lambda a, b: a + True, "outer": lambda a, b: a.reshape(4, 1) * b, "abs": lambda a, b: abs(a),
    "sum": lambda a, b: a.sum(),
}  # fmt: skip
TARGETS = ["eager", "interp", "llvm"]
EMPTY = np.zeros((3, 0), np.float32)
# A function of an array with an empty axis, and its result.
EMPTY_AXES = {
    "softmax": (ts.softmax, EMPTY),
    "log_softmax": (ts.log_softmax, EMPTY),
    "pinv": (ts.linalg.pinv, EMPTY.T),
    "pad": (lambda x: ts.pad(x, ((0, 0), (1, 2)), 5.0), np.full((3, 3), 5, np.float32)),
    "pad of a product": (lambda x: ts.pad(x * 2.0, ((1, 0), (2, 0)), 5.0) + 1.0, np.full((4, 2), 6, np.float32)),
    "concatenate": (lambda x: ts.concatenate([x * 2.0, ts.ones((3, 2))], axis=1), np.ones((3, 2), np.float32)),
}


def call(function, target, *args):
    if target == "eager":
        return function(*map(ts.Tensor, args)).numpy()
    return np.asarray(ts.jit(function, target=target)(*args))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_bools_in_arithmetic_as_numpy(name, target):
    found, expected = call(ARITHMETIC[name], target, B, C), ARITHMETIC[name](B, C)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("target", TARGETS)
def test_the_mean_of_bools(target):
    assert call(lambda x: x.mean(), target, B) == 0.5


@pytest.mark.parametrize("wrong", [operator.sub, lambda a, b: -a])
def test_differences_of_bools_are_refused_as_in_numpy(wrong):
    with pytest.raises(DTypeError, match="arithmetic on bool"):
        wrong(ts.Tensor(B), ts.Tensor(C))
    with pytest.raises(TypeError):
        wrong(B, C)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", EMPTY_AXES)
def test_empty_axes(name, target):
    function, expected = EMPTY_AXES[name]
    found = call(function, target, EMPTY)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("level", ["graph", "schedule", "tile", "target"])
@pytest.mark.parametrize("name", [n for n in EMPTY_AXES if n != "pinv"])
def test_empty_axes_at_every_level(name, level):
    function, expected = EMPTY_AXES[name]
    levels = prepare(ts.jit(function), (EMPTY,), "llvm").levels
    np.testing.assert_array_equal(run_level(levels, level, [EMPTY])[0], expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_argmax_of_a_scalar(target, axis):
    assert call(lambda x: ts.argmax(x, axis=axis) + ts.argmin(x, axis=axis), target, np.float32(3)) == 0
    assert call(lambda x: ts.argmax(x, axis=axis, keepdims=True), target, np.float32(3)).shape == ()


# Attention.


def attention_inputs(*leads):
    rng = np.random.default_rng(len(leads))
    return [rng.standard_normal((*lead, n, 8)).astype(np.float32) for lead, n in zip(leads, (4, 5, 5), strict=True)]


@pytest.mark.parametrize("target", [*TARGETS, "ptx"])
@pytest.mark.parametrize("leads", [((2, 3), (1, 3), (3,)), ((), (2,), (2,)), ((1,), (4, 1), (2,))])
def test_leading_axes_of_attention_broadcast(leads, target):
    q, k, v = attention_inputs(*leads)
    found = call(ts.scaled_dot_product_attention, target, q, k, v)
    weights = np.exp(q @ np.swapaxes(k, -1, -2) / np.sqrt(8))
    np.testing.assert_allclose(found, (weights / weights.sum(-1, keepdims=True)) @ v, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("target", [*TARGETS, "ptx"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_a_query_that_sees_no_key_gives_zeros(lead, kind, target):
    """As PyTorch's function, for masks of both kinds; its gradient is 0, too."""
    q, k, v = attention_inputs(lead, lead, lead)
    seen = np.ones((4, 5), bool)
    seen[1], seen[2, 3:] = False, False
    mask = seen if kind == "bool" else np.where(seen, 0, -np.inf).astype(np.float32)
    found = call(ts.scaled_dot_product_attention, target, q, k, v, mask)
    weights = np.exp(q @ np.swapaxes(k, -1, -2) / np.sqrt(8)) * seen
    expected = (weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)) @ v
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert not found[..., 1, :].any()
    slope = ts.grad(lambda q: ts.scaled_dot_product_attention(q, k, v, ts.Tensor(mask)).sum())(ts.Tensor(q)).numpy()
    assert np.isfinite(slope).all() and not slope[..., 1, :].any()


def test_masked_attention_as_pytorch():
    torch = pytest.importorskip("torch")
    q, k, v = attention_inputs((2, 3), (2, 3), (2, 3))
    seen = np.random.default_rng(0).random((2, 1, 4, 5)) < 0.4
    seen[0, 0, 2] = False
    found = ts.scaled_dot_product_attention(q, k, v, ts.Tensor(seen)).numpy()
    given = [torch.tensor(x) for x in (q, k, v, seen)]
    np.testing.assert_allclose(found, torch.nn.functional.scaled_dot_product_attention(*given).numpy(), atol=2e-6)


@pytest.mark.parametrize("target", [*TARGETS, "ptx"])
def test_losses_of_images(target):
    rng = np.random.default_rng(0)
    logs, classes = rng.standard_normal((2, 3, 4, 5)).astype(np.float32), rng.integers(0, 3, (2, 4, 5))
    picked = np.take_along_axis(logs, classes[:, None], axis=1)
    np.testing.assert_allclose(call(ts.nll_loss, target, logs, classes), -picked.mean(), rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 6), (5, 1, 6), (2, 1, 5, 7), (2,)])
@pytest.mark.parametrize("traced", [False, True])
def test_a_mask_of_another_shape_is_named(shape, traced):
    q, k = np.ones((3, 5, 4), np.float32), np.ones((3, 6, 4), np.float32)
    function = lambda q, k, m: ts.scaled_dot_product_attention(q, k, k, mask=m)  # noqa: E731
    with pytest.raises(ts.errors.ShapeError, match="the mask of attention does not fit") as caught:
        (ts.jit(function) if traced else function)(q, k, np.ones(shape, bool))
    text = str(caught.value)
    assert "broadcasts to (3, 5, 6)" in text and "5 queries and 6 keys" in text and str(shape) in text
    assert "test_edge_values.py" in caught.value.location.file


def test_masks_may_broadcast_either_way():
    q, k = np.ones((3, 5, 4), np.float32), np.ones((3, 6, 4), np.float32)
    for shape, lead in [((6,), ()), ((5, 1), ()), ((1, 1, 6), ()), ((2, 3, 5, 6), (2,)), ((2, 1, 1, 6), (2,))]:
        found = ts.scaled_dot_product_attention(q, k, k, mask=np.ones(shape, bool))
        np.testing.assert_allclose(found.numpy(), np.ones((*lead, 3, 5, 4)), rtol=1e-6)
    q, k = (each[None].swapaxes(1, 2) for each in (q, k))
    seen = attention.positional_attention(q, k, k, np.ones((1, 3, 1, 6), bool))
    assert seen.shape == (1, 5, 3, 4)
    with pytest.raises(ts.errors.ShapeError, match="the mask of attention does not fit"):
        attention.positional_attention(q, k, k, np.ones((1, 5, 3, 6), bool))


@pytest.mark.parametrize("target", ["eager", "interp", "llvm", "ptx"])
def test_an_update_leaves_the_zeros_of_others(target):
    x, updates = np.float32([-0.0, -0.0, 3.0, 0.0]), np.float32([-0.0, -3.0])
    found = call(lambda x, i, u: ts.scatter_add(x, i, u), target, x, np.array([0, 2]), updates)
    np.testing.assert_array_equal(np.signbit(np.asarray(found)), [True, True, False, False])
