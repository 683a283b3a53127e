"""Calls on a device with a memory of its own (the emulated GPU where there is none): results stay there."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.ptx.runtime.resident_program import ResidentProgram
from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, ShapeError
from tessera.core.hooks import find_device_memory

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
W = np.linspace(1, 2, 16, dtype=np.float32).reshape(4, 4)


@ts.jit(target="ptx")
def layer(x, w):
    return ts.softmax(x @ w + 1.0)


@ts.kernel
def doubled(x, y):
    row = tile.program_id(0)
    tile.store(y[row, 0:4], tile.load(x[row, 0:4]) * 2.0)


@pytest.fixture
def memory():
    return find_device_memory("ptx")


def counted(memory, run):
    """The result, and the copies to and from the device that it took."""
    before = memory.copies_in, memory.copies_out
    return run(), (memory.copies_in - before[0], memory.copies_out - before[1])


def test_a_chain_of_calls_copies_nothing(memory):
    x, w = ts.Tensor(X).to("ptx"), ts.Tensor(W).to("ptx")
    y, copies = counted(memory, lambda: layer(layer(layer(x, w), w), w))
    assert copies == (0, 0) and y.device == memory.name and isinstance(y.data, DeviceArray)
    want = ts.jit(layer.function)
    found, copies = counted(memory, y.numpy)
    assert copies == (0, 1)
    np.testing.assert_allclose(found, want(want(want(X, W), W), W).numpy(), rtol=1e-5)


def test_host_arrays_numbers_and_containers_are_copied_in(memory):
    @ts.jit(target="ptx")
    def step(params, scale, names):
        return {"y": params["x"] * scale + params["w"][0]}

    arguments = {"x": X, "w": [ts.Tensor(W[0]).to("ptx")]}
    for _ in range(3):  # bound, then known
        y, copies = counted(memory, lambda: step(arguments, 0.5, names="two"))
        assert copies == (2, 0)
        np.testing.assert_allclose(y["y"].numpy(), X * np.float32(0.5) + W[0], rtol=1e-6)


def test_captured_arrays_are_copied_once_and_again_when_they_change(memory):
    table = np.ones(4, np.float32)
    scaled = ts.jit(lambda x: x * table, target="ptx")
    x = ts.Tensor(X).to("ptx")
    assert counted(memory, lambda: scaled(x))[1] == (1, 0)
    assert counted(memory, lambda: scaled(x))[1] == (0, 0)
    table[2] = 5.0
    y, copies = counted(memory, lambda: scaled(x))
    assert copies == (1, 0) and np.array_equal(y.numpy(), X * table)


def test_random_numbers_of_a_device(memory):
    draw = ts.jit(lambda x: x + ts.rand((3, 4)), target="ptx")
    ts.manual_seed(3)
    found = [draw(ts.Tensor(X).to("ptx")).numpy() for _ in range(2)]
    ts.manual_seed(3)
    want = [(X + ts.rand((3, 4))).numpy() for _ in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(found, want, strict=True))


def test_tensors_on_a_device(memory):
    x = ts.tensor(X, device="ptx")
    assert x.device == memory.name and x.layout == "row_major" and x.to(x.device) is x
    assert f'device="{memory.name}"' in repr(x) and x.cpu().device == "cpu" and np.array_equal(x.cpu().numpy(), X)
    assert np.array_equal(np.asarray(x), X) and x[0, 1].item() == X[0, 1]
    assert ts.zeros((2, 2), device="ptx").to("cpu").tolist() == [[0.0, 0.0], [0.0, 0.0]]
    y = x.clone()
    assert y.device == x.device and y.data.address != x.data.address and np.array_equal(y.numpy(), X)


def test_ops_outside_of_a_trace_run_on_the_device(memory):
    x = ts.Tensor(X).to("ptx")
    y, copies = counted(memory, lambda: (x + x).sum(axis=0))
    assert copies == (0, 0) and y.device == memory.name
    np.testing.assert_allclose(y.numpy(), (X + X).sum(0), rtol=1e-6)
    assert np.array_equal((x * 2.0).numpy(), X * 2)
    with pytest.raises(ArgumentError, match="different devices"):
        x + ts.Tensor(X)
    assert (x[0] + ts.Tensor(1.0)).device == memory.name


def test_host_targets_take_tensors_of_a_device():
    x = ts.Tensor(X).to("ptx")
    for target in ("interp", "llvm"):
        y = ts.jit(lambda a: a + 1.0, target=target)(x)
        assert y.device == "cpu" and np.array_equal(y.numpy(), X + 1)


def test_misfits_and_moves_are_refused():
    x = ts.Tensor(X).to("ptx")
    with pytest.raises(ShapeError):
        layer(x, x)
    with pytest.raises(ArgumentError, match="requires gradients"):
        ts.Tensor(X, requires_grad=True).to("ptx")


def test_gradients_on_a_device(memory):
    grad = ts.jit(ts.grad(lambda w, x: ts.sum(ts.tanh(x @ w))), target="ptx")
    w, x = ts.Tensor(W).to("ptx"), ts.Tensor(X).to("ptx")
    y, copies = counted(memory, lambda: grad(w, x))
    assert copies == (0, 0)
    want = X.T @ (1 - np.tanh(X @ W) ** 2)
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-4, atol=1e-5)


@ts.kernel
def axpy(x, y, a, out):
    i = ts.tile.program_id(0)
    out[i] = a * x[i] + y[i]


def test_kernels_run_where_their_arrays_lie(memory):
    x, y, out = (ts.tensor(a, device="ptx") for a in (X[0], W[0], np.zeros(4, np.float32)))
    for scale in (2.0, 3.0):
        _, copies = counted(memory, lambda a=scale: axpy[4](x, y, a, out))
        assert copies == (0, 0) and np.array_equal(out.numpy(), np.float32(scale) * X[0] + W[0])
    assert np.array_equal(layer(ts.tensor(X, device="ptx"), W).numpy(), layer(X, W).numpy())
    with pytest.raises(ArgumentError, match="argument out is written by a kernel on"):
        axpy[4](x, y, 1.0, np.zeros(4, np.float32))
    with pytest.raises(ArgumentError, match="a kernel for llvm takes an array on"):
        ts.kernel(target="llvm")(axpy.kernel_function)[4](x, y, 1.0, out)


def test_loops_outside_of_a_trace_run_on_the_device(memory):
    x = ts.tensor(X, device="ptx")
    (total, sums), copies = counted(memory, lambda: ts.scan(lambda c, row: (c + row, c * 2.0), x[0], x))
    assert copies == (0, 0) and total.device == sums.device == memory.name
    np.testing.assert_allclose(total.numpy(), X[0] + X.sum(0), rtol=1e-6)


@pytest.mark.parametrize("exponent", [2.0, 3, 0.5, 0.0, -1.0])
def test_the_gradient_of_a_power_with_a_constant_stays_on_the_device(exponent):
    for values in (X[:, 1:] ** 2 + 1, X[:1, :1] ** 2 + 1, X[:0]):  # many elements, one, none
        x = ts.Tensor(values).to("ptx")
        g = ts.grad(lambda x: ts.sum(x**exponent))(x)
        assert g.device == x.device
        np.testing.assert_allclose(g.numpy(), exponent * values ** (exponent - 1.0), rtol=1e-5)


def test_pointwise_ops_on_broadcast_numbers_give_broadcast_numbers():
    for _ in range(2):  # the second calls have cached plans
        y = ts.where(ts.full((2, 3), 4, dtype=ts.bf16) > 1.0, ts.full((2, 3), 7.0), ts.full((1, 3), 2.0)) * 2.0 + 1.0
        assert y.numpy().tolist() == [[15.0] * 3] * 2 and not any(y.numpy().strides)
    assert (ts.Tensor(np.ones((2, 3), "f4")).to("ptx") + y).numpy().tolist() == [[16.0] * 3] * 2
    assert np.array_equal((ts.full((0, 3), 1.0) + 1.0).numpy(), np.zeros((0, 3), "f4"))
    assert (ts.full((3,), 2.0) + ts.Tensor(np.arange(3, dtype="f4"))).numpy().tolist() == [2.0, 3.0, 4.0]


def many_results(x):
    """Twelve small results, and a large one."""
    return [x[i] * float(i) for i in range(12)] + [ts.broadcast_to(x[0], (4096, 8)) + 1.0]


def test_small_results_share_a_block_and_keep_their_values():
    run, x = ts.jit(many_results, target="ptx"), np.arange(96, dtype=np.float32).reshape(12, 8)
    *first, large = run(x)
    *second, _ = run(x + 1.0)
    addresses = [t.data.address for t in first]
    assert len(set(addresses)) == 12 and max(addresses) - min(addresses) < 12 * 512
    assert not min(addresses) <= large.data.address <= max(addresses) + 32
    kept = second[7]
    del second
    others = [run(x + float(i)) for i in range(3)]
    np.testing.assert_array_equal(kept.numpy(), (x[7] + 1.0) * 7.0)
    for i, t in enumerate(first):
        np.testing.assert_array_equal(t.numpy(), x[i] * float(i))
    np.testing.assert_array_equal(others[2][5].numpy(), (x[5] + 2.0) * 5.0)


def test_few_small_results_have_blocks_of_their_own():
    run = ts.jit(lambda x: (x + 1.0, x * 2.0), target="ptx")
    assert all(t.data.memory.owns(t.data) for t in run(np.ones(8, np.float32)))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_array_of_the_host_among_those_of_a_device_is_copied_alone(memory, place, monkeypatch):
    add = ts.jit(lambda a, b, c: a + 2.0 * b + 4.0 * c, target="ptx")
    held = [ts.Tensor(X + i).to("ptx") for i in range(3)]
    held[place] = X + place
    add(*held)
    monkeypatch.setattr(ResidentProgram, "_call_any", None)  # the short way suffices
    y, copies = counted(memory, lambda: add(*held))
    assert copies == (1, 0)
    np.testing.assert_array_equal(y.numpy(), X + 2 * (X + 1) + 4 * (X + 2))
    assert [type(x) for x in held].count(np.ndarray) == 1  # the caller's list keeps what it had


def test_what_was_copied_is_not_copied_again_where_an_argument_is_of_another_library(memory):
    torch = pytest.importorskip("torch")
    add = ts.jit(lambda a, b: a + 2.0 * b, target="ptx")
    y, copies = counted(memory, lambda: add(X, torch.tensor(X + 1)))
    assert copies[0] <= 2
    np.testing.assert_array_equal(y.numpy(), X + 2 * (X + 1))


def test_a_kernel_on_arrays_of_a_device_runs_there(memory):
    x, y = ts.tensor(X, device="ptx"), ts.zeros((3, 4), device="ptx")
    _, copies = counted(memory, lambda: doubled[(3,)](x, y))
    assert copies == (0, 0) and np.array_equal(y.numpy(), 2 * X)
