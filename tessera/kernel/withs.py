"""`with ts.memory.prefetch(A) as a:` — the one context manager that kernels have."""

from __future__ import annotations

import ast

from tessera.errors import UnsupportedSyntaxError
from tessera.kernel.expressions import evaluate
from tessera.kernel.frame import Frame
from tessera.kernel.placement import Prefetched
from tessera.kernel.statements import Flow, run, statement
from tessera.kernel.unsupported import unsupported


@statement(ast.With)
def _(frame: Frame, node: ast.With) -> None:
    before, opened = dict(frame.names), []
    for item in node.items:
        found = evaluate(frame, item.context_expr)
        if not isinstance(found, Prefetched):
            raise unsupported(frame, node)
        opened.append(found)
        frame.names[_name(frame, item)] = found.view
    if run(frame, node.body) is not Flow.NEXT:
        raise UnsupportedSyntaxError("a `with` is left before its end", location=frame.place(node),
                                     suggestion="make the rest of the body an `if`")  # fmt: skip
    for item, found in zip(node.items, opened, strict=True):
        found.close()
        name = _name(frame, item)
        frame.names.pop(name, None)
        if name in before:
            frame.names[name] = before[name]


def _name(frame: Frame, item: ast.withitem) -> str:
    """The name of the copy: as given, or that of what is copied."""
    if isinstance(item.optional_vars, ast.Name):
        return item.optional_vars.id
    call = item.context_expr
    first = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if item.optional_vars is None and isinstance(first, ast.Name):
        return first.id
    raise UnsupportedSyntaxError(
        "the copy has no name", location=frame.place(item.context_expr),
        suggestion="with ts.memory.prefetch(A[m : m + BM, :]) as a:",
    )  # fmt: skip
