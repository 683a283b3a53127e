"""Tensor: constructor, properties, NumPy protocols, DLPack, pickling, updates."""

import copy
import pickle

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DeviceUnavailable, DTypeError, OutOfBoundsError, ShapeError, TraceError

X = ts.Tensor([[1.0, 2.0], [3.0, 4.0]])


def test_properties():
    assert (X.shape, X.ndim, X.size, X.nbytes, X.device, X.layout) == ((2, 2), 2, 4, 16, "cpu", "row_major")
    assert X.T.layout == "column_major" and ts.Tensor([[1, 2], [3, 4]], layout="column_major").layout == "column_major"
    assert ts.Tensor([1.0], requires_grad=True).requires_grad and not X.requires_grad and X.grad is None
    with pytest.raises(ArgumentError, match="there is no layout"):
        ts.Tensor([1.0], layout="diagonal")


def test_devices():
    assert X.cpu() is X and X.to("cpu").to("interp") is X
    for move in (
        X.cuda,
        lambda: X.to("cuda:0"),
        lambda: ts.Tensor([1], device="cuda:0"),
        lambda: ts.zeros(2, device="cuda:1"),
    ):
        with pytest.raises(DeviceUnavailable):
            move()


def test_repr_and_numbers():
    assert repr(ts.zeros((0, 3))) == "Tensor([], f32, shape=(0, 3))"
    assert repr(ts.Tensor([1.0], ts.bf16 @ ts.saturate)) == "Tensor([1], bf16 @ saturate=True)"
    assert ts.Tensor([2.5], ts.bf16).item() == 2.5 and ts.Tensor([1, 2], ts.int4).tolist() == [1, 2]
    with pytest.raises(ShapeError, match="not one element"):
        X.item()
    assert X.stats()["mean"] == 2.5


def test_numpy_functions_run_ops():
    assert isinstance(np.exp(X), ts.Tensor) and isinstance(np.float32([1, 2]) + X, ts.Tensor)
    assert np.sum(X, axis=0).tolist() == [4.0, 6.0] and np.concatenate([X, X]).shape == (4, 2)
    assert np.add(X.numpy(), X, out=np.empty((2, 2), np.float32)).tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert np.hypot(X, 0.0).tolist() == X.tolist() and np.allclose(X, X) and np.median(X) == 2.5
    traced = ts.jit(lambda x: np.exp(x) + np.sum(x)).trace(X).function
    assert [n.op.name for n in traced.body.nodes if n.op.name in ("ts.exp", "ts.sum")] == ["ts.exp", "ts.sum"]
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(X, dtype=np.float64, copy=False) if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else X.__array__(
            np.float64, copy=False
        )


def test_dlpack_shares_memory():
    array = np.arange(4, dtype=np.float32)
    inside = ts.from_dlpack(array)
    assert np.shares_memory(inside.numpy(), array) and np.shares_memory(np.from_dlpack(inside), array)
    assert np.from_dlpack(ts.full(shape=(2,), value=3.0)).tolist() == [3.0, 3.0]


def test_pickle_keeps_the_type():
    x = ts.Tensor([1.0, 2.0], ts.bf16 @ ts.accum(ts.f64), requires_grad=True)
    y = pickle.loads(pickle.dumps(x))
    assert y.type == x.type and y.requires_grad and y.tolist() == x.tolist()


def test_updates_leave_the_tensor():
    x = ts.Tensor([1.0, 2.0, 3.0])
    assert x.at[[0, 0]].add(1).tolist() == [3.0, 2.0, 3.0] and x.at[::-1].set([7, 8, 9]).tolist() == [9.0, 8.0, 7.0]
    assert x.at[x > 1].multiply(2).tolist() == [1.0, 4.0, 6.0] and x.at[1:].min(2).tolist() == [1.0, 2.0, 2.0]
    assert x.at[0].max(5).tolist() == [5.0, 2.0, 3.0] and x.at[-1].get().item() == 3.0 and x.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(TraceError, match="in place"):
        x[0] = 1.0
    assert ts.jit(lambda x: x.at[0].set(1.0))(x).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ShapeError):
        x.at[:2].set([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("use", "advice"),
    [
        (bool, r"ts\.where"),
        (float, "with the tensor itself"),
        (int, "static_argnames"),
        (np.fft.fft, "a function of ts"),
    ],
)
def test_the_error_of_a_traced_value_says_what_to_write(use, advice):
    with pytest.raises(TraceError, match=advice):
        ts.jit(lambda x: use(x.sum()))(X)


R = np.arange(120.0).reshape(2, 3, 4, 5)
I, J = np.array([0, 1, -1]), np.array([[0], [2]])
INDICES = (
    np.s_[::-1], np.s_[:, ::-2, 1], np.s_[:, I], np.s_[:, I, I], np.s_[I % 2, :, I], np.s_[0, :, I], np.s_[0, I],
    np.s_[:, None, I, 2, ...], np.s_[J % 2, I, None, :], R > 50, np.s_[:, R[0, :, :, 0] > 7], np.s_[..., -1:0:-2],
    np.s_[R[:, :, 0, 0] > 3, 1], np.s_[1:1:-1], np.s_[:, []], np.s_[[1, 0]], np.s_[I % 2, :, 0, None, I],
)  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=lambda i: None)
def test_subscripts_are_numpys(index):
    np.testing.assert_array_equal(ts.Tensor(R)[index].numpy(), R[index])


def test_subscripts_outside():
    with pytest.raises(OutOfBoundsError, match="index 3 is outside axis 1 of size 3"):
        ts.Tensor(R)[np.array([0, 1]), np.array([0, 3])]
    with pytest.raises(ShapeError, match="broadcast"):
        ts.Tensor(R)[np.array([0, 1]), np.array([0, 1, 2])]


def test_one_element_or_a_typed_error():
    assert (
        bool(ts.Tensor([1])) and int(ts.Tensor(3.7)) == 3 and [5, 6][ts.Tensor(1)] == 6 and 2.0 in ts.Tensor([1.0, 2.0])
    )
    for number in (bool, int, float):
        with pytest.raises(ShapeError, match="not one (element|truth value)"):
            number(X)
    with pytest.raises(ShapeError, match="no tensor"):
        ts.Tensor([1, [2]])
    for bad in ("abc", {"a": 1}, None, [1, "a"], 1 + 2j):
        with pytest.raises(DTypeError, match="not a tensor or a number"):
            ts.Tensor(bad)


def test_what_a_tensor_is_not_equal_to():
    assert not (X == None) and X != "text" and X != object()  # noqa: E711  (what is under test)
    assert f"{ts.Tensor(3.14159):.2f}" == "3.14" and f"{ts.Tensor([1])}" == "Tensor([1], int64)"
    with pytest.raises(ShapeError, match="not one element"):
        f"{X:.2f}"


def test_only_what_fits_becomes_an_element():
    for call in (
        lambda: ts.Tensor([300], ts.int8), lambda: ts.Tensor([-1], ts.uint8), lambda: ts.full((2,), 300, ts.int8),
        lambda: ts.Tensor([1], ts.int8) + 300, lambda: ts.jit(lambda x: x + 300)(ts.Tensor([1], ts.int8)),
    ):  # fmt: skip
        with pytest.raises(DTypeError, match="does not fit"):
            call()
    assert ts.Tensor([300]).to(ts.int8).tolist() == ts.Tensor(np.array([300]), ts.int8).tolist() == [44]
    with pytest.raises(DTypeError, match="only float tensors have gradients"):
        ts.Tensor([1], requires_grad=True)
    with pytest.raises(DeviceUnavailable, match="tpu:0"):
        ts.Tensor([1.0], device="tpu:0")


def test_indices_that_are_none():
    with pytest.raises(DTypeError, match="not integers"):
        X[1.5]
    with pytest.raises(ShapeError, match="the shape of a bool array"):
        X[np.array([True])]


def test_copies_keep_the_type():
    x = ts.Tensor([1.0, 2.0], ts.bf16 @ ts.accum(ts.f32))
    for y in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.clone(), x.contiguous(), ts.Tensor(x)):
        assert y.type == x.type and y.tolist() == x.tolist()
    assert X.T.contiguous().layout == "row_major" and ts.Tensor([1.0], ts.fp8_e5m2).tolist() == [1.0]


def test_a_traced_tensor_is_its_own_copy():
    """Averages of weights begin with a deep copy of the model, inside of a compiled program too."""
    model = ts.nn.Linear(2, 1)
    found = ts.jit(lambda model, x: (copy.deepcopy(model)(x), copy.copy(x) + 1.0))(model, ts.ones(2))
    assert found[0].tolist() == model(ts.ones(2)).tolist() and found[1].tolist() == [2.0, 2.0]


def test_tensor_copies():
    """As PyTorch's function of this name."""
    array = np.zeros(3, np.float32)
    x, y = ts.tensor(array), ts.tensor(ts.Tensor(array))
    array[0] = 5.0
    assert x.tolist() == y.tolist() == [0.0] * 3 and ts.tensor([1, 2]).dtype == ts.int64
    assert ts.tensor(3.0, dtype=ts.bf16, requires_grad=True).requires_grad
    assert ts.jit(lambda x: ts.tensor(x) + 1.0)(x).tolist() == [1.0] * 3
    with pytest.raises(DTypeError, match="str is not a tensor or a number"):
        ts.tensor("a")
