"""Einstein summation: an equation read, and done pair by pair by permute, reshape, dot and sum."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from tessera.errors import ArgumentError, ShapeError, here
from tessera.ops.arguments import typed
from tessera.ops.coerce import same_dtype
from tessera.ops.elementwise import equal, where
from tessera.ops.linalg import dot
from tessera.ops.reduce import sum
from tessera.ops.shape import count, iota, permute, reshape
from tessera.tensor import Tensor

HIDDEN = "⟨{}⟩"  # the label of an axis that "..." stands for, counted from the end
Labels = tuple[str, ...]


@typed
def einsum(equation: str, *tensors: Any) -> Tensor:
    """The sum over products that `equation` says, in NumPy's notation: "bij,bjk->bik", "ii", "...i->...".

    A label that stands twice in one operand takes its diagonal; labels that the result lacks are summed; without
    "->" the result has the labels that occur once, in alphabetical order. More than two operands are joined in the
    order that opt_einsum finds cheapest (from left to right where a size is known by name alone).

    >>> einsum("ij,jk->ik", [[1.0, 2.0]], [[3.0], [4.0]])
    Tensor([[11.]], f32)

    Raises:
        ArgumentError: the equation is malformed or names another number of operands.
        ShapeError: a label stands for two sizes.
    """
    if not tensors:
        raise ArgumentError("einsum of nothing", location=here(), expected="an equation and its operands")
    operands = same_dtype(tensors)
    inputs, output = parse(equation, [t.ndim for t in operands])
    _check_sizes(equation, operands, inputs)
    left = [_diagonal(t, labels) for t, labels in zip(operands, inputs, strict=True)]
    for group in _path(equation, operands):
        joined, *others = [left.pop(i) for i in sorted(group, reverse=True)][::-1]
        for number, other in enumerate(others, start=1):
            rest = [*others[number:], *left]
            joined = _join(*joined, *other, {*output, *(label for _, labels in rest for label in labels)})
        left.append(joined)
    out, labels = _summed(*left[0], set(output))
    return permute(out, axes=tuple(labels.index(label) for label in output)) if labels != output else out


def _path(equation: str, operands: list[Tensor]) -> list[tuple[int, ...]]:
    """Which operands are joined at each step; what comes of them goes to the end of the list."""
    if len(operands) < 3 or not all(isinstance(n, int) for t in operands for n in t.shape):
        return [tuple(range(len(operands)))]
    return _cheapest(equation, tuple(t.shape for t in operands))


@functools.lru_cache(maxsize=1024)
def _cheapest(equation: str, shapes: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    # Here, since it takes a tenth of a second to import, and few programs join more than two operands.
    from opt_einsum import contract_path

    return contract_path(equation, *shapes, shapes=True, optimize="auto")[0]


def parse(equation: str, ranks: list[int]) -> tuple[list[Labels], Labels]:
    """The labels of each operand's axes and of the result's.

    >>> parse("...i,i", [2, 1])
    ([('⟨1⟩', 'i'), ('i',)], ('⟨1⟩',))
    """
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ArgumentError(
            f'einsum "{equation}" names {len(terms)} operands', location=here(), received=f"{len(ranks)} operands"
        )
    inputs = [_labels(equation, term, rank) for term, rank in zip(terms, ranks, strict=True)]
    spread = max((tuple(x for x in each if len(x) > 1) for each in inputs), key=len)
    used = Counter(label for each in inputs for label in each if len(label) == 1)
    if not arrow:
        return inputs, (*spread, *sorted(label for label, times in used.items() if times == 1))
    output = _labels(equation, right, len(spread) + len(right.replace("...", "")))
    wrong = [x for x in output if (len(x) == 1 and x not in used) or output.count(x) > 1]
    if wrong:
        raise ArgumentError(f'einsum "{equation}": the result cannot have {wrong[0]!r}', location=here())
    return inputs, output


def _labels(equation: str, term: str, rank: int) -> Labels:
    before, dots, after = term.partition("...")
    free = rank - len(before) - len(after)
    if not (before + after).isalpha() and before + after:
        raise ArgumentError(f'einsum "{equation}": {term!r} is not letters and "..."', location=here())
    if free < 0 or (free and not dots):
        raise ShapeError(
            f'einsum "{equation}": {term!r} for a tensor of rank {rank}', location=here(),
            expected=f"a letter for each axis: {rank}", received=term,
        )  # fmt: skip
    return (*before, *(HIDDEN.format(i) for i in range(free, 0, -1)), *after)


def _check_sizes(equation: str, operands: list[Tensor], inputs: list[Labels]) -> None:
    known: dict[str, Any] = {}
    for operand, labels in zip(operands, inputs, strict=True):
        for label, size in zip(labels, operand.shape, strict=True):
            first = known.setdefault(label, size)
            known[label] = size if first == 1 else first
            if size not in (1, known[label]):
                raise ShapeError(
                    f'einsum "{equation}": {label} is {known[label]} and {size}', location=here(),
                    received=" and ".join(str(t.type) for t in operands),
                )  # fmt: skip


def _diagonal(x: Tensor, labels: Labels) -> tuple[Tensor, Labels]:
    """Labels that stand twice: off the diagonal all is zero, and one of the two axes is summed."""
    for label in [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            on = equal(iota(shape=x.shape, axis=first), iota(shape=x.shape, axis=second))
            x = _sum(where(on, x, 0), (second,))
            labels = labels[:second] + labels[second + 1 :]
    return x, labels


def _sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """A sum in the operand's own type, as the products beside it have."""
    out = sum(x, axis=axes)
    return out if out.dtype == x.dtype else out.to(x.dtype)


def _summed(x: Tensor, labels: Labels, kept: set[str]) -> tuple[Tensor, Labels]:
    axes = tuple(i for i, label in enumerate(labels) if label not in kept)
    return (_sum(x, axes), tuple(label for label in labels if label in kept)) if axes else (x, labels)


def _join(a: Tensor, la: Labels, b: Tensor, lb: Labels, later: set[str]) -> tuple[Tensor, Labels]:
    """Two operands made one: a product over the labels both have, with those still needed kept."""
    a, la = _summed(a, la, later | set(lb))
    b, lb = _summed(b, lb, later | set(la))
    both = [x for x in la if x in lb and a.shape[la.index(x)] == b.shape[lb.index(x)]]
    over = tuple(x for x in both if x not in later)
    if not over:
        return _multiplied(a, la, b, lb)
    batch = tuple(x for x in both if x in later)
    rows, columns = (tuple(x for x in labels if x not in both) for labels in (la, lb))
    if set(rows) & set(columns):  # sizes 1 against n: a broadcast, not a product of matrices
        out, labels = _multiplied(a, la, b, lb)
        return _summed(out, labels, later)
    left, shape_b, shape_m, _ = _grouped(a, la, batch, rows, over)
    right, _, _, shape_n = _grouped(b, lb, batch, over, columns)
    out = reshape(dot(left, right, dtype=a.dtype), shape=(*shape_b, *shape_m, *shape_n))
    return _summed(out, (*batch, *rows, *columns), later)


def _grouped(x: Tensor, labels: Labels, *groups: Labels) -> tuple[Any, ...]:
    """`x` with the axes of each group made one, and the sizes of each."""
    order = tuple(labels.index(label) for group in groups for label in group)
    shapes = [tuple(x.shape[labels.index(label)] for label in group) for group in groups]
    return reshape(permute(x, axes=order), shape=tuple(count(s) for s in shapes)), *shapes


def _multiplied(a: Tensor, la: Labels, b: Tensor, lb: Labels) -> tuple[Tensor, Labels]:
    """The product element by element, with every label of either."""
    labels = (*la, *(x for x in lb if x not in la))
    return _spread(a, la, labels) * _spread(b, lb, labels), labels


def _spread(x: Tensor, labels: Labels, wanted: Labels) -> Tensor:
    order = tuple(labels.index(label) for label in wanted if label in labels)
    shape = tuple(x.shape[labels.index(label)] if label in labels else 1 for label in wanted)
    return reshape(permute(x, axes=order), shape=shape)
