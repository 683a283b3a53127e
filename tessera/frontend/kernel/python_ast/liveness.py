"""Liveness analysis of names: what a loop must carry and a branch must yield (backward data flow)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence

NameSet = frozenset[str]
# Functions that, called as statements, update the variable given first (see marks.updates_first).
UPDATING_FUNCTIONS = frozenset({"mma", "mask_causal"})
_NESTED_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.GeneratorExp)


def find_reads(*nodes: ast.AST | None) -> NameSet:
    """The names read anywhere inside."""
    walked = (n for node in nodes if node is not None for n in ast.walk(node))
    return frozenset(n.id for n in walked if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def find_writes(nodes: Iterable[ast.AST]) -> NameSet:
    """The names assigned inside, inner functions and comprehensions left out."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Expr):
            found |= _find_updated(node.value)
        if not isinstance(node, _NESTED_SCOPES):
            found |= find_writes(ast.iter_child_nodes(node))
    return frozenset(found)


def _find_updated(node: ast.expr) -> set[str]:
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Name):
        return set()
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return {node.args[0].id} if name in UPDATING_FUNCTIONS else set()


class Liveness:
    """For each statement the names live after it; for each loop also those live where its body begins."""

    def __init__(self, body: Sequence[ast.stmt]) -> None:
        inner = [n for s in body for n in ast.walk(s) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
        self.always = find_reads(*inner)  # an inner function may be called anywhere
        self.after: dict[ast.stmt, NameSet] = {}
        self.head: dict[ast.stmt, NameSet] = {}
        self._exits: list[NameSet] = []
        self._block(body, frozenset())

    def _block(self, statements: Sequence[ast.stmt], after: NameSet) -> NameSet:
        for each in reversed(statements):
            self.after[each] = after | self.always
            after = _LIVENESS_RULES.get(type(each), Liveness._simple)(self, each, after)
        return after

    def _simple(self, node: ast.stmt, after: NameSet) -> NameSet:
        return after - find_writes([node]) | find_reads(node) | _find_augmented(node)

    def _if(self, node: ast.If, after: NameSet) -> NameSet:
        return find_reads(node.test) | self._block(node.body, after) | self._block(node.orelse, after)

    def _with(self, node: ast.With, after: NameSet) -> NameSet:
        named = find_writes(i.optional_vars for i in node.items if i.optional_vars is not None)
        return find_reads(*(i.context_expr for i in node.items)) | (self._block(node.body, after) - named)

    def _for(self, node: ast.For, after: NameSet) -> NameSet:
        return find_reads(node.iter) | self._loop(node, after, find_reads(), find_writes([node.target]))

    def _while(self, node: ast.While, after: NameSet) -> NameSet:
        return self._loop(node, after, find_reads(node.test), frozenset())

    def _loop(self, node: ast.For | ast.While, after: NameSet, test: NameSet, bound: NameSet) -> NameSet:
        head: NameSet = after | test
        while True:
            self._exits.append(head)
            found = head | (self._block(node.body, head) - bound)
            self._exits.pop()
            if found == head:
                self.head[node] = head | self.always
                return head
            head = found

    def _leave(self, node: ast.stmt, after: NameSet) -> NameSet:
        return self._exits[-1] if self._exits else after

    def _return(self, node: ast.Return, after: NameSet) -> NameSet:
        return find_reads(node.value)


def _find_augmented(node: ast.stmt) -> NameSet:
    target = node.target if isinstance(node, ast.AugAssign) else None
    return frozenset([target.id]) if isinstance(target, ast.Name) else frozenset()


_LIVENESS_RULES: dict[type, Callable[..., NameSet]] = {
    ast.If: Liveness._if,
    ast.For: Liveness._for,
    ast.While: Liveness._while,
    ast.Break: Liveness._leave,
    ast.Continue: Liveness._leave,
    ast.Return: Liveness._return,
    ast.With: Liveness._with,
}
