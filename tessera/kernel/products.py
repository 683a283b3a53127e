"""Matrix products of blocks: accumulated wide, and handed back wide."""

from __future__ import annotations

from typing import Any

from tessera.errors import ArgumentError
from tessera.kernel.marks import takes_places
from tessera.kernel.place import Place, value
from tessera.kernel.rounding import rounded, wider
from tessera.ops.basic import cast
from tessera.ops.linalg import dot as dot_op
from tessera.tensor import Tensor
from tessera.types import DType, as_dtype, f32, int32


def product(a: Any, b: Any, acc: Any = None) -> Tensor:
    """The product of two blocks, plus `acc`, in the accumulation type (f32 for 16-bit floats, int32 for int8)."""
    a, b = _blocks(a, b)
    found = dot_op(a, b, dtype=a.type.accumulate)
    return found if acc is None else value(acc) + found


def _blocks(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    a, b = value(a), value(b)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise ArgumentError("a matrix product needs two blocks", received=f"{a!r} and {b!r}")
    return a, b


@takes_places
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
        found = product(a, b, *acc)
    else:
        found = mma_mixed(a, b, *acc, accumulate=accumulate, saturate=saturate, rounding=rounding)
    if len(blocks) < 4 or not isinstance(blocks[0], Place):
        return found
    blocks[0].store(found)
    return blocks[0]


@takes_places
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
    a, b = _blocks(a, b)
    if a.dtype.is_float != b.dtype.is_float:
        raise ArgumentError(f"cannot multiply {a.dtype} by {b.dtype}", expected="two float or two integer types")
    to = as_dtype(accumulate) if accumulate is not None else _sum_type(a, b)
    wide = _compute_type(a, b, to, saturate or rounding != "rte")
    parts = [x if x.dtype == wide else cast(x, dtype=wide) for x in (a, b)]
    found = dot_op(*parts, dtype=wide)
    if acc is not None:
        held = value(acc)
        found = found + (held if held.dtype == wide else cast(held, dtype=wide))
    return found if wide == to else rounded(found, to, rounding, saturate)


def _sum_type(a: Tensor, b: Tensor) -> DType:
    both = (a.dtype, b.dtype)
    return (f32 if all(t.bits <= 32 for t in both) else max(both, key=lambda t: t.bits)) if a.dtype.is_float else int32


def _compute_type(a: Tensor, b: Tensor, to: DType, careful: bool) -> DType:
    """What the sum is computed in: no narrower than its type, and wider where it is then rounded with care."""
    if careful or not to.is_float:
        return wider(to)
    widest = max((a.dtype, b.dtype, to, f32), key=lambda t: t.bits)
    return widest
