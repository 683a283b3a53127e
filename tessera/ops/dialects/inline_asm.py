"""Inline assembly: target text in a kernel, with a Python emulation that defines its meaning."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import CodeType
from typing import Any

from tessera.core.errors import ShapeError, UnknownNameError
from tessera.core.io import hash_text
from tessera.core.types import DType, TensorType, f32
from tessera.ir.rules import STORAGE, op
from tessera.ops.dialects.control_flow import refuse_direct_call

# The emulations of this process by name; the IR holds names, since it must have a textual form.
EMULATIONS: dict[str, Callable[..., Any]] = {}


def find_emulation_name(function: Callable[..., Any]) -> str:
    """The name of an emulation: where it is defined, and a hash of its code."""
    name = f"{function.__module__}:{function.__qualname__}#{_hash_function(function)}"
    EMULATIONS[name] = function
    return name


def _hash_function(function: Any) -> str:
    cells = [repr(c.cell_contents) for c in getattr(function, "__closure__", None) or ()]
    code = getattr(function, "__code__", None)
    content = (_code_content(code) if code is not None else repr(function), cells)
    return hash_text(repr(content))[:12]


def _code_content(code: CodeType) -> tuple[Any, ...]:
    inner = (_code_content(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return (code.co_code, code.co_names, *inner)


def find_emulation(name: str) -> Callable[..., Any]:
    """The emulation of this name.

    Raises:
        UnknownNameError: the module that defines it is not loaded and cannot be imported.
    """
    if name not in EMULATIONS:
        EMULATIONS[name] = _import_emulation(name)
    return EMULATIONS[name]


def _import_emulation(name: str) -> Callable[..., Any]:
    module, _, rest = name.partition(":")
    path, _, known = rest.partition("#")
    found: Any = None
    try:
        found = functools.reduce(getattr, path.split("."), sys.modules.get(module) or import_module(module))
    except (ImportError, AttributeError, ValueError):
        pass
    if found is None or _hash_function(found) != known:
        raise UnknownNameError(
            f"the emulation {path} of tile.inline is not loaded",
            expected=f"the function {path} of module {module}, unchanged",
            suggestion="import the file that defines the kernel before this program is run",
        )
    return found  # type: ignore[no-any-return]


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
