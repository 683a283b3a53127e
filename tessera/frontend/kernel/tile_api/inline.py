"""`tile.inline`: target assembly in a kernel, with the Python function that emulates it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from tessera.core.errors import ArgumentError, UnsupportedSyntaxError
from tessera.core.shapes import broadcast
from tessera.core.types import as_dtype
from tessera.frontend.kernel.memref import MemRefAccess
from tessera.frontend.kernel.python_ast.calls import KernelClosure
from tessera.frontend.kernel.python_ast.source import find_reads, find_writes
from tessera.frontend.kernel.trace import as_value, current_trace, emit_op, is_traced
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import inline_asm as ops
from tessera.ops.tensor.basic import broadcast_to


def inline(
    *operands: Any, python: Callable[..., Any], llvm: str = "", ptx: str = "", dtype: Any = None, ulp: float = 0.0
) -> Tensor:
    """Each element of the operands (broadcast together) through a target's own instructions.

    `python(*arrays)` is the emulation: a NumPy function of each element by itself, which the interpreter runs and
    against which targets are held. Floats of 16 bits come to it, and to the text, as f32; the result is rounded to
    `dtype` (that of the first operand unless given). `ulp` says how far a target's text may lie from it.

    The texts are format strings: `{0}`, `{1}`, … are the operands, `{out}` the result (`{out}.a` is a name of your
    own). In `llvm`, `{t}` and `{s}` are the result's type and its intrinsic suffix, `{t0}`, `{s0}`, … those of the
    operands: a text that names `{t}` is emitted for whole vectors, any other once for each element. Statements
    are separated by line ends or semicolons.

    A target without a text for it refuses the kernel with the line.

    Raises:
        ArgumentError: `python` is no function, or `ulp` is negative.
        ShapeError: the operands do not broadcast together.
    """
    current_trace("tile.inline")
    blocks = [as_value(x) for x in operands]
    if not callable(python):
        raise ArgumentError("tile.inline needs its meaning as a function", expected="python=a NumPy function",
                            received=repr(python))  # fmt: skip
    if ulp < 0:
        raise ArgumentError("an error is not negative", expected="ulp >= 0", received=str(ulp))
    shape = broadcast(*(b.shape for b in blocks))
    whole = [b if b.shape == shape else broadcast_to(b, shape=shape) for b in blocks]
    function = compile_closure(python) if isinstance(python, KernelClosure) else python
    result = as_dtype(dtype) if dtype is not None else whole[0].dtype if whole else as_dtype("f32")
    name = ops.register_emulation(function)
    return emit_op(ops.inline, whole, python=name, llvm=llvm, ptx=ptx, dtype=result, ulp=float(ulp))


def compile_closure(closure: KernelClosure) -> Callable[..., Any]:
    """A lambda or inner function of a kernel as an ordinary Python function.

    Raises:
        UnsupportedSyntaxError: it uses a value known only at run time.
    """
    source, file = closure.source, closure.frame.source.file
    parameters = [ast.arg(name) for name in closure.signature.parameters]
    definition = ast.FunctionDef(source.name, ast.arguments([], parameters, None, [], [], None, []), [*source.body], [])
    definition.__dict__["type_params"] = []  # a field since Python 3.12
    scope = {**_closure_scope(closure), "__name__": f"{file}:{source.first}"}
    exec(compile(ast.fix_missing_locations(ast.Module([definition], [])), file, "exec"), scope)
    return scope[source.name]  # type: ignore[no-any-return]


def _closure_scope(closure: KernelClosure) -> dict[str, Any]:
    """The names that an inner function sees outside itself, with what they hold."""
    own = {*closure.signature.parameters, *find_writes(closure.source.body)}
    scope = {}
    for name in sorted(find_reads(*closure.source.body) - own):
        scope[name] = closure.frame.find(name)
        if is_traced(scope[name]) or isinstance(scope[name], MemRefAccess):
            raise UnsupportedSyntaxError(
                f"the emulation uses `{name}`, a value known only at run time",
                suggestion=f"pass it as an operand: tile.inline(x, {name}, python=lambda x, {name}: ...)",
            )
    return scope
