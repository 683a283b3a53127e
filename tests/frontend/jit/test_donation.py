"""Donated arguments: their memory is used again where that is safe; no target lets them be used afterwards."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError

TARGETS = ("interp", "llvm", "ptx")
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
G = np.cos(X)


def address(tensor):
    return getattr(tensor.data, "address", None) or tensor.data.ctypes.data


def fresh(array, target):
    return ts.tensor(array, device="ptx" if target == "ptx" else "cpu")


@pytest.mark.parametrize("target", TARGETS)
def test_updates_in_place(target):
    @ts.jit(target=target, donate="p")
    def update(p, g):
        return p - 0.5 * g

    p, want, first = fresh(X, target), X, None
    for _ in range(3):
        first = first or address(p)
        given, p = p, update(p, G)
        want = want - np.float32(0.5) * G
        assert target == "interp" or address(p) == first
        with pytest.raises(ArgumentError, match=r"donated to the call of update at .*test_donation.py:\d+"):
            given + 1.0
    assert np.allclose(p.numpy(), want, rtol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_every_use_names_the_call(target):
    take = ts.jit(lambda x: x * 2.0, target=target, donate=("x",))
    x = fresh(X, target)
    take(x)
    uses = [x.numpy, lambda: take(x), lambda: x[0], lambda: np.asarray(x), ts.jit(lambda: x + 1.0), x.tolist,
            lambda: ts.exp(x), lambda: x.to("cpu"), lambda: np.from_dlpack(x), x.clone, lambda: x @ x]  # fmt: skip
    for use in uses:
        with pytest.raises(ArgumentError, match="donated to the call of"):
            use()
    assert "donated" in repr(x) and x.shape == (8, 8)


FUNCTIONS = {
    "pointwise": lambda a, b: (a + b, a * b),
    "transposed": lambda a, b: (a.T, ts.exp(b).T),
    "flipped": lambda a, b: (ts.flip(a, 0), ts.roll(b, 1)),
    "reduced": lambda a, b: (a - ts.sum(a * b, axis=0), ts.softmax(b)),
    "product": lambda a, b: (a @ b, a + 1.0),
    "swapped": lambda a, b: (b, a),
    "stages": lambda a, b: (ts.tanh(a @ b) @ a, ts.cumsum(b, axis=0)),
    "later": lambda a, b: (ts.sum(a, axis=1, keepdims=True) + ts.zeros((8, 8)) + b @ b, b - 1.0),
}


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_without_donation(name, target):
    function = FUNCTIONS[name]
    want = ts.jit(function, target=target)(X, G)
    for _ in range(2):  # bound, then known
        found = ts.jit(function, target=target, donate=("a", "b"))(fresh(X, target), fresh(G, target))
        assert all(np.array_equal(f.numpy(), w.numpy()) for f, w in zip(found, want, strict=True))


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_shared_memory_is_not_overwritten(target):
    update = ts.jit(lambda p: p + 1.0, target=target, donate=("p",))
    x = fresh(X, target)
    other = x.detach()
    y = update(x)
    assert np.array_equal(other.numpy(), X) and np.array_equal(y.numpy(), X + 1) and address(y) != address(other)
    array = X.copy()
    view = ts.Tensor(array[2:])
    update(view)
    assert np.array_equal(array, X)
    pair = ts.jit(lambda p, q: p + q, target=target, donate=("p",))
    x = fresh(X, target)
    assert np.array_equal(pair(x, x).numpy(), X + X)


@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_results_have_memory_of_their_own(target):
    """A buffer that is filled again, as a loader of data does, leaves the results of calls before as they were."""
    function = ts.jit(lambda x: (x, x.T, x[1:], x + 0.0, x), target=target)
    array = X.copy()
    found = [y.numpy() for y in function(array)]
    array[:] = 0.0
    want = (X, X.T, X[1:], X, X)
    assert all(np.array_equal(y, w) for y, w in zip(found, want, strict=True))
    assert not any(np.shares_memory(a, b) for i, a in enumerate(found) for b in found[:i])


def test_trees_are_donated_whole():
    @ts.jit(target="llvm", donate=("state",))
    def step(state, rate):
        return {"w": [w - rate * w for w in state["w"]], "n": state["n"] + 1}

    first = {"w": [ts.tensor(X), ts.tensor(G)], "n": 3}
    places = [address(w) for w in first["w"]]
    second = step(state=first, rate=0.5)
    assert [address(w) for w in second["w"]] == places and second["n"].item() == 4
    assert all("donated" in repr(w) for w in first["w"])


def test_what_cannot_be_donated():
    with pytest.raises(ArgumentError, match="no argument y to donate"):
        ts.jit(lambda x: x, donate=("y",))
    with pytest.raises(ArgumentError, match="no argument n"):
        ts.jit(lambda x, n: x * n, donate=("n",), static_argnames=("n",))
    step = ts.jit(lambda x: x + 1.0, donate=("x",))
    for given in (X, ts.tensor(X, requires_grad=True)):
        with pytest.raises(ArgumentError, match="x of <lambda> cannot be donated"):
            step(given)


@ts.kernel
def overlapping(x, out):
    """Blocks of 16 elements, 8 apart: neighbours write the same values to what they share."""
    at = ts.tile.program_id(0) * 16 - ts.tile.program_id(0) * 8
    ts.tile.store(out[at : at + 16], 3.0 * ts.tile.load(x[at : at + 16]))


def test_blocks_that_share_elements_are_not_written_in_place():
    update = ts.jit(lambda x: ts.launch(overlapping, (3,), x, ts.like(x)), target="llvm", donate=("x",))
    x = np.arange(32, dtype=np.float32)
    assert update(ts.tensor(x)).tolist() == (3.0 * x).tolist()


@ts.kernel
def read_again(x, out, more):
    """What the first result overwrites is read again for the second."""
    at = ts.tile.program_id(0) * 8
    ts.tile.store(out[at : at + 8], 3.0 * ts.tile.load(x[at : at + 8]))
    ts.tile.store(more[at : at + 8], ts.tile.load(x[at : at + 8]) + 1.0)


def test_memory_that_is_read_after_the_store_is_not_overwritten():
    launched = lambda x: ts.launch(read_again, (4,), x, ts.like(x), ts.like(x))  # noqa: E731
    x = np.arange(32, dtype=np.float32)
    out, more = ts.jit(launched, target="llvm", donate=("x",))(ts.tensor(x))
    assert (out.tolist(), more.tolist()) == ((3.0 * x).tolist(), (x + 1.0).tolist())


@ts.kernel
def moved(x, place, out):
    """A place that memory holds is added to the program's."""
    at = ts.tile.program_id(0) * 8 + place[0]
    ts.tile.store(out[at : at + 8], 3.0 * ts.tile.load(x[at : at + 8]))


def test_blocks_at_places_that_memory_holds():
    launched = lambda x, place: ts.launch(moved, (4,), x, place, ts.like(x))  # noqa: E731
    x = np.arange(32, dtype=np.float32)
    found = ts.jit(launched, target="llvm", donate=("x",))(ts.tensor(x), np.zeros(1, np.int64))
    assert found.tolist() == (3.0 * x).tolist()


@ts.kernel
def repeated(x, out, *, ROUNDS: int):
    """Each round reads the argument again, after the round before has stored."""
    at = ts.tile.program_id(0) * 8
    for _ in ts.tile.range(0, ROUNDS):
        ts.tile.store(out[at : at + 8], 3.0 * ts.tile.load(x[at : at + 8]))


def test_memory_that_a_loop_reads_again_is_not_overwritten():
    launched = lambda x: ts.launch(repeated, (4,), x, ts.like(x), ROUNDS=2)  # noqa: E731
    x = np.arange(32, dtype=np.float32)
    assert ts.jit(launched, target="llvm", donate=("x",))(ts.tensor(x)).tolist() == (3.0 * x).tolist()
