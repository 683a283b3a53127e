"""Stateful objects against PyTorch and NumPy, at once and compiled; state is donated and updated in place."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, EffectError, TraceError

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(0)
W_H, W_X, W_O = (RNG.standard_normal(s).astype(np.float32) * 0.5 for s in ((4, 4), (3, 4), (4, 2)))
XS = RNG.standard_normal((6, 3)).astype(np.float32)
TARGETS = ("interp", "llvm", "ptx")


class RNNCell(ts.Stateful):
    """The cell of the programming model."""

    def __init__(self, hidden_size):
        self.hidden_size = hidden_size
        self.state = ts.zeros((hidden_size,))

    @ts.stateful
    def forward(self, x):
        self.state = ts.tanh(self.state @ W_H + x @ W_X)
        return self.state @ W_O

    def reset(self):
        self.state = ts.zeros((self.hidden_size,))


def expected():
    h, out = torch.zeros(4), []
    for x in torch.tensor(XS):
        h = torch.tanh(h @ torch.tensor(W_H) + x @ torch.tensor(W_X))
        out.append(h @ torch.tensor(W_O))
    return torch.stack(out).numpy(), h.numpy()


@pytest.mark.parametrize("target", [None, *TARGETS])
def test_a_cell_at_once_and_compiled(target):
    cell = RNNCell(4)
    step = cell.forward if target is None else ts.jit(cell.forward, target=target)
    for _ in range(2):
        got = [step(x).numpy() for x in XS]
        assert np.allclose(got, expected()[0], atol=1e-5) and np.allclose(cell.state.numpy(), expected()[1], atol=1e-5)
        cell.reset()


@pytest.mark.parametrize("target", TARGETS)
def test_a_cell_is_a_carry_of_scan(target):
    def step(cell, x):
        y = cell.forward(x)
        return cell, y

    cell, ys = ts.jit(lambda cell, xs: ts.scan(step, cell, xs), target=target)(RNNCell(4), XS)
    assert np.allclose(ys.numpy(), expected()[0], atol=1e-5)
    assert isinstance(cell, RNNCell) and np.allclose(cell.state.numpy(), expected()[1], atol=1e-5)


@pytest.mark.parametrize("target", [None, "llvm"])
def test_with_state(target):
    @ts.with_state
    def functional_rnn(x, initial_state):
        def step(state, x_t):
            new_state = ts.tanh(state @ W_H + x_t @ W_X)
            return new_state, new_state @ W_O

        final_state, outputs = ts.scan(step, initial_state, x)
        return outputs, final_state

    run = functional_rnn if target is None else ts.jit(functional_rnn, target=target)
    outputs, final = run(XS, ts.zeros((4,)))
    assert np.allclose(outputs.numpy(), expected()[0], atol=1e-5)
    assert np.allclose(final.numpy(), expected()[1], atol=1e-5)

    @ts.with_state
    def run_two(first, x, second):
        return first.forward(x) + second.forward(x)

    one, two = RNNCell(4), RNNCell(4)
    call = run_two if target is None else ts.jit(run_two, target=target)
    got = [call(one, x, second=two).numpy() for x in XS]
    assert np.allclose(got, 2 * expected()[0], atol=1e-5) and np.allclose(two.state.numpy(), expected()[1], atol=1e-5)


def test_the_state_is_an_effect_and_is_part_of_the_graph():
    cell = RNNCell(4)
    assert ts.effects.of(cell.forward) == {"state"} == ts.effects.of(ts.jit(cell.forward))
    assert ts.effects.inferred(lambda: cell.forward(XS[0])) == {"state"}
    with pytest.raises(EffectError, match="state"), ts.effects.suspend("state"):
        cell.forward(XS[0])
    function = ts.jit(cell.forward).trace(XS[0]).function
    assert [p.hint for p in function.params][:1] == ["state.state"] and len(function.results) == 2


def test_gradients_go_through_state():
    def loss(w, cell, xs):
        def step(cell, x):
            cell.state = ts.tanh(cell.state @ w + x @ W_X)
            return cell, cell.state

        return ts.scan(step, cell, xs)[1].sum()

    w = torch.tensor(W_H, requires_grad=True)
    h, total = torch.zeros(4), 0.0
    for x in torch.tensor(XS):
        h = torch.tanh(h @ w + x @ torch.tensor(W_X))
        total = total + h.sum()
    total.backward()
    assert np.allclose(ts.grad(loss)(ts.tensor(W_H), RNNCell(4), XS).numpy(), w.grad.numpy(), atol=1e-5)


def test_misuse_is_an_error():
    cell = RNNCell(4)
    with pytest.raises(TraceError, match=r"RNNCell\.state changes in a traced function"):
        ts.jit(lambda x: cell.forward(x))(XS[0])
    assert not cell.state.is_traced
    with pytest.raises(ArgumentError, match="state lacks|has no other"):
        cell.load_state_dict({"other": ts.zeros((4,))})
    with pytest.raises(ArgumentError, match="state state has another type"):
        cell.load_state_dict({"state": ts.zeros((5,))})
    cell.load_state_dict({"state": ts.ones((4,))})
    assert cell.state.tolist() == [1] * 4 and [*cell.state_dict()] == ["state"]
    cell.copy = cell.state
    with pytest.raises(ArgumentError, match="holds one tensor as state and as copy"):
        ts.jit(cell.forward)(XS[0])
    with pytest.raises(ArgumentError, match="its object is not"):
        type("Plain", (), {"f": ts.stateful(lambda self: 1)})().f()


def test_state_stays_in_place():
    class Sum(ts.Stateful):
        def __init__(self):
            self.total = ts.zeros((1000,))

        @ts.stateful
        def add(self, x):
            self.total = self.total + x
            return x

    held = Sum()
    add = ts.jit(held.add, target="llvm")
    add(1.0)
    address = held.total.numpy().ctypes.data
    add(2.0)
    assert held.total.numpy().ctypes.data == address and held.total.tolist() == [3.0] * 1000
