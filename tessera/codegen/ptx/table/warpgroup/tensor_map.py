"""TMA descriptors: the boxes by which tensor-map copies (cp.async.bulk.tensor) move operands, and their sizes.

Boxes are 128 bytes wide and swizzled, as wgmma reads them (PTX ISA, "Tensor map", "Swizzling modes").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.codegen.ptx.ops import async_mma, fetched_block, resident_operand
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.text.builder import element_bytes
from tessera.core.symbolic_dim import round_up
from tessera.ir.core import Function, Node, Value

WGMMA_ROWS = 64  # rows of one wgmma instruction's accumulator
BOX_COLUMNS = 64  # 16-bit elements in a swizzled row of 128 bytes
SWIZZLE_ROW_BYTES = 128
SWIZZLE_ROWS = 8  # the swizzle repeats after so many rows
FETCHED_DEPTH = 32  # of a `fetched_block` in one stage, along the contraction
PRODUCED_OPS = (resident_operand, async_mma, fetched_block)  # ops whose operands the producer fetches


@dataclass(frozen=True)
class TensorMapSpec:
    """A TMA descriptor of a parameter: `index` numbers the entry's descriptors, `box` is the shape of one copy."""

    index: int
    param: int
    box: tuple[int, ...]

    def describe(self, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """The descriptor as manifest data."""
        return {"param": self.param, "box": list(self.box), "dtype": dtype, "shape": list(shape)}


def stage_bytes(node: Node) -> tuple[int, int]:
    """The bytes of the left and of the right operand of a `gemm_mainloop` in a stage."""
    rows, columns, depth = node.attrs["block"]
    size = element_bytes(node.args[1].type.dtype)  # type: ignore[union-attr]
    return rows * depth * size, (columns if node.attrs["flipped"] else round_up(columns, BOX_COLUMNS)) * depth * size


def count_fetched_rows(node: Node) -> int:
    """The rows of a left block that are fetched: those that the memory has, rounded up to the swizzle's period."""
    rows, block = int(node.args[1].type.shape[-2]), int(node.attrs["block"][0])  # type: ignore[union-attr]
    return block if node.attrs["turned"] else min(block, round_up(rows, SWIZZLE_ROWS))


def source_ref(node: Node) -> Value:
    """The memory that the producer fetches for a node."""
    return node.args[1] if node.op is async_mma else node.args[0]


def block_starts(node: Node) -> tuple[Value, ...]:
    """The indices at which the fetched block begins."""
    return node.args[3 if node.attrs["summed"] else 2 :] if node.op is async_mma else node.args[1:]


def block_extent(node: Node) -> tuple[int, int]:
    """The rows and columns of the fetched block in memory."""
    if node.op is not async_mma:
        rows, columns = static_shape(node.out)
        return (columns, rows) if node.attrs.get("turned") else (rows, columns)
    depth, columns = node.attrs["block"]
    return (columns, max(depth, BOX_COLUMNS)) if node.attrs["flipped"] else (depth, columns)


def block_bytes(node: Node) -> int:
    """The bytes of the fetched block."""
    rows, columns = block_extent(node)
    return rows * columns * element_bytes(source_ref(node).type.dtype)  # type: ignore[union-attr]


def ring_bytes(node: Node) -> int:
    """The bytes of a stage of the ring that a fetched node needs."""
    if node.op is not fetched_block:
        return block_bytes(node)
    return block_bytes(node) * FETCHED_DEPTH // static_shape(node.out)[1]


def box_columns(node: Node) -> int:
    """The elements in a swizzled row of the fetched block."""
    return SWIZZLE_ROW_BYTES // element_bytes(source_ref(node).type.dtype)  # type: ignore[union-attr]


def box_rows(node: Node) -> int:
    """The rows of a box of the fetched block."""
    return FETCHED_DEPTH if node.attrs.get("turned") else block_extent(node)[0]


def collect_async_mma_maps(function: Function) -> dict[Node, TensorMapSpec]:
    """The descriptor of each fetched node; nodes with equal boxes of one parameter share a descriptor."""
    made: dict[tuple[int, tuple[int, ...]], TensorMapSpec] = {}
    found = {}
    for node in function.body.walk():
        if node.op in PRODUCED_OPS:
            ref = source_ref(node)
            box = make_box(ref.type.rank, node.attrs["axis"], box_rows(node), box_columns(node))  # type: ignore[union-attr]
            param = function.params.index(ref)
            found[node] = made.setdefault((param, box), TensorMapSpec(len(made), param, box))
    return found


def make_box(rank: int, axis: int, rows: int, columns: int = BOX_COLUMNS) -> tuple[int, ...]:
    """The box of so many rows along an axis (negative), of the columns of a swizzled row."""
    return tuple({axis: rows, -1: columns}.get(i, 1) for i in range(-rank, 0))
