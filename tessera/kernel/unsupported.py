"""Python that the kernel language does not have, and what to write instead."""

from __future__ import annotations

import ast

from tessera.errors import UnsupportedSyntaxError
from tessera.kernel.frame import Frame

_INSTEAD: dict[type, tuple[str, str | None]] = {
    ast.Try: ("try", "a kernel has no exceptions: check with `if`, or mask the access"),
    ast.With: ("with", "call the function directly"),
    ast.ClassDef: ("class", "define it outside the kernel"),
    ast.AsyncFunctionDef: ("async", "use tile.cp_async to overlap copies"),
    ast.AsyncFor: ("async for", "use for"),
    ast.AsyncWith: ("async with", "call the function directly"),
    ast.Await: ("await", "use tile.cp_wait_group"),
    ast.Yield: ("yield", "store into an array instead"),
    ast.YieldFrom: ("yield from", "store into an array instead"),
    ast.Import: ("import", "import at the top of the file"),
    ast.ImportFrom: ("import", "import at the top of the file"),
    ast.Delete: ("del", "names end with the kernel"),
    ast.Global: ("global", "pass the value as an argument and return or store the result"),
    ast.Nonlocal: ("nonlocal", "return the value instead"),
    ast.Raise: ("raise", "a kernel has no exceptions: use assert on values known while compiling"),
    ast.Set: ("a set", "use a tuple"),
    ast.SetComp: ("a set comprehension", "use a list comprehension"),
    ast.DictComp: ("a dict comprehension", "build the dict outside the kernel"),
    ast.Starred: ("a starred expression", "write the elements one by one"),
    ast.NamedExpr: (":=", "assign on a line of its own"),
    ast.Match: ("match", "use if and elif"),
    ast.Break: ("break", None),
    ast.Continue: ("continue", None),
}


def unsupported(
    frame: Frame, node: ast.AST, what: str | None = None, suggestion: str | None = None
) -> UnsupportedSyntaxError:
    """The error for a piece of syntax, at its place."""
    name, instead = _INSTEAD.get(type(node), (type(node).__name__, None))
    return UnsupportedSyntaxError(
        f"{what or name} is not part of the kernel language",
        location=frame.place(node),
        suggestion=suggestion or instead,
    )
