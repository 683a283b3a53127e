"""Collectives in the simulator against NumPy on the tensors of all ranks, at every level, with gradients and vmap."""

import numpy as np
import pytest
from collective_cases import CASES, DTYPES, MESHES, make_inputs, run_case, skips

import tessera as ts
from tessera.errors import ArgumentError, DTypeError, EffectError, ShapeError, TraceError

P = ts.dist.P
mesh = ts.Mesh((4,), "x")


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name, dtype, mesh_name):
    if skips(name, dtype):
        pytest.skip("the mean of integers is refused")
    groups, found = run_case(name, dtype, mesh_name, "simulated")
    inputs = [x.numpy() for x in make_inputs(dtype)]
    for group in groups:
        for rank, want in zip(group, CASES[name][1]([inputs[r] for r in group]), strict=True):
            np.testing.assert_array_equal(found[rank], want)


def run_ranks(function, xs, **options):
    """The stacked results of ranks whose tensors are the rows of `xs`."""
    whole = ts.spmd(lambda x: function(x[0]), mesh=mesh, in_specs=P("x"), out_specs="ranks", **options)
    return np.stack([np.asarray(r) for r in whole(ts.Tensor(xs))])


X = np.random.default_rng(0).uniform(0.5, 2, (4, 4, 8))
DIFFERENTIABLE = [c for c in CASES if c not in ("all_reduce_async", "all_gather_into")]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_is_that_of_the_sum_over_ranks(name):
    def loss(x):
        return (ts.sin(CASES[name][0](x, mesh)) ** 2.0).sum()

    def total(xs):
        return sum((np.sin(y) ** 2).sum() for y in CASES[name][1](list(xs)))

    grads = run_ranks(ts.grad(loss), X)
    for at in [(0, 0, 0), (1, 2, 3), (2, 3, 7), (3, 1, 4)]:
        step = np.zeros_like(X)
        step[at] = 1e-6
        np.testing.assert_allclose(grads[at], (total(X + step) - total(X - step)) / 2e-6, rtol=2e-5, atol=1e-7)


def test_gradient_of_a_tied_maximum_is_shared():
    grads = run_ranks(ts.grad(lambda x: ts.all_reduce(x, "max").sum()), np.ones((4, 3)))
    np.testing.assert_allclose(grads, np.ones((4, 3)))  # the sum of four results has the derivative 4, shared by four


def test_gradient_of_a_product_with_a_zero():
    xs = np.array([[2.0], [0.0], [3.0], [5.0]])
    grads = run_ranks(ts.grad(lambda x: ts.all_reduce(x, "prod").sum()), xs)
    np.testing.assert_allclose(grads[:, 0], 4 * np.array([0.0, 30.0, 0.0, 0.0]))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_vmap_is_a_call_for_each_example(name):
    xs = X[:, None] * np.array([1.0, 2.0, 0.5])[None, :, None, None]
    found = run_ranks(ts.vmap(lambda x: CASES[name][0](x, mesh)), xs)
    for lane in range(3):
        want = CASES[name][1](list(xs[:, lane]))
        np.testing.assert_allclose(found[:, lane], np.stack(want), rtol=1e-15)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_compiled_ranks(name, target):
    found = run_ranks(lambda x: CASES[name][0](x * 2.0, mesh) + 1.0, X.astype("f4"), target=target)
    want = np.stack(CASES[name][1](list(X.astype("f4") * 2))) + 1
    np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_in_scan_and_cond(target):
    def body(x):
        def step(carry, row):
            carry = carry + ts.all_reduce(row, "sum")
            return carry, ts.cond(carry[0] > 0.0, lambda c: ts.all_reduce(c, "max"), lambda c: c, carry)

        last, rows = ts.scan(step, ts.zeros((8,)), x)
        return last + rows.sum(axis=0)

    xs = X.astype("f4")
    total = np.cumsum(xs.sum(0), axis=0)
    np.testing.assert_allclose(run_ranks(body, xs, target=target)[2], total[-1] + total.sum(0), rtol=1e-5)
    grads = run_ranks(ts.grad(lambda x: body(x).sum()), xs)
    assert grads.shape == xs.shape and np.all(grads > 0)


@pytest.mark.parametrize("level", ["graph", "schedule", "tile"])
def test_every_level(level):
    from tessera.runtime.driver import lower, run_level

    def rank(x):
        traced = ts.jit(lambda x: ts.all_reduce(ts.exp(x), "sum") * 0.5).trace(x)
        return ts.Tensor(run_level(lower(traced.function), level, [x.numpy()])[0])

    np.testing.assert_allclose(run_ranks(rank, X.astype("f4"))[1], np.exp(X.astype("f4")).sum(0) / 2, rtol=1e-5)


def test_ir_text_of_a_collective_is_parsed_again():
    from tessera.ir.core import Module
    from tessera.ir.parser import parse_module
    from tessera.ir.printer import print_module

    def rank(x):
        module = Module("graph", (ts.jit(lambda x: ts.all_gather(x, mesh)).trace(x).function,))
        assert print_module(parse_module(print_module(module))) == print_module(module)
        return x

    run_ranks(rank, X.astype("f4"))


def test_effect_is_declared():
    def body(x):
        return ts.pure(lambda x: ts.all_reduce(x))(x)

    with pytest.raises(EffectError, match="collective"):
        run_ranks(body, X)
    assert run_ranks(lambda x: ts.effects(["collective"])(ts.all_reduce)(x), X).shape == X.shape


BAD = {
    "an unknown reduction": (lambda x: ts.all_reduce(x, "median"), ArgumentError, "no reduction 'median'"),
    "a number of the tensor's axis": (lambda x: ts.all_reduce(x, axis=0), ArgumentError, "no axis 0"),
    "no pairs": (lambda x: ts.dist.collective_permute(x, [0, 1]), ArgumentError, "0 is no pair"),
    "three ends": (lambda x: ts.dist.collective_permute(x, [(0, 1, 2)]), ArgumentError, "is no pair"),
    "an unknown axis": (lambda x: ts.all_reduce(x, axis="rows"), ArgumentError, "no axis 'rows'"),
    "the mean of integers": (lambda x: ts.all_reduce(x.to(ts.int32), "mean"), DTypeError, "mean over ranks"),
    "the sum of bools": (lambda x: ts.all_reduce(x > 0.0), DTypeError, "sum over ranks"),
    "unequal parts": (lambda x: ts.reduce_scatter(x[:3]), ShapeError, "no 4 equal parts"),
    "no such member": (lambda x: ts.broadcast(x, 4), ArgumentError, "no member 4"),
    "no axis of a scalar": (lambda x: ts.all_gather(x.sum()), ShapeError, "scalar"),
    "two ends": (lambda x: ts.dist.collective_permute(x, [(0, 1), (2, 1)]), ArgumentError, "one end"),
    "a message to itself": (lambda x: ts.send(x, ts.get_rank()), ArgumentError, "no partner"),
    "a gathered tensor that is too small": (lambda x: ts.all_gather_into(ts.zeros((3,)), x), ShapeError, "not fit"),
    "a derivative of a message": (lambda x: ts.grad(lambda y: ts.recv(y, 1).sum())(x), ArgumentError, "no derivative"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    call, error, text = BAD[name]
    with pytest.raises(error, match=text) as found:
        run_ranks(call, X)
    assert found.value.location is not None and found.value.location.file == __file__


def test_forms_of_axes_and_members():
    grid = ts.Mesh((2, 3), ("rows", "columns"))

    def program():
        mine = ts.full((1, 1), float(ts.get_rank()))
        shifted = ts.dist.mesh_shift(mine, mesh=grid.axis("columns"))
        gathered = ts.all_gather(mine, axis=("columns", "rows"))
        wide = ts.all_gather(mine, grid.axis("rows"), axis=np.int64(1))
        return shifted.item(), gathered.numpy().ravel().tolist(), wide.tolist(), ts.broadcast(mine, np.int64(4)).item()

    ranks = np.arange(6.0).reshape(2, 3)
    found = ts.spmd(program, mesh=grid, out_specs="ranks")()
    assert [f[0] for f in found] == np.roll(ranks, 1, axis=1).ravel().tolist()
    assert found[2][1:] == (ranks.T.ravel().tolist(), [ranks[:, 2].tolist()], 4.0)


def test_outside_of_ranks():
    with pytest.raises(ArgumentError, match="not one of them"):
        ts.all_reduce(ts.ones((2,)))
    with pytest.raises(TraceError, match="starts ranks inside"):
        ts.jit(ts.spmd(lambda x: x, mesh=mesh))(ts.ones((4,)))


def test_infinite_and_nan_parts():
    xs = np.array([[np.nan], [np.inf], [1.0], [2.0]])
    assert np.isnan(run_ranks(lambda x: ts.all_reduce(x, "max"), xs)).all()
    assert (run_ranks(lambda x: ts.all_reduce(x, "sum"), np.nan_to_num(xs, posinf=np.inf)) == np.inf).all()


def test_empty_and_single():
    assert run_ranks(lambda x: ts.all_gather(x), np.zeros((4, 0, 3))).shape == (4, 0, 3)
    one = ts.spmd(lambda x: ts.all_gather(ts.all_reduce(x, "mean")), mesh=ts.Mesh(1))
    np.testing.assert_array_equal(one(ts.Tensor([3.0, 4.0])), [3.0, 4.0])
