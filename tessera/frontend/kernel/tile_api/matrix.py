"""Matrix products: MMA with wide accumulation, and fragments, the register operands of matrix instructions (WMMA)."""

from __future__ import annotations

from typing import Any

from tessera.core.errors import ArgumentError, ShapeError
from tessera.core.types import DType, as_dtype, bf16, f32, int32
from tessera.frontend.kernel.memref import MemRefAccess, MemRefView, load_if_memref, subscript_view, takes_memrefs
from tessera.frontend.kernel.tile_api.blocks import round_to_dtype, wider_dtype
from tessera.frontend.kernel.tile_api.memory import alloc_register, locate_access
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.contractions import dot as dot_op
from tessera.ops.tensor.shape import iota, reshape

# Fragments: the operands and sums of matrix instructions, as memory of one tile's own.


class FragmentFactory:
    """`tile.fragment`: makes fragments, filled with zeros. A matrix instruction takes an `a`, a `b` and a `c`."""

    def a(self, shape: Any, dtype: Any = bf16) -> MemRefView:
        """A left operand [M, K]."""
        return _zero_fragment(shape, dtype)

    def b(self, shape: Any, dtype: Any = bf16) -> MemRefView:
        """A right operand [K, N]."""
        return _zero_fragment(shape, dtype)

    def c(self, shape: Any, dtype: Any = f32) -> MemRefView:
        """A sum [M, N]."""
        return _zero_fragment(shape, dtype)


fragment = FragmentFactory()


def _zero_fragment(shape: Any, dtype: Any) -> MemRefView:
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise ShapeError("a fragment is a matrix", expected="shape=(16, 16)", received=repr(shape))
    made = alloc_register(shape, dtype)
    made.store(0)
    return made


@takes_memrefs
def load_matrix(into: Any, place: Any, stride: int | None = None) -> None:
    """Fill a fragment with the matrix at a place; from a whole tensor, with this program's block of it.

    `stride` is the number of elements from one row to the next: a memory of one axis needs it, and where the
    memory has rows it must be theirs.

    Raises:
        ArgumentError: `into` is no fragment, or the stride is not that of the memory's rows.
    """
    into.store(_locate_matrix(place, _is_fragment(into).shape, stride).load())


@takes_memrefs
def store_matrix(place: Any, held: Any, stride: int | None = None) -> None:
    """Write a fragment (or a block) to the matrix at a place, found as `load_matrix` finds it."""
    block = load_if_memref(held)
    if not isinstance(block, Tensor) or block.ndim != 2:
        raise ShapeError("a matrix is stored", received=str(getattr(block, "type", block)))
    _locate_matrix(place, tuple(int(n) for n in block.shape), stride).store(block)


def _is_fragment(x: Any) -> MemRefView:
    if not isinstance(x, MemRefView) or x.ndim != 2:
        raise ArgumentError(
            "this is no fragment", expected="tile.fragment.a(shape=(16, 16), dtype=ts.bf16)", received=repr(x)
        )
    return x


def _locate_matrix(place: Any, shape: tuple[int, ...], stride: int | None) -> MemRefAccess:
    """The matrix of a shape at a place."""
    found = locate_access(place, (), None)
    if isinstance(found, MemRefView) and found.ndim == 1 and len(found.memory.shape) == 1:
        return _strided_matrix(found, shape, stride)
    row = found.memory.shape[-1]
    if stride is not None and stride != row:
        raise ArgumentError(
            f"the rows of {found.memory.name} are {row} elements apart", expected=f"stride={row}",
            received=f"stride={stride}",
        )  # fmt: skip
    return locate_access(place, (), shape)


def _strided_matrix(view: MemRefView, shape: tuple[int, ...], stride: int | None) -> MemRefAccess:
    """Rows `stride` apart in a memory of one axis."""
    if not isinstance(stride, int) or stride < shape[1]:
        raise ArgumentError(
            f"rows of {shape[1]} elements in a memory of one axis need a stride",
            expected=f"stride= an int of at least {shape[1]}", received=repr(stride),
        )  # fmt: skip
    rows = reshape(iota(shape=shape[:1]) * stride, shape=(shape[0], 1))
    return subscript_view(view, rows + reshape(iota(shape=shape[1:]), shape=(1, shape[1])))


def matrix_product(a: Any, b: Any, acc: Any = None) -> Tensor:
    """The product of two blocks, plus `acc`, in the accumulation type (f32 for 16-bit floats, int32 for int8)."""
    a, b = _load_blocks(a, b)
    found = dot_op(a, b, dtype=a.type.accumulate)
    return found if acc is None else load_if_memref(acc) + found


def _load_blocks(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    a, b = load_if_memref(a), load_if_memref(b)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise ArgumentError("a matrix product needs two blocks", received=f"{a!r} and {b!r}")
    return a, b


@takes_memrefs
def mma(*blocks: Any, accumulate: Any = None, saturate: bool = False, rounding: str = "rte") -> Any:
    """mma(a, b), mma(a, b, acc) or mma(out, a, b, acc): a times b, plus acc.

    The last form is that of tensor cores: it fills the fragment `out`; as a statement it gives a variable `out` the
    result. The keywords are those of `mma_mixed`.

    Raises:
        ArgumentError: fewer than 2 or more than 4 blocks, or what is no block.
    """
    if not 2 <= len(blocks) <= 4:
        raise ArgumentError(f"mma takes 2 to 4 blocks, not {len(blocks)}", expected="mma(a, b[, acc])")
    a, b, *acc = blocks if len(blocks) < 4 else blocks[1:]
    if accumulate is None and not saturate and rounding == "rte":
        found = matrix_product(a, b, *acc)
    else:
        found = mma_mixed(a, b, *acc, accumulate=accumulate, saturate=saturate, rounding=rounding)
    if len(blocks) < 4 or not isinstance(blocks[0], MemRefAccess):
        return found
    blocks[0].store(found)
    return blocks[0]


@takes_memrefs
def mma_mixed(
    a: Any, b: Any, acc: Any = None, *, accumulate: Any = None, saturate: bool = False, rounding: str = "rte"
) -> Tensor:
    """a times b, plus acc, of two float types (or two integer types), rounded once to the type `accumulate`.

    Products and sums are computed in f32 (f64 where `accumulate` is f32 and `saturate` or "rtz" is asked for; int64
    for integers); then `rounding` ("rte" to nearest even, "rtz" toward zero) and `saturate` apply, once. By default
    `accumulate` is f32 for floats of up to 32 bits and int32 for integers.

    Raises:
        ArgumentError: a float times an integer, or a rounding that the type does not have.
    """
    a, b = _load_blocks(a, b)
    if a.dtype.is_float != b.dtype.is_float:
        raise ArgumentError(f"cannot multiply {a.dtype} by {b.dtype}", expected="two float or two integer types")
    to = as_dtype(accumulate) if accumulate is not None else _accumulator_type(a, b)
    wide = _mixed_compute_type(a, b, to, saturate or rounding != "rte")
    parts = [x if x.dtype == wide else cast(x, dtype=wide) for x in (a, b)]
    found = dot_op(*parts, dtype=wide)
    if acc is not None:
        held = load_if_memref(acc)
        found = found + (held if held.dtype == wide else cast(held, dtype=wide))
    return found if wide == to else round_to_dtype(found, to, rounding, saturate)


def _accumulator_type(a: Tensor, b: Tensor) -> DType:
    both = (a.dtype, b.dtype)
    return (f32 if all(t.bits <= 32 for t in both) else max(both, key=lambda t: t.bits)) if a.dtype.is_float else int32


def _mixed_compute_type(a: Tensor, b: Tensor, to: DType, careful: bool) -> DType:
    """What the sum is computed in: no narrower than its type, and wider where it is then rounded with care."""
    if careful or not to.is_float:
        return wider_dtype(to)
    widest = max((a.dtype, b.dtype, to, f32), key=lambda t: t.bits)
    return widest
