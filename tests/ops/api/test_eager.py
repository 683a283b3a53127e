"""Eager calls by plan: the second call of a kind gives what the first gave, which went the whole way."""

import itertools

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import DTypeError, OutOfBoundsError, ShapeError, TraceError
from tessera.ir.rules import REGISTRY
from tessera.ops.api import methods

TYPES = (ts.f32, ts.f64, ts.f16, ts.bf16, ts.fp8_e4m3, ts.tf32, ts.int8, ts.int64, ts.bool)
BINARY = (ts.add, ts.mul, ts.div, ts.maximum, ts.pow, ts.less, ts.equal, ts.floor_divide, ts.atan2, ts.hypot)
UNARY = (ts.exp, ts.neg, ts.sum, ts.mean, ts.var, ts.softmax, ts.relu, ts.isnan, ts.argmax, ts.sign, ts.cumsum)
G = np.random.default_rng(0)


def operand(dtype, *shape):
    return ts.Tensor(G.uniform(0.5, 2.0, shape) if dtype.is_float else G.integers(1, 3, shape), dtype)


def whole(op, args, named):
    """The results without a plan, or the error."""
    op.plans.clear()
    return outcome(op, args, named)


def outcome(op, args, named):
    try:
        return op(*args, **named)
    except DTypeError as error:
        return str(error.message)


def same(first, second):
    if isinstance(first, str):
        return first == second
    a, b = first.numpy(), second.numpy()
    return first.type == second.type and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("op", BINARY, ids=lambda o: o.__name__)
def test_two_operands(op):
    for left, right in itertools.product(TYPES, TYPES):
        for shapes in (((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 1), (1, 4)), ((), (2,))):
            args = [operand(t, *s) for t, s in zip((left, right), shapes, strict=True)]
            assert same(whole(op, args, {}), outcome(op, args, {}))
            assert len(op.plans) <= 1


@pytest.mark.parametrize("op", BINARY, ids=lambda o: o.__name__)
def test_numbers(op):
    for dtype, number in itertools.product(TYPES, (2, 2.5, True)):
        for args in ([operand(dtype, 3), number], [number, operand(dtype, 3)]):
            assert same(whole(op, args, {}), outcome(op, args, {}))


@pytest.mark.parametrize("op", UNARY, ids=lambda o: o.__name__)
def test_one_operand(op):
    for dtype in TYPES:
        for named in ({}, {"axis": 0}) if "axis" in op.attrs else ({},):
            args = [operand(dtype, 3, 4)]
            assert same(whole(op, args, named), outcome(op, args, named))


def test_policies_and_choices():
    x = operand(ts.bf16, 8)
    careful = ts.Tensor(x.numpy(), ts.bf16 @ ts.toward_zero @ ts.accum(ts.f64))
    for args in ([careful, 1.0], [careful, x], [x, careful]):
        assert same(whole(ts.add, args, {}), outcome(ts.add, args, {}))
    for args in ([x > 1.0, x, 0.0], [x > 1.0, 1, x], [ts.Tensor(True), x, x]):
        assert same(whole(ts.where, args, {}), outcome(ts.where, args, {}))
    row = ts.Tensor([1e8, 1.0, -1e8, 1.0], ts.f32 @ ts.compensated)
    assert ts.sum(row).item() == ts.sum(row).item() == 2.0


def test_a_plan_is_kept_and_used():
    ts.exp.plans.clear()
    x = operand(ts.f32, 2)
    ts.exp(x)
    (plan,) = ts.exp.plans.values()
    assert isinstance(plan, methods.EagerPlan) and same(plan.run((x,)), ts.exp(x))


def test_plans_do_not_fill_the_memory():
    ts.abs.plans.clear()
    for n in range(methods.MAX_PLANS + 10):
        ts.abs(ts.zeros((n, 1)))
    assert len(ts.abs.plans) <= methods.MAX_PLANS


def test_errors_are_the_same_by_plan():
    x, places = ts.Tensor([1.0, 2.0]), ts.Tensor([0])
    ts.gather(x, places, axis=0)
    with pytest.raises(OutOfBoundsError) as found:
        ts.gather(x, ts.Tensor([5]), axis=0)
    assert found.value.location.file == __file__


def test_a_tensor_of_a_trace_that_is_over():
    kept = []
    ts.jit(lambda x: kept.append(x) or x + 1.0)(np.ones(3, np.float32))
    with pytest.raises(TraceError):
        kept[0] + 1.0
    assert (ts.ones((3,)) + 1.0).tolist() == [2.0] * 3
    with pytest.raises(TraceError):
        kept[0] + 1.0


def test_ops_with_effects_have_no_plan():
    assert not any(o.plans for o in REGISTRY.values() if o.effects)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("half", "x.to(ts.f16)"),
        ("t", "x.T"),
        ("numel", "x.size"),
        ("add_", "x = x.add(...)"),
        ("exp_", "x = x.exp(...)"),
    ],
)
def test_methods_of_other_systems(name, hint):
    with pytest.raises(AttributeError, match="a tensor has no") as error:
        getattr(ts.ones((2,)), name)
    assert hint in str(error.value)
    assert not hasattr(ts.ones((2,)), "nothing_like_this")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("cat", "ts.concatenate"), ("no_grad", "ts.stop_gradient"), ("bfloat16", "ts.bf16"), ("PRNGKey", "ts.Generator"),
     ("program_id", "tile.program_id"), ("mm", "ts.matmul"), ("cdiv", "tile.cdiv")],
)  # fmt: skip
def test_names_of_other_systems(name, hint):
    with pytest.raises(AttributeError, match="has no attribute") as error:
        getattr(ts, name)
    assert hint in str(error.value)


def test_no_spelling_hides_a_name_that_exists():
    from tessera.lazy_exports import SPELLINGS
    from tessera.ops.api import methods

    assert not [name for name in SPELLINGS if hasattr(ts, name)]
    assert not [name for name in methods.SPELLINGS if name in dir(ts.Tensor)]


def test_expand_takes_sizes_as_well():
    x = ts.ones((3, 1))
    assert x.expand(3, 4).shape == x.expand((3, 4)).shape == x.expand(-1, 4).shape == (3, 4)
    assert x.expand(2, 3, 4).shape == (2, 3, 4)


def test_the_truth_of_many_elements():
    x = ts.Tensor([[1.0, 2.0], [3.0, 4.0]])
    assert 3.0 in x and 5 not in x and bool(ts.Tensor([1.0]))
    with pytest.raises(ShapeError, match="a tensor of 4 elements is not one truth value") as error:
        bool(x)
    assert error.value.suggestion == "write x.any() or x.all()"
