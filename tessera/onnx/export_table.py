"""Export table: for each op of Graph functions, the ONNX nodes that compute it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import helper

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, int64
from tessera.ir.core import Block, Node, Value
from tessera.onnx.element_types import NAMES


class Writer(Protocol):
    """What a row needs of the writer (`tessera.onnx.export`)."""

    opset: int
    nodes: list[onnx.NodeProto]
    names: dict[Value, str]

    def add(self, operator: str, *inputs: str, count: int = 1, **attributes: Any) -> Any: ...
    def constant(self, value: Any, dtype: Any = None) -> str: ...
    def ints(self, values: Sequence[Any]) -> str: ...
    def size(self, value: Any) -> int: ...
    def make_name(self, text: str) -> str: ...
    def make_info(self, value: Value, name: str) -> onnx.ValueInfoProto: ...
    def write_block(self, block: Block) -> list[str]: ...
    def graph(self) -> Any: ...


Row = Callable[..., Any]
EXPORTS: dict[str, Row] = {}


def exports(*names: str) -> Callable[[Row], Row]:
    """Add a row for ops: a function of the writer, the node and the names of its operands."""

    def add(row: Row) -> Row:
        EXPORTS.update({f"ts.{n}" if "." not in n else n: row for n in names})
        return row

    return add


# Ops that are an operator.

SAME = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "maximum": "Max", "minimum": "Min",
    "neg": "Neg", "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "tanh": "Tanh", "erf": "Erf", "sin": "Sin",
    "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh",
    "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "floor": "Floor", "ceil": "Ceil", "round": "Round",
    "sign": "Sign", "less": "Less", "less_equal": "LessOrEqual", "greater": "Greater", "where": "Where",
    "greater_equal": "GreaterOrEqual", "equal": "Equal", "sigmoid": "Sigmoid", "reciprocal": "Reciprocal",
    "isnan": "IsNaN", "isinf": "IsInf", "relu": "Relu", "softsign": "Softsign", "recompute": "Identity",
    "fusion_barrier": "Identity", "kept": "Identity", "stop_gradient": "Identity",
}  # fmt: skip


@exports(*SAME)
def _(w: Writer, node: Node, *xs: str) -> str:
    return w.add(SAME[node.op.__name__], *xs)


@exports("not_equal")
def _(w: Writer, node: Node, x: str, y: str) -> str:
    return w.add("Not", w.add("Equal", x, y))


BITS = {"bitwise_and": "And", "bitwise_or": "Or", "bitwise_xor": "Xor", "bitwise_not": "Not"}


@exports(*BITS)
def _(w: Writer, node: Node, *xs: str) -> str:
    name = BITS[node.op.__name__]
    return w.add(name if node.out.type.dtype.kind == "bool" else f"Bitwise{name}", *xs)


@exports("shift_left", "shift_right")
def _(w: Writer, node: Node, x: str, y: str) -> str:
    dtype, left = node.out.type.dtype, node.op.__name__ == "shift_left"
    if dtype.kind == "uint":
        return w.add("BitShift", x, y, direction="LEFT" if left else "RIGHT")
    power = _cast(w, w.add("Pow", w.constant(2.0, np.float64), _cast(w, y, np.float64)), dtype)
    return w.add("Mul", x, power) if left else _floor_divide(w, x, power, dtype)


def _cast(w: Writer, x: str, dtype: DType | Any) -> str:
    element = NAMES[dtype] if isinstance(dtype, DType) else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return w.add("Cast", x, to=int(element))


def _modulo(w: Writer, x: str, y: str, dtype: DType) -> str:
    """The remainder that has the sign of `y`."""
    if dtype.is_integer:
        return w.add("Mod", x, y)
    rest, zero = w.add("Mod", x, y, fmod=1), w.constant(0, dtype)
    differs = w.add("Xor", w.add("Less", rest, zero), w.add("Less", y, zero))
    wrong = w.add("And", differs, w.add("Not", w.add("Equal", rest, zero)))
    return w.add("Where", wrong, w.add("Add", rest, y), rest)


def _floor_divide(w: Writer, x: str, y: str, dtype: DType) -> str:
    whole = w.add("Div", w.add("Sub", x, _modulo(w, x, y, dtype)), y)
    return whole if dtype.is_integer else w.add("Round", whole)


@exports("remainder")
def _(w: Writer, node: Node, x: str, y: str) -> str:
    return _modulo(w, x, y, node.out.type.dtype)


@exports("floor_divide")
def _(w: Writer, node: Node, x: str, y: str) -> str:
    return _floor_divide(w, x, y, node.out.type.dtype)


@exports("exp2")
def _(w: Writer, node: Node, x: str) -> str:
    return w.add("Pow", w.constant(2, node.out.type.dtype), x)


@exports("log2", "log10")
def _(w: Writer, node: Node, x: str) -> str:
    base = math.log(2 if node.op.__name__ == "log2" else 10)
    return w.add("Div", w.add("Log", x), w.constant(base, node.out.type.dtype))


@exports("rsqrt")
def _(w: Writer, node: Node, x: str) -> str:
    return w.add("Reciprocal", w.add("Sqrt", x))


@exports("expm1")
def _(w: Writer, node: Node, x: str) -> str:
    """2t / (1 - t) with t = tanh(x / 2) where x is small: exp(x) - 1 loses its digits there."""
    one, two = (w.constant(n, node.out.type.dtype) for n in (1, 2))
    t = w.add("Tanh", w.add("Div", x, two))
    near = w.add("Div", w.add("Mul", two, t), w.add("Sub", one, t))
    small = w.add("Less", w.add("Abs", x), one)
    return w.add("Where", small, near, w.add("Sub", w.add("Exp", x), one))


@exports("log1p")
def _(w: Writer, node: Node, x: str) -> str:
    """log(u) · x / (u - 1) with u = 1 + x (Goldberg 1991, theorem 4)."""
    one = w.constant(1, node.out.type.dtype)
    u = w.add("Add", x, one)
    rounded = w.add("Equal", u, one)
    infinite = w.add("IsInf", x)
    skip = w.add("Or", rounded, infinite)
    found = w.add("Mul", w.add("Log", u), w.add("Div", x, w.add("Sub", u, one)))
    return w.add("Where", skip, x, found)


# Types, shapes and constants.


@exports("cast")
def _(w: Writer, node: Node, x: str) -> str:
    if node.out.type.policy is not None:
        raise UnsupportedOpError("a policy of rounding or accumulation", location=node.loc)
    return x if node.types[0].dtype == node.out.type.dtype else _cast(w, x, node.out.type.dtype)


@exports("full")
def _(w: Writer, node: Node) -> str:
    value = w.constant(node.attrs["value"], node.out.type.dtype)
    return w.add("Expand", value, w.ints(node.out.type.shape)) if node.out.type.shape else value


@exports("iota")
def _(w: Writer, node: Node) -> str:
    shape = [w.size(n) for n in node.attrs["shape"]]
    axis = node.attrs["axis"] % len(shape)
    along = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    held = w.constant(along, node.out.type.dtype)
    return held if list(along.shape) == shape else w.add("Expand", held, w.ints(shape))


@exports("broadcast")
def _(w: Writer, node: Node, x: str) -> str:
    return w.add("Expand", x, w.ints(node.out.type.shape))


@exports("reshape")
def _(w: Writer, node: Node, x: str) -> str:
    return w.add("Reshape", x, w.ints(node.out.type.shape), allowzero=1)


@exports("permute")
def _(w: Writer, node: Node, x: str) -> str:
    rank = node.types[0].rank
    return w.add("Transpose", x, perm=[a % rank for a in node.attrs["axes"]])


@exports("slice")
def _(w: Writer, node: Node, x: str) -> str:
    rank = node.types[0].rank
    steps = node.attrs["step"] or (1,) * rank
    return w.add("Slice", x, *(w.ints(v) for v in (node.attrs["start"], node.attrs["stop"], range(rank), steps)))


@exports("pad")
def _(w: Writer, node: Node, x: str) -> str:
    counts = w.ints([*node.attrs["low"], *node.attrs["high"]])
    return w.add("Pad", x, counts, w.constant(node.attrs["value"], node.out.type.dtype))


@exports("concatenate")
def _(w: Writer, node: Node, *xs: str) -> str:
    return w.add("Concat", *xs, axis=node.attrs["axis"])


@exports("check_index")
def _(w: Writer, node: Node, x: str) -> str:
    """Indices from 0 on; the operators that take them check their range."""
    whole = x if node.types[0].dtype == int64 else _cast(w, x, int64)
    if not node.attrs["wrap"]:
        return whole
    zero = w.constant(0, np.int64)
    moved = w.add("Add", whole, w.constant(w.size(node.attrs["size"]), np.int64))
    return w.add("Where", w.add("Less", whole, zero), moved, whole)


@exports("gather")
def _(w: Writer, node: Node, x: str, indices: str) -> str:
    dtype = node.types[1].dtype
    places = indices if dtype.name in ("int32", "int64") else _cast(w, indices, int64)
    return w.add("Gather", x, places, axis=node.attrs["axis"])


# Reductions and products.

REDUCTIONS = {"sum": "ReduceSum", "max": "ReduceMax", "min": "ReduceMin", "mean": "ReduceMean", "prod": "ReduceProd"}


@exports(*REDUCTIONS, "logsumexp")
def _(w: Writer, node: Node, x: str) -> str:
    operator = REDUCTIONS.get(node.op.__name__, "ReduceLogSumExp")
    x = x if node.types[0].dtype == node.out.type.dtype else _cast(w, x, node.out.type.dtype)
    axes = node.attrs["axis"]
    if not axes:
        return w.add("Identity", x)
    return w.add(operator, x, w.ints(axes), keepdims=int(node.attrs["keepdims"]))


@exports("argmax", "argmin")
def _(w: Writer, node: Node, x: str) -> str:
    operator = "ArgMax" if node.op.__name__ == "argmax" else "ArgMin"
    x = _cast(w, x, np.int32) if node.types[0].dtype.kind == "bool" else x
    return w.add(operator, x, axis=node.attrs["axis"], keepdims=int(node.attrs["keepdims"]))


@exports("dot")
def _(w: Writer, node: Node, a: str, b: str) -> str:
    dtype = node.out.type.dtype
    wide = [x if v.type.dtype == dtype else _cast(w, x, dtype) for x, v in zip((a, b), node.args, strict=True)]
    return w.add("MatMul", *wide)


@exports("softmax", "log_softmax")
def _(w: Writer, node: Node, x: str) -> str:
    return w.add("Softmax" if node.op.__name__ == "softmax" else "LogSoftmax", x, axis=node.attrs["axis"])


@exports("gelu")
def _(w: Writer, node: Node, x: str) -> str:
    return w.add("Gelu", x, approximate=node.attrs["approximate"])


@exports("leaky_relu", "elu")
def _(w: Writer, node: Node, x: str) -> str:
    if node.op.__name__ == "elu":
        return w.add("Elu", x, alpha=float(node.attrs["alpha"]))
    return w.add("LeakyRelu", x, alpha=float(node.attrs["slope"]))


@exports("cumsum")
def _(w: Writer, node: Node, x: str) -> str:
    x = x if node.types[0].dtype == node.out.type.dtype else _cast(w, x, node.out.type.dtype)
    return w.add("CumSum", x, w.constant(node.attrs["axis"], np.int64))


@exports("argsort")
def _(w: Writer, node: Node, x: str) -> str:
    size = w.ints([node.types[0].shape[node.attrs["axis"]]])
    largest = int(node.attrs["descending"])
    return w.add("TopK", x, size, count=2, axis=node.attrs["axis"], largest=largest, sorted=1)[1]


# Control flow: regions become graphs, which see the names around them.


def _write_graph(w: Writer, title: str, block: Block, inputs: Sequence[onnx.ValueInfoProto]) -> onnx.GraphProto:
    with w.graph() as nodes:
        results = w.write_block(block)
    infos = [w.make_info(v, n) for v, n in zip(block.results, results, strict=True)]
    return helper.make_graph(nodes, title, inputs, infos)


@exports("transform.called")
def _(w: Writer, node: Node, *xs: str) -> list[str]:
    block = node.regions[0]
    w.names.update(zip(block.params, xs, strict=True))
    return w.write_block(block)


@exports("cond")
def _(w: Writer, node: Node, condition: str, *xs: str) -> list[str]:
    graphs = []
    for title, block in zip(("then", "else"), node.regions, strict=True):
        w.names.update(zip(block.params, xs, strict=True))
        graphs.append(_write_graph(w, title, block, ()))
    out = w.add("If", condition, count=len(node.results), then_branch=graphs[0], else_branch=graphs[1])
    return [out] if isinstance(out, str) else out


def _bind(w: Writer, params: Sequence[Value], title: str) -> list[onnx.ValueInfoProto]:
    """Parameters of a region as inputs of its graph."""
    found = []
    for value in params:
        w.names[value] = w.make_name(value.hint or title)
        found.append(w.make_info(value, w.names[value]))
    return found


@exports("scan")
def _(w: Writer, node: Node, *xs: str) -> list[str]:
    carry, many, block = node.attrs["carry"], node.attrs["xs"], node.regions[0]
    inputs = _bind(w, block.params[: carry + many], "step")
    w.names.update(zip(block.params[carry + many :], xs[carry + many :], strict=True))
    rows = list(xs[carry : carry + many])
    if not rows:  # the number of steps
        rows = [w.constant(np.zeros(w.size(node.attrs["length"]), np.int64))]
        inputs.append(helper.make_tensor_value_info(w.make_name("step"), onnx.TensorProto.INT64, []))
    body = _write_graph(w, "step", block, inputs)
    backwards = int(node.attrs["reverse"])
    out = w.add(
        "Scan", *xs[:carry], *rows, count=len(node.results), body=body, num_scan_inputs=len(rows),
        scan_input_directions=[backwards] * len(rows),
        scan_output_directions=[backwards] * (len(node.results) - carry),
    )  # fmt: skip
    return [out] if isinstance(out, str) else out


@exports("while_loop")
def _(w: Writer, node: Node, *xs: str) -> list[str]:
    carry, tests = node.attrs["carry"], node.attrs["test"]
    goes_on, step = node.regions
    constants = {goes_on: xs[carry : carry + tests], step: xs[carry + tests :]}

    def write_test(state: Sequence[str]) -> str:
        w.names.update(zip(goes_on.params, [*state, *constants[goes_on]], strict=True))
        return w.write_block(goes_on)[0]

    first = write_test(xs[:carry])
    heads = [(w.make_name("round"), onnx.TensorProto.INT64), (w.make_name("going"), onnx.TensorProto.BOOL)]
    inputs = [helper.make_tensor_value_info(name, element, []) for name, element in heads]
    inputs += _bind(w, step.params[:carry], "state")
    w.names.update(zip(step.params[carry:], constants[step], strict=True))
    with w.graph() as nodes:
        results = w.write_block(step)
        going = write_test(results)
        infos = [w.make_info(v, n) for v, n in zip(step.results, results, strict=True)]
        flag = w.make_info(goes_on.results[0], going)
    body = helper.make_graph(nodes, "step", inputs, [flag, *infos])
    out = w.add("Loop", "", first, *xs[:carry], count=len(node.results), body=body)
    return [out] if isinstance(out, str) else out
