"""Op semantics of the Tile interpreter: what each op does to all program instances at once.

Pure ops use their own reference functions; NumPy broadcasting takes care of the instance axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.core.errors import ExecutionError
from tessera.core.types import SHARED, TensorType
from tessera.interp.bound import apply_with_bounds
from tessera.interp.tile import control_flow, memory, mesh, synchronisation
from tessera.interp.tile import memory as tile_memory
from tessera.interp.tile.affine import AffineScalar, combine_affine
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import (
    BlockAccess,
    InstanceMemory,
    allocate_memory,
    check_indices,
    expand_block_axes,
    keep_last_instance,
    read_blocks,
    scatter_elements,
    take_elements,
    write_blocks,
)
from tessera.ir.builder import NodeSemantics
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.numerics.conversion import convert, round_to_storage
from tessera.ir.numerics.error_model import find_rounding_model
from tessera.ir.numerics.interval_arithmetic import IntervalArray, require_exact, to_interval
from tessera.ir.rewrite import RewritePatterns, Rewriter, rewrite_function
from tessera.ir.rules import Op, Rules
from tessera.ops.dialects import control_flow as dialects_control_flow
from tessera.ops.dialects import tile
from tessera.ops.dialects.inline_asm import find_emulation, inline
from tessera.ops.tensor import basic, contractions, reduce, shape

# Op semantics of the Tile interpreter: what each op does to all program instances at once.
#
# Pure ops use their own reference functions; NumPy broadcasting takes care of the instance axes.


check_rules = Rules("tile checks")


@check_rules(tile.assert_)
def _(machine, node, args, run):
    wrong = ~require_exact(args[0])
    if machine.active is not None:
        wrong = wrong & expand_block_axes(machine.active, wrong.ndim - machine.rank)
    if wrong.any():
        raise _assertion_error(machine, node, wrong, args[1:])
    return ()


def _assertion_error(machine: TileMachine, node: Node, wrong: np.ndarray, values: list[Any]) -> ExecutionError:
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    held = [_select_instance(_to_python(v), first) for v in values]
    known = f" with {', '.join(held)}" if held else ""
    element = f", element {first[machine.rank :]}" if len(first) > machine.rank else ""
    return ExecutionError(
        f"assertion failed: {node.attrs['message']}" if node.attrs["message"] else "assertion failed",
        expected="a condition that holds for every element of every program",
        received=f"false at {_describe_instance(machine, first[: machine.rank])}{element}{known}",
    )


def _to_python(value: Any) -> np.ndarray:
    return to_interval(value).value if not isinstance(value, np.ndarray) else value


def _select_instance(value: np.ndarray, place: tuple[int, ...]) -> str:
    """The element of a value at an index; axes of size 1 are broadcast."""
    aligned = place[: value.ndim] if value.ndim <= len(place) else (*place, *(0,) * (value.ndim - len(place)))
    return str(value[tuple(i if n > 1 else 0 for i, n in zip(aligned, value.shape, strict=True))])


def _describe_instance(machine: TileMachine, place: tuple[int, ...]) -> str:
    """Format an instance: its program and, in a group, its tile."""
    numbers = tuple(f + i for f, i in zip(machine.first, place, strict=True))
    grid = numbers[: len(machine.grid)]
    tile = f", tile {numbers[-1]}" if machine.group > 1 else ""
    return f"program {grid}{tile}"


@check_rules(tile.print_)
def _(machine, node, args, run):
    if machine.bound:  # the value run prints already
        return ()
    arrays, label = [np.asarray(a) for a in args], node.attrs["label"]
    for place in _active_instances(machine):
        words = [_format_value(a, place) for a in arrays]
        text = label.format(*words) if node.attrs["ordered"] else " ".join([label, *words] if label else words)
        print(f"{_describe_instance(machine, place)}: {text}")
    return ()


@check_rules(tile.line, tile.pause)
def _(machine, node, args, run):
    return ()  # a debugger has seen it already (observers.py)


def _active_instances(machine: TileMachine) -> Iterator[tuple[int, ...]]:
    active = np.ones(machine.count, bool)
    if machine.active is not None:
        active &= machine.active
    return (tuple(int(i) for i in place) for place in np.argwhere(active))


def _format_value(array: np.ndarray, place: tuple[int, ...]) -> str:
    own = array[tuple(i if n > 1 else 0 for i, n in zip(place, array.shape, strict=False))]
    return np.array2string(own, separator=", ") if own.ndim else str(own)


inline_rules = Rules("tile inline")


@inline_rules(inline)
def _(machine, node, args, run):
    if machine.bound:
        return (_emulate_with_bounds(node, [to_interval(a) for a in args]),)
    out = node.out.type
    return (round_to_storage(_emulate(node, args), out.dtype, None),)


def _emulate(node: Node, arrays: Sequence[Any]) -> np.ndarray:
    """Call the emulation; floats are passed in the compute type.

    Raises:
        ExecutionError: it fails, or gives an array of another shape.
    """
    name = node.attrs["python"]
    function = find_emulation(name)
    wide = [convert(a, _compute_dtype(v.type)) for a, v in zip(arrays, node.args, strict=True)]
    shape = np.broadcast_shapes(*(a.shape for a in wide))
    try:
        found = np.asarray(function(*wide))
    except Exception as error:  # any exception of a user's function is reported at its line
        raise ExecutionError(
            f"the emulation of tile.inline fails: {type(error).__name__}: {error}", received=name.partition("#")[0]
        ) from error
    if found.shape != shape:
        raise ExecutionError(
            "the emulation of tile.inline is not elementwise", expected=f"an array of shape {shape}",
            received=f"shape {found.shape}", suggestion="use elementwise NumPy functions",
        )  # fmt: skip
    return found


def _compute_dtype(type: Any) -> Any:
    assert isinstance(type, TensorType)
    return type.compute


def _emulate_with_bounds(node: Node, operands: Sequence[IntervalArray]) -> IntervalArray:
    """The bound is `ulp` and the rounding where the operands are exact; else it is infinite."""
    out = node.out.type.dtype
    held = [convert(x.value, v.type.dtype) for x, v in zip(operands, node.args, strict=True)]
    found = _emulate(node, held)
    sure = np.broadcast_to(np.logical_and.reduce(np.broadcast_arrays(*(x.radius == 0 for x in operands))), found.shape)
    value = round_to_storage(found, out, None)
    if not out.is_float:
        return IntervalArray(value, np.where(sure, 0.0, np.inf))
    wide = value.astype(np.float64)
    step = 2 * find_rounding_model(out).rounding(np.abs(wide))  # twice half a unit in the last place
    return IntervalArray(
        wide, np.where(sure, node.attrs["ulp"] * step, np.inf) if node.attrs["ulp"] else _unknown_bound(sure)
    )


def _unknown_bound(sure: np.ndarray) -> np.ndarray:
    return np.where(sure, 0.0, np.inf)


# Rules of `places` receive index scalars as affine scalars or arrays; rules of `rules` receive arrays.
affine_rules = Rules("tile places")
array_rules = Rules("tile interpreter")
for _table in (
    control_flow.control_flow_rules,
    check_rules,
    synchronisation.grid_barrier_rules,
    synchronisation.group_rules,
    inline_rules,
    synchronisation.mbarrier_rules,
    mesh.mesh_rules,
):
    for _op in _table:
        (affine_rules if _op is dialects_control_flow.for_ else array_rules)(_op)(_table.of(_op))


def make_evaluator(machine: TileMachine) -> NodeSemantics:
    """Make the semantics of nodes on this machine."""

    def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
        rule = affine_rules.get(node.op)
        if rule is not None:
            return rule(machine, node, args, walk)
        if AffineScalar in map(type, args):
            index = combine_affine(node.op, args)
            if index is not None:
                return (index,)
            args = machine.arrays(args)
        rule = array_rules.get(node.op)
        return evaluate_pure(machine, node, args) if rule is None else rule(machine, node, args, walk)

    return mean


def evaluate_pure(machine: TileMachine, node: Node, args: list[Any]) -> Sequence[Any]:
    """Evaluate a pure op: NumPy broadcasting handles the instance axes."""
    if machine.bound:
        return apply_with_bounds(node.op, node.types, node.result_types, node.attrs, args)
    return node.op.compute(node.types, node.result_types, node.attrs.plain(), args)


# prepare(node, operands) returns the operands in the form that NumPy needs.
operand_rules = Rules("tile operands")


@operand_rules(basic.cast, reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin, reduce.mean, reduce.var)
def _(node, args):
    return [memory.expand_block(a, v.type.shape) for a, v in zip(args, node.args, strict=True)]


@operand_rules(contractions.dot)
def _(node, args):
    a, b = (memory.expand_block(x, v.type.shape) for x, v in zip(args, node.args, strict=True))
    if type(b) is np.ndarray and b.strides[-1] != b.itemsize:
        # BLAS is a third slower on transposed right operands: more than a copy costs.
        b = np.ascontiguousarray(convert(b, node.types[1].accumulate))
    return [a, b]


@array_rules(*operand_rules)
def _(machine, node, args, run):
    return evaluate_pure(machine, node, operand_rules.of(node.op)(node, args))


@affine_rules(tile.program_id)
def _(machine, node, args, run):
    axis = node.attrs["axis"]
    if axis >= len(machine.grid):
        return (machine.constant(0),)
    return (machine.place(axis),)


@affine_rules(tile.grid_size)
def _(machine, node, args, run):
    axis = node.attrs["axis"]
    return (machine.constant(machine.grid[axis] if axis < len(machine.grid) else 1),)


@affine_rules(tile.local_id)
def _(machine, node, args, run):
    return (machine.place(machine.rank - 1) if machine.group > 1 else machine.constant(0),)


@affine_rules(tile.group_size)
def _(machine, node, args, run):
    return (machine.constant(machine.group),)


@affine_rules(basic.full)
def _(machine, node, args, run):
    found = machine.constants.get(node)
    if found is None and node.out.type == tile.INDEX_TYPE:
        found = machine.constants[node] = machine.constant(node.attrs["value"])
    if found is None:
        lead = (1,) * (machine.rank + len(node.attrs["shape"]))
        found = basic.full.ref(shape=lead, value=node.attrs["value"], dtype=node.attrs["dtype"])
        machine.constants[node] = found
    return (found,)


@affine_rules(basic.dim_value)
def _(machine, node, args, run):
    return (machine.constant(node.attrs["size"]),)


@array_rules(shape.iota)
def _(machine, node, args, run):
    sizes = node.attrs["shape"]
    one = [1] * len(sizes)
    one[node.attrs["axis"]] = sizes[node.attrs["axis"]]
    array = shape.iota.ref(shape=tuple(one), axis=node.attrs["axis"], dtype=node.attrs["dtype"])
    return (array.reshape((1,) * machine.rank + array.shape),)


@array_rules(*memory.view_rules)
def _(machine, node, args, run):
    return (memory.view_rules.of(node.op)(node, machine.rank)(args[0]),)


@affine_rules(tile.load)
def _(machine, node, args, run):
    memory, known = args[0], node.attrs
    if machine.active is None and len(args) == 1 + len(memory.shape):
        view = memory.view(args[1:], known["shape"], machine.count)
        if view is not None:
            return (view.copy() if memory.written else view,)
    place, rest = _make_block_access(machine, node, args, tuple(known["shape"]), 1)
    mask, other = (*rest, None, None)[:2]
    return (read_blocks(place, mask, other, machine.active, known["edge"] == "clip"),)


@affine_rules(tile.store)
def _(machine, node, args, run):
    memory, block = args[0], node.args[1].type.shape
    if machine.active is None and len(args) == 2 + len(memory.shape) and type(args[1]) is np.ndarray:
        view = memory.view(args[2:], block, machine.count)
        if view is not None:
            view[...] = keep_last_instance(args[1], view.shape)
            return ()
    place, rest = _make_block_access(machine, node, args, block, 2)
    write_blocks(
        place, machine.arrays([args[1]])[0], rest[0] if rest else None, machine.active, node.attrs["edge"] == "clip"
    )
    return ()


def _make_block_access(
    machine: TileMachine, node: Node, args: list[Any], block: tuple, skip: int
) -> tuple[BlockAccess, list[Any]]:
    memory: InstanceMemory = args[0]
    end = skip + len(memory.shape)
    starts, rest = args[skip:end], args[end:]
    if machine.bound:
        starts = [require_exact(a) for a in starts]
    if machine.active is not None:  # indices of inactive instances are ignored
        starts = [s if s.size == 1 else np.where(machine.active, s, 0) for s in machine.arrays(starts)]
    if rest:  # a mask or value that is one for the whole block varies with the instance alone
        given = zip(machine.arrays(rest), node.args[end:], strict=True)
        rest = [a if v.type.rank else expand_block_axes(a, len(block)) for a, v in given]
        rest[0] = require_exact(rest[0])
    return BlockAccess(memory, starts, block, machine.count), rest


@array_rules(shape.check_index)
def _(machine, node, args, run):
    indices = require_exact(args[0])
    counted: Any = True
    if machine.active is not None:
        counted = expand_block_axes(machine.active, indices.ndim - machine.rank)
    return (shape.normalise_indices(indices, counted=counted, **node.attrs),)


@array_rules(tile.gather)
def _(machine, node, args, run):
    memory, _, indices, rest = _align_indices(machine, node, args, 1)
    mask, other = (*rest, None, None)[:2]
    depth = node.out.type.rank
    wanted = _combine_masks(machine, mask, depth)
    safe, _ = check_indices(memory, indices, wanted)
    data = take_elements(memory.array, safe)
    if mask is None:
        return (data,)
    return (np.where(mask, data, np.zeros((), data.dtype) if other is None else other),)


@array_rules(tile.scatter)
def _(machine, node, args, run):
    memory, (value,), indices, rest = _align_indices(machine, node, args, 2)
    depth = max(v.type.rank for v in node.args[2:]) if node.args[2:] else 0
    keep = _combine_masks(machine, rest[0] if rest else None, depth)
    safe, _ = check_indices(memory, indices, keep)
    scatter_elements(memory.array, safe, value, keep)
    return ()


def _combine_masks(machine: TileMachine, mask: Any, depth: int) -> Any:
    if machine.active is None:
        return mask
    lanes = expand_block_axes(machine.active, depth)
    return lanes if mask is None else lanes & mask


def _align_indices(
    machine: TileMachine, node: Node, args: list[Any], skip: int
) -> tuple[InstanceMemory, list[Any], list[Any], list[Any]]:
    """Align the values before the operand `skip`, an index for each axis, and the remaining operands to one rank."""
    memory: InstanceMemory = args[0]
    depth = max((v.type.rank for v in node.args[skip:]), default=0)
    aligned = [
        a.reshape(a.shape[: machine.rank] + (1,) * (depth - v.type.rank) + a.shape[machine.rank :])
        for a, v in zip(args[1:], node.args[1:], strict=True)
    ]
    values, level = aligned[: skip - 1], aligned[skip - 1 :]
    own = [_instance_index(n, a, machine.rank + depth) for a, n in enumerate(memory.array.shape[: memory.lead])]
    count = len(memory.shape)
    sure = [require_exact(a) for a in level[: count + 1]]  # the indices and the mask
    return memory, values, [*own, *sure[:count]], sure[count:] + level[count + 1 :]


def _instance_index(size: int, axis: int, rank: int) -> np.ndarray:
    return np.arange(size).reshape((1,) * axis + (size,) + (1,) * (rank - axis - 1))


@array_rules(tile.atomic, tile.compare_exchange)
def _(machine, node, args, run):
    skip = 2 if node.op is tile.atomic else 3
    memory, values, indices, rest = _align_indices(machine, node, args, skip)
    keep = _combine_masks(machine, rest[0] if rest else None, node.out.type.rank)
    safe, _ = check_indices(memory, indices, keep)
    full = machine.count + node.out.type.shape
    kind = node.attrs.get("kind", "compare")
    return (tile_memory.update_atomically(memory, node.args[0].type.dtype, safe, keep, full, kind, values),)


@array_rules(tile.alloc)
def _(machine, node, args, run):
    grid_axes = len(machine.grid)
    shared = (1,) * (machine.rank - grid_axes) if node.attrs["space"] == SHARED else machine.count[grid_axes:]
    type, variable = node.out.type, node.loc.variable()
    name = f"the {type.space} memory " + (f"`{variable}`" if variable else f"of line {node.loc.line}")
    lead = (*machine.count[:grid_axes], *shared)
    return (allocate_memory(lead, type.shape, type.dtype.numpy, name, machine.bound, node.attrs["padding"]),)


@affine_rules(tile.async_copy)
def _(machine, node, args, run):
    # The copy runs now: that is one of its legal moments.
    dst, src, starts = args[0], args[1], [require_exact(a) for a in args[2:]]
    block, clip = node.attrs["shape"], node.attrs["edge"] == "clip"
    here, there = len(dst.shape), len(src.shape)
    rank = max(here, there, len(block))
    full = (1,) * (rank - len(block)) + tuple(block)
    source = BlockAccess(src, starts[here:], full[rank - there :], machine.count)
    data = read_blocks(source, None, None, machine.active, clip)
    target = BlockAccess(dst, starts[:here], full[rank - here :], machine.count)
    write_blocks(target, data.reshape(*data.shape[: machine.rank], *target.block), None, machine.active, False)
    return ()


@array_rules(tile.async_commit, tile.async_wait)
def _(machine, node, args, run):
    return ()


@array_rules(tile.barrier)
def _(machine, node, args, run):
    # Instances run in lockstep, so earlier writes are visible; only divergence is an error.
    if machine.divergent:
        raise ExecutionError(
            "a barrier is reached by some tiles of a group and not by others",
            expected="every tile of the group at the same barrier",
            received=f"a condition that differs between the {machine.group} tiles",
            suggestion="move the barrier out of the `if` or loop whose condition differs between tiles",
        )
    return ()


# Target ops in the Tile interpreter: an op of one target is executed as the Tile ops that it stands for.
#
# A generator's passes introduce ops that no other target sees (staged operands, asynchronous products). Each has a rule
# that expands it into Tile ops, so that a module after any pass runs in every mode of the interpreter: debug mode
# checks the copies, waits and buffers that a pass has put into the program.


# rule(builder, node, operands) adds Tile ops and gives the results.
expansion_rules = Rules("expansion into Tile ops")


def expand_target_ops(function: Function) -> Function:
    """A tile function without target ops that have an expansion."""
    body = _expand_body(function.body)
    return function if body is function.body else replace(function, body=body)


@lru_cache(maxsize=1024)
def _expand_body(body: Block) -> Block:
    patterns = RewritePatterns("expansion into Tile ops")
    patterns(*expansion_rules)(_expand_node)
    return rewrite_function(Function("", body), patterns).body


def _expand_node(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value]:
    return expansion_rules.of(node.op)(rewriter.builder, node, args)


def needs_whole_blocks(*ops: Op) -> None:
    """Let these ops see their operands at full size, where a block holds 1 for what is the same everywhere."""

    def prepare(node: Node, args: list[Any]) -> list[Any]:
        return [memory.expand_block(a, tuple(map(int, v.type.shape))) for a, v in zip(args, node.args, strict=True)]

    operand_rules(*ops)(prepare)
    array_rules(*ops)(lambda machine, node, args, run: evaluate_pure(machine, node, prepare(node, args)))
