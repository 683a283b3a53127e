"""Emitter: the walk over a tile function that emits each node by its rule of the emission table; elementwise ops by the
scalar table, widened before and rounded after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from tessera.codegen.coverage import make_refusal_error
from tessera.codegen.ptx.context import EmissionContext, at_location
from tessera.codegen.ptx.table import REFUSED, emission_rule
from tessera.codegen.ptx.table.blocks.layout_conversion import broadcast_registers
from tessera.codegen.ptx.table.scalars.arithmetic import (
    convert,
    convert_for_storage,
    materialise_operand,
    narrow_register,
    round_to_narrow,
    widen_register,
)
from tessera.codegen.ptx.table.scalars.math_functions import ScalarContext, emit
from tessera.codegen.ptx.table.warpgroup.wgmma import find_accumulator, wait_for_all, wait_for_results
from tessera.codegen.ptx.text.builder import NARROW_FLOATS, PtxBuilder, ptx_type, register_class
from tessera.core.errors import ArgumentError, UnsupportedOpError
from tessera.core.types import DType, TensorType, int32, int64, join_compute_types, uint32, uint64
from tessera.ir.core import Block, Node, Value
from tessera.ir.rules import COMPUTE
from tessera.ops.dialects import control_flow
from tessera.ops.dialects.inline_asm import inline
from tessera.ops.tensor import basic, elementwise, shape

LARGE_BLOCK = 64  # registers of a block from which on a chain of ops is emitted element by element


def emit_elementwise(ctx: EmissionContext, nodes: Sequence[Node]) -> None:
    """Emit elementwise ops node by node; a chain over large blocks element by element, which keeps few values live.

    Raises:
        UnsupportedOpError: the scalar table has no rule for an op.
    """
    rules = [(_find_rule(node), _find_unsigned_bits(ctx, node)) for node in nodes]
    counts = {ctx.layout(node.out).count for node in nodes}
    results: list[list[str]] = [[] for _ in nodes]
    known: list[dict[tuple[str, ...], str]] = [{} for _ in nodes]  # results by operands: equal ones are computed once
    by_element = len(counts) == 1 and min(counts) >= LARGE_BLOCK
    for element in range(min(counts) if by_element else 1):
        for position, node in enumerate(nodes):
            chained = {n.out: registers for n, registers in zip(nodes, results, strict=True)}
            held = [chained[v] if v in chained else ctx.values[v] for v in node.args]
            for i in (element,) if by_element else range(ctx.layout(node.out).count):
                operands = tuple(registers[i] for registers in held)
                if operands not in known[position]:
                    with at_location(ctx, node):
                        known[position][operands] = _emit_element(ctx, node, *rules[position], operands)
                results[position].append(known[position][operands])
    ctx.values.update((node.out, tuple(registers)) for node, registers in zip(nodes, results, strict=True))


def _find_rule(node: Node) -> Callable[..., str]:
    found = emit.get(node.op)
    if found is None:
        raise make_refusal_error("ptx", node, REFUSED)
    return found


def _emit_element(
    ctx: EmissionContext, node: Node, rule: Callable[..., str], unsigned: int, operands: tuple[str, ...]
) -> str:
    text, types = ctx.text, [_compute_type(node, v) for v in node.args]
    xs = [convert(text, v.type.dtype, own, x) for v, own, x in zip(node.args, types, operands, strict=True)]
    wide = join_compute_types(types)
    if wide.is_float:
        xs = [convert(text, own, wide, x) if own.is_float else x for own, x in zip(types, xs, strict=True)]
    out = node.out.type
    assert isinstance(out, TensorType)
    if unsigned:
        return _emit_unsigned(text, node, rule, xs, unsigned)
    result = rule(ScalarContext(text, wide, out.dtype, out.policy), *xs)
    if node.op.numerics != COMPUTE:
        return result
    if wide in NARROW_FLOATS and out.dtype.is_float:  # a policy computes in it; the registers are of f32
        result = round_to_narrow(text, wide, result)
    return convert_for_storage(text, wide, out, result)


# Ops that are on unsigned integers, and on 32 bits, where all that they take and give is proven to be: a division
# then needs no corrections, and an op on 64 bits is two instructions or more.
DIVISIONS = (elementwise.floor_divide, elementwise.remainder)
# Their results are no integers.
FROM_INTEGERS = (
    basic.cast, elementwise.less, elementwise.less_equal, elementwise.greater, elementwise.greater_equal,
    elementwise.equal, elementwise.not_equal,
)  # fmt: skip
SUMS = (elementwise.add, elementwise.sub, elementwise.mul, elementwise.maximum, elementwise.minimum)


def _find_unsigned_bits(ctx: EmissionContext, node: Node) -> int:
    """The bits of the unsigned integers in which an op is computed; 0 where that gains nothing or may be wrong.

    Scalars are the same for all threads, which costs little.
    """
    if node.op not in (*DIVISIONS, *SUMS, *FROM_INTEGERS) or (dtype := node.args[0].type.dtype) not in (int32, int64):  # type: ignore[union-attr]
        return 0
    if node.op not in DIVISIONS and (dtype == int32 or node.out.type.rank == 0):  # type: ignore[union-attr]
        return 0
    if node.op is basic.cast and not node.out.type.dtype.is_float:  # type: ignore[union-attr]
        return 0
    ranges = [ctx.analyses.ranges.of(v) for v in (*node.args, *(() if node.op in FROM_INTEGERS else (node.out,)))]
    if any(low < 0 for low, _ in ranges) or (node.op in DIVISIONS and ranges[1][0] <= 0):
        return 0
    if all(high < 1 << 32 for _, high in ranges):
        return 32
    return dtype.bits if node.op in DIVISIONS else 0


def _emit_unsigned(text: PtxBuilder, node: Node, rule: Callable[..., str], xs: Sequence[str], bits: int) -> str:
    wide, out = node.args[0].type.dtype, node.out.type  # type: ignore[union-attr]
    dtype = uint64 if bits == 64 else uint32
    if node.op not in FROM_INTEGERS and bits == wide.bits:
        return rule(ScalarContext(text, dtype, dtype), *xs)
    narrow = [narrow_register(text, x) for x in xs]
    if node.op in FROM_INTEGERS:
        return rule(ScalarContext(text, dtype, out.dtype, out.policy), *narrow)  # type: ignore[union-attr]
    return widen_register(text, rule(ScalarContext(text, dtype, dtype), *narrow))


def _compute_type(node: Node, v: Value) -> DType:
    return v.type.compute if node.op.numerics == COMPUTE else v.type.dtype  # type: ignore[union-attr]


@emission_rule(inline)
def _(ctx: EmissionContext, node: Node) -> None:
    if not node.attrs["ptx"]:
        raise UnsupportedOpError(
            "tile.inline has no text for the target ptx", location=node.loc, expected='ptx="..."',
            suggestion='give the instructions: tile.inline(x, python=f, ptx="neg.f32 {out}, {0};")',
        )  # fmt: skip
    layout, out = ctx.layout(node.out), node.out.type.dtype
    operands = [broadcast_registers(ctx, v, layout) for v in node.args]
    found = []
    for registers in zip(*operands, strict=True):
        result = _fill_template(ctx, node, registers)
        found.append(round_to_narrow(ctx.text, out, result) if out in NARROW_FLOATS else result)
    ctx.values[node.out] = tuple(found)


def _fill_template(ctx: EmissionContext, node: Node, registers: tuple[str, ...]) -> str:
    """Emit the user's instructions with registers for the placeholders; the result's register."""
    text = ctx.text
    out = text.new(ptx_type(node.out.type.dtype))  # type: ignore[union-attr]
    operands = [
        materialise_operand(text, register_class(v.type.dtype), x) for v, x in zip(node.args, registers, strict=True)
    ]
    try:
        instructions = node.attrs["ptx"].format(*operands, out=out)
    except (KeyError, IndexError, ValueError) as error:
        raise ArgumentError(
            f"the ptx text of tile.inline cannot be filled in: {error}", location=node.loc,
            expected="{out}, and {0}, {1}, ... for the operands; other braces doubled",
        ) from None  # fmt: skip
    for instruction in instructions.split(";"):
        if instruction.strip():
            text.line(instruction.strip())
    return out


# Ops that only bind registers: they may move above elementwise ops whose results they do not use.
REGISTER_BINDING_OPS = (basic.full, basic.dim_value, basic.broadcast_to, shape.iota)


def emit_block(ctx: EmissionContext, block: Block) -> None:
    """Emit the nodes of a block in order; adjacent elementwise ops together, so that large blocks go by element."""
    chain: list[Node] = []
    for node in block.nodes:
        if node.op.pointwise and emission_rule.get(node.op) is None:
            ctx.analyses.producers.update(dict.fromkeys(node.results, node))
            chain.append(node)
            continue
        if node.op not in REGISTER_BINDING_OPS or {n.out for n in chain} & set(node.args):
            _flush_elementwise(ctx, chain)
        emit_node(ctx, node)
    _flush_elementwise(ctx, chain)


def _flush_elementwise(ctx: EmissionContext, chain: list[Node]) -> None:
    """Emit the deferred elementwise nodes, those with equal register counts as one group."""
    for _, group in groupby(chain, lambda node: ctx.layout(node.out).count):
        nodes = list(group)
        _wait_for_operands(ctx, nodes)
        emit_elementwise(ctx, nodes)
    chain.clear()


def _wait_for_operands(ctx: EmissionContext, nodes: Sequence[Node]) -> None:
    """Wait for the MMAs in flight whose results some nodes use; before a branch or a while loop, for all of them."""
    if any(node.regions and node.op is not control_flow.for_ for node in nodes):
        wait_for_all(ctx)
    elif ctx.pipeline.in_flight and not any(node.regions for node in nodes):
        # A product adds to the accumulator of one in flight in order.
        wait_for_results(ctx, [v for node in nodes for v in node.args if v is not find_accumulator(node)])


def emit_node(ctx: EmissionContext, node: Node) -> None:
    """Emit one node, after the barrier and the waits that its operands need.

    Raises:
        UnsupportedOpError: the table has no rule for the op.
    """
    ctx.analyses.producers.update(dict.fromkeys(node.results, node))
    _wait_for_operands(ctx, [node])
    with at_location(ctx, node):
        if ctx.smem.hazards.needs_barrier(node):
            ctx.team.synchronise()
        rule = emission_rule.get(node.op)
        if rule is not None:
            rule(ctx, node)
        elif node.op.pointwise:
            emit_elementwise(ctx, [node])
        else:
            raise make_refusal_error("ptx", node, REFUSED)
