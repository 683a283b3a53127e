"""Recurrent layers as one op each: PyTorch unrolls them, or has one op for each device (torch.nn.modules.rnn).

The whole ops are `tessera_recurrent::lstm`, `gru`, `rnn_tanh` and `rnn_relu`, and their backward ops, which take no
reserved space of a forward op. Each has PyTorch's own computation where the op table does not take it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import _VF
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame

_TAIL = "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, "
_TAIL += "bool batch_first)"
SCHEMAS = {
    "lstm": f"(Tensor input, Tensor[] hx, {_TAIL} -> (Tensor, Tensor, Tensor)",
    "gru": f"(Tensor input, Tensor hx, {_TAIL} -> (Tensor, Tensor)",
    "rnn_tanh": f"(Tensor input, Tensor hx, {_TAIL} -> (Tensor, Tensor)",
    "rnn_relu": f"(Tensor input, Tensor hx, {_TAIL} -> (Tensor, Tensor)",
}
LIBRARY = "tessera_recurrent"
WHOLE_OPS = {f"{LIBRARY}.{name}.default": f"aten.{name}.input" for name in SCHEMAS}
WHOLE_OPS |= {f"{LIBRARY}.{name}_backward.default": f"{LIBRARY}.{name}_backward" for name in SCHEMAS}
"""The ops that stand for recurrent layers, and the names of their rows."""
LIBRARIES: list[Any] = []  # an op ends with the object that defined it
_LOCK = threading.Lock()


# The ops.


@functools.cache
def define_ops() -> dict[str, Callable[..., Any]]:
    """PyTorch's own functions, by name; the ops that stand for them are defined once in a process."""
    library = torch.library.Library(LIBRARY, "DEF")
    LIBRARIES.append(library)
    own = {name: getattr(_VF, name) for name in SCHEMAS}
    for name, schema in SCHEMAS.items():
        _define(library, name, schema, own[name])
    return own


def _define(library: Any, name: str, schema: str, own: Callable[..., Any]) -> None:
    backward = f"{name}_backward"
    library.define(name + schema)
    library.impl(name, own, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{LIBRARY}::{name}", _infer, lib=library)
    taken = schema.split(" -> ")[0].removeprefix("(")
    library.define(f"{backward}(Tensor[] gradients, {taken} -> Tensor[]")
    library.impl(backward, functools.partial(_differentiate, own), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{LIBRARY}::{backward}", _infer_gradients, lib=library)
    torch.library.register_autograd(
        f"{LIBRARY}::{name}", functools.partial(_pull_back, backward), setup_context=_keep, lib=library
    )


def _list_states(hx: Any) -> list[torch.Tensor]:
    return list(hx) if isinstance(hx, (list, tuple)) else [hx]


def _infer(
    x: Any, hx: Any, params: Any, has_biases: bool, layers: int, dropout: float, train: bool, both: bool, first: bool
) -> Any:
    states = _list_states(hx)
    size = states[0].shape[-1] * (2 if both else 1)
    return (x.new_empty((*x.shape[:-1], size)), *(s.new_empty(s.shape) for s in states))


def _infer_gradients(gradients: Any, x: Any, hx: Any, params: Any, *rest: Any) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t in (x, *_list_states(hx), *params)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, hx, params, *ctx.numbers = inputs
    ctx.is_list = isinstance(hx, (list, tuple))
    states = _list_states(hx)
    ctx.states = len(states)
    ctx.save_for_backward(x, *states, *params)


def _pull_back(backward: str, ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    states, params = rest[: ctx.states], rest[ctx.states :]
    op = getattr(getattr(torch.ops, LIBRARY), backward)
    found = op(list(gradients), x, states if ctx.is_list else states[0], params, *ctx.numbers)
    by_state = list(found[1 : 1 + ctx.states])
    by_params = list(found[1 + ctx.states :])
    return (found[0], by_state if ctx.is_list else by_state[0], by_params, *[None] * len(ctx.numbers))


def _differentiate(
    own: Callable[..., Any], gradients: Sequence[torch.Tensor], x: torch.Tensor, hx: Any, params: Sequence[Any],
    *numbers: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """PyTorch's gradients of a layer, which is computed again."""
    states = _list_states(hx)
    leaves = [t.detach().clone().requires_grad_() for t in (x, *states, *params)]
    first = 1 + len(states)
    given = leaves[1:first] if isinstance(hx, (list, tuple)) else leaves[1]
    with torch.enable_grad():
        outs = own(leaves[0], given, leaves[first:], *numbers)
        found = torch.autograd.grad(outs, leaves, list(gradients), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]


# Calls of layers.


def call_layer(name: str, *args: Any) -> Any:
    """A recurrent layer through its whole op; what that does not take, such as packed sequences, through PyTorch's own.

    Layers with dropout between them are one op each.
    """
    own = define_ops()[name]
    packed = not isinstance(args[2], (list, tuple)) or isinstance(args[1], torch.Tensor) == (name == "lstm")
    if packed or torch.is_autocast_enabled(args[0].device.type):
        return own(*args)
    x, hx, params, *numbers = args
    given = (x, list(hx) if isinstance(hx, (list, tuple)) else hx, list(params), *numbers)
    _, layers, dropout, train, _, _ = numbers
    op = getattr(getattr(torch.ops, LIBRARY), name)
    return _call_in_turn(op, *given) if dropout and train and layers > 1 else op(*given)


def _call_in_turn(
    op: Any, x: Any, hx: Any, params: Any, has_biases: bool, layers: int, dropout: float, train: bool, both: bool,
    batch_first: bool,
) -> Any:  # fmt: skip
    each, width = len(params) // layers, 2 if both else 1
    kept = []
    for i in range(layers):
        state = [h[i * width : (i + 1) * width] for h in _list_states(hx)]
        weights = list(params[i * each : (i + 1) * each])
        given = state if isinstance(hx, (list, tuple)) else state[0]
        out, *last = op(x, given, weights, has_biases, 1, 0.0, train, both, batch_first)
        kept.append(last)
        x = torch.dropout(out, dropout, True) if i < layers - 1 else out
    return (x, *(torch.cat(s) for s in zip(*kept, strict=True)))


@contextmanager
def whole_recurrent_layers() -> Iterator[None]:
    """A context in which recurrent layers are traced through their whole ops (torch.export)."""
    own = define_ops()
    for name in own:
        setattr(_VF, name, functools.partial(call_layer, name))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(_VF, name, function)


# Capture by TorchDynamo.


def rewrite_layers(module: torch.fx.GraphModule) -> None:
    """Replace PyTorch's functions of recurrent layers in a graph of TorchDynamo by calls of the whole ops."""
    names = {function: name for name, function in define_ops().items()}
    found = [n for n in module.graph.nodes if n.op == "call_function" and n.target in names]
    for node in found:
        node.target = functools.partial(call_layer, names[node.target])
    if found:
        module.recompile()


class _Capture:
    """A context in which TorchDynamo captures recurrent layers (`torch._dynamo.config.allow_rnn`), on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._before = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._before = dynamo_config.allow_rnn
                dynamo_config.allow_rnn = True
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                dynamo_config.allow_rnn = self._before


_CAPTURE = _Capture()


@functools.cache
def capture_recurrent_layers(backend: Callable[..., Any]) -> None:
    """Let TorchDynamo capture recurrent layers while it compiles a frame for this backend, and for no other.

    TorchDynamo breaks graphs there unless a global option is set, and a backend has no say in it: the conversion of
    frames is wrapped. Where PyTorch has no such conversion, recurrent layers stay in PyTorch.
    """
    convert = getattr(convert_frame, "ConvertFrameAssert", None)
    if convert is None:
        return
    own = convert.__call__

    @functools.wraps(own)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        with _CAPTURE if find_backend(self) is backend else nullcontext():
            return own(self, *args, **named)

    convert.__call__ = call


def find_backend(converter: Any) -> Any:
    """The backend for which TorchDynamo converts a frame, below its own wrappers."""
    while (inner := getattr(converter, "_torchdynamo_orig_backend", None)) is not None:
        converter = inner
    return getattr(converter, "compiler_fn", converter)
