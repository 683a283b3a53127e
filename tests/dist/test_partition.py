"""Sharding propagation: programs on a mesh equal the program on whole tensors, values and gradients."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.dist import NETWORK, P, explain, partition
from tessera.errors import ArgumentError, ShapeError, UnsupportedOpError

AXES = ("a", "b")
MESHES = [ts.Mesh((2, 2), AXES), ts.Mesh((4, 1), AXES), ts.Mesh((1, 2), AXES)]
# Each takes matrices [8, 8], and gives one.
OPS = {
    "product": lambda x, y: x @ y * 0.2,
    "sum": lambda x, y: x + y,
    "turned": lambda x, y: ts.transpose(x) * ts.tanh(y),
    "rows": lambda x, y: x - x.sum(axis=0, keepdims=True) * 0.1,
    "softmax": lambda x, y: ts.softmax(x, axis=1) + y,
    "maximum": lambda x, y: x - ts.max(y, axis=1, keepdims=True),
    "reshaped": lambda x, y: (x.reshape((4, 2, 8)) * 2.0).reshape((8, 8)) + y,
    "merged": lambda x, y: (x.reshape((64,)) * ts.arange(64.0) * 0.02).reshape((8, 8)) - y,
    "halves": lambda x, y: ts.concatenate([x[:4], y[4:]], axis=0),
    "flat": lambda x, y: ts.concatenate([x, y], axis=1)[:, 4:12],
    "taken": lambda x, y: x[ts.Tensor(np.arange(8)[::-1].copy())] + y,
    "padded": lambda x, y: ts.pad(x[1:, :], ((0, 1), (0, 0))) + y,
    "scaled": lambda x, y: x / (1.0 + (y * y).mean()),
    "chosen": lambda x, y: ts.where(x > y, x, ts.cumsum(y, axis=1)),
    "stepped": lambda x, y: ts.scan(lambda c, r: (c + r * 0.1, c * r), ts.zeros((8,)), x)[1] + y,
    "biased": lambda x, y: x + y[0] + ts.iota(shape=(8, 8), axis=1, dtype=ts.f32) * 0.01,
}
specs = st.tuples(*[st.sampled_from([None, "a", "b", ("a", "b")])] * 2).filter(
    lambda pair: (
        len([n for e in pair for n in ((e,) if isinstance(e, str) else e or ())])
        == len({n for e in pair for n in ((e,) if isinstance(e, str) else e or ())})
    )
)


def make_program(steps):
    def program(x, y, z):
        values = [x, y, z]
        for name, i, j in steps:
            values.append(OPS[name](values[i % len(values)], values[j % len(values)]))
        return values[-1]

    return program


@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=5),
    st.lists(specs, min_size=3, max_size=3), specs, st.sampled_from(MESHES),
)  # fmt: skip
def test_random_programs(steps, inputs, output, mesh):
    program, rng = make_program(steps), np.random.default_rng(len(steps))
    xs = [ts.Tensor(rng.uniform(-1, 1, (8, 8)).astype("f4")) for _ in range(3)]
    found = partition(program, mesh=mesh, in_specs=[P(*s) for s in inputs], out_specs=P(*output))(*xs)
    np.testing.assert_allclose(found, program(*xs), rtol=1e-4, atol=1e-4)

    def both(*xs):
        return ts.value_and_grad(lambda *xs: (program(*xs) ** 2.0).mean(), argnums=(0, 1, 2))(*xs)

    value, grads = partition(both, mesh=mesh, in_specs=[P(*s) for s in inputs])(*xs)
    wanted, alone = both(*xs)
    np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4)
    for a, b in zip(grads, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPS)
def test_each_op_alone(name):
    rng = np.random.default_rng(7)
    x, y = (ts.Tensor(rng.uniform(-1, 1, (8, 8)).astype("f4")) for _ in range(2))
    for spec in (P("a", "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a"))):
        found = partition(OPS[name], mesh=MESHES[0], in_specs=spec, target="llvm")(x, y)
        np.testing.assert_allclose(found, OPS[name](x, y), rtol=1e-5, atol=1e-5)


def list_ops(function, *args):
    return [t.op for t in function.plan(*args).transfers()]


def test_the_collectives_of_tensor_parallel_layers():
    """Megatron: columns then rows of the weights need one all_reduce, and nothing else."""
    mesh = ts.Mesh((2, 2), ("dp", "tp"))
    args = ts.Tensor[64, 32], ts.Tensor[32, 128], ts.Tensor[128, 32]
    layers = partition(
        lambda x, w, v: ts.gelu(x @ w) @ v, mesh=mesh, in_specs=(P("dp"), P(None, "tp"), P("tp")),
    )  # fmt: skip
    (only,) = layers.plan(*args).transfers()
    assert (only.op, only.axes, only.bytes) == ("all_reduce", ("tp",), 2 * (32 * 32 * 4) // 2)
    scattered = partition(
        lambda x, w, v: ts.gelu(x @ w) @ v, mesh=mesh, in_specs=(P("dp"), P(None, "tp"), P("tp")),
        out_specs=P("dp", "tp"),
    )  # fmt: skip
    assert list_ops(scattered, *args) == ["reduce_scatter"]


def test_moves_between_layouts():
    mesh = ts.Mesh((2, 2), AXES)

    def moves(before, after):
        return list_ops(partition(lambda x: x + 0.0, mesh=mesh, in_specs=before, out_specs=after), ts.Tensor[8, 8])

    assert moves(P("a"), P(None, "a")) == ["all_to_all"] and moves(P("a"), P("a")) == []
    assert moves(P("a"), P()) == ["all_gather"] and moves(P(), P("a", "b")) == []
    assert moves(P(("a", "b")), P("a")) == ["all_gather"] and moves(P("a"), P(("a", "b"))) == []


def test_large_operands_stay_where_links_are_slow():
    """Where operands disagree, the small one moves."""
    mesh = ts.Mesh((4,), "a")
    f = partition(lambda x, w: x @ w, mesh=mesh, in_specs=(P(None, "a"), P(None, "a")), links={"a": NETWORK})
    plan = f.plan(ts.Tensor[16, 4096], ts.Tensor[4096, 4096])
    (step,) = plan.steps
    assert step.moves[1] == [] and [t.op for t in step.moves[0]] == ["all_gather"]


def test_gradient_of_a_partitioned_function():
    """Against NumPy: the gradients of sum(tanh(x w)^2), which keep the layouts of their arguments."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 5)), rng.standard_normal((5, 9))
    mesh = ts.Mesh((2, 3), ("dp", "tp"))
    f = partition(lambda x, w: (ts.tanh(x @ w) ** 2.0).sum(), mesh=mesh, in_specs=(P("dp"), P(None, "tp")))
    value, (gx, gw) = ts.value_and_grad(f, argnums=(0, 1))(ts.Tensor(x), ts.Tensor(w))
    y = np.tanh(x @ w)
    back = 2 * y * (1 - y * y)
    np.testing.assert_allclose(value, (y * y).sum(), rtol=1e-12)
    np.testing.assert_allclose(gx, back @ w.T, rtol=1e-10)
    np.testing.assert_allclose(gw, x.T @ back, rtol=1e-10)
    plan = ts.value_and_grad(f, argnums=1).plan(ts.Tensor(x), ts.Tensor(w))
    assert plan.outputs[1].dims == ((), ("tp",))


def test_explain(tmp_path):
    mesh = ts.Mesh((2, 2), ("dp", "tp"))
    f = partition(lambda x, w: ts.relu(x @ w), mesh=mesh, in_specs=(P("dp", "tp"), P("tp")))
    shown = explain(f, ts.Tensor[1024, 512], ts.Tensor[512, 256])
    text = str(shown)
    assert "test_partition.py" in text and "all_reduce over tp" in text and "sum over tp" in text
    assert all(layout in text for layout in ("[dp, tp]", "[tp, -]", "[dp, -] sum over tp"))  # every row has its own
    assert shown.bytes == 512 * 256 * 4 and shown.seconds > 0
    shown.save_svg(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    with pytest.raises(ArgumentError, match="partitioned function"):
        explain(abs, 1)


def test_bad_specs():
    mesh = ts.Mesh((2, 2), AXES)
    x = ts.ones((6, 6))
    with pytest.raises(ShapeError, match="no 4 equal parts"):
        partition(abs, mesh=mesh, in_specs=P(("a", "b")))(x)
    with pytest.raises(ArgumentError, match="no axis 'c'"):
        partition(lambda x: x, mesh=mesh, in_specs=P("c"))(x)
    with pytest.raises(ArgumentError, match="used twice"):
        P("a", "a")
    with pytest.raises(ShapeError, match="not cut along"):
        partition(lambda x: x, mesh=mesh, in_specs=P(None, None, "a"))(x)
    with pytest.raises(UnsupportedOpError, match="draws random numbers"):
        partition(lambda x: x + ts.rand(6), mesh=mesh)(x)
    with pytest.raises(ArgumentError, match="does not fit"):
        partition(lambda x: x["w"], mesh=mesh, in_specs=[{"v": P("a")}])({"w": x})
    with pytest.raises(ArgumentError, match="needs a mesh"):
        partition(abs)(x)
