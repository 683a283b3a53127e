"""Recurrent networks: RNN, GRU and LSTM as scans over time, in one or both directions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.types import int64
from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule
from tessera.onnx.rules.indexing import reverse_sequences, select
from tessera.ops.tensor import activations, nn
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.rearrange import flip
from tessera.ops.tensor.shape import expand_dims, iota, permute, stack, transpose
from tessera.transforms.flow.control_flow import scan

Function = Callable[[Tensor], Tensor]
# The functions that `activations` may name, of (x, alpha, beta), and the defaults of alpha and beta.
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], float, float]] = {
    "relu": (lambda x, a, b: nn.relu(x), 0.0, 0.0),
    "tanh": (lambda x, a, b: e.tanh(x), 0.0, 0.0),
    "sigmoid": (lambda x, a, b: f.sigmoid(x), 0.0, 0.0),
    "affine": (lambda x, a, b: x * a + b, 1.0, 0.0),
    "leakyrelu": (lambda x, a, b: e.where(e.less(x, 0), x * a, x), 0.01, 0.0),
    "thresholdedrelu": (lambda x, a, b: e.where(e.greater(x, a), x, 0.0), 1.0, 0.0),
    "scaledtanh": (lambda x, a, b: e.tanh(x * b) * a, 1.0, 1.0),
    "hardsigmoid": (lambda x, a, b: f.clip(x * a + b, 0.0, 1.0), 0.2, 0.5),
    "elu": (lambda x, a, b: nn.elu(x, alpha=a), 1.0, 0.0),
    "softsign": (lambda x, a, b: activations.softsign(x), 0.0, 0.0),
    "softplus": (lambda x, a, b: nn.softplus(x), 0.0, 0.0),
}
DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@dataclass(frozen=True)
class _Direction:
    """The weights of one direction: `w` [gates · H, input], `r` [gates · H, H], biases [gates · H], peepholes [3 · H].

    Its activations are `functions`, whose arguments are limited to [-clip, clip].
    """

    w: Tensor
    r: Tensor
    w_bias: Tensor | None
    r_bias: Tensor | None
    peepholes: Tensor | None
    functions: list[Function]
    clip: float | None
    hidden: Any

    def limited(self, x: Tensor) -> Tensor:
        """The argument of an activation, limited to [-clip, clip]."""
        return x if self.clip is None else e.minimum(e.maximum(x, -self.clip), self.clip)

    def part(self, x: Tensor, gate: int) -> Tensor:
        """The part of one gate."""
        return x[..., gate * self.hidden : (gate + 1) * self.hidden]


State = tuple[Tensor, ...]


def _step_rnn(d: _Direction, x: Tensor, state: State, call: NodeCall) -> State:
    total = x + matmul(state[0], transpose(d.r))
    total = total if d.r_bias is None else total + d.r_bias
    return (d.functions[0](d.limited(total)),)


def _step_gru(d: _Direction, x: Tensor, state: State, call: NodeCall) -> State:
    h = state[0]
    size = 2 * d.hidden
    gates = x[..., :size] + matmul(h, transpose(d.r[:size]))
    gates = gates if d.r_bias is None else gates + d.r_bias[:size]
    update, reset = (d.functions[0](d.limited(d.part(gates, i))) for i in range(2))
    rows = transpose(d.r[size:])
    bias: Any = 0.0 if d.r_bias is None else d.r_bias[size:]
    if call.attr("linear_before_reset", 0):
        inner = reset * (matmul(h, rows) + bias)
    else:
        inner = matmul(reset * h, rows) + bias
    new = d.functions[1](d.limited(x[..., size:] + inner))
    return ((1.0 - update) * new + update * h,)


def _step_lstm(d: _Direction, x: Tensor, state: State, call: NodeCall) -> State:
    h, c = state
    total = x + matmul(h, transpose(d.r))
    total = total if d.r_bias is None else total + d.r_bias
    i, o, forget, new = (d.part(total, k) for k in range(4))
    if d.peepholes is not None:
        i, forget = i + d.part(d.peepholes, 0) * c, forget + d.part(d.peepholes, 2) * c
    gate, inner, outer = d.functions
    forget = 1.0 - gate(d.limited(i)) if call.attr("input_forget", 0) else gate(d.limited(forget))
    cell = forget * c + gate(d.limited(i)) * inner(d.limited(new))
    o = o if d.peepholes is None else o + d.part(d.peepholes, 1) * cell
    return gate(d.limited(o)) * outer(cell), cell


STEPS = {"RNN": _step_rnn, "GRU": _step_gru, "LSTM": _step_lstm}


@rule("RNN", "GRU", "LSTM")
def _(
    call: NodeCall, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
    h: Tensor | None = None, c: Tensor | None = None, peepholes: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if call.attr("layout", 0):
        x = permute(x, axes=(1, 0, 2))
        h, c = (None if s is None else permute(s, axes=(1, 0, 2)) for s in (h, c))
    count = w.shape[0]
    outs, states = [], []
    for i in range(count):
        direction = _read_direction(call, i, w, r, bias, peepholes)
        backwards = call.attr("direction") == "reverse" or i == 1
        initial = [_initial(s, i, x, direction.hidden) for s in ((h, c) if call.operator == "LSTM" else (h,))]
        out, state = _run(call, direction, x, initial, lengths, backwards)
        outs.append(out)
        states.append(state)
    y = stack(outs, axis=1)
    finals = [stack([s[k] for s in states], axis=0) for k in range(len(states[0]))]
    if call.attr("layout", 0):
        return permute(y, axes=(2, 0, 1, 3)), *(permute(s, axes=(1, 0, 2)) for s in finals)
    return y, *finals


def _initial(state: Tensor | None, index: int, x: Tensor, hidden: int) -> Tensor:
    if state is None:
        return Tensor(np.zeros((x.shape[1], hidden), x.dtype.numpy))
    return select(state, 0, index)


def _read_direction(
    call: NodeCall, index: int, w: Tensor, r: Tensor, bias: Tensor | None, peepholes: Tensor | None
) -> _Direction:
    hidden, gates = r.shape[-1], GATES[call.operator]
    size = gates * hidden
    both = None if bias is None else select(bias, 0, index)
    return _Direction(
        select(w, 0, index),
        select(r, 0, index),
        None if both is None else both[:size],
        None if both is None else both[size:],
        None if peepholes is None else select(peepholes, 0, index),
        _read_functions(call, index),
        call.attr("clip", None),
        hidden,
    )


def _read_functions(call: NodeCall, index: int) -> list[Function]:
    defaults = DEFAULTS[call.operator]
    names = call.attr("activations", None) or defaults * 2
    chosen = names[index * len(defaults) : (index + 1) * len(defaults)]
    alphas, betas = (iter(call.attr(f"activation_{k}", None) or ()) for k in ("alpha", "beta"))
    found: list[Function] = []
    for name in chosen:
        if name.lower() not in FUNCTIONS:
            raise call.refuse(f"the activation {name}")
        function, alpha, beta = FUNCTIONS[name.lower()]
        a, b = (next(alphas, alpha) if alpha else alpha), (next(betas, beta) if beta else beta)
        found.append(functools.partial(_activate, function, a, b))
    return found


def _activate(function: Callable[..., Tensor], a: float, b: float, x: Tensor) -> Tensor:
    return function(x, a, b)


def _run(
    call: NodeCall, d: _Direction, x: Tensor, initial: Sequence[Tensor], lengths: Tensor | None, backwards: bool
) -> tuple[Tensor, State]:
    """The outputs [T, B, H] and the last state of one direction."""
    if backwards:
        x = flip(x, 0) if lengths is None else reverse_sequences(x, lengths, 0, 1)
    rows = matmul(x, transpose(d.w))
    rows = rows if d.w_bias is None else rows + d.w_bias
    length = None if lengths is None else expand_dims(cast(lengths, dtype=int64), 1)
    step = STEPS[call.operator]

    def advance(state: State, inputs: Any) -> tuple[State, Tensor]:
        row, time = inputs
        new = step(d, row, state, call)
        if length is None:
            return new, new[0]
        going = e.less(time, length)
        kept = tuple(e.where(going, a, b) for a, b in zip(new, state, strict=True))
        return kept, e.where(going, new[0], 0.0)

    state, out = scan(advance, tuple(initial), (rows, iota(shape=(x.shape[0],))))
    if backwards:
        out = flip(out, 0) if lengths is None else reverse_sequences(out, lengths, 0, 1)
    return out, state
