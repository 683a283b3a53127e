"""Export: writes a traced function as StableHLO text, by one row for each op that has no lowering."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, TensorType, bool_, f32, f64, int32, int64
from tessera.frontend.jit.tracing import Jit
from tessera.ir.core import Node
from tessera.ir.rewrite import expand_composites
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, bits, contractions, decompositions, reduce, shape, sorting
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f
from tessera.ops.tensor import scatter as scatters
from tessera.stablehlo.writer import HloWriter, Operand, export_rules, spell_list, spell_type, tensor_type

# Pointwise ops.

_SAME = {
    e.abs: "stablehlo.abs", e.add: "stablehlo.add", e.sub: "stablehlo.subtract", e.mul: "stablehlo.multiply",
    e.div: "stablehlo.divide", e.pow: "stablehlo.power", e.maximum: "stablehlo.maximum",
    e.minimum: "stablehlo.minimum", e.neg: "stablehlo.negate", e.exp: "stablehlo.exponential", e.log: "stablehlo.log",
    e.sqrt: "stablehlo.sqrt", e.rsqrt: "stablehlo.rsqrt", e.tanh: "stablehlo.tanh", e.sin: "stablehlo.sine",
    e.cos: "stablehlo.cosine", e.floor: "stablehlo.floor", e.ceil: "stablehlo.ceil",
    e.round: "stablehlo.round_nearest_even", e.bitwise_and: "stablehlo.and", e.bitwise_or: "stablehlo.or",
    e.bitwise_xor: "stablehlo.xor", e.bitwise_not: "stablehlo.not", e.shift_left: "stablehlo.shift_left",
    e.where: "stablehlo.select", e.erf: "chlo.erf", e.erfc: "chlo.erfc", f.atan: "chlo.atan",
    f.expm1: "stablehlo.exponential_minus_one", f.log1p: "stablehlo.log_plus_one", f.sigmoid: "stablehlo.logistic",
    f.tan: "stablehlo.tan", f.isfinite: "stablehlo.is_finite", shape.reshape: "stablehlo.reshape",
    bits.bitcast_elements: "stablehlo.bitcast_convert",
}  # fmt: skip
_COMPARISONS = {
    e.less: "LT",
    e.less_equal: "LE",
    e.greater: "GT",
    e.greater_equal: "GE",
    e.equal: "EQ",
    e.not_equal: "NE",
}


def _define_same(name: str) -> Callable[..., Operand]:
    return lambda w, node, *operands: w.one(name, operands, tensor_type(node.out))


def _define_comparison(direction: str) -> Callable[..., Operand]:
    return lambda w, node, x, y: w.compare(direction, x, y)


for _op, _name in _SAME.items():
    export_rules(_op)(_define_same(_name))
for _op, _name in _COMPARISONS.items():
    export_rules(_op)(_define_comparison(_name))


@export_rules(e.exp2)
def _(w: HloWriter, node: Node, x: Operand) -> Operand:
    return w.binary("power", w.constant(2, x.type), x)


@export_rules(e.log2)
def _(w: HloWriter, node: Node, x: Operand) -> Operand:
    return w.binary("multiply", w.one("stablehlo.log", [x], x.type), w.constant(1 / math.log(2), x.type))


@export_rules(e.shift_right)
def _(w: HloWriter, node: Node, x: Operand, y: Operand) -> Operand:
    return w.binary(f"shift_right_{'logical' if x.type.dtype.kind == 'uint' else 'arithmetic'}", x, y)


@export_rules(e.remainder)
def _(w: HloWriter, node: Node, x: Operand, y: Operand) -> Operand:
    return _write_remainder(w, x, y)


def _write_remainder(w: HloWriter, x: Operand, y: Operand) -> Operand:
    """The remainder with the sign of the divisor; StableHLO's has that of the dividend."""
    rest, zero = w.binary("remainder", x, y), w.constant(0, x.type)
    if x.type.dtype.kind == "uint":
        return rest
    signs = w.one("stablehlo.xor", [w.compare("LT", rest, zero), w.compare("LT", y, zero)], _bools(x))
    differs = w.one("stablehlo.and", [signs, w.compare("NE", rest, zero)], _bools(x))
    return w.select(differs, w.binary("add", rest, y), rest)


def _bools(x: Operand) -> TensorType:
    return TensorType(x.type.shape, bool_)


@export_rules(e.floor_divide)
def _(w: HloWriter, node: Node, x: Operand, y: Operand) -> Operand:
    whole = w.binary("divide", w.binary("subtract", x, _write_remainder(w, x, y)), y)
    return w.one("stablehlo.round_nearest_even", [whole], x.type) if x.type.dtype.is_float else whole


@export_rules(basic.cast)
def _(w: HloWriter, node: Node, x: Operand) -> Operand:
    return w.convert(x, tensor_type(node.out).dtype)


@export_rules(basic.recompute, basic.fusion_barrier)
def _(w: HloWriter, node: Node, x: Operand) -> list[Operand]:
    return w.emit("stablehlo.optimization_barrier", [x], [x.type])


# Ops that make and move elements.


@export_rules(basic.full)
def _(w: HloWriter, node: Node) -> Operand:
    return w.constant(node.attrs["value"], tensor_type(node.out))


@export_rules(shape.iota)
def _(w: HloWriter, node: Node) -> Operand:
    type = tensor_type(node.out)
    axis = node.attrs["axis"] % type.rank
    return w.one("stablehlo.iota", [], type, {"iota_dimension": f"{axis} : i64"})


@export_rules(basic.broadcast_to)
def _(w: HloWriter, node: Node, x: Operand) -> Operand:
    type = tensor_type(node.out)
    places = range(type.rank - x.type.rank, type.rank)
    return w.one("stablehlo.broadcast_in_dim", [x], type, {"broadcast_dimensions": spell_list(list(places))})


@export_rules(shape.permute)
def _(w: HloWriter, node: Node, x: Operand) -> Operand:
    axes = [a % x.type.rank for a in node.attrs["axes"]]
    return w.one("stablehlo.transpose", [x], tensor_type(node.out), {"permutation": spell_list(axes)})


@export_rules(shape.slice_)
def _(w: HloWriter, node: Node, x: Operand) -> Operand:
    steps = node.attrs["step"] or (1,) * x.type.rank
    attrs = {"start_indices": node.attrs["start"], "limit_indices": node.attrs["stop"], "strides": steps}
    return w.one("stablehlo.slice", [x], tensor_type(node.out), {k: spell_list(v) for k, v in attrs.items()})


@export_rules(shape.pad)
def _(w: HloWriter, node: Node, x: Operand) -> Operand:
    value = w.constant(node.attrs["value"], x.type.with_shape(()))
    sides = {"low": node.attrs["low"], "high": node.attrs["high"]}
    attrs = {f"edge_padding_{k}": spell_list(v) for k, v in sides.items()}
    attrs["interior_padding"] = spell_list([0] * x.type.rank)
    return w.one("stablehlo.pad", [x, value], tensor_type(node.out), attrs)


@export_rules(shape.concatenate)
def _(w: HloWriter, node: Node, *parts: Operand) -> Operand:
    axis = node.attrs["axis"] % parts[0].type.rank
    return w.one("stablehlo.concatenate", parts, tensor_type(node.out), {"dimension": f"{axis} : i64"})


@export_rules(shape.check_index)
def _(w: HloWriter, node: Node, indices: Operand) -> Operand:
    return _wrap_indices(w, indices, node.attrs["size"]) if node.attrs["wrap"] else indices


def _wrap_indices(w: HloWriter, indices: Operand, size: int) -> Operand:
    """Negative indices count from the end; those outside have no error in StableHLO."""
    if indices.type.dtype.kind == "uint":
        return indices
    negative = w.compare("LT", indices, w.constant(0, indices.type))
    return w.select(negative, w.binary("add", indices, w.constant(size, indices.type)), indices)


def _spell_parameters(name: str, items: dict[str, Any]) -> str:
    return f"#stablehlo.{name}<{', '.join(f'{k} = {v}' for k, v in items.items())}>"


@export_rules(shape.gather)
def _(w: HloWriter, node: Node, x: Operand, indices: Operand) -> Operand:
    at, many = node.attrs["axis"] % x.type.rank, indices.type.rank
    type = tensor_type(node.out)
    offsets = [a for a in range(type.rank) if not at <= a < at + many]
    numbers = {"offset_dims": offsets, "collapsed_slice_dims": [at], "start_index_map": [at], "index_vector_dim": many}
    sizes = [1 if a == at else n for a, n in enumerate(x.type.shape)]
    attrs = {"dimension_numbers": _spell_parameters("gather", numbers), "slice_sizes": spell_list(sizes),
             "indices_are_sorted": "false"}  # fmt: skip
    return w.one("stablehlo.gather", [x, _wrap_indices(w, indices, x.type.shape[at])], type, attrs)


_SCATTER_JOINS = {"set": "", "multiply": "multiply", "min": "minimum", "max": "maximum"}


@export_rules(scatters.scatter)
def _(w: HloWriter, node: Node, x: Operand, indices: Operand, updates: Operand) -> Operand:
    return _write_scatter(w, node, x, indices, updates, _SCATTER_JOINS[node.attrs["mode"]])


@export_rules(scatters.scatter_add)
def _(w: HloWriter, node: Node, x: Operand, indices: Operand, updates: Operand) -> Operand:
    wide = _accumulator(x.type)
    found = _write_scatter(w, node, w.convert(x, wide), indices, w.convert(updates, wide), "add")
    return w.convert(found, x.type.dtype)


def _write_scatter(w: HloWriter, node: Node, x: Operand, indices: Operand, updates: Operand, join: str) -> Operand:
    at, many = node.attrs["axis"] % x.type.rank, indices.type.rank
    window = [a for a in range(updates.type.rank) if not at <= a < at + many]
    numbers = {"update_window_dims": window, "inserted_window_dims": [at], "scatter_dims_to_operand_dims": [at],
               "index_vector_dim": many}  # fmt: skip
    attrs = {"scatter_dimension_numbers": _spell_parameters("scatter", numbers), "indices_are_sorted": "false",
             "unique_indices": "false"}  # fmt: skip
    old, new = w.params([x.type.with_shape(())] * 2)
    body = ((old, new), lambda: [w.binary(join, old, new) if join else new])
    places = _wrap_indices(w, indices, x.type.shape[at])
    return w.emit("stablehlo.scatter", [x, places, updates], [x.type], attrs, [body])[0]


# Reductions, sorting and products.


def _accumulator(type: TensorType) -> DType:
    """The type in which sums of these elements are formed."""
    return type.accumulate if type.dtype.is_float else type.dtype


def _least(dtype: DType, sign: int) -> Any:
    """The neutral element of max (sign -1) or min (sign 1)."""
    if dtype.is_float:
        return sign * math.inf
    unsigned = dtype.kind == "uint"
    return (0 if unsigned else -(2 ** (dtype.bits - 1))) if sign < 0 else 2 ** (dtype.bits - (not unsigned)) - 1


def _write_reduction(w: HloWriter, x: Operand, axes: list[int], join: str, start: Any) -> Operand:
    element = x.type.with_shape(())
    kept = x.type.with_shape(tuple(n for a, n in enumerate(x.type.shape) if a not in axes))
    left, right = w.params([element] * 2)
    body = ((left, right), lambda: [w.binary(join, left, right)])
    first = w.constant(start, element)
    return w.emit("stablehlo.reduce", [x, first], [kept], {"dimensions": spell_list(axes)}, [body])[0]


@export_rules(reduce.sum)
def _(w: HloWriter, node: Node, x: Operand) -> Operand:
    type, axes = tensor_type(node.out), [a % x.type.rank for a in node.attrs["axis"]]
    wide = type.dtype if type.dtype.is_integer else _accumulator(x.type)
    found = _write_reduction(w, w.convert(x, wide), axes, "add", 0)
    return w.reshape(w.convert(found, type.dtype), type.shape)


def _define_extremum(join: str, sign: int) -> Callable[..., Operand]:
    def write(w: HloWriter, node: Node, x: Operand) -> Operand:
        axes = [a % x.type.rank for a in node.attrs["axis"]]
        if x.type.dtype.kind == "bool":
            found = _write_reduction(w, x, axes, "or" if sign < 0 else "and", sign > 0)
        else:
            found = _write_reduction(w, x, axes, join, _least(x.type.dtype, sign))
        return w.reshape(found, tensor_type(node.out).shape)

    return write


export_rules(reduce.max)(_define_extremum("maximum", -1))
export_rules(reduce.min)(_define_extremum("minimum", 1))


def _define_place(direction: str, sign: int) -> Callable[..., Operand]:
    """The index of the first largest or smallest element; NaN comes before numbers."""

    def write(w: HloWriter, node: Node, x: Operand) -> Operand:
        type, axis = tensor_type(node.out), node.attrs["axis"] % x.type.rank
        x = w.convert(x, int32) if x.type.dtype.kind == "bool" else x
        places = w.one("stablehlo.iota", [], x.type.with_dtype(type.dtype), {"iota_dimension": f"{axis} : i64"})
        element, index = x.type.with_shape(()), TensorType((), type.dtype)
        a, i, b, j = w.params([element, index, element, index])

        def body() -> list[Operand]:
            wins = w.compare(direction, a, b)
            if element.dtype.is_float:
                wins = w.binary("or", wins, w.compare("NE", a, a))
            ties = w.binary("and", w.compare("EQ", a, b), w.compare("LT", i, j))
            return [w.select(wins, a, b), w.select(w.binary("or", wins, ties), i, j)]

        starts = [w.constant(_least(element.dtype, sign), element), w.constant(0, index)]
        kept = tuple(n for a, n in enumerate(x.type.shape) if a != axis)
        types = [x.type.with_shape(kept), TensorType(kept, type.dtype)]
        attrs = {"dimensions": spell_list([axis])}
        found = w.emit("stablehlo.reduce", [x, places, *starts], types, attrs, [((a, i, b, j), body)])
        return w.reshape(found[1], type.shape)

    return write


export_rules(reduce.argmax)(_define_place("GT", -1))
export_rules(reduce.argmin)(_define_place("LT", 1))


@export_rules(sorting.argsort)
def _(w: HloWriter, node: Node, x: Operand) -> Operand:
    axis, down = node.attrs["axis"] % x.type.rank, node.attrs["descending"]
    x = w.convert(x, int32) if x.type.dtype.kind == "bool" else x
    places = w.one("stablehlo.iota", [], x.type.with_dtype(int64), {"iota_dimension": f"{axis} : i64"})
    element, index = x.type.with_shape(()), TensorType((), int64)
    a, b, i, j = w.params([element, element, index, index])

    def body() -> list[Operand]:
        before = w.compare("GT" if down else "LT", a, b)
        if element.dtype.is_float:  # NaN is the largest
            large, small = (a, b) if down else (b, a)
            apart = w.binary("and", w.compare("NE", large, large), w.compare("EQ", small, small))
            before = w.binary("or", before, apart)
        return [before]

    attrs = {"dimension": f"{axis} : i64", "is_stable": "true"}
    return w.emit("stablehlo.sort", [x, places], [x.type, places.type], attrs, [((a, b, i, j), body)])[1]


@export_rules(contractions.dot)
def _(w: HloWriter, node: Node, a: Operand, b: Operand) -> Operand:
    type, rank = tensor_type(node.out), a.type.rank
    if a.type.dtype != b.type.dtype:
        a, b = (w.convert(x, type.dtype) for x in (a, b))
    batch = list(range(rank - 2))
    numbers = {"lhs_batching_dimensions": batch, "rhs_batching_dimensions": batch,
               "lhs_contracting_dimensions": [rank - 1], "rhs_contracting_dimensions": [rank - 2]}  # fmt: skip
    attrs = {"dot_dimension_numbers": _spell_parameters("dot", numbers)}
    if a.type.dtype in (f32, f64):
        attrs["precision_config"] = "[#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]"
    wide = _accumulator(a.type) if type.dtype.is_float else type.dtype
    found = w.one("stablehlo.dot_general", [a, b], type.with_dtype(wide), attrs)
    return w.convert(found, type.dtype)


@export_rules(decompositions.cholesky)
def _(w: HloWriter, node: Node, x: Operand) -> Operand:
    return w.one("stablehlo.cholesky", [x], x.type, {"lower": "true"})


# Control flow.


@export_rules(control_flow.cond)
def _(w: HloWriter, node: Node, condition: Operand, *operands: Operand) -> list[Operand]:
    types = [tensor_type(v) for v in node.results]
    bodies = [((), lambda region=region: w.block(region, operands)) for region in node.regions]
    return w.emit("stablehlo.if", [condition], types, None, bodies)


@export_rules(control_flow.while_loop)
def _(w: HloWriter, node: Node, *operands: Operand) -> list[Operand]:
    count, split = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    types = [o.type for o in operands[:count]]
    asked, given = w.params(types), w.params(types)
    test = (asked, lambda: w.block(node.regions[0], [*asked, *operands[count:split]]))
    body = (given, lambda: w.block(node.regions[1], [*given, *operands[split:]]))
    return w.emit("stablehlo.while", operands[:count], types, None, [test, body])


@export_rules(control_flow.scan)
def _(w: HloWriter, node: Node, *operands: Operand) -> list[Operand]:
    """A loop with a counter, which reads a slice of each input and updates a slice of each result."""
    count, inputs, length = node.attrs["carry"], node.attrs["xs"], node.attrs["length"]
    carry, xs, consts = operands[:count], operands[count : count + inputs], operands[count + inputs :]
    stacks = [tensor_type(v) for v in node.results[count:]]
    index = TensorType((), int64)
    start = [w.constant(0, index), *carry, *(w.constant(0, t) for t in stacks)]
    types = [s.type for s in start]
    asked, given = w.params(types), w.params(types)

    def body() -> list[Operand]:
        step, *state = given
        place = w.binary("subtract", w.constant(length - 1, index), step) if node.attrs["reverse"] else step
        slices = [_read_slice(w, x, place) for x in xs]
        found = w.block(node.regions[0], [*state[:count], *slices, *consts])
        new = [_write_slice(w, s, y, place) for s, y in zip(state[count:], found[count:], strict=True)]
        return [w.binary("add", step, w.constant(1, index)), *found[:count], *new]

    test = (asked, lambda: [w.compare("LT", asked[0], w.constant(length, index))])
    return w.emit("stablehlo.while", start, types, None, [test, (given, body)])[1:]


def _starts(w: HloWriter, x: Operand, place: Operand) -> list[Operand]:
    zero = w.constant(0, place.type)
    return [place, *[zero] * (x.type.rank - 1)]


def _read_slice(w: HloWriter, x: Operand, place: Operand) -> Operand:
    sizes = (1, *x.type.shape[1:])
    cut = w.one(
        "stablehlo.dynamic_slice", [x, *_starts(w, x, place)], x.type.with_shape(sizes),
        {"slice_sizes": spell_list(sizes)},
    )  # fmt: skip
    return w.reshape(cut, sizes[1:])


def _write_slice(w: HloWriter, x: Operand, new: Operand, place: Operand) -> Operand:
    row = w.reshape(new, (1, *new.type.shape))
    return w.one("stablehlo.dynamic_update_slice", [x, row, *_starts(w, x, place)], x.type)


# Functions for users.


def export(function: Callable[..., Any], *args: Any, **named: Any) -> str:
    """The StableHLO text of a function for these arguments: arrays, tensors or types of fixed sizes.

    JAX's parser, `stablehlo-opt` and xDSL read it, and XLA runs it. Closed-over arrays become constants. Each operation
    has the location of its line of Python. An index outside its axis is an error in Tessera and none in StableHLO.

    >>> import tessera as ts
    >>> print(export(lambda x: x + x, ts.Tensor[2]).splitlines()[2].strip().partition(" loc")[0])
    %0 = "stablehlo.add"(%arg0, %arg0) : (tensor<2xf32>, tensor<2xf32>) -> (tensor<2xf32>)

    Raises:
        UnsupportedOpError: an op has no form in StableHLO (kernels, LAPACK), a size is symbolic, a type has a policy.
    """
    traced = (function if isinstance(function, Jit) else Jit(function)).trace(*args, **named)
    if traced.random is not None:
        raise UnsupportedOpError(
            "the function draws from the default generator, whose state is no argument",
            location=traced.function.loc, suggestion="draw from ts.Generator(seed)",
        )  # fmt: skip
    graph = expand_composites(traced.function, export_rules.__contains__)
    kept = len(graph.params) - len(traced.captures)
    writer = HloWriter()
    params = [Operand(f"%arg{i}", tensor_type(p)) for i, p in enumerate(graph.params[:kept])]
    arrays = [
        writer.array(array, tensor_type(p)) for array, p in zip(traced.captures, graph.params[kept:], strict=True)
    ]
    results = writer.block(graph.body, [*params, *arrays])
    writer.emit("func.return", results, [])
    listed = ", ".join(f"{p.name}: {spell_type(p.type)}" for p in params)
    types = ", ".join(spell_type(r.type) for r in results)
    head = f"module @{graph.name} {{\n  func.func public @main({listed}) -> ({types}) {{\n"
    return head + "\n".join(writer.lines) + "\n  }\n}\n"
