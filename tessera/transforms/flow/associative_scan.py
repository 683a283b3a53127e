"""Associative scan: all prefixes under an associative function, in a logarithmic number of steps (Blelloch 1990)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.pytree import flatten
from tessera.core.shapes import normalize_axis
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_function
from tessera.ops.tensor.matrices import moveaxis
from tessera.ops.tensor.shape import concatenate, reshape, stack

Combine = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


def associative_scan(function: Callable[[Any, Any], Any], elements: Any, reverse: bool = False, axis: int = 0) -> Any:
    """All prefixes of `elements` along an axis, combined by a function that is associative: result i is of 0 to i.

    `function(a, b)` combines two containers like `elements`, whose leaves hold many elements along the axis, each pair
    by itself; of the two, `a` comes first. As JAX's: the number of calls grows with the logarithm of the length, where
    `ts.scan` takes a step for each element. With `reverse` the last element comes first, and result i is of it to i.

    >>> associative_scan(lambda a, b: a + b, Tensor([1.0, 2.0, 3.0]))
    Tensor([1., 3., 6.], f32)
    >>> linear = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])      # h = decay · h + x
    >>> associative_scan(linear, (Tensor([0.5, 0.5, 0.5]), Tensor([1.0, 1.0, 1.0])))[1]
    Tensor([1.  , 1.5 , 1.75], f32)

    Raises:
        ShapeError: the leaves differ in length, or it is not known; the function returns another shape.
        ArgumentError: there is nothing to scan, or the function returns another container.
    """
    check_function(function, "associative_scan")
    leaves, tree = flatten(elements)
    given = [as_tensor(leaf) for _, leaf in leaves]
    if not given:
        raise ArgumentError("associative_scan of no tensors", location=user_location(), expected="one or more")
    try:
        axes = [normalize_axis(axis, x.ndim) for x in given]
    except ShapeError as error:
        raise error.at(user_location()) from None
    moved = [moveaxis(x, at, 0) for x, at in zip(given, axes, strict=True)]
    _check_lengths(moved)

    def combine(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        first, second = (_build(tree, side, axes) for side in (a, b))
        found, made = flatten(function(first, second))
        if made != tree:
            raise ArgumentError(
                "the function of associative_scan returns another container", location=user_location(),
                expected=f"{len(leaves)} tensors as in elements", received=f"{len(found)} tensors",
            )  # fmt: skip
        results = [moveaxis(as_tensor(x), at, 0) for (_, x), at in zip(found, axes, strict=True)]
        for (path, _), x, y in zip(leaves, results, a, strict=True):
            if x.shape != y.shape or x.dtype != y.dtype:
                raise ShapeError(
                    f"the function of associative_scan changes {path or 'its operand'}", location=user_location(),
                    expected=str(y.type), received=str(x.type),
                )  # fmt: skip
        return results

    found = _scan(combine, [x[::-1] for x in moved] if reverse else moved)
    return _build(tree, [x[::-1] for x in found] if reverse else found, axes)


def _build(tree: Any, tensors: list[Tensor], axes: list[int]) -> Any:
    return tree.build(iter([moveaxis(x, 0, at) for x, at in zip(tensors, axes, strict=True)]))


def _check_lengths(moved: list[Tensor]) -> None:
    lengths = {x.shape[0] for x in moved}
    if len(lengths) > 1 or not all(isinstance(n, int) for n in lengths):
        raise ShapeError(
            "the elements of associative_scan need one known length", location=user_location(),
            expected="tensors of one size along the axis", received=", ".join(str(x.type) for x in moved),
        )  # fmt: skip


def _scan(combine: Combine, x: list[Tensor]) -> list[Tensor]:
    """The prefixes along axis 0: those that end at odd places are the prefixes of pairs."""
    n = x[0].shape[0]
    if n < 2:
        return x
    half = n // 2
    odd = _scan(combine, combine([t[: 2 * half : 2] for t in x], [t[1::2] for t in x]))
    if n == 2:
        return [concatenate([t[:1], o]) for t, o in zip(x, odd, strict=True)]
    later = [t[2::2] for t in x]  # each joins the prefix before it
    even = combine([o[: later[0].shape[0]] for o in odd], later)
    even = [concatenate([t[:1], e]) for t, e in zip(x, even, strict=True)]
    return [_interleave(e, o) for e, o in zip(even, odd, strict=True)]


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    """The elements of both alternately; `even` may have one more."""
    half = odd.shape[0]
    pairs = reshape(stack([even[:half], odd], axis=1), shape=(2 * half, *odd.shape[1:]))
    return pairs if even.shape[0] == half else concatenate([pairs, even[half:]])
