"""Annotated signatures: the tensor types of arguments and results, and the check of a call against them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import DTypeError, ShapeError, TesseraError
from tessera.core.shapes import SizeConstraint, bind_shapes, find_plain_name, find_size_constraints
from tessera.core.symbolic_dim import Size
from tessera.core.types import TensorType
from tessera.frontend.jit.tracing import fit_product, pair_results, read_annotations
from tessera.ir.tensor import Tensor
from tessera.tools.check.diagnostics import format_annotation


@dataclass(frozen=True)
class AnnotatedSignature:
    """A function's parameters, the annotations that are tensor types, and what it requires of sizes."""

    name: str
    python: inspect.Signature
    tensors: Mapping[str, TensorType]
    results: Any
    required: tuple[SizeConstraint, ...]

    @staticmethod
    @functools.cache
    def of(function: Callable[..., Any]) -> AnnotatedSignature:
        """The signature of a Python function."""
        found = read_annotations(function)
        tensors = {k: v for k, v in found.items() if isinstance(v, TensorType) and k != "return"}
        return AnnotatedSignature(
            function.__name__,
            inspect.signature(function),
            tensors,
            found.get("return"),
            find_size_constraints(function),
        )


def check_call(signature: AnnotatedSignature, args: tuple, named: dict[str, Any], sizes: dict[str, Size]) -> Any:
    """What is wrong with a call, or None; adds the sizes of the names in the annotations to `sizes`."""
    try:
        bound = signature.python.bind(*args, **named).arguments
    except TypeError:
        return None  # Python says it better when the call is made
    wanted = [(n, v.type, signature.tensors[n]) for n, v in bound.items() if n in signature.tensors and _is_known(v)]
    for name, type, want in wanted:
        if want.dtype != type.dtype:
            return _wrong_dtype(
                f"function '{signature.name}' takes {want.dtype} for {name}, not {type.dtype}", want, type
            )
    if misfit := bind_shapes([(w.shape, t.shape) for _, t, w in wanted], sizes):
        name, type, want = wanted[misfit.number]
        message = f"function '{signature.name}' does not take this for {name}: {misfit.problem}"
        hint = f"Pass another tensor for {name}, or annotate it as {format_annotation(type)}"
        return ShapeError(
            message, expected=_format_expected(want, sizes), received=format_annotation(type), suggestion=hint
        )
    return first_broken_requirement(signature.required, sizes)


def _is_known(value: Any) -> bool:
    return isinstance(value, Tensor)


def first_broken_requirement(required: Sequence[SizeConstraint], sizes: Mapping[str, Size]) -> TesseraError | None:
    """The error of the first requirement that the sizes break."""
    for requirement in required:
        try:
            requirement.check(sizes)
        except ShapeError as error:
            return error
    return None


def _format_expected(want: TensorType, sizes: Mapping[str, Size]) -> str:
    """An annotation, with the sizes that its names have by now."""
    names = sorted(n for s in want.shape if (n := find_plain_name(s)) is not None and not n.startswith(("?", ".")))
    known = [f"{n} = {sizes[n]}" for n in dict.fromkeys(names) if n in sizes and str(sizes[n]) != n]
    return format_annotation(want) + (f" where {', '.join(known)}" if known else "")


def _wrong_dtype(message: str, want: TensorType, type: TensorType) -> DTypeError:
    return DTypeError(
        message,
        expected=format_annotation(want, dtype=True),
        received=format_annotation(type, dtype=True),
        suggestion=f"Add an explicit cast: {{value}}.to(ts.{want.dtype})",
    )


def check_result(signature: AnnotatedSignature, sizes: Mapping[str, Size], value: Any) -> TesseraError | None:
    """What in a returned value is not as the return annotation says, or None."""
    known = dict(sizes)
    for want, result in pair_results(signature.results, value):
        got = result.type
        if want.dtype != fit_product(result, want).dtype:
            return _wrong_dtype(f"function '{signature.name}' returns {got.dtype}, not {want.dtype}", want, got)
        if misfit := bind_shapes([(want.shape, got.shape)], known):
            return ShapeError(
                f"function '{signature.name}' does not return what it says: {misfit.problem}",
                expected=_format_expected(want, sizes),
                received=format_annotation(got),
                suggestion=f"Change the result, or the return annotation to {format_annotation(got)}",
            )
    return None
