"""Recurrent layers: RNN, LSTM and GRU with PyTorch's weights, as loops over the sequence (`ts.scan`)."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import f32
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn import initialisation as init
from tessera.nn.activations import relu
from tessera.nn.linear import check_count, linear
from tessera.nn.module import Module, Parameter
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.elementwise import tanh
from tessera.ops.tensor.nn import dropout
from tessera.ops.tensor.rearrange import flip
from tessera.ops.tensor.scalar_functions import sigmoid
from tessera.ops.tensor.shape import concatenate, permute, stack
from tessera.transforms.flow.control_flow import scan


class RNN(Module):
    """A recurrent layer: h' = tanh(x W_ihᵀ + b_ih + h W_hhᵀ + b_hh), stacked `num_layers` times.

    Inputs are [S, N, input_size], or [N, S, input_size] with `batch_first`, or without N. The call gives (outputs,
    h), with h [num_layers · directions, N, hidden_size]. Weights and first values are those of PyTorch.

    >>> out, h = RNN(3, 4)(zeros((5, 2, 3)))
    >>> out.shape, h.shape
    ((5, 2, 4), (1, 2, 4))

    Raises:
        ShapeError: the input or the state does not fit.
        ArgumentError: an option is out of range.
    """

    gates = 1
    states = 1

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, nonlinearity: str = "tanh", dtype: Any = f32,
    ) -> None:  # fmt: skip
        self.input_size, self.hidden_size = (
            check_count("input_size", input_size),
            check_count("hidden_size", hidden_size),
        )
        self.num_layers, self.batch_first, self.p = check_count("num_layers", num_layers), batch_first, dropout
        self.directions, self.bias = 2 if bidirectional else 1, bias
        if nonlinearity not in ("tanh", "relu"):
            raise ArgumentError(
                f"nonlinearity is {nonlinearity!r}", location=user_location(), expected="'tanh' or 'relu'"
            )
        self.nonlinearity = nonlinearity
        bound = 1.0 / math.sqrt(hidden_size)
        rows = self.gates * hidden_size
        for end, layer in self._list_runs():
            size = input_size if layer == 0 else hidden_size * self.directions
            shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, size), "weight_hh": (rows, hidden_size)}
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if bias else {}
            for name, shape in shapes.items():
                setattr(self, f"{name}_l{layer}{end}", Parameter(init.uniform(shape, -bound, bound, dtype)))

    def _list_runs(self) -> list[tuple[str, int]]:
        """The ending of the names of each run over the sequence, and its layer."""
        return [(end, layer) for layer in range(self.num_layers) for end in ("", "_reverse")[: self.directions]]

    def forward(self, x: Any, state: Any = None) -> Any:
        """The outputs and the last state."""
        x = as_tensor(x)
        single = x.ndim == 2
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            order = "[N, S, {}]" if self.batch_first else "[S, N, {}]"
            raise ShapeError(
                f"{type(self).__name__} does not take this input", location=user_location(),
                expected=f"{order.format(self.input_size)}, or without N", received=str(x.type),
            )  # fmt: skip
        x = x[:, None] if single else permute(x, axes=(1, 0, 2)) if self.batch_first else x
        starts = self._read_state(state, x.shape[1], x.dtype, single)
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            if layer:
                x = dropout(x, self.p, training=self.training)
            runs = [self._run(x, starts[len(ends) + d], layer, d) for d in range(self.directions)]
            ends += [end for _, end in runs]
            x = runs[0][0] if self.directions == 1 else concatenate([out for out, _ in runs], axis=-1)
        out = x[:, 0] if single else permute(x, axes=(1, 0, 2)) if self.batch_first else x
        last = [stack([end[i] for end in ends], axis=0) for i in range(self.states)]
        last = [h[:, 0] for h in last] if single else last
        return out, last[0] if self.states == 1 else tuple(last)

    def _read_state(self, state: Any, batch: Any, dtype: Any, single: bool) -> list[tuple[Tensor, ...]]:
        """The first state of each run."""
        count = self.num_layers * self.directions
        shape = (count, batch, self.hidden_size)
        if state is None:
            return [tuple(zeros(shape[1:], dtype=dtype) for _ in range(self.states))] * count
        given = [as_tensor(s) for s in ((state,) if self.states == 1 else tuple(state))]
        given = [s[:, None] if single and s.ndim == 2 else s for s in given]
        if len(given) != self.states or any(s.shape != shape for s in given):
            raise ShapeError(
                f"the state of {type(self).__name__} does not fit", location=user_location(),
                expected=f"{self.states} of shape {shape}", received=", ".join(str(s.type) for s in given),
            )  # fmt: skip
        return [tuple(s[i] for s in given) for i in range(count)]

    def _run(self, x: Tensor, start: tuple[Tensor, ...], layer: int, direction: int) -> Any:
        """One run over the sequence: its outputs, and its last state."""
        end = f"_l{layer}" + ("_reverse" if direction else "")
        own = self._parameters
        weights = own["weight_hh" + end], own.get("bias_hh" + end)
        inputs = linear(x, own["weight_ih" + end], own.get("bias_ih" + end))

        def step(state: tuple[Tensor, ...], row: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            new = self.step(row, state, *weights)
            return new, new[0]

        last, out = scan(step, start, flip(inputs, 0) if direction else inputs)
        return (flip(out, 0) if direction else out), last

    def step(self, row: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
        """The state after one row of projected inputs."""
        found = row + linear(state[0], weight, bias)
        return ((tanh if self.nonlinearity == "tanh" else relu)(found),)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


class LSTM(RNN):
    """Long short-term memory (Hochreiter and Schmidhuber 1997): the state is (h, c); see `RNN`.

    >>> out, (h, c) = LSTM(3, 4)(zeros((5, 2, 3)))
    >>> out.shape, c.shape
    ((5, 2, 4), (1, 2, 4))
    """

    gates = 4
    states = 2

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, dtype: Any = f32,
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype=dtype)

    def step(self, row: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
        """The state after one row of projected inputs."""
        h, c = state
        i, f, g, o = split_gates(row + linear(h, weight, bias), 4)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        return sigmoid(o) * tanh(c), c


class GRU(RNN):
    """Gated recurrent units (Cho et al. 2014), with the reset gate after the product as in PyTorch; see `RNN`.

    >>> GRU(3, 4)(zeros((5, 2, 3)))[0].shape
    (5, 2, 4)
    """

    gates = 3

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, dtype: Any = f32,
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype=dtype)

    def step(self, row: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
        """The state after one row of projected inputs."""
        (h,) = state
        xr, xz, xn = split_gates(row, 3)
        hr, hz, hn = split_gates(linear(h, weight, bias), 3)
        z = sigmoid(xz + hz)
        new = tanh(xn + sigmoid(xr + hr) * hn)
        return ((1.0 - z) * new + z * h,)


def split_gates(x: Tensor, count: int) -> list[Tensor]:
    """The last axis in `count` equal parts.

    >>> [part.shape for part in split_gates(zeros((2, 6)), 3)]
    [(2, 2), (2, 2), (2, 2)]
    """
    size = x.shape[-1] // count
    return [x[..., i * size : (i + 1) * size] for i in range(count)]
