"""What annotations say of a function's arguments and results, and what in a call does not fit them."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.checking.report import spell
from tessera.closures import hints_of
from tessera.errors import DTypeError, ShapeError, TesseraError
from tessera.shapes import Size, bind_all
from tessera.shapes.binding import plain_name
from tessera.shapes.constraints import Requirement, requirements
from tessera.tensor import Tensor
from tessera.types import TensorType


@dataclass(frozen=True)
class Signature:
    """A function's parameters, the annotations that are tensor types, and what it requires of sizes."""

    name: str
    python: inspect.Signature
    tensors: Mapping[str, TensorType]
    results: Any
    required: tuple[Requirement, ...]

    @staticmethod
    @functools.cache
    def of(function: Callable[..., Any]) -> Signature:
        """The signature of a Python function."""
        found = hints_of(function)
        tensors = {k: v for k, v in found.items() if isinstance(v, TensorType) and k != "return"}
        return Signature(
            function.__name__, inspect.signature(function), tensors, found.get("return"), requirements(function)
        )


def misfit_of_call(signature: Signature, args: tuple, named: dict[str, Any], sizes: dict[str, Size]) -> Any:
    """What is wrong with a call, or None; adds the sizes of the names in the annotations to `sizes`."""
    try:
        bound = signature.python.bind(*args, **named).arguments
    except TypeError:
        return None  # Python says it better when the call is made
    wanted = [(n, v.type, signature.tensors[n]) for n, v in bound.items() if n in signature.tensors and _known(v)]
    for name, type, want in wanted:
        if want.dtype != type.dtype:
            return _wrong_dtype(
                f"function '{signature.name}' takes {want.dtype} for {name}, not {type.dtype}", want, type
            )
    if misfit := bind_all([(w.shape, t.shape) for _, t, w in wanted], sizes):
        name, type, want = wanted[misfit.number]
        message = f"function '{signature.name}' does not take this for {name}: {misfit.problem}"
        hint = f"Pass another tensor for {name}, or annotate it as {spell(type)}"
        return ShapeError(message, expected=_where(want, sizes), received=spell(type), suggestion=hint)
    return broken(signature.required, sizes)


def _known(value: Any) -> bool:
    return isinstance(value, Tensor)


def broken(required: Sequence[Requirement], sizes: Mapping[str, Size]) -> TesseraError | None:
    """The error of the first requirement that the sizes break."""
    for requirement in required:
        try:
            requirement.check(sizes)
        except ShapeError as error:
            return error
    return None


def _where(want: TensorType, sizes: Mapping[str, Size]) -> str:
    """An annotation, with the sizes that its names have by now."""
    names = sorted(n for s in want.shape if (n := plain_name(s)) is not None and not n.startswith(("?", ".")))
    known = [f"{n} = {sizes[n]}" for n in dict.fromkeys(names) if n in sizes and str(sizes[n]) != n]
    return spell(want) + (f" where {', '.join(known)}" if known else "")


def _wrong_dtype(message: str, want: TensorType, type: TensorType) -> DTypeError:
    return DTypeError(
        message,
        expected=spell(want, dtype=True),
        received=spell(type, dtype=True),
        suggestion=f"Add an explicit cast: {{value}}.to(ts.{want.dtype})",
    )


def misfit_of_result(signature: Signature, sizes: Mapping[str, Size], value: Any) -> TesseraError | None:
    """What in a returned value is not as the return annotation says, or None."""
    known = dict(sizes)
    for want, got in _results(signature.results, value):
        if want.dtype != got.dtype:
            return _wrong_dtype(f"function '{signature.name}' returns {got.dtype}, not {want.dtype}", want, got)
        if misfit := bind_all([(want.shape, got.shape)], known):
            return ShapeError(
                f"function '{signature.name}' does not return what it says: {misfit.problem}",
                expected=_where(want, sizes),
                received=spell(got),
                suggestion=f"Change the result, or the return annotation to {spell(got)}",
            )
    return None


def _results(annotation: Any, value: Any) -> Iterator[tuple[TensorType, TensorType]]:
    """The annotated type and the type of each tensor returned."""
    if isinstance(annotation, TensorType):
        if isinstance(value, Tensor):
            yield annotation, value.type
        return
    parts = typing.get_args(annotation) if typing.get_origin(annotation) is tuple else ()
    if isinstance(value, tuple) and len(parts) == len(value):
        for part, each in zip(parts, value, strict=True):
            yield from _results(part, each)
