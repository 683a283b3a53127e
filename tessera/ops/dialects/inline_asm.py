"""Inline assembly: target text in a kernel, with a Python emulation that defines its meaning."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from tessera.core.errors import ShapeError, UnknownNameError
from tessera.core.io import hash_text
from tessera.core.types import DType, TensorType, f32
from tessera.ir.rules import STORAGE, op
from tessera.ops.dialects.control_flow import refuse_direct_call

# The emulations of this process by name; the IR holds names, since it must have a textual form. A name never leads to
# an import: whoever writes a text would choose what runs.
EMULATIONS: dict[str, Callable[..., Any]] = {}
_OBJECTS: list[Any] = []  # what emulations use and no text describes, in the order of first use


def register_emulation(function: Callable[..., Any]) -> str:
    """The name of an emulation, under which this process finds it: where it is defined, and a hash of its meaning."""
    name = f"{function.__module__}:{function.__qualname__}#{hash_text(repr(_describe(function, ())))[:12]}"
    EMULATIONS[name] = function
    return name


def _describe(value: Any, outer: tuple[int, ...]) -> Any:
    """What determines a function's results: code, defaults, and the values that it reads; `outer` breaks cycles."""
    if isinstance(value, FunctionType) and id(value) not in outer:
        inner = (*outer, id(value))
        code = value.__code__
        read = {n: value.__globals__[n] for n in _list_names(code) if n in value.__globals__}
        read |= dict(zip(code.co_freevars, (c.cell_contents for c in value.__closure__ or ()), strict=True))
        parts = (value.__defaults__, value.__kwdefaults__, tuple(sorted(read.items())))
        return ("function", _describe_code(code), *(_describe(p, inner) for p in parts))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(_describe(v, outer) for v in value))
    if isinstance(value, dict):
        return ("dict", *((_describe(k, outer), _describe(v, outer)) for k, v in value.items()))
    if isinstance(value, (np.ndarray, np.generic)):
        return (str(value.dtype), value.shape, value.tobytes().hex())
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, DType)):
        return repr(value)
    if isinstance(value, (ModuleType, type, FunctionType, BuiltinFunctionType, np.ufunc)):
        return (getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__))
    return (type(value).__qualname__, _number_object(value))


def _number_object(value: Any) -> int:
    """The number of an object that no text describes, the same in every run that uses such objects in this order."""
    known = next((i for i, held in enumerate(_OBJECTS) if held is value), None)
    if known is None:
        _OBJECTS.append(value)
    return len(_OBJECTS) - 1 if known is None else known


def _list_names(code: CodeType) -> list[str]:
    inner = [n for c in code.co_consts if isinstance(c, CodeType) for n in _list_names(c)]
    return sorted({*code.co_names, *inner})


def _describe_code(code: CodeType) -> tuple[Any, ...]:
    return (code.co_code, code.co_names, *(_describe_constant(c) for c in code.co_consts))


def _describe_constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _describe_code(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def find_emulation(name: str) -> Callable[..., Any]:
    """The emulation of this name.

    Raises:
        UnknownNameError: this process has not traced a kernel that uses it.
    """
    if name not in EMULATIONS:
        raise UnknownNameError(
            f"the emulation {name.partition('#')[0]} of tile.inline is not loaded",
            expected="an emulation of a kernel that this process has launched or built",
            suggestion="launch or build the kernel that uses it before this program is run",
        )
    return EMULATIONS[name]


def _infer_inline(*operands: TensorType, python: str, llvm: str, ptx: str, dtype: DType, ulp: float) -> TensorType:
    if not operands:
        raise ShapeError("tile.inline needs an operand", expected="at least one block or scalar")
    shapes = {o.shape for o in operands}
    if len(shapes) != 1:
        raise ShapeError("the operands of tile.inline have one shape", received=", ".join(map(str, operands)))
    return TensorType(operands[0].shape, dtype)


@op(infer=_infer_inline, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile")
def inline(*operands, python: str, llvm: str = "", ptx: str = "", dtype: DType = f32, ulp: float = 0.0):
    """Apply a target's own text, or the emulation named `python`, to each element of the operands.

    Floats of 16 bits and fewer are passed as f32, and the result is rounded once to `dtype`. `ulp` bounds the
    difference between the text and the emulation. A target whose text is empty refuses the op.
    """
