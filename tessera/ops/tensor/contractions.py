"""Contractions: the primitive `dot`, matmul, gemm, outer, Kronecker products and Einstein summation, with their
rules."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, TesseraError, user_location
from tessera.core.shapes import broadcast, normalize_axis
from tessera.core.types import DType, TensorType, as_dtype, bool_, f32, fp8_e4m3, fp8_e5m2, int8, int32, uint8
from tessera.ir.builder import CURRENT_NUMERICS
from tessera.ir.numerics import error_rules
from tessera.ir.rules import ACCUMULATE, AxisFactors, Op, batch, error, jvp, op, sharding, transpose
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import broadcast_to, cast, check_operand_count, is_undefined_primal, sum_of_exact_partials
from tessera.ops.tensor.coercion import composite, promote_types, unify_dtypes
from tessera.ops.tensor.elementwise import equal, not_equal, where
from tessera.ops.tensor.reduce import sum
from tessera.ops.tensor.shape import count_elements, expand_dims, iota, permute, reshape, squeeze
from tessera.ops.tensor.shape import transpose as swap
from tessera.ops.tensor.shape import transpose as transpose_


def _canonicalise_dot(a: TensorType, b: TensorType, *, dtype: Any) -> dict[str, Any]:
    return {"dtype": as_dtype(dtype) if dtype is not None else find_product_dtype(a, b)}


def find_product_dtype(a: TensorType, b: TensorType) -> DType:
    """The element type of a product: int8 and mixed types give the accumulation type."""
    whole = a.dtype.is_integer and a.dtype.bits <= int8.bits
    return int32 if whole else a.dtype if a.dtype == b.dtype else f32


# Pairs of types that matrix units multiply exactly.
MIXED_DTYPES = (frozenset((fp8_e4m3, fp8_e5m2)), frozenset((int8, uint8)))


def allows_mixed_dtypes(a: DType, b: DType) -> bool:
    """Whether the operands of a product may have these two types."""
    return any({a, b} <= family for family in MIXED_DTYPES)


def _infer_dot(a: TensorType, b: TensorType, *, dtype: DType) -> TensorType:
    if a.dtype != b.dtype and not allows_mixed_dtypes(a.dtype, b.dtype):
        raise DTypeError(
            f"cannot multiply {a.dtype} by {b.dtype}",
            received=f"{a} and {b}",
            expected="one element type, or two of "
            + " or of ".join(", ".join(sorted(map(str, f))) for f in MIXED_DTYPES),
            suggestion="cast one side to the other's type before",
        )
    if a.dtype == bool_:
        raise DTypeError("a matrix product of bools", received=f"{a} and {b}", suggestion="cast to ts.int32 before")
    if a.rank != b.rank or a.rank < 2 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            "the shapes do not fit a matrix product",
            expected=f"({a.shape[-1] if a.rank else '?'}, N) on the right",
            received=f"{a} and {b}",
        )
    return a.with_shape((*a.shape[:-1], b.shape[-1])).with_dtype(dtype)


def coerce_dot(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `coerce_plain`; two vectors become a row and a column."""
    check_operand_count(op, operands)
    a, b = (as_tensor(x) for x in operands)
    if a.ndim == 1 == b.ndim:
        return reshape(bind_op(op, [expand_dims(a, 0), expand_dims(b, 1)], attrs), shape=())
    return bind_op(op, [a, b], attrs)


@op(infer=_infer_dot, coerce=coerce_dot, canonical=_canonicalise_dot, numerics=ACCUMULATE)
def dot(a, b, *, dtype: Any = None):
    """The matrix product over the last two axes, with equal leading axes as a batch; for two vectors, the dot product.

    Products are summed in the accumulation type of the sides and rounded once to `dtype` (default: the storage type,
    int32 for int8 and uint8). The sides have one type, or are both fp8 (the default is f32 where they differ), or int8
    and uint8.
    """
    return np.matmul(a, b)


error(dot)(error_rules.bound_dot)


@check_arguments
def matmul(a: Any, b: Any, *, dtype: Any = None) -> Tensor:
    """The matrix product, with NumPy's rules for vectors and broadcast batch axes.

    Shapes: [..., M, K] by [..., K, N] gives [..., M, N].

    >>> matmul([[1.0, 2.0]], [[3.0], [4.0]])
    Tensor([[11.]], f32)
    """
    a, b = as_tensor(a), as_tensor(b)
    try:
        if a.dtype is not b.dtype and not allows_mixed_dtypes(a.dtype, b.dtype):
            context = CURRENT_NUMERICS.get()
            a, b = (a, b) if context is None else map(context.cast_state, (a, b))
            common = promote_types([a.type, b.type])
            a, b = (t if t.dtype == common else cast(t, dtype=common) for t in (a, b))
        if a.dtype == bool_ and dtype is None:  # as in NumPy: whether any pair is true
            return not_equal(_matmul(cast(a, dtype=int32), cast(b, dtype=int32), None), 0)
        return _matmul(a, b, dtype)
    except TesseraError as error:
        raise error.at(user_location()) from None


def _matmul(a: Tensor, b: Tensor, dtype: Any) -> Tensor:
    if not a.ndim or not b.ndim:
        raise ShapeError("matmul needs at least one axis on each side", received=f"{a.type} and {b.type}")
    if a.ndim == 1:
        return squeeze(_matmul(expand_dims(a, 0), b, dtype), -1 if b.ndim == 1 else -2)
    if b.ndim == 1:
        return squeeze(_matmul(a, expand_dims(b, -1), dtype), -1)
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"cannot multiply: the left has {a.shape[-1]} columns, the right {b.shape[-2]} rows",
            expected=f"({a.shape[-1]}, N) on the right",
            received=f"{a.type} and {b.type}",
        )
    if b.ndim == 2 and a.ndim > 2:  # one large product instead of many small ones
        rows = reshape(a, shape=(count_elements(a.shape[:-1]), a.shape[-1]))
        return reshape(dot(rows, b, dtype=dtype), shape=(*a.shape[:-1], b.shape[-1]))
    if a.ndim == 2 == b.ndim:
        return dot(a, b, dtype=dtype)
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    sides = [t if t.shape[:-2] == batch else broadcast_to(t, shape=(*batch, *t.shape[-2:])) for t in (a, b)]
    return dot(*sides, dtype=dtype)


@composite
def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """`x` [..., D] times `weight` [D, N], plus `bias` [N] if given."""
    out = matmul(x, weight)
    return out if bias is None else out + bias


# Einstein summation: pairwise contractions by permute, reshape, dot and sum.


HIDDEN_LABEL = "⟨{}⟩"  # the label of an axis of "...", counted from the end
Labels = tuple[str, ...]


def _unify_factors(tensors: Sequence[Any]) -> list[Tensor]:
    """Operands of one element type: int32 for int8 beside uint8, as in a product of two matrices."""
    found = [as_tensor(t) for t in tensors]
    return [cast(t, dtype=int32) for t in found] if {t.dtype for t in found} == {int8, uint8} else unify_dtypes(tensors)


@composite
def einsum(equation: str, *tensors: Any) -> Tensor:
    """The Einstein sum of `equation`, in NumPy's notation: "bij,bjk->bik", "ii", "...i->...".

    A label that occurs twice in one operand takes its diagonal; labels that the result lacks are summed. Without "->"
    the result has the labels that occur once, in alphabetical order. More than two operands are contracted in the
    order that opt_einsum finds cheapest (from left to right where a size is symbolic).

    >>> einsum("ij,jk->ik", [[1.0, 2.0]], [[3.0], [4.0]])
    Tensor([[11.]], f32)

    Raises:
        ArgumentError: the equation is malformed or names another number of operands.
        ShapeError: a label has two sizes.
    """
    if not tensors:
        raise ArgumentError("einsum needs an operand", location=user_location(), expected="an equation and operands")
    operands = _unify_factors(tensors)
    inputs, output = parse_equation(equation, [t.ndim for t in operands])
    _check_sizes(equation, operands, inputs)
    left = [_mask_diagonal(t, labels) for t, labels in zip(operands, inputs, strict=True)]
    for group in _find_path(equation, operands):
        joined, *others = [left.pop(i) for i in sorted(group, reverse=True)][::-1]
        for number, other in enumerate(others, start=1):
            rest = [*others[number:], *left]
            joined = _contract_pair(*joined, *other, {*output, *(label for _, labels in rest for label in labels)})
        left.append(joined)
    out, labels = _sum_labels(*left[0], set(output))
    return permute(out, axes=tuple(labels.index(label) for label in output)) if labels != output else out


def _find_path(equation: str, operands: list[Tensor]) -> list[tuple[int, ...]]:
    """The operands that each step contracts; the result is appended to the list."""
    if len(operands) < 3 or not all(isinstance(n, int) for t in operands for n in t.shape):
        return [tuple(range(len(operands)))]
    return _find_cheapest_path(equation, tuple(t.shape for t in operands))


@functools.lru_cache(maxsize=1024)
def _find_cheapest_path(equation: str, shapes: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    # A local import: it takes 0.1 s, and few programs contract more than two operands.
    from opt_einsum import contract_path

    return contract_path(equation, *shapes, shapes=True, optimize="auto")[0]


def parse_equation(equation: str, ranks: list[int]) -> tuple[list[Labels], Labels]:
    """The labels of each operand's axes and of the result's.

    >>> parse_equation("...i,i", [2, 1])
    ([('⟨1⟩', 'i'), ('i',)], ('⟨1⟩',))
    """
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ArgumentError(
            f'einsum "{equation}" names {len(terms)} operands',
            location=user_location(),
            received=f"{len(ranks)} operands",
        )
    inputs = [_expand_labels(equation, term, rank) for term, rank in zip(terms, ranks, strict=True)]
    spread = max((tuple(x for x in each if len(x) > 1) for each in inputs), key=len)
    used = Counter(label for each in inputs for label in each if len(label) == 1)
    if not arrow:
        return inputs, (*spread, *sorted(label for label, times in used.items() if times == 1))
    output = _expand_labels(equation, right, len(spread) + len(right.replace("...", "")))
    wrong = [x for x in output if (len(x) == 1 and x not in used) or output.count(x) > 1]
    if wrong:
        raise ArgumentError(f'einsum "{equation}": the result cannot have {wrong[0]!r}', location=user_location())
    return inputs, output


def _expand_labels(equation: str, term: str, rank: int) -> Labels:
    before, dots, after = term.partition("...")
    free = rank - len(before) - len(after)
    if not (before + after).isalpha() and before + after:
        raise ArgumentError(f'einsum "{equation}": {term!r} is not letters and "..."', location=user_location())
    if free < 0 or (free and not dots):
        raise ShapeError(
            f'einsum "{equation}": {term!r} for a tensor of rank {rank}', location=user_location(),
            expected=f"a letter for each axis: {rank}", received=term,
        )  # fmt: skip
    return (*before, *(HIDDEN_LABEL.format(i) for i in range(free, 0, -1)), *after)


def _check_sizes(equation: str, operands: list[Tensor], inputs: list[Labels]) -> None:
    known: dict[str, Any] = {}
    for operand, labels in zip(operands, inputs, strict=True):
        for label, size in zip(labels, operand.shape, strict=True):
            first = known.setdefault(label, size)
            known[label] = size if first == 1 else first
            if size not in (1, known[label]):
                raise ShapeError(
                    f'einsum "{equation}": {label} is {known[label]} and {size}', location=user_location(),
                    received=" and ".join(str(t.type) for t in operands),
                )  # fmt: skip


def _mask_diagonal(x: Tensor, labels: Labels) -> tuple[Tensor, Labels]:
    """Repeated labels: elements off the diagonal are masked to zero, and one of the two axes is summed."""
    for label in [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            on = equal(iota(shape=x.shape, axis=first), iota(shape=x.shape, axis=second))
            x = _sum_axes(where(on, x, 0), (second,))
            labels = labels[:second] + labels[second + 1 :]
    return x, labels


def _sum_axes(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """A sum in the operand's own type, as that of the products."""
    out = sum(x, axis=axes)
    return out if out.dtype == x.dtype else out.to(x.dtype)


def _sum_labels(x: Tensor, labels: Labels, kept: set[str]) -> tuple[Tensor, Labels]:
    axes = tuple(i for i, label in enumerate(labels) if label not in kept)
    return (_sum_axes(x, axes), tuple(label for label in labels if label in kept)) if axes else (x, labels)


def _contract_pair(a: Tensor, la: Labels, b: Tensor, lb: Labels, later: set[str]) -> tuple[Tensor, Labels]:
    """The contraction of two operands over their common labels, except those that are still needed."""
    a, la = _sum_labels(a, la, later | set(lb))
    b, lb = _sum_labels(b, lb, later | set(la))
    both = [x for x in la if x in lb and a.shape[la.index(x)] == b.shape[lb.index(x)]]
    over = tuple(x for x in both if x not in later)
    if not over:
        return _multiply_aligned(a, la, b, lb)
    batch = tuple(x for x in both if x in later)
    rows, columns = (tuple(x for x in labels if x not in both) for labels in (la, lb))
    if set(rows) & set(columns):  # sizes 1 against n: a broadcast, not a product of matrices
        out, labels = _multiply_aligned(a, la, b, lb)
        return _sum_labels(out, labels, later)
    left, shape_b, shape_m, _ = _group_axes(a, la, batch, rows, over)
    right, _, _, shape_n = _group_axes(b, lb, batch, over, columns)
    out = reshape(dot(left, right, dtype=a.dtype), shape=(*shape_b, *shape_m, *shape_n))
    return _sum_labels(out, (*batch, *rows, *columns), later)


def _group_axes(x: Tensor, labels: Labels, *groups: Labels) -> tuple[Any, ...]:
    """`x` with the axes of each group merged, and the sizes of each group."""
    order = tuple(labels.index(label) for group in groups for label in group)
    shapes = [tuple(x.shape[labels.index(label)] for label in group) for group in groups]
    return reshape(permute(x, axes=order), shape=tuple(count_elements(s) for s in shapes)), *shapes


def _multiply_aligned(a: Tensor, la: Labels, b: Tensor, lb: Labels) -> tuple[Tensor, Labels]:
    """The elementwise product, with the labels of both."""
    labels = (*la, *(x for x in lb if x not in la))
    return _align_labels(a, la, labels) * _align_labels(b, lb, labels), labels


def _align_labels(x: Tensor, labels: Labels, wanted: Labels) -> Tensor:
    order = tuple(labels.index(label) for label in wanted if label in labels)
    shape = tuple(x.shape[labels.index(label)] if label in labels else 1 for label in wanted)
    return reshape(permute(x, axes=order), shape=shape)


# Derivatives and batching of `dot`.


jvp(dot)(
    sum_of_exact_partials(
        lambda t, out, a, b, dtype: dot(t, b, dtype=dtype),
        lambda t, out, a, b, dtype: dot(a, t, dtype=dtype),
    )
)


@transpose(dot)
def _(g, a, b, *, dtype):
    if is_undefined_primal(a):
        g = g if g.dtype == b.dtype else cast(g, dtype=b.dtype)
        return dot(g, swap(b), dtype=a.dtype), None
    g = g if g.dtype == a.dtype else cast(g, dtype=a.dtype)
    return None, dot(swap(a), g, dtype=b.dtype)


@batch(dot)
def _(lanes, *, dtype):
    a, b = lanes.tensors
    if lanes.batched[1] or b.ndim > 2:
        return dot(*lanes.spread(), dtype=dtype)
    # One product of the rows of all lanes.
    rows = reshape(a, shape=(lanes.size * a.shape[1], a.shape[2]))
    return reshape(dot(rows, b, dtype=dtype), shape=(lanes.size, a.shape[1], b.shape[1]))


# Composite products: gemm, outer, vecdot, kron.


@check_arguments
def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    trans_a: bool = False,
    trans_b: bool = False,
) -> Tensor:
    """alpha · op(a) op(b) + beta · c, where op transposes the last two axes if its flag says so.

    Shapes: op(a) [..., M, K], op(b) [..., K, N], `c` what broadcasts with [..., M, N]; `c` is not read where
    `beta` is 0.

    >>> gemm([[1.0, 2.0]], [[3.0], [4.0]], [[1.0]], alpha=2.0, beta=-1.0)
    Tensor([[21.]], f32)
    """
    left = transpose_(a) if trans_a else a
    right = transpose_(b) if trans_b else b
    if alpha == 1 and (c is None or beta == 0):
        return matmul(left, right)
    return _scaled_product(left, right, None if beta == 0 else c, alpha, beta)


@composite
def _scaled_product(a: Any, b: Any, c: Any, alpha: float, beta: float) -> Tensor:
    out = matmul(a, b)
    out = out if alpha == 1 else out * alpha
    return out if c is None else out + as_tensor(c) * beta


@composite
def outer(a: Any, b: Any) -> Tensor:
    """Every product of an element of vector `a` [M] with one of vector `b` [N], as [M, N].

    >>> outer([1, 2], [3, 4])
    Tensor([[3, 4],
            [6, 8]], int64)
    """
    a, b = as_tensor(a), as_tensor(b)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError("outer takes two vectors", location=user_location(), received=f"{a.type} and {b.type}")
    return expand_dims(a, 1) * expand_dims(b, 0)


@composite
def vecdot(a: Any, b: Any, axis: int = -1) -> Tensor:
    """The dot product of two tensors along `axis`; the other axes broadcast.

    >>> vecdot([1.0, 2.0], [3.0, 4.0])
    Tensor(11., f32)

    Raises:
        ShapeError: the sizes of the axis differ.
    """
    a, b = as_tensor(a), as_tensor(b)
    sizes = [t.shape[normalize_axis(axis, t.ndim)] for t in (a, b)]
    if sizes[0] != sizes[1]:
        raise ShapeError(
            "the vectors differ in length", location=user_location(), expected=str(sizes[0]), received=str(sizes[1])
        )
    return sum(a * b, axis=axis)


@composite
def kron(a: Any, b: Any) -> Tensor:
    """The Kronecker product: each element of `a` replaced by itself times `b`.

    >>> kron([1, 10], [1, 2])
    Tensor([ 1,  2, 10, 20], int64)
    """
    a, b = as_tensor(a), as_tensor(b)
    rank = max(a.ndim, b.ndim)
    left, right = ((1,) * (rank - t.ndim) + tuple(t.shape) for t in (a, b))
    spread_a = tuple(n for size in left for n in (size, 1))
    spread_b = tuple(n for size in right for n in (1, size))
    product = reshape(a, shape=spread_a) * reshape(b, shape=spread_b)
    return reshape(product, shape=tuple(m * n for m, n in zip(left, right, strict=True)))


# Sharding: products of parts of the contracted axis are terms of the result.


@sharding(dot)
def _(types, results, *, dtype):
    lead = tuple(range(types[0].rank - 2))
    return AxisFactors(((*lead, "m", "k"), (*lead, "k", "n")), ((*lead, "m", "n"),), {"k": "sum"})
