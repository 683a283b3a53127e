"""Early returns made branches: `if done: return` puts what follows in the other branch."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def normalized(statements: Sequence[ast.stmt]) -> tuple[list[ast.stmt], frozenset[ast.stmt]]:
    """Statements of a function body in which only the last one of a list returns, and the last branches."""
    tails: set[ast.stmt] = set()
    return _tail(list(statements), tails), frozenset(tails)


def _tail(statements: list[ast.stmt], tails: set[ast.stmt]) -> list[ast.stmt]:
    for place, each in enumerate(statements):
        if isinstance(each, ast.Return):
            return statements[: place + 1]
        rest = statements[place + 1 :]
        if isinstance(each, ast.If) and (not rest or _ends(each.body) or _ends(each.orelse)):
            body = each.body if _ends(each.body) else [*each.body, *rest]
            other = each.orelse if _ends(each.orelse) else [*each.orelse, *rest]
            branch = ast.If(each.test, _tail(body, tails), _tail(other, tails))
            ast.copy_location(branch, each)
            tails.add(branch)
            return [*statements[:place], branch]
    return statements


def _ends(statements: Sequence[ast.stmt]) -> bool:
    """Whether every way through the statements returns."""
    if not statements:
        return False
    last = statements[-1]
    both = isinstance(last, ast.If) and _ends(last.body) and _ends(last.orelse)
    return both or any(isinstance(s, ast.Return) for s in statements)
