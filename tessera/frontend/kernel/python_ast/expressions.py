"""Expressions: a rule for each kind of Python expression, with short-circuit logic and indices on traced values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tessera.core.errors import (
    ArgumentError,
    DTypeError,
    ShapeError,
    TesseraError,
    UnsupportedSyntaxError,
    user_location,
)
from tessera.core.symbolic_dim import Dim, compare_for_program
from tessera.core.types import GLOBAL, bool_
from tessera.frontend.kernel.conversions import convert_to_type, join_types
from tessera.frontend.kernel.memref import MemRef, MemRefAccess, MemRefView, load_if_memref, subscript_view, view_whole
from tessera.frontend.kernel.python_ast.scope import KernelFrame, read_attribute
from tessera.frontend.kernel.python_ast.unsupported_syntax import unsupported_error
from tessera.frontend.kernel.tile_api.assertions import TracedString, format_traced
from tessera.frontend.kernel.tile_api.ids import TileRange
from tessera.frontend.kernel.tile_api.matrix import matrix_product
from tessera.frontend.kernel.tile_api.memory import alloc_register
from tessera.frontend.kernel.trace import TraceState, current_trace, is_number, is_traced, value_sizes
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Node
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import elementwise
from tessera.ops.tensor.basic import full

# Buffers in a list: one allocation with a leading axis, so that the list can be indexed while the kernel runs.


def pack_buffers(values: list[Any]) -> list[Any]:
    """The list; where it holds fresh buffers of one kind, they are made one allocation."""
    if len(values) < 2 or not all(_is_fresh_buffer(v) for v in values):
        return values
    builder = current_trace().builder
    memories = [v.memory for v in values]
    nodes = [builder.producers[m.value] for m in memories]
    if len({id(m) for m in memories}) < len(memories) or any(n.attrs != nodes[0].attrs for n in nodes):
        return values
    attrs = {**nodes[0].attrs, "shape": (len(values), *nodes[0].attrs["shape"])}
    joint = builder.add(tile.alloc, [], attrs).out
    for place, memory in enumerate(memories):
        memory.value, memory.prefix = joint, (place,)
    return values


def _is_fresh_buffer(value: Any) -> bool:
    return (
        isinstance(value, MemRefView)
        and value.is_whole
        and value.memory.type.space != GLOBAL
        and _is_unused(value.memory)
    )


def _is_unused(memory: MemRef) -> bool:
    return not memory.used and not memory.prefix


def index_buffers(values: Sequence[Any], index: Any) -> MemRefView:
    """An element of a list of buffers, chosen while the kernel runs.

    Raises:
        UnsupportedSyntaxError: the list holds something else.
    """
    memories = [v.memory for v in values if isinstance(v, MemRefView) and v.is_whole]
    prefixes = [m.prefix for m in memories]
    if not values or prefixes != [(n,) for n in range(len(values))] or len({m.value for m in memories}) != 1:
        raise UnsupportedSyntaxError(
            "a list is indexed by a value known only at run time",
            expected="a list of buffers of one shape and type, made where the list is: [tile.alloc_shared(...), ...]",
            suggestion="unroll the loop: for i in tile.static_range(n)",
        )
    joint = MemRef(memories[0].value, memories[0].name, used=True)
    return subscript_view(view_whole(joint), index)


def selects_elements(block: Any, index: Any) -> bool:
    """Whether a subscript picks some of a block's elements, rather than giving it other axes."""
    items = index if isinstance(index, tuple) else (index,)
    if not (isinstance(block, Tensor) and is_traced(block) and block.ndim) or any(i is None for i in items):
        return False
    return not all(_is_full_slice(i) for i in items)


def _is_full_slice(item: Any) -> bool:
    """Whether an item takes all of an axis; nothing is compared, for `==` of a block is a block."""
    unbounded = isinstance(item, slice) and all(b is None for b in (item.start, item.stop, item.step))
    return item is Ellipsis or unbounded


def index_block(block: Tensor, index: Any) -> Tensor:
    """The elements of a block that an index names."""
    buffer = alloc_register(block.shape, block.dtype)
    buffer.store(block)
    return load_if_memref(subscript_view(buffer, index))  # type: ignore[no-any-return]


# Truth and choice on traced values: `and`, `or`, `not`, `a if c else b`, evaluated no further than Python would.


Thunk = Callable[[], Any]


def as_condition(found: Any) -> Any:
    """A condition: a Python bool, or a traced bool scalar.

    Raises:
        ShapeError: the condition is a block, which is not one truth.
    """
    if not is_traced(found):
        return bool(found)
    if found.ndim:
        raise ShapeError(
            "a block is not one truth value", expected="a bool scalar", received=str(found.type),
            suggestion="choose elements with tile.where(condition, a, b), or mask the access",
        )  # fmt: skip
    return as_bool(found)


def as_bool(found: Any) -> Any:
    """Whether each element is not 0."""
    return found if not isinstance(found, Tensor) or found.dtype == bool_ else found != 0


def logical_not(found: Any) -> Any:
    """`not x`."""
    return elementwise.bitwise_not(as_bool(found)) if is_traced(found) else not found


def chain_comparisons(a: Any, b: Any) -> Any:
    """Both comparisons of a chain."""
    if not is_traced(a) and not is_traced(b):
        return a and b
    return elementwise.bitwise_and(as_bool(a), as_bool(b))


def contains(a: Any, values: Any) -> Any:
    """`a in values`: whether `a` equals one of a tuple or list, known now or when the kernel runs.

    Raises:
        ShapeError: `values` is a block, whose elements are not looked through.
    """
    if is_traced(values):
        raise ShapeError(
            "`in` does not look through a block", received=str(values.type),
            suggestion="compare the block and reduce: tile.max(block == value)",
        )  # fmt: skip
    values = [load_if_memref(v) for v in values] if isinstance(values, (tuple, list)) else values
    if not is_traced(a) and not (isinstance(values, list) and any(is_traced(v) for v in values)):
        return a in values
    found: Any = False
    for each in values:
        same = a == each
        found = same if found is False else elementwise.bitwise_or(as_bool(found), as_bool(as_bool_tensor(same)))
    return found


def logical_and(trace: TraceState, left: Any, right: Thunk) -> Any:
    """`left and right`: what `right` reads is read only where `left` holds."""
    if not is_traced(left):
        return right() if left else left
    return _short_circuit(trace, as_bool(left), right, stop=False)


def logical_or(trace: TraceState, left: Any, right: Thunk) -> Any:
    """`left or right`: what `right` reads is read only where `left` does not hold."""
    if not is_traced(left):
        return left if left else right()
    return _short_circuit(trace, as_bool(left), right, stop=True)


def _short_circuit(trace: TraceState, left: Tensor, right: Thunk, stop: bool) -> Any:
    nodes, found = _record_aside(trace.builder, lambda: as_bool_tensor(as_bool(right())))
    if left.ndim or found.ndim or not _has_effects(nodes):
        _append_nodes(trace.builder, nodes)
        return (elementwise.bitwise_or if stop else elementwise.bitwise_and)(left, found)
    settled = as_bool_tensor(stop)
    regions = [((), settled), (nodes, found)] if stop else [(nodes, found), ((), settled)]
    return _emit_if(trace.builder, left, regions)


def as_bool_tensor(found: Any) -> Tensor:
    """A truth as a tensor."""
    return found if isinstance(found, Tensor) else full(shape=(), value=bool(found), dtype=bool_)


def conditional_expression(trace: TraceState, test: Tensor, yes: Thunk, no: Thunk) -> Any:
    """`a if test else b`: a branch that reads memory runs only where it is chosen."""
    (one, a), (other, b) = _record_aside(trace.builder, yes), _record_aside(trace.builder, no)
    type = join_types("the conditional expression", a, b)
    if type is None:
        return a
    a, b = convert_to_type(a, type), convert_to_type(b, type)
    if _has_effects([*one, *other]):
        return _emit_if(trace.builder, test, [(one, a), (other, b)])
    _append_nodes(trace.builder, [*one, *other])
    return elementwise.where(test, a, b)


def _record_aside(builder: Builder, thunk: Thunk) -> tuple[list[Node], Any]:
    with builder.region() as nodes:
        found = thunk()
    return nodes, found


def _has_effects(nodes: Sequence[Node]) -> bool:
    return any(n.op.effects for node in nodes for n in (node, *(i for r in node.regions for i in r.walk())))


def _append_nodes(builder: Builder, nodes: Sequence[Node]) -> None:
    for node in nodes:
        builder.append(node)


def _emit_if(builder: Builder, test: Tensor, regions: Sequence[tuple[Sequence[Node], Tensor]]) -> Tensor:
    blocks = tuple(Block((), tuple(nodes), (found.data,)) for nodes, found in regions)
    node = builder.add(control_flow.if_, [test.data], types=(regions[0][1].type,), regions=blocks)
    return Tensor(node.out)


ExpressionRule = Callable[[KernelFrame, Any], Any]
EXPRESSION_RULES: dict[type, ExpressionRule] = {}
PYTHON_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError, OSError)


def expression(kind: type) -> Callable[[ExpressionRule], ExpressionRule]:
    """Give a kind of expression its meaning."""

    def add(rule: ExpressionRule) -> ExpressionRule:
        EXPRESSION_RULES[kind] = rule
        return rule

    return add


def evaluate_expression(frame: KernelFrame, node: ast.expr) -> Any:
    """The value of an expression; every node recorded meanwhile carries its place.

    Raises:
        UnsupportedSyntaxError: the kernel language has no such expression.
    """
    rule = EXPRESSION_RULES.get(type(node))
    if rule is None:
        raise unsupported_error(frame, node)
    return apply_at_location(frame, node, rule)


def evaluate_operand(frame: KernelFrame, node: ast.expr) -> Any:
    """The value of an expression, read from memory if it names a place there."""
    found = evaluate_expression(frame, node)
    return (
        apply_at_location(frame, node, lambda f, n: load_if_memref(found)) if isinstance(found, MemRefAccess) else found
    )


def evaluate_condition(frame: KernelFrame, node: ast.expr) -> Any:
    """The truth of an expression: a Python bool, or a traced bool scalar."""
    found = evaluate_operand(frame, node)
    return apply_at_location(frame, node, lambda f, n: as_condition(_decide_size(f, found)))


def apply_at_location(frame: KernelFrame, node: Any, rule: ExpressionRule) -> Any:
    """A rule applied with its piece of syntax as the place of nodes and errors."""
    builder = frame.trace.builder
    before, builder.location = builder.location, frame.place(node)
    try:
        return rule(frame, node)
    except TesseraError as error:
        # Ops know only the Python line that is running: the launch.
        if error.location is None or error.location == user_location():
            error.location = builder.location
        raise
    except PYTHON_ERRORS as error:
        raise ArgumentError(f"{type(error).__name__}: {error}", location=builder.location) from error
    finally:
        builder.location = before


@expression(ast.Constant)
def _(frame: KernelFrame, node: ast.Constant) -> Any:
    return node.value


@expression(ast.Name)
def _(frame: KernelFrame, node: ast.Name) -> Any:
    return frame.find(node.id)


@expression(ast.Attribute)
def _(frame: KernelFrame, node: ast.Attribute) -> Any:
    return read_attribute(frame, evaluate_expression(frame, node.value), node.attr)


@expression(ast.Tuple)
def _(frame: KernelFrame, node: ast.Tuple) -> Any:
    return tuple(evaluate_expression(frame, e) for e in node.elts)


@expression(ast.List)
def _(frame: KernelFrame, node: ast.List) -> Any:
    return pack_buffers([evaluate_expression(frame, e) for e in node.elts])


@expression(ast.Dict)
def _(frame: KernelFrame, node: ast.Dict) -> Any:
    if None in node.keys:
        raise unsupported_error(frame, node, "a dict unpacked with **")
    return {
        evaluate_expression(frame, k): evaluate_expression(frame, v)
        for k, v in zip(node.keys, node.values, strict=True)
        if k
    }


@expression(ast.Slice)
def _(frame: KernelFrame, node: ast.Slice) -> Any:
    return slice(
        *(None if part is None else evaluate_expression(frame, part) for part in (node.lower, node.upper, node.step))
    )


@expression(ast.Subscript)
def _(frame: KernelFrame, node: ast.Subscript) -> Any:
    return get_item(evaluate_expression(frame, node.value), evaluate_expression(frame, node.slice))


def get_item(base: Any, index: Any) -> Any:
    """`base[index]`."""
    if isinstance(base, MemRefView):
        return subscript_view(base, index)
    index = load_if_memref(index)
    if isinstance(base, (list, tuple)) and is_traced(index):
        return index_buffers(base, index)
    if isinstance(base, (list, tuple, str)) and isinstance(index, slice) and any(map(is_traced, _load_bounds(index))):
        raise UnsupportedSyntaxError(
            f"a {type(base).__name__}, which is a constant of the kernel, is cut at a place known only at run time",
            expected="memory: a tensor or a NumPy array", received=repr(base)[:60],
            suggestion="pass the kernel np.asarray(...) of it",
        )  # fmt: skip
    if base is None:
        raise ArgumentError(
            "this is None, which has no elements", expected="memory: a tensor or a NumPy array",
            suggestion="pass an array; where it may be left out, ask first: if x is not None",
        )  # fmt: skip
    held = load_if_memref(base)
    if selects_elements(held, index):
        return index_block(held, index)
    with compare_for_program(current_trace().builder.location):
        return held[index]


def _load_bounds(index: slice) -> tuple[Any, Any, Any]:
    return load_if_memref(index.start), load_if_memref(index.stop), load_if_memref(index.step)


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.MatMult: matrix_product,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: contains,
    ast.NotIn: lambda a, b: logical_not(contains(a, b)),
}
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: lambda x: x,
    ast.Invert: operator.invert,
    ast.Not: logical_not,
}


@expression(ast.BinOp)
def _(frame: KernelFrame, node: ast.BinOp) -> Any:
    left, right = evaluate_operand(frame, node.left), evaluate_operand(frame, node.right)
    if is_traced(left) or is_traced(right):
        _refuse_sequence_operand("combine", (left, node.left), (right, node.right))
    left, right = value_sizes(left, right, isinstance(node.op, ast.Div))
    try:
        found = OPERATORS[type(node.op)](left, right)
    except ShapeError:
        refuse_pointer_arithmetic(frame, node, node.left, right)
        raise
    place = _find_pointer_base(frame, node.left)
    if place is not None and is_traced(found):
        frame.trace.memory_sums[id(found.data)] = place
    return found


def _find_pointer_base(frame: KernelFrame, node: ast.expr) -> MemRefView | None:
    """The whole tensor parameter that an expression, or the sum that it names, begins with."""
    while isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        node = node.left
    if not isinstance(node, ast.Name):
        return None
    found = frame.lookup(node.id)
    if isinstance(found, Tensor):
        return frame.trace.memory_sums.get(id(found.data))
    whole = isinstance(found, MemRefView) and found.is_whole and found.memory.type.space == GLOBAL
    return found if whole else None


def refuse_pointer_arithmetic(frame: KernelFrame, node: Any, base: ast.expr, offset: Any) -> None:
    """Refuse `x + offsets`, where `x` is a tensor parameter, with the subscript that it means.

    Raises:
        ArgumentError: the base is such a parameter or a sum with it, and the offset an integer of the run.
    """
    place = _find_pointer_base(frame, base) if isinstance(node.op, (ast.Add, ast.Sub)) else None
    if place is None or not (is_traced(offset) and offset.dtype.is_integer):
        return
    name, axes = place.memory.name, "ijklmn"[: place.ndim]
    slices = ", ".join(f"{axis} : {axis} + B{axis.upper()}" for axis in axes)
    blocks = "offsets" if len(axes) == 1 else "rows[:, None], cols[None, :]" if len(axes) == 2 else "one block an axis"
    raise ArgumentError(
        f"`{name}` is a tensor, not a pointer: an offset would be added to its elements",
        expected=f"its elements by slices, {name}[{slices}], or by blocks of indices, {name}[{blocks}]",
        received=f"{place.memory.type} and {offset.type}",
        suggestion=f'write tile.load({name}[{slices}], other=0.0), or tile.store({name}[{slices}], value, edge="clip")',
    ) from None


@expression(ast.UnaryOp)
def _(frame: KernelFrame, node: ast.UnaryOp) -> Any:
    operand = evaluate_operand(frame, node.operand)
    return UNARY[type(node.op)](_decide_size(frame, operand) if isinstance(node.op, ast.Not) else operand)


@expression(ast.Compare)
def _(frame: KernelFrame, node: ast.Compare) -> Any:
    left = _compare(frame, node.ops[0], node.left)
    result: Any = True
    for kind, each in zip(node.ops, node.comparators, strict=True):
        right = _compare(frame, kind, each)
        if not isinstance(kind, (ast.In, ast.NotIn)) and (
            isinstance(kind, ORDER) or is_traced(left) or is_traced(right)
        ):
            _refuse_sequence_operand("compare", (left, node.left), (right, each))
        with nullcontext() if is_traced(left) or is_traced(right) else _compare_as_written(frame):
            found = COMPARISONS[type(kind)](left, right)
        result = found if result is True else chain_comparisons(result, found)
        left = right
    return result


def _compare_as_written(frame: KernelFrame) -> AbstractContextManager[None]:
    """What a kernel compares becomes a guard; kernels of this package treat sizes not proven equal alike."""
    home = getattr(frame.outer, "globals", {}).get("__name__", "")
    return nullcontext() if str(home).startswith("tessera.") else compare_for_program(frame.trace.builder.location)


def _decide_size(frame: KernelFrame, found: Any) -> Any:
    """Whether a size is not 0, as the kernel takes it for a condition; anything else as it is."""
    if not isinstance(found, Dim):
        return found
    with _compare_as_written(frame):
        return bool(found)


def _refuse_sequence_operand(what: str, *operands: tuple[Any, ast.expr]) -> None:
    """Refuse an operation of a number or block with a tuple or list, such as a shape.

    Raises:
        DTypeError: one operand is a number or a block, the other a sequence.
    """
    sequence = next((each for each in operands if isinstance(each[0], (tuple, list))), None)
    other = next((each for each in operands if is_traced(each[0]) or is_number(each[0])), None)
    if sequence is None or other is None:
        return
    (held, node), text = sequence, ast.unparse(sequence[1])
    kind = "block" if is_traced(other[0]) and other[0].ndim else "number"
    is_shape = isinstance(node, ast.Attribute) and node.attr == "shape"
    raise DTypeError(
        f"cannot {what} a {kind} with {'the shape ' if is_shape else ''}`{text}`, a {type(held).__name__}",
        expected=f"one of its elements: {text}[0]" if held else "a number or a block", received=repr(held),
        suggestion=f"write {text}[0]" + (" for the size of the first axis" if is_shape else "") if held else None,
    )  # fmt: skip


def _compare(frame: KernelFrame, kind: ast.cmpop, node: ast.expr) -> Any:
    # `is` asks about the name itself: a place is never None.
    return (evaluate_expression if isinstance(kind, (ast.Is, ast.IsNot)) else evaluate_operand)(frame, node)


@expression(ast.BoolOp)
def _(frame: KernelFrame, node: ast.BoolOp) -> Any:
    join = logical_and if isinstance(node.op, ast.And) else logical_or
    result = evaluate_operand(frame, node.values[0])
    for each in node.values[1:]:
        if isinstance(result, Dim) and _decide_size(frame, result) != isinstance(node.op, ast.And):
            return result
        result = join(frame.trace, result, lambda each=each: evaluate_operand(frame, each))  # type: ignore[misc]
    return result


@expression(ast.IfExp)
def _(frame: KernelFrame, node: ast.IfExp) -> Any:
    test = evaluate_condition(frame, node.test)
    if not isinstance(test, Tensor):
        return evaluate_expression(frame, node.body if test else node.orelse)
    branches = (lambda: evaluate_operand(frame, node.body), lambda: evaluate_operand(frame, node.orelse))
    return conditional_expression(frame.trace, test, *branches)


@expression(ast.JoinedStr)
def _(frame: KernelFrame, node: ast.JoinedStr) -> str | TracedString:
    parts = [format_traced(evaluate_expression(frame, part)) for part in node.values]
    values = tuple(v for p in parts for v in p.values)
    template = "".join(p.template for p in parts)
    return TracedString(template, values) if values else template.format()


@expression(ast.FormattedValue)
def _(frame: KernelFrame, node: ast.FormattedValue) -> Any:
    found = evaluate_operand(frame, node.value)
    if is_traced(found):
        if node.format_spec is None and node.conversion == -1:
            return found
        raise UnsupportedSyntaxError(
            "a value of the running program is printed as it is, without a format", received=str(found.type),
            suggestion="leave what follows the `:` or `!` out",
        )  # fmt: skip
    convert: Any = {ord("r"): repr, ord("s"): str, ord("a"): ascii}.get(node.conversion)
    spec = evaluate_expression(frame, node.format_spec) if node.format_spec else ""
    return format(found if convert is None else convert(found), spec)


def _expand_comprehension(frame: KernelFrame, node: ast.ListComp | ast.GeneratorExp) -> list[Any]:
    return pack_buffers([evaluate_expression(inner, node.elt) for inner in _iterate_frames(frame, node.generators)])


def _iterate_frames(frame: KernelFrame, generators: Sequence[ast.comprehension]) -> Iterator[KernelFrame]:
    """The frames in which a comprehension evaluates its element, in order."""
    if not generators:
        yield frame
        return
    first, *rest = generators
    for each in _iterate_items(evaluate_expression(frame, first.iter)):
        step = frame.child({})
        bind_target(step, first.target, each)
        if all(evaluate_expression(step, test) for test in first.ifs):
            yield from _iterate_frames(step, rest)


def _iterate_items(values: Any) -> Any:
    if isinstance(values, MemRefAccess) or is_traced(values):
        raise UnsupportedSyntaxError(
            "a comprehension cannot walk over a block", received=str(values.type),
            suggestion="compute on the whole block at once, or walk over tile.static_range(n)",
        )  # fmt: skip
    return values.static() if isinstance(values, TileRange) else values


def bind_target(frame: KernelFrame, target: ast.expr, found: Any) -> None:
    """Give the names of a target (a name, or a tuple of them) their values."""
    if isinstance(target, ast.Name):
        frame.names[target.id] = found
        return
    if not isinstance(target, (ast.Tuple, ast.List)):
        raise unsupported_error(frame, target, "this target")
    parts = list(found)
    if len(parts) != len(target.elts):
        raise ArgumentError(f"{len(parts)} values cannot be given to {len(target.elts)} names")
    for name, part in zip(target.elts, parts, strict=True):
        bind_target(frame, name, part)


EXPRESSION_RULES[ast.ListComp] = EXPRESSION_RULES[ast.GeneratorExp] = _expand_comprehension
