"""Multi-tensor updates: one launch for all parameters of a type, with the bits of the rule on each alone."""

import numpy as np
import pytest

import tessera as ts
from tessera import optim
from tessera.runtime.driver import lower

SHAPES = [(3, 5), (2100,), (), (0, 4), (1,)]
GENERATORS = {"cpu": "llvm", "ptx": "ptx"}


def make_params(count, dtype):
    rng = np.random.default_rng(0)
    shapes = [SHAPES[i % len(SHAPES)] for i in range(count)]
    return {f"p{i}": ts.Tensor(np.asarray(rng.standard_normal(s), np.float32)).to(dtype) for i, s in enumerate(shapes)}


def count_launches(optimizer, params, target):
    traced = ts.jit(optimizer.update, target=target).trace(params, params, optimizer.init(params))
    module = lower(traced.function, GENERATORS[target])["tile"]
    names = [n.attrs["kernel"] for n in module.main.body.nodes if n.op.name == "host.launch"]
    return len(names), sum(n.startswith("update_parameters") for n in names)


@pytest.mark.parametrize("target", ["cpu", "ptx"])
def test_one_launch_for_each_type(target):
    optimizer = optim.AdamW()
    few, many = (count_launches(optimizer, make_params(n, ts.f32), target) for n in (3, 13))
    assert few == many == (few[0], 1)  # the others compute the numbers that all parameters share
    mixed = {**make_params(4, ts.f32), "q": ts.ones((7,), dtype=ts.bf16), "r": ts.ones((9,), dtype=ts.bf16)}
    assert count_launches(optimizer, mixed, target)[1] == 2


@pytest.mark.parametrize("target", ["cpu", "ptx"])
@pytest.mark.parametrize("dtype", [ts.f32, ts.bf16, ts.f64], ids=str)
def test_the_launch_has_the_bits_of_the_rule(dtype, target):
    params = make_params(6, dtype)
    grads = ts.tree.map(lambda p: p * 0.5, params)
    optimizer = optim.AdamW(lr=optim.WarmupCosine(0.1, 2, 9), weight_decay=0.1, master_weights=dtype is ts.bf16)
    state = optimizer.init(params)
    ours, expected = (ts.jit(optimizer.update, target=t) for t in (target, "interp"))
    for _ in range(3):
        got, new = ours(params, grads, state)
        want, state = expected(params, grads, state)
        for (path, a), (_, b) in zip(
            ts.tree.leaves_with_path([got, new]), ts.tree.leaves_with_path([want, state]), strict=True
        ):
            np.testing.assert_allclose(
                a.numpy().astype(float), b.numpy().astype(float), rtol=1e-6 if dtype is not ts.bf16 else 8e-3,
                atol=1e-7, err_msg=path,
            )  # fmt: skip
        params = want


def test_donated_parameters_are_updated_in_place():
    params = make_params(6, ts.f32)
    optimizer = optim.Adam(lr=0.1)
    want = optimizer.update(params, params, optimizer.init(params))[0]
    state, grads = optimizer.init(params), ts.tree.map(lambda p: ts.tensor(p.numpy().copy()), params)
    given = ts.tree.map(lambda p: ts.tensor(p.numpy().copy()), params)
    update = ts.jit(optimizer.update, target="cpu", donate=("params", "state"))
    got, _ = update(given, grads, state)
    for name in want:
        np.testing.assert_array_equal(got[name].numpy(), want[name].numpy())


def test_an_update_inside_a_derivative_is_differentiated():
    optimizer = optim.SGD(lr=0.5)

    def after(p):
        new, _ = optimizer.update([p], [p * p], optimizer.init([p]))
        return new[0].sum()

    g = ts.jit(ts.grad(after), target="cpu")(ts.Tensor([1.0, 3.0]))
    np.testing.assert_allclose(g.numpy(), [0.0, -2.0])  # p - p²/2
