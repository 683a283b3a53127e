"""Ops that move elements, against NumPy; subscripts too."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, OutOfBoundsError, ShapeError, TesseraError
from tessera.core.symbolic_dim import Dim
from tessera.core.types import TensorType, bf16, f16, f32, int8, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import shape as s

A = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
X = Tensor(A)

SAME = {
    "reshape": (lambda x: x.reshape(4, -1), lambda a: a.reshape(4, -1)),
    "view": (lambda x: x.view((6, 4)), lambda a: a.reshape(6, 4)),
    "permute": (lambda x: x.permute(2, 0, 1), lambda a: a.transpose(2, 0, 1)),
    "permute_negative": (lambda x: x.permute(-1, 0, -2), lambda a: a.transpose(2, 0, 1)),
    "transpose": (lambda x: x.transpose(0, 2), lambda a: a.swapaxes(0, 2)),
    "T": (lambda x: x.T, lambda a: a.swapaxes(1, 2)),
    "slice": (lambda x: s.slice_(x, start=(0, 1, 0), stop=(2, 3, 4), step=(1, 1, 3)), lambda a: a[:, 1:3, ::3]),
    "pad": (lambda x: s.pad(x, low=(0, 1, 0), high=(1, 0, 2), value=7), None),
    "concatenate": (lambda x: s.concatenate([x, x, x], axis=1), lambda a: np.concatenate([a, a, a], axis=1)),
    "stack": (lambda x: s.stack([x, x], axis=-1), lambda a: np.stack([a, a], axis=-1)),
    "gather": (lambda x: s.gather(x, Tensor([[2, 0]]), axis=1), lambda a: a[:, [[2, 0]]]),
    "expand_dims": (lambda x: s.expand_dims(x, 1), lambda a: a[:, None]),
    "unsqueeze": (lambda x: x.unsqueeze(-1), lambda a: a[..., None]),
    "squeeze": (lambda x: x[:1].squeeze(0), lambda a: a[0]),
    "flatten": (lambda x: x.flatten(1), lambda a: a.reshape(2, 12)),
}
SAME["pad"] = (SAME["pad"][0], lambda a: np.pad(a, ((0, 1), (1, 0), (0, 2)), constant_values=7))


@pytest.mark.parametrize(("ours", "numpys"), SAME.values(), ids=SAME)
def test_as_numpy(ours, numpys):
    out = ours(X)
    assert np.array_equal(out.numpy(), numpys(A)) and out.shape == numpys(A).shape and out.dtype == f32


INDICES = [
    np.s_[0], np.s_[-1], np.s_[:, 1], np.s_[..., 2], np.s_[1:, ..., ::2], np.s_[None], np.s_[:, None, 1],
    np.s_[1, 2, 3], np.s_[..., None], np.s_[-2:, :-1], np.s_[5:], np.s_[:, 3:1], np.s_[...],
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_subscripts(index):
    assert np.array_equal(X[index].numpy(), A[index]) and X[index].shape == A[index].shape


item = st.one_of(
    st.integers(-2, 1),
    st.none(),
    st.builds(slice, *[st.none() | st.integers(-5, 5)] * 2, st.none() | st.integers(1, 3)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(item, max_size=3), st.booleans())
def test_any_subscript(items, dots):
    index = (*items, ...) if dots else tuple(items)
    assert np.array_equal(X[index].numpy(), A[index])


picks = st.one_of(st.just([0, -1]), st.just([[1], [0]]), st.just([[1, 0]]), st.integers(-2, 1))


@settings(max_examples=80, deadline=None)
@given(st.lists(picks | item, max_size=3), st.integers(0, 3))
def test_indices_beside_dots(items, at):
    """Arrays and integers on both sides of `...` go first, also where it covers no axis."""
    index = tuple(np.array(i, int) if isinstance(i, list) else i for i in (*items[:at], ..., *items[at:]))
    assert np.array_equal(X[index].numpy(), A[index])
    changed = A.copy()
    changed[index] = rows = np.arange(A[index].size, dtype=A.dtype).reshape(A[index].shape)
    assert np.array_equal(X.at[index].set(rows).numpy(), changed)


def test_a_tensor_as_subscript():
    picks = np.array([[1, 0], [1, 1]])
    assert np.array_equal(X[Tensor(picks)].numpy(), A[picks])
    assert np.array_equal(X[:, Tensor([2, 0])].numpy(), A[:, [2, 0]])


def test_indices_of_one_axis_each():
    """As `np.ix_` makes them: they select along one axis after the other, and read no array of merged axes."""
    rows, columns = np.array([[1], [-1], [0]]), np.array([3, 0, -2, 1])
    function = lambda x: x[1, rows, columns]  # noqa: E731
    assert np.array_equal(X[:, rows, columns].numpy(), A[:, rows, columns])
    assert np.array_equal(X[:, rows[:, None], columns].numpy(), A[:, rows[:, None], columns])
    assert np.array_equal(X[np.array([[[1]], [[0]]]), rows, columns].numpy(), A[np.ix_([1, 0], rows[:, 0], columns)])
    ops = [n.op.name for n in ts.jit(lambda x: x[:, rows, columns]).trace(X).function.body.nodes]
    assert ops.count("ts.gather") == 2 and "ts.mul" not in ops
    want = np.zeros_like(A)
    np.add.at(want, (1, rows, columns), 1.0)
    assert np.array_equal(ts.grad(lambda x: ts.sum(function(x)))(X).numpy(), want)
    for wrong in ((rows, columns + 2), (rows + 3, columns)):
        with pytest.raises(OutOfBoundsError):
            X[:, wrong[0], wrong[1]]


def test_subscript_errors():
    with pytest.raises(OutOfBoundsError, match="index 2 is outside axis 0 of size 2"):
        X[2]
    with pytest.raises(OutOfBoundsError, match="index -4 is outside axis 1 of size 3"):
        X[0, -4]
    with pytest.raises(ShapeError, match="4 indices for a tensor of rank 3"):
        X[0, 0, 0, 0]
    with pytest.raises(ShapeError, match="a slice step cannot be zero"):
        X[::0]


def test_iota_and_arange():
    assert s.iota(shape=(2, 3), axis=0).numpy().tolist() == [[0] * 3, [1] * 3] and s.iota(shape=4).dtype == int64
    for args in ((5,), (2, 7), (1, 10, 3), (5, 0, -2), (3, 3)):
        assert s.arange(*args).numpy().tolist() == list(range(*args))
    assert s.arange(3, dtype=bf16).dtype == bf16


def test_embedding():
    rows = Tensor(np.arange(6, dtype="f4").reshape(3, 2))
    assert s.embedding(rows, Tensor([[2], [0]])).numpy().tolist() == [[[4, 5]], [[0, 1]]]


def test_pad_takes_the_tensors_type():
    assert s.pad(Tensor([1], int8), low=(1,), high=(0,), value=-3).numpy().tolist() == [-3, 1]
    assert s.pad(Tensor([1.0], f16), low=(0,), high=(1,), value=np.inf).numpy().tolist() == [1, np.inf]


ERRORS = {
    "cannot reshape (2, 3, 4) to (5, -1)": lambda: X.reshape(5, -1),
    "cannot reshape (2, 3, 4) to (4, 5)": lambda: X.reshape(4, 5),
    "reshape can infer only one size": lambda: X.reshape(-1, -1),
    "(0, 0, 1) is not a permutation of the 3 axes of 2x3x4xf32": lambda: X.permute(0, 0, 1),
    "slice 0:5:1 is outside axis 2 of 2x3x4xf32": lambda: s.slice_(X, start=(0, 0, 0), stop=(2, 3, 5)),
    "slice needs a start, stop and step for each of 3 axes": lambda: s.slice_(X, start=(0,), stop=(2,)),
    "pad needs a count ≥ 0": lambda: s.pad(X, low=(-1, 0, 0), high=(0, 0, 0)),
    "cannot concatenate along axis 2": lambda: s.concatenate([X, X[:1]], axis=2),
    "axis 1 has size 3, not 1": lambda: s.squeeze(X, 1),
}


@pytest.mark.parametrize("text", ERRORS)
def test_shape_errors(text):
    with pytest.raises(ShapeError) as caught:
        ERRORS[text]()
    assert text in str(caught.value)


def test_gather_errors():
    with pytest.raises(OutOfBoundsError, match="index 3 is outside axis 1 of size 3"):
        s.gather(X, Tensor([0, 3]), axis=1)
    with pytest.raises(OutOfBoundsError, match="index -3 is outside"):
        s.gather(X, Tensor([-3]))
    with pytest.raises(DTypeError, match="indices are not integers"):
        s.gather(X, Tensor([0.0]))
    assert s.gather(X, Tensor(np.zeros(0, np.int64))).shape == (0, 3, 4)


def test_concatenate_errors():
    with pytest.raises(ArgumentError, match="needs at least one tensor"):
        s.concatenate([])
    with pytest.raises(DTypeError, match="cannot mix"):
        s.concatenate([X, X.to(bf16)])


def test_symbolic_shapes():
    b = Dim.of("B")
    x = TensorType((b, 4), f32)
    reshape = s.reshape.canonical(x, shape=(-1, 2))
    assert reshape == {"shape": (2 * b, 2)} and s.reshape.result_types((x,), reshape)[0].shape == (2 * b, 2)
    assert s.concatenate.result_types((x, x), {"axis": -2})[0].shape == (2 * b, 4)
    assert s.pad.result_types((x,), {"low": (1, 0), "high": (1, 0), "value": 0.0})[0].shape == (b + 2, 4)
    with pytest.raises(ShapeError, match="elements"):
        s.reshape.result_types((x,), {"shape": (b, 5)})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: ts.stack([x, ts.ones((5, 2))]), r"stack takes tensors of one shape[\s\S]*\(3, 4\), \(5, 2\)"),
        (lambda x: ts.stack([x, ts.ones(3)]), "stack takes tensors of one shape"),
        (lambda x: ts.stack([x, x], axis=7), "out of range"),
        (lambda x: ts.split(x, [1, 2], axis=1), r"parts of sizes \[1, 2\][\s\S]*add up to 4"),
        (lambda x: ts.split(x, 3, axis=1), r"3 equal parts[\s\S]*a multiple of 3"),
        (lambda x: ts.adaptive_avg_pool2d(x[None, None], np.int64(0)), "output_size"),
    ],
)
def test_errors_say_what_was_passed(call, text):
    with pytest.raises(TesseraError, match=text) as error:
        call(ts.ones((3, 4)))
    assert error.value.location.file == __file__


@pytest.mark.parametrize("counts", [(2, 1, 1), ((2, 1),), (2, 3)])
def test_repeating_as_pytorch_does(counts):
    """PyTorch's `repeat` repeats the whole tensor: what cannot be meant here names `tile`."""
    with pytest.raises(TesseraError) as error:
        ts.zeros((2, 3)).repeat(*counts)
    whole = counts if len(counts) > 1 else counts[0]
    assert error.value.suggestion == f"to repeat the whole tensor, as PyTorch does: x.tile({whole})"
    assert ts.zeros((2, 3)).repeat(2, axis=1).shape == (2, 6)
