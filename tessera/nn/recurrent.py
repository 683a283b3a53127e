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
from tessera.nn.pooling import check_probability
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.elementwise import tanh
from tessera.ops.tensor.nn import dropout
from tessera.ops.tensor.rearrange import flip
from tessera.ops.tensor.scalar_functions import sigmoid
from tessera.ops.tensor.shape import concatenate, permute, stack
from tessera.transforms.flow.control_flow import scan


def check_nonlinearity(name: str) -> str:
    """The activation of a recurrent layer.

    Raises:
        ArgumentError: it has no such one.
    """
    if name not in ("tanh", "relu"):
        raise ArgumentError(f"nonlinearity is {name!r}", location=user_location(), expected="'tanh' or 'relu'")
    return name


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
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, dtype: Any = f32,
    ) -> None:  # fmt: skip
        self.nonlinearity = check_nonlinearity(nonlinearity)
        self._set_up(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype)

    def _set_up(
        self, input_size: int, hidden_size: int, num_layers: int, bias: bool, batch_first: bool, dropout: float,
        bidirectional: bool, dtype: Any, proj_size: int = 0,
    ) -> None:  # fmt: skip
        """Check the options, and make the weights."""
        self.input_size = check_count("input_size", input_size)
        self.hidden_size, self.proj_size = (
            check_count("hidden_size", hidden_size),
            check_count("proj_size", proj_size, 0),
        )
        self.num_layers, self.batch_first = check_count("num_layers", num_layers), batch_first
        self.directions, self.bias, self.p = 2 if bidirectional else 1, bias, check_probability(dropout)
        if proj_size >= hidden_size:
            raise ArgumentError(
                f"proj_size is {proj_size}", location=user_location(), expected=f"below hidden_size, {hidden_size}"
            )
        bound, rows, out = 1.0 / math.sqrt(hidden_size), self.gates * hidden_size, proj_size or hidden_size
        for end, layer in self._list_runs():
            size = input_size if layer == 0 else out * self.directions
            shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, size), "weight_hh": (rows, out)}
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if bias else {}
            shapes |= {"weight_hr": (proj_size, hidden_size)} if proj_size else {}
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
        shapes = [(count, batch, n) for n in (self.proj_size or self.hidden_size, self.hidden_size)[: self.states]]
        if state is None:
            return [tuple(zeros(shape[1:], dtype=dtype) for shape in shapes)] * count
        given = [as_tensor(s) for s in ((state,) if self.states == 1 else tuple(state))]
        given = [s[:, None] if single and s.ndim == 2 else s for s in given]
        if [s.shape for s in given] != shapes:
            raise ShapeError(
                f"the state of {type(self).__name__} does not fit", location=user_location(),
                expected=f"shapes {', '.join(map(str, shapes))}", received=", ".join(str(s.type) for s in given),
            )  # fmt: skip
        return [tuple(s[i] for s in given) for i in range(count)]

    def _run(self, x: Tensor, start: tuple[Tensor, ...], layer: int, direction: int) -> Any:
        """One run over the sequence: its outputs, and its last state."""
        end = f"_l{layer}" + ("_reverse" if direction else "")
        own = self._parameters
        weights = own["weight_hh" + end], own.get("bias_hh" + end), own.get("weight_hr" + end)
        inputs = linear(x, own["weight_ih" + end], own.get("bias_ih" + end))

        def step(state: tuple[Tensor, ...], row: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            new = self.step(row, state, *weights)
            return new, new[0]

        last, out = scan(step, start, flip(inputs, 0) if direction else inputs)
        return (flip(out, 0) if direction else out), last

    def step(
        self, row: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any, projection: Any = None
    ) -> tuple[Tensor, ...]:
        """The state after one row of projected inputs."""
        found = row + linear(state[0], weight, bias)
        return ((tanh if self.nonlinearity == "tanh" else relu)(found),)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


class LSTM(RNN):
    """Long short-term memory (Hochreiter and Schmidhuber 1997): the state is (h, c); see `RNN`.

    With `proj_size` h is projected to that many features, which the outputs then have (Sak, Senior and Beaufays 2014).

    >>> out, (h, c) = LSTM(3, 4)(zeros((5, 2, 3)))
    >>> out.shape, c.shape
    ((5, 2, 4), (1, 2, 4))
    """

    gates = 4
    states = 2

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0, dtype: Any = f32,
    ) -> None:  # fmt: skip
        self._set_up(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype, proj_size)

    def step(
        self, row: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any, projection: Any = None
    ) -> tuple[Tensor, ...]:
        """The state after one row of projected inputs."""
        h, c = state
        i, f, g, o = split_gates(row + linear(h, weight, bias), 4)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        return (h if projection is None else linear(h, projection)), c


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
        self._set_up(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype)

    def step(
        self, row: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any, projection: Any = None
    ) -> tuple[Tensor, ...]:
        """The state after one row of projected inputs."""
        (h,) = state
        xr, xz, xn = split_gates(row, 3)
        hr, hz, hn = split_gates(linear(h, weight, bias), 3)
        z = sigmoid(xz + hz)
        new = tanh(xn + sigmoid(xr + hr) * hn)
        return ((1.0 - z) * new + z * h,)


class RNNCell(Module):
    """One step of an `RNN` layer: `h = cell(x, h)` for x [N, input_size] and h [N, hidden_size], or without N.

    >>> RNNCell(3, 4)(zeros((2, 3))).shape
    (2, 4)

    Raises:
        ShapeError: the input or the state does not fit.
    """

    layer: type[RNN] = RNN

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh", dtype: Any = f32
    ) -> None:
        self.nonlinearity = check_nonlinearity(nonlinearity)
        self._set_up(input_size, hidden_size, bias, dtype)

    def _set_up(self, input_size: int, hidden_size: int, bias: bool, dtype: Any) -> None:
        self.input_size = check_count("input_size", input_size)
        self.hidden_size = check_count("hidden_size", hidden_size)
        bound, rows = 1.0 / math.sqrt(hidden_size), self.layer.gates * hidden_size
        self.weight_ih = Parameter(init.uniform((rows, input_size), -bound, bound, dtype))
        self.weight_hh = Parameter(init.uniform((rows, hidden_size), -bound, bound, dtype))
        for name in ("bias_ih", "bias_hh"):
            self.register_parameter(name, init.uniform((rows,), -bound, bound, dtype) if bias else None)

    def forward(self, x: Any, state: Any = None) -> Any:
        """The state after one step; that of an LSTM is (h, c)."""
        x, count = as_tensor(x), self.layer.states
        shape = (*x.shape[:-1], self.hidden_size)
        given = (zeros(shape, dtype=x.dtype),) * count if state is None else (state,) if count == 1 else tuple(state)
        given = tuple(as_tensor(s) for s in given)
        if x.ndim not in (1, 2) or x.shape[-1] != self.input_size or [s.shape for s in given] != [shape] * count:
            raise ShapeError(
                f"{type(self).__name__} does not take this input", location=user_location(),
                expected=f"[N, {self.input_size}] and {count} of [N, {self.hidden_size}], or without N",
                received=", ".join(str(t.type) for t in (x, *given)),
            )  # fmt: skip
        row = linear(x[None] if x.ndim == 1 else x, self.weight_ih, self.bias_ih)
        state = tuple(s[None] if x.ndim == 1 else s for s in given)
        new = self.layer.step(self, row, state, self.weight_hh, self.bias_hh)  # type: ignore[arg-type]
        new = tuple(s[0] for s in new) if x.ndim == 1 else new
        return new[0] if count == 1 else new

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.input_size}, {self.hidden_size}"


class LSTMCell(RNNCell):
    """One step of an `LSTM` layer: `h, c = cell(x, (h, c))`; see `RNNCell`.

    >>> h, c = LSTMCell(3, 4)(zeros((2, 3)))
    """

    layer: type[RNN] = LSTM

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, dtype: Any = f32) -> None:
        self._set_up(input_size, hidden_size, bias, dtype)


class GRUCell(LSTMCell):
    """One step of a `GRU` layer: `h = cell(x, h)`; see `RNNCell`."""

    layer = GRU


def split_gates(x: Tensor, count: int) -> list[Tensor]:
    """The last axis in `count` equal parts.

    >>> [part.shape for part in split_gates(zeros((2, 6)), 3)]
    [(2, 2), (2, 2), (2, 2)]
    """
    size = x.shape[-1] // count
    return [x[..., i * size : (i + 1) * size] for i in range(count)]
