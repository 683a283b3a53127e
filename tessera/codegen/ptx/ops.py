"""Ops and function attributes of the PTX level, which the target's passes introduce: layout conversion, asynchronous
MMAs, staged operands; facts that a pass records for later passes.

They are part of the IR: the printer writes them, the parser reads them, and no pass keeps state beside the module.

| attribute | recorded by | meaning |
|---|---|---|
| `ptx.arch` | launch analysis | the architecture, as in ".target" |
| `ptx.grids` | launch analysis | the grid of each launch, all of one rank |
| `ptx.noalias` | launch analysis | in no launch does a written array share memory with another argument |
| `ptx.alignments` | launch analysis | for each parameter, a number of bytes that its address is a multiple of |
| `ptx.constants` | launch analysis | the parameters that are always inputs of the program, and no kernel writes |
| `ptx.rounding` | launch analysis | present if a result has a rounding policy: passes then leave the function alone |
| `ptx.kernel` | kernel selection | `uniform`, `warp_specialised` or `prefetching` |
| `ptx.stages` | kernel selection | the stages of the ring buffer in shared memory |
| `ptx.cluster` | kernel selection | size, grid axis and multicast operand of a thread-block cluster |
| `ptx.threads` | thread mapping | the threads that work on one tile |
| `ptx.teams` | thread mapping | the teams of a block that work on tiles of their own (2: ping-pong) |
| `ptx.vector` | thread mapping | neighbouring elements that a thread holds |
| `ptx.resident` | thread mapping | blocks that a multiprocessor should hold at once; 0: any |
| `ptx.raster` | rasterisation | of a persistent kernel: axes, whether the last falls, and the programs of a section |
| `ptx.layouts` | layout assignment | the distributed layouts of the function's blocks |
| `ptx.value_layouts` | layout assignment | for each value in order the index of its layout, or - for a ref |
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera.codegen.ptx.text.builder import SMALL_FLOATS, element_bytes
from tessera.core.types import (
    SHARED,
    DType,
    RefType,
    TensorType,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    fp8_e4m3,
    fp8_e5m2,
    int4,
    int8,
    int32,
    int64,
    uint8,
)  # fmt: skip
from tessera.interp.tile.op_rules import expansion_rules, needs_whole_blocks
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.levels import TARGET_OPS, define_target_level
from tessera.ir.rules import STORAGE, Op
from tessera.lower.passes.canonicalisation import COMBINERS
from tessera.ops.dialects import control_flow, tile
from tessera.ops.dialects.control_flow import refuse_direct_call
from tessera.ops.tensor import basic, contractions, elementwise, reduce
from tessera.ops.tensor import shape as shapes

# Function attributes: facts that a pass records for later passes and for emission.


PREFIX = "ptx."
UNIFORM, WARP_SPECIALISED, PREFETCHING = "uniform", "warp_specialised", "prefetching"


def set_facts(function: Function, **facts: Any) -> Function:
    """The function with these facts as attributes."""
    return replace(function, attrs=Attrs({**function.attrs, **{PREFIX + k: v for k, v in facts.items()}}))


def get_fact(function: Function, name: str, default: Any = None) -> Any:
    """A fact that an earlier pass recorded, or the default."""
    return function.attrs.get(PREFIX + name, default)


@dataclass(frozen=True)
class LaunchFacts:
    """What launch analysis knows of a function."""

    arch: str
    grids: tuple[tuple[int, ...], ...]
    noalias: bool
    alignments: tuple[int, ...]

    @classmethod
    def of(cls, function: Function) -> LaunchFacts:
        """The facts that a function's attributes hold."""
        return cls(*(get_fact(function, name) for name in ("arch", "grids", "noalias", "alignments")))

    @property
    def grid(self) -> tuple[int, ...]:
        """The first grid; empty for a function that is never launched."""
        return self.grids[0] if self.grids else ()


# Ops of the PTX level, which the target's passes introduce: layout conversion, asynchronous MMAs, staged operands.
#
# Each has NumPy semantics for one program instance. An op that reads memory, or that is no elementwise op, also has an
# expansion into Tile ops, by which the Tile interpreter runs it for all instances and debug mode checks it.


WARP_TILES = 32  # tiles of a group that exchange bits by one instruction
LEVEL = "ptx"  # the level of a module between the pipeline's first pass and its text
define_target_level(LEVEL)


def define_op(
    infer: Callable[..., Any], pointwise: bool = False, effects: frozenset[str] = frozenset()
) -> Callable[[Callable[..., Any]], Op]:
    """Define an op that is legal at the level `ptx` alone; no other target sees it."""

    def define(ref: Callable[..., Any]) -> Op:
        parameters = inspect.signature(ref).parameters
        keyword = {k: p for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        operands = tuple(k for k in parameters if k not in keyword)
        name = f"{LEVEL}.{ref.__name__}"
        TARGET_OPS[name] = Op(
            name, ref, infer, STORAGE, pointwise, refuse_direct_call, None, effects, operands, keyword
        )
        return TARGET_OPS[name]

    return define


@define_op(lambda x, *, layout: x, pointwise=True)
def convert_layout(x, *, layout: str):
    """Layout conversion: the same block, distributed over threads and registers as `layout` says."""
    return x


def _accumulator_type(acc: TensorType, a: TensorType, b: TensorType) -> TensorType:
    return acc


@define_op(_accumulator_type)
def matmul_accumulate(acc, a, b):
    """`acc` plus the matrix product of `a` and `b`, accumulated in place."""
    return acc + np.matmul(np.asarray(a, acc.dtype), np.asarray(b, acc.dtype))


def _mainloop_type(acc: TensorType, a: RefType, b: RefType, *scalars: TensorType, **_: Any) -> TensorType:
    return acc


@expansion_rules(matmul_accumulate)
def _(builder, node, args):
    return [add_product(builder, *args)]


def add_product(builder: Builder, acc: Value, a: Value, b: Value) -> Value:
    """`acc` plus the matrix product of two blocks, as Tile ops."""
    product = builder.add(contractions.dot, [a, b], {"dtype": acc.type.dtype}).out
    return builder.add(elementwise.add, [acc, product]).out


def load_matrix(
    builder: Builder, ref: Value, starts: Sequence[Value], shape: Sequence[int], turned: bool, axis: int = -2
) -> Value:
    """A block of memory, 0 outside, its axes exchanged where `turned`: as Tile ops. Its rows lie along `axis`, its
    columns along the last one."""
    whole = [1] * (len(starts) - 1) + [shape[1]]
    whole[axis] = shape[0]
    block = builder.add(tile.load, [ref, *starts], {"shape": tuple(whole), "edge": "clip"}).out
    block = builder.add(shapes.reshape, [block], {"shape": tuple(shape)}).out
    return builder.add(shapes.permute, [block], {"axes": (1, 0)}).out if turned else block


def index_constant(builder: Builder, n: int) -> Value:
    """A constant of the index type."""
    return builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out


@define_op(_mainloop_type)
def gemm_mainloop(
    acc, a_ref, b_ref, lower, upper, *starts, step: int, left: tuple, right: tuple, block: tuple, flipped: bool,
    turned: bool = False, digits: tuple = (), strides: tuple = (),
):  # fmt: skip
    """Mainloop of a GEMM: for each index from `lower` to before `upper` by `step`, a block of `a_ref` times one of
    `b_ref` is added to `acc`.

    `block` is (rows, columns, depth). For each axis of `a_ref` and `b_ref`, `left` and `right` hold the number of the
    element of `starts` at which the block begins, or -1 for the index. Elements out of bounds read as 0. `flipped`:
    `b_ref` is transposed in memory; `turned`: `a_ref` is.

    A collapsed nest of loops has `digits`, their iterations from the outermost: the index is a number in this mixed
    radix. `strides` are what each digit adds to the start on each axis of `a_ref`, and of `b_ref`.
    """
    rows, columns, depth = block
    first, second = (depth, rows) if turned else (rows, depth), (columns, depth) if flipped else (depth, columns)
    total = np.array(acc)
    for index in range(int(lower), int(upper), step):
        places = [[index if at < 0 else int(starts[at]) for at in side] for side in (left, right)]
        for side, steps in zip(places, strides, strict=False):
            for axis, each in enumerate(steps):
                side[axis] += sum(d * n for d, n in zip(np.unravel_index(index, digits), each, strict=True))
        x, y = _load_block(a_ref, places[0], first), _load_block(b_ref, places[1], second)
        total = total + np.matmul(x.T if turned else x, y.T if flipped else y, dtype=total.dtype)
    return total


@expansion_rules(gemm_mainloop)
def _(builder, node, args):
    acc, a_ref, b_ref, lower, upper, *starts = args
    rows, columns, depth = node.attrs["block"]
    turned, flipped = node.attrs["turned"], node.attrs["flipped"]
    params = (Value(lower.type, "round"), Value(acc.type))
    with builder.region() as nodes:
        sides = [[params[0] if at < 0 else starts[at] for at in node.attrs[side]] for side in ("left", "right")]
        for side, steps in zip(sides, node.attrs["strides"], strict=False):
            side[:] = _add_digits(builder, params[0], node.attrs["digits"], side, steps)
        a = load_matrix(builder, a_ref, sides[0], (depth, rows) if turned else (rows, depth), turned)
        b = load_matrix(builder, b_ref, sides[1], (columns, depth) if flipped else (depth, columns), flipped)
        total = add_product(builder, params[1], a, b)
    body, step = Block(params, tuple(nodes), (total,)), index_constant(builder, node.attrs["step"])
    return builder.add(control_flow.for_, [lower, upper, step, acc], types=(acc.type,), regions=(body,)).results


def _add_digits(
    builder: Builder, index: Value, digits: Sequence[int], starts: Sequence[Value], strides: Sequence[Sequence[int]]
) -> list[Value]:
    """Starts plus what the digits of an index add to them, as Tile ops."""
    found, period = list(starts), math.prod(digits)
    for place, count in enumerate(digits):
        whole, period = period, period // count
        digit = builder.add(elementwise.remainder, [index, index_constant(builder, whole)]).out
        digit = builder.add(elementwise.floor_divide, [digit, index_constant(builder, period)]).out
        for axis, each in enumerate(strides):
            if each[place]:
                step = builder.add(elementwise.mul, [digit, index_constant(builder, each[place])]).out
                found[axis] = builder.add(elementwise.add, [found[axis], step]).out
    return found


def _load_block(array: np.ndarray, starts: list[int], shape: tuple[int, int], axis: int = -2) -> np.ndarray:
    """A block with rows along `axis` and columns along the last one; 0 outside the memory."""
    array, first = np.moveaxis(array, axis, -2), starts[axis]
    starts = [*starts[:axis], *starts[axis:][1:-1], first, starts[-1]]
    matrix = array[tuple(starts[:-2])]
    found = np.zeros(shape, matrix.dtype)
    spans = [(max(s, 0), min(s + n, size)) for s, n, size in zip(starts[-2:], shape, matrix.shape, strict=True)]
    if all(low < high for low, high in spans):
        inner = tuple(slice(low - s, high - s) for (low, high), s in zip(spans, starts[-2:], strict=True))
        found[inner] = matrix[tuple(slice(low, high) for low, high in spans)]
    return found


def _smem_slots_type(*, shape: tuple[int, ...], dtype: DType, swizzled: bool = False, padding: int = 0) -> RefType:
    return RefType(tuple(shape), dtype, SHARED)


@define_op(_smem_slots_type, effects=frozenset(("memory",)))
def smem_slots(*, shape: tuple, dtype: DType, swizzled: bool = False, padding: int = 0):
    """Multi-stage staging buffer in shared memory: the first axis counts slots of one block each.

    The program itself orders accesses by waits and barriers. `swizzled`: only ldmatrix reads the slots, and 16-byte
    chunks are permuted within each row. `padding`: bytes after each row; products read single elements of the slots.
    """


@expansion_rules(smem_slots)
def _(builder, node, args):
    return builder.add(tile.alloc, [], {k: node.attrs[k] for k in ("shape", "dtype")}).results


def _smem_operand_type(ref: RefType, slot: TensorType, *, flipped: bool) -> TensorType:
    rows, columns = math.prod(ref.shape[1:-1]), ref.shape[-1]  # type: ignore[arg-type]
    return ref.block((columns, rows) if flipped else (rows, columns))  # type: ignore[arg-type]


@define_op(_smem_operand_type)
def smem_operand(ref, slot, *, flipped: bool):
    """The block in a slot as an operand that ldmatrix reads in place, transposed if `flipped`: it has no registers."""
    block = ref[int(slot)].reshape(-1, ref.shape[-1])
    return block.T if flipped else block


@expansion_rules(smem_operand)
def _(builder, node, args):
    (ref, slot), (_, *block) = args, args[0].type.shape
    starts = [slot, *(index_constant(builder, 0) for _ in block)]
    loaded = builder.add(tile.load, [ref, *starts], {"shape": (1, *block)}).out
    matrix = builder.add(shapes.reshape, [loaded], {"shape": (math.prod(block[:-1]), block[-1])}).out
    return builder.add(shapes.permute, [matrix], {"axes": (1, 0)}).results if node.attrs["flipped"] else [matrix]


def _resident_operand_type(ref: RefType, *starts: TensorType, shape: tuple[int, ...], axis: int = -2) -> TensorType:
    return ref.block(shape)


@define_op(_resident_operand_type)
def resident_operand(ref, *starts, shape: tuple, axis: int = -2):
    """A block that a TMA copy puts in shared memory, where it stays until it is released.

    Its rows lie along `axis` of `ref`, its columns along the last one.
    """
    return _load_block(ref, [int(s) for s in starts], shape, axis)


@expansion_rules(resident_operand)
def _(builder, node, args):
    ref, *starts = args
    return [load_matrix(builder, ref, starts, node.attrs["shape"], False, node.attrs["axis"])]


def _fetched_block_type(ref: RefType, *starts: TensorType, shape: tuple[int, ...], **_: Any) -> TensorType:
    return ref.block(shape)


@define_op(_fetched_block_type)
def fetched_block(ref, *starts, shape: tuple, turned: bool, axis: int = -2):
    """A block that TMA copies put in stages of the ring, from which threads read their elements into registers.

    Its rows lie along `axis` of `ref`, its columns along the last one; `turned`: it is transposed in memory.
    """
    found = _load_block(ref, [int(s) for s in starts], shape[::-1] if turned else shape, axis)
    return found.T if turned else found


@expansion_rules(fetched_block)
def _(builder, node, args):
    ref, *starts = args
    sizes, turned = node.attrs["shape"], node.attrs["turned"]
    return [load_matrix(builder, ref, starts, sizes[::-1] if turned else sizes, turned, node.attrs["axis"])]


@define_op(lambda ref, *starts, shape, same: ref.block(shape))
def prefetched_load(ref, *starts, shape: tuple, same: bool):
    """A block that a bulk copy has prefetched for this program; one that is the `same` for all is copied once."""
    return ref[tuple(slice(int(s), int(s) + n) for s, n in zip(starts, shape, strict=True))]


@expansion_rules(prefetched_load)
def _(builder, node, args):
    return builder.add(tile.load, args, {"shape": node.attrs["shape"]}).results


@define_op(lambda x: (), effects=frozenset(("release",)))
def release_operand(x):
    """Release the buffer of a `resident_operand`: no later op reads it. It computes nothing."""
    return ()


def _async_mma_type(left: TensorType, ref: RefType, *rest: TensorType, block: tuple, **_: Any) -> TensorType:
    return left.with_shape((left.shape[0], block[1])).with_dtype(f32)


@define_op(_async_mma_type)
def async_mma(
    left, ref, *rest, block: tuple, flipped: bool, summed: bool, axis: int = -2, shares: bool = False,
    keeps: bool = False,
):  # fmt: skip
    """Asynchronous MMA (wgmma): `left` times the block of `ref` at given starts, added to an accumulator if `summed`.

    `rest` holds the accumulator if there is one, then the starts. `left` is a `resident_operand` or the result of
    `pack_pairs`. `block` is (depth, columns); `flipped`: `ref` is transposed in memory. Its rows lie along
    `axis` of `ref`, its columns along the last one. Elements out of bounds are 0.

    `keeps`: the next product reads the same block, which stays in its stage; `shares`: the product before has kept it.
    """
    starts = [int(s) for s in rest[1 if summed else 0 :]]
    found = _load_block(ref, starts, block[::-1] if flipped else block, axis)
    right = found.T if flipped else found
    total = np.matmul(np.asarray(left).view(ref.dtype), right, dtype=np.float32)
    return rest[0] + total if summed else total


@expansion_rules(async_mma)
def _(builder, node, args):
    left, ref, *rest = args
    sums, starts = (rest[:1], rest[1:]) if node.attrs["summed"] else ([], rest)
    block, flipped = node.attrs["block"], node.attrs["flipped"]
    right = load_matrix(builder, ref, starts, block[::-1] if flipped else block, flipped, node.attrs["axis"])
    if left.type.dtype != ref.type.dtype:
        left = builder.add(unpack_pairs, [left], {"dtype": ref.type.dtype}).out
    product = builder.add(contractions.dot, [left, right], {"dtype": f32}).out
    return [builder.add(elementwise.add, [*sums, product]).out if sums else product]


def _pack_pairs_type(x: TensorType) -> TensorType:
    return x.with_shape((x.shape[0], x.shape[1] // 2)).with_dtype(int32)


@define_op(_pack_pairs_type)
def pack_pairs(x):
    """Pairs of neighbouring 16-bit elements of a row as 32-bit words, the first in the lower half."""
    return np.ascontiguousarray(x).view(np.int32)


@define_op(lambda x, *, dtype: x.with_shape((x.shape[0], 2 * x.shape[1])).with_dtype(dtype))
def unpack_pairs(x, *, dtype: DType):
    """The inverse of `pack_pairs`: 32-bit words as pairs of 16-bit elements. Only expansions use it."""
    return np.ascontiguousarray(x).view(dtype.numpy)


needs_whole_blocks(pack_pairs, unpack_pairs)


@define_op(lambda x, y, z: x, pointwise=True)
def fma(x, y, z):
    """`x` times `y` plus `z`, rounded once."""
    return np.asarray(np.float64(x) * y + z, x.dtype)


@define_op(lambda x: x.with_dtype(bf16), pointwise=True)
def truncate_bf16(x):
    """An f32 truncated to bf16: the upper half of its bits."""
    bits = np.ascontiguousarray(x).view(np.uint32) >> np.uint32(16)
    return bits.astype(np.uint16).view(bf16.numpy)


@define_op(lambda x: x, pointwise=True)
def exp2_ftz(x):
    """Two to the power `x`; a subnormal result is flushed to 0."""
    found = np.exp2(x)
    return np.where(found < np.finfo(np.float32).tiny, np.float32(0), found)


@define_op(lambda condition: condition.with_dtype(int64))
def ballot(condition):
    """The tiles of this tile's warp in which a condition holds, as the bits of an int64, for each element."""


@expansion_rules(ballot)
def _(builder, node, args):
    seen = builder.add(tile.collect, args, {"width": WARP_TILES}).out
    sizes = seen.type.shape
    lanes = builder.add(shapes.iota, [], {"shape": sizes, "axis": 0, "dtype": int64}).out
    one, none = (builder.add(basic.full, [], {"shape": sizes, "value": n, "dtype": int64}).out for n in (1, 0))
    bits = builder.add(elementwise.shift_left, [one, lanes]).out
    chosen = builder.add(elementwise.where, [seen, bits, none]).out
    return builder.add(reduce.sum, [chosen], {"axis": (-len(sizes),), "keepdims": False}).results


@define_op(lambda x, *, place: x.with_shape((1,) * len(place)))
def element(x, *, place: tuple):
    """One element of a block that a thread holds alone, as a block of one element."""
    return np.asarray(x)[place].reshape((1,) * len(place))


@expansion_rules(element)
def _(builder, node, args):
    (x,), place = args, node.attrs["place"]
    described = {"dtype": x.type.dtype, "space": "register", "alignment": 16, "swizzle": "", "padding": 0}
    memory = builder.add(tile.alloc, [], {"shape": x.type.shape, **described}).out
    builder.add(tile.store, [memory, x, *(index_constant(builder, 0) for _ in place)])
    starts = [index_constant(builder, n) for n in place]
    return builder.add(tile.load, [memory, *starts], {"shape": (1,) * len(place)}).results


@define_op(lambda x, place, *, inside: x.with_shape((*x.shape[:-1], 1)))
def element_of_row(x, place, *, inside: bool):
    """The element of each row of a block at a place, an integer; 0 where that is outside, unless all are `inside`."""


@expansion_rules(element_of_row)
def _(builder, node, args):
    x, place = args
    along = builder.add(shapes.iota, [], {"shape": x.type.shape, "axis": -1, "dtype": place.type.dtype}).out
    spread = builder.add(basic.broadcast_to, [place], {"shape": x.type.shape}).out
    zero = builder.add(basic.full, [], {"shape": x.type.shape, "value": 0, "dtype": x.type.dtype}).out
    chosen = builder.add(elementwise.where, [builder.add(elementwise.equal, [along, spread]).out, x, zero]).out
    return builder.add(reduce.sum, [chosen], {"axis": (-1,), "keepdims": True}).results


@define_op(lambda limit, *, shape, steps: TensorType(shape, bool_))
def indices_below(limit, *, shape: tuple, steps: tuple):
    """A mask: whether the sum of an element's indices, each times the step of its axis, is less than `limit`."""
    return sum(n * i for n, i in zip(steps, np.indices(shape), strict=True)) < limit


@expansion_rules(indices_below)
def _(builder, node, args):
    sizes = node.attrs["shape"]
    total = builder.add(basic.full, [], {"shape": sizes, "value": 0, "dtype": int64}).out
    for axis, step in enumerate(node.attrs["steps"]):
        along = builder.add(shapes.iota, [], {"shape": sizes, "axis": axis, "dtype": int64}).out
        factor = builder.add(basic.full, [], {"shape": sizes, "value": step, "dtype": int64}).out
        total = builder.add(elementwise.add, [total, builder.add(elementwise.mul, [along, factor]).out]).out
    limit = builder.add(basic.broadcast_to, [args[0]], {"shape": sizes}).out
    return builder.add(elementwise.less, [total, limit]).results


@define_op(lambda: (), effects=frozenset(("wait",)))
def wait_copy():
    """Wait for the TMA copy of the next `async_mma`'s operand before other work. It computes nothing."""
    return ()


@define_op(lambda x: (), effects=frozenset(("wait",)))
def wait_mma(x):
    """Wait for an `async_mma` to complete before other work. It computes nothing."""
    return ()


@expansion_rules(release_operand, wait_copy, wait_mma)
def _(builder, node, args):
    # A hint to emission, which waits for each value at its first use in any case: leaving one out is no error.
    return ()


# Tensor cores: the products that mma.sync computes, and the types of its operands (PTX ISA, "Matrix multiply-accumulate
# operation using mma instruction").

MMA_K_BYTES = 32  # bytes of the k axis of one instruction of the tensor cores
# The operand type of mma.sync for each element type: floats of 8 bits or fewer become f16, accumulated in f32.
MMA_OPERAND_TYPES = {
    bf16: bf16, f16: f16, **dict.fromkeys(SMALL_FLOATS, f16), int4: int8, int8: int8, uint8: uint8,
}  # fmt: skip
# Operand types as PTX instructions spell them.
MMA_TYPE_NAMES = {bf16: "bf16", f16: "f16", fp8_e4m3: "e4m3", fp8_e5m2: "e5m2", int8: "s8", uint8: "u8"}
MIN_MMA_EXTENT = 8  # rows and columns from which tensor cores pay


def folds_rows(node: Node) -> bool:
    """Whether a node adds up the rows of a block that partial sums fold: each thread what it holds itself."""
    return node.op in COMBINERS and node.attrs["axis"] == (0,) and len(node.out.type.shape) == 1


def uses_tensor_cores(node: Node) -> bool:
    """Whether tensor cores compute a product: their operand and accumulator types, and large enough axes."""
    if node.op not in (contractions.dot, matmul_accumulate):
        return False
    a, b = (v.type for v in node.args[-2:])
    rows, depth, columns = (int(n) for n in (a.shape[-2], a.shape[-1], b.shape[-1]))  # type: ignore[union-attr]
    held, other = (MMA_OPERAND_TYPES.get(x.dtype) for x in (a, b))  # type: ignore[union-attr]
    if held is None or other is None or not are_mma_compatible(held, other):
        return False
    fits = a.rank == 2 and depth * element_bytes(held) % MMA_K_BYTES == 0 and min(rows, columns) >= MIN_MMA_EXTENT  # type: ignore[union-attr]
    return fits and a.accumulate == (f32 if held.is_float else int32)  # type: ignore[union-attr]


DOUBLE_MMA = (16, 8, 8)  # rows, columns and depth of one instruction on doubles


def uses_double_mma(node: Node) -> bool:
    """Whether tensor cores compute a product of doubles: axes that whole instructions cover."""
    return _find_whole_sizes(node, f64) is not None


def _find_whole_sizes(node: Node, dtype: DType) -> tuple[int, int, int] | None:
    """Rows, depth and columns of a product in one type that whole instructions cover."""
    if node.op not in (contractions.dot, matmul_accumulate):
        return None
    a, b = (v.type for v in node.args[-2:])
    if a.rank != 2 or {a.dtype, b.dtype, a.accumulate} != {dtype}:  # type: ignore[union-attr]
        return None
    rows, depth, columns = (int(n) for n in (a.shape[-2], a.shape[-1], b.shape[-1]))  # type: ignore[union-attr]
    whole = rows >= DOUBLE_MMA[0] and columns >= DOUBLE_MMA[1] and depth % DOUBLE_MMA[2] == 0
    return (rows, depth, columns) if whole else None


# Bytes after a row of operands whose fragments are read element by element, so that the lanes of an access use all
# banks: where rows are along the contraction (f32: pairs of a row), or across it (f32: every other row).
FRAGMENT_PADDINGS = {f64: (32, 32), f32: (32, 16)}
LEAST_SPLIT = 1 << 14  # multiply-adds of an f32 product from which on its parts of tf32 pay
# Elements of a contraction from which on parts of tf32 stay within the bound of f32: they leave out the product of the
# small parts, 2**-22 of an element's magnitude at most, and cut off the last bit of each small part, another 2**-22.
LEAST_SPLIT_DEPTH = 16


def uses_split_mma(node: Node) -> bool:
    """Whether tensor cores compute a product of f32 in parts of tf32: axes that whole instructions cover."""
    sizes = _find_whole_sizes(node, f32)
    if sizes is None or math.prod(sizes) < LEAST_SPLIT:
        return False
    rows, depth, columns = sizes
    return depth >= LEAST_SPLIT_DEPTH and columns % DOUBLE_MMA[1] == 0 and rows & (rows - 1) == 0


def uses_any_mma(node: Node) -> bool:
    """Whether tensor cores compute a product, also of doubles, or of f32 in parts."""
    return uses_tensor_cores(node) or uses_double_mma(node) or uses_split_mma(node)


def are_mma_compatible(a: DType, b: DType) -> bool:
    """Whether one instruction takes these operand types: equal ones, or two 8-bit ones that are both floats or not."""
    return a == b or (a.bits == b.bits == 8 and a.is_float == b.is_float)


def mma_type_suffix(a: DType, b: DType) -> str:
    """The suffix of an MMA instruction: its k, the accumulator type and the operand types.

    >>> mma_type_suffix(bf16, bf16), mma_type_suffix(int8, uint8)
    ('k16.f32.bf16.bf16', 'k32.s32.s8.u8')
    """
    return (
        f"k{MMA_K_BYTES // element_bytes(a)}.{'f32' if a.is_float else 's32'}.{MMA_TYPE_NAMES[a]}.{MMA_TYPE_NAMES[b]}"
    )
