"""Recurrent rows: LSTM, GRU and plain recurrent layers as scans over time (ATen's recurrent ops)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.matrices import matrix_transpose
from tessera.ops.tensor.scalar_functions import sigmoid
from tessera.ops.tensor.shape import concatenate, permute, reshape, stack
from tessera.torch.rows.shapes import slice_axis
from tessera.torch.table import ATEN, aten
from tessera.transforms.autodiff import vjp
from tessera.transforms.flow import scan

State = tuple[Tensor, ...]
# A step of a cell: its state, the share of the gates that the input gives, and that of the state; the next state.
Cell = Callable[[State, Tensor, Tensor], State]


def _split(gates: Tensor, count: int) -> list[Tensor]:
    size = gates.shape[-1] // count
    return [slice_axis(gates, gates.ndim - 1, i * size, (i + 1) * size) for i in range(count)]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product with a weight [outputs, inputs], plus a bias."""
    out = matmul(x, matrix_transpose(weight))
    return out if bias is None else out + bias


def lstm_cell(state: State, given: Tensor, kept: Tensor) -> State:
    """Hochreiter and Schmidhuber 1997; gates in ATen's order: input, forget, cell, output."""
    enter, forget, cell, out = _split(given + kept, 4)
    memory = sigmoid(forget) * state[1] + sigmoid(enter) * e.tanh(cell)
    return sigmoid(out) * e.tanh(memory), memory


def gru_cell(state: State, given: Tensor, kept: Tensor) -> State:
    """Cho et al. 2014; gates in ATen's order: reset, update, new."""
    (reset, update, new), (by_reset, by_update, by_new) = _split(given, 3), _split(kept, 3)
    candidate = e.tanh(new + sigmoid(reset + by_reset) * by_new)
    share = sigmoid(update + by_update)
    return ((1.0 - share) * candidate + share * state[0],)


def plain_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    """A cell of one gate, with an activation."""
    return lambda state, given, kept: (activation(given + kept),)


def run_layer(
    cell: Cell, x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool, reverse: bool
) -> tuple[Tensor, State]:
    """One direction of one layer over x [time, batch, features]: its outputs, and the last state.

    A weight after the biases projects the output of each step (Sak et al. 2014).
    """
    by_input, by_state, *rest = weights
    first, second = rest[:2] if has_biases else (None, None)
    projection = rest[2 if has_biases else 0 :]
    gates = linear(x, by_input, first)

    def step(now: Any, given: Tensor) -> Any:
        out, *kept = cell(now, given, linear(now[0], by_state, second))
        out = linear(out, projection[0], None) if projection else out
        return (out, *kept), out

    last, outputs = scan(step, state, gates, reverse=reverse)
    return outputs, last


def run_layers(
    cell: Cell, x: Tensor, initial: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, layers: int,
    directions: int, batch_first: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """All layers: the outputs of the last one, and the last states [layers * directions, batch, features]."""
    each = len(params) // (layers * directions)
    x = permute(x, axes=(1, 0, 2)) if batch_first else x
    found: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            state = tuple(reshape(slice_axis(h, 0, at, at + 1), shape=h.shape[1:]) for h in initial)
            out, last = run_layer(cell, x, state, params[at * each : (at + 1) * each], has_biases, direction == 1)
            outputs.append(out)
            found.append(last)
        x = concatenate(outputs, axis=-1) if directions > 1 else outputs[0]
    states = [stack([s[i] for s in found], axis=0) for i in range(len(initial))]
    return (permute(x, axes=(1, 0, 2)) if batch_first else x), states


Layer = Callable[..., tuple[Tensor, ...]]


def _list_states(hx: Any) -> list[Tensor]:
    return list(hx) if isinstance(hx, (list, tuple)) else [hx]


def _recurrent(cell: Cell) -> Layer:
    def row(
        x: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        directions = 1 + bool(bidirectional)
        out, states = run_layers(cell, x, _list_states(hx), params, has_biases, num_layers, directions, batch_first)
        return (out, *states)

    return row


def _backward(layer: Layer) -> Callable[..., list[Tensor]]:
    """The gradients of the input, the states and the weights, as one list; the layer is computed again."""

    def row(gradients: Sequence[Tensor], x: Tensor, hx: Any, params: Sequence[Tensor], *numbers: Any) -> list[Tensor]:
        states = _list_states(hx)
        first = 1 + len(states)
        _, pull = vjp(lambda *all: layer(all[0], list(all[1:first]), all[first:], *numbers), x, *states, *params)
        return list(pull(tuple(gradients)))

    return row


CELLS = {
    "lstm": lstm_cell, "gru": gru_cell, "rnn_tanh": plain_cell(e.tanh),
    "rnn_relu": plain_cell(lambda x: e.maximum(x, 0.0)),
}  # fmt: skip
for _name, _cell in CELLS.items():
    aten(f"{_name}.input")(_recurrent(_cell))
    ATEN[f"tessera_recurrent.{_name}_backward"] = _backward(_recurrent(_cell))
