"""The layouts of matrix products: as tensor cores hold them, or a square of elements in each thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera.codegen.ptx.layout import Bit, Layout, width
from tessera.codegen.ptx.ops import multiply_add
from tessera.codegen.ptx.types import SMALL, size
from tessera.ir.core import Node, Value
from tessera.ops import linalg
from tessera.types import DType, bf16, f16, f32, fp8_e4m3, fp8_e5m2, int4, int8, int32, uint8

LANES = 5
STEP = 32  # bytes of the shared axis, in one instruction of the tensor cores
# What elements are multiplied as: every float of 8 bits or fewer is one of f16, whose products GPUs add up in f32.
HELD = {
    bf16: bf16, f16: f16, **dict.fromkeys(SMALL, f16), int4: int8, int8: int8, uint8: uint8,
}  # fmt: skip
# How instructions name the types of the sides.
NAMES = {bf16: "bf16", f16: "f16", fp8_e4m3: "e4m3", fp8_e5m2: "e5m2", int8: "s8", uint8: "u8"}
LEAST = 8  # rows and columns from which tensor cores are worth their while


def tensor_cores(node: Node) -> bool:
    """Whether a product is one for tensor cores: narrow floats or int8, sums as wide as theirs, enough of each axis."""
    if node.op not in (linalg.dot, multiply_add):
        return False
    a, b = (v.type for v in node.args[-2:])
    rows, depth, columns = (int(n) for n in (a.shape[-2], a.shape[-1], b.shape[-1]))  # type: ignore[union-attr]
    held, other = (HELD.get(x.dtype) for x in (a, b))  # type: ignore[union-attr]
    if held is None or other is None or not together(held, other):
        return False
    fits = a.rank == 2 and depth * size(held) % STEP == 0 and min(rows, columns) >= LEAST  # type: ignore[union-attr]
    return fits and a.accumulate == (f32 if held.is_float else int32)  # type: ignore[union-attr]


def together(a: DType, b: DType) -> bool:
    """Whether one instruction multiplies elements of two types: any of 8 bits by each other, floats by floats."""
    return a == b or (a.bits == b.bits == 8 and a.is_float == b.is_float)


def named(a: DType, b: DType) -> str:
    """What the name of an instruction says of the types of its sides: the depth it takes, its sums, and them.

    >>> named(bf16, bf16), named(int8, uint8)
    ('k16.f32.bf16.bf16', 'k32.s32.s8.u8')
    """
    return f"k{STEP // size(a)}.{'f32' if a.is_float else 's32'}.{NAMES[a]}.{NAMES[b]}"


def product_layout(node: Node, threads: int, by_rows: bool) -> Layout:
    """The layout of a product; `by_rows` asks for warps one below the other, where there are rows for all."""
    shape = tuple(int(n) for n in node.out.type.shape)  # type: ignore[union-attr]
    if threads == 1 or not tensor_cores(node):
        return square(shape, threads)
    return fragments(shape, threads, by_rows and enough_rows(shape[0], threads))


def enough_rows(rows: int, threads: int) -> bool:
    """Whether each warp of a team has 16 rows of its own."""
    return width(rows) >= 4 + width(threads) - LANES


def fragments(shape: tuple[int, ...], threads: int, by_rows: bool = False) -> Layout:
    """As m16n8 instructions give their sums: warps side by side, their parts as square as can be, or all in one column.

    In one column the left side of another product has the same layout: its rows are the warp's own.

    A thread holds two neighbours of a row, the same eight rows further down, and these again for each 8 columns
    (PTX ISA, "Matrix fragments for mma.m16n8k16").
    """
    rows, columns = width(shape[0]), width(shape[1])
    inner: list[Bit] = [(1, 0), (0, 3)]
    lanes: list[Bit] = [(1, 1), (1, 2), (0, 0), (0, 1), (0, 2)]
    down: list[Bit] = [(0, p) for p in range(4, rows)]
    across: list[Bit] = [(1, p) for p in range(3, columns)]
    warps: list[Bit] = []
    while len(warps) < width(threads) - LANES and (down or across):
        tall = 4 + len(down) >= 3 + len(across) or by_rows
        warps.append((down if tall and down else across or down).pop())
    sizes = (rows, columns)
    registers = tuple(b for b in (*inner, *across, *down) if b[1] < sizes[b[0]])
    known = tuple(b if b[1] < sizes[b[0]] else None for b in lanes)
    return Layout(shape, registers, (*known, *warps, *(None,) * (width(threads) - LANES - len(warps))))


def group_fragments(shape: tuple[int, ...], threads: int) -> Layout:
    """As instructions of a warp group give their sums: four warps one below the other, then the groups.

    (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16"; further rows are registers.)
    """
    rows, columns = width(shape[0]), width(shape[1])
    lanes: list[Bit] = [(1, 1), (1, 2), (0, 0), (0, 1), (0, 2), (0, 4), (0, 5)]
    groups: list[Bit] = [(0, 6 + i) for i in range(width(threads) - len(lanes))]
    down = [(0, p) for p in range(6 + len(groups), rows)]
    return Layout(shape, ((1, 0), (0, 3), *((1, p) for p in range(3, columns)), *down), (*lanes, *groups))


def paired(layout: Layout) -> Layout:
    """The layout of a block's words, where each register pair of a layout holds two neighbours of a row."""
    names = {(a, p): (a, p - 1 if a == 1 else p) for a, n in enumerate(layout.shape) for p in range(width(n))}
    del names[1, 0]
    return layout.renamed((layout.shape[0], layout.shape[1] // 2), names)


def square(shape: tuple[int, ...], threads: int) -> Layout:
    """A square of elements in each thread's registers, neighbours along rows first."""
    row, column = len(shape) - 2, len(shape) - 1
    rows, columns = ([(axis, p) for p in range(width(shape[axis]))] for axis in (row, column))
    outer = [(a, p) for a in reversed(range(row)) for p in range(width(shape[a]))]
    lanes = width(threads)
    held = max(0, len(rows) + len(columns) + len(outer) - lanes)
    vector = min(2, held, len(columns))
    tall = min(len(rows), (held - vector + 1) // 2)
    wide = min(len(columns) - vector, held - vector - tall)
    tall = min(len(rows), held - vector - wide)
    inner: list[Bit] = [*columns[:vector], *rows[:tall], *columns[len(columns) - wide :]]
    rest = [b for b in (*columns, *rows, *outer) if b not in inner]
    across = rest[:lanes]
    return Layout(shape, (*inner, *rest[lanes:]), (*across, *(None,) * (lanes - len(across))))


def operand_layouts(node: Node, held: Callable[[Value], Layout], direct: bool, threads: int) -> Sequence[Layout | None]:
    """The layouts in which the operands of a product are wanted: as they are, and then put into memory; but
    `direct` asks for the left one in the registers that the instructions read."""
    left, right = node.args[-2:]
    shape = tuple(int(n) for n in left.type.shape)  # type: ignore[union-attr]
    return [fragments(shape, threads, True) if direct else held(left), held(right)]
