"""AST instrumentation: a function compiled again with each call, operator and index passed to a guard."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from tessera.core.errors import Location

# The names that guarded code calls, in the order in which a checker gives their functions.
GUARDS = tuple(f"__ts_{n}__" for n in ("call", "operate", "return", "unpack", "slice", "truth"))
CALL, OPERATE, RETURN, UNPACK, SLICE, TRUTH = GUARDS
LOOP_ITEM = "__ts_item__"
INNER_NAME = "__ts_guarded__"  # not the function's own: a recursive call must find the global function
# What reads the frame it is called from cannot be called for someone else.
FRAME_READERS = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec"})


@dataclass(frozen=True)
class GuardedSite:
    """A place in a program where something may go wrong: where, and how its operands are written."""

    location: Location
    text: str
    operands: tuple[str, ...] = ()
    receiver: str = ""  # what a method is called on, or the module of a function


@dataclass(frozen=True)
class InstrumentedCode:
    """The new code of a function, its sites, and where its parameters stand."""

    code: CodeType
    sites: tuple[GuardedSite, ...]
    parameters: dict[str, Location]
    location: Location


def instrument_function(function: FunctionType) -> InstrumentedCode | None:
    """The guarded code of a function; None where its source cannot be read."""
    return _instrument_code(function.__code__)


@functools.cache
def _instrument_code(code: CodeType) -> InstrumentedCode | None:
    lines = linecache.getlines(code.co_filename)
    try:
        node = _find_definition(ast.parse("".join(lines)), code) if lines else None
    except SyntaxError:
        return None
    # Names such as self.__x are mangled by the class around them, which is not compiled here.
    guarded = {*GUARDS} & {*code.co_freevars, *code.co_cellvars}  # it was inside a function that is
    if (
        node is None
        or guarded
        or any(n.startswith("_") and "__" in n[1:] and not n.endswith("__") for n in code.co_names)
    ):
        return None
    guards = _GuardInserter(code.co_filename, lines)
    parameters = {a.arg: guards.location(a) for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    place = Location(code.co_filename, node.lineno)
    made = _compile_definition(guards.function(node), code)
    return InstrumentedCode(made, tuple(guards.sites), parameters, place) if made else None


def _is_mangled(name: str) -> bool:
    """Whether a name such as self.__x took on the class around it, which is not compiled here."""
    return name.startswith("_") and "__" in name[1:] and not name.endswith("__")


def _find_definition(tree: ast.Module, code: CodeType) -> ast.FunctionDef | ast.Lambda | None:
    kind = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
    found = [n for n in ast.walk(tree) if isinstance(n, kind) and _first_line(n) == code.co_firstlineno]
    same = [n for n in found if isinstance(n, ast.Lambda) or n.name == code.co_name]
    return same[0] if len(same) == 1 else None  # type: ignore[return-value]


def _first_line(node: Any) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _compile_definition(node: ast.FunctionDef, code: CodeType) -> CodeType | None:
    """The code of a definition whose free names are the same as before."""
    free = [ast.arg(n) for n in (*code.co_freevars, *GUARDS)]
    empty: list[Any] = []
    around: Any = ast.arguments(posonlyargs=empty, args=free, kwonlyargs=empty, kw_defaults=empty, defaults=empty)
    outer = ast.FunctionDef("__outer__", around, [node], [], **_empty_type_params())
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code_objects = [compile(module, code.co_filename, "exec")]
    for name in ("__outer__", INNER_NAME):
        inner = [c for c in code_objects[-1].co_consts if isinstance(c, CodeType) and c.co_name == name]
        if len(inner) != 1:
            return None
        code_objects += inner
    return code_objects[-1].replace(co_name=code.co_name)


def _empty_type_params() -> dict[str, Any]:
    return {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}


def with_instrumented_code(
    function: FunctionType, made: InstrumentedCode, guards: dict[str, Callable[..., Any]]
) -> FunctionType:
    """The function with its new code; `guards` are what the code calls, reached through its closure."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType(guard) for name, guard in guards.items()}
    closure = tuple(cells[n] for n in made.code.co_freevars)
    new = FunctionType(made.code, function.__globals__, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


class _GuardInserter(ast.NodeTransformer):
    """Puts a guard in the place of each call, operator and index, and of the function's returns."""

    def __init__(self, file: str, lines: list[str]) -> None:
        self.file, self.lines = file, lines
        self.sites: list[GuardedSite] = []
        self.depth = 0

    def function(self, node: ast.FunctionDef | ast.Lambda) -> ast.FunctionDef:
        """The definition without decorators, defaults and annotations, its body guarded."""
        body: list[ast.stmt] = node.body if isinstance(node, ast.FunctionDef) else [self._lambda_return(node)]
        arguments = node.args
        for each in ast.walk(arguments):
            if isinstance(each, ast.arg):
                each.annotation = None
        statements = [self.visit(s) for s in body]
        new = ast.FunctionDef(INNER_NAME, arguments, statements, [], **_empty_type_params())
        return ast.copy_location(new, node)

    def _lambda_return(self, node: ast.Lambda) -> ast.stmt:
        return ast.copy_location(ast.Return(node.body), node.body)

    def location(self, node: ast.AST) -> Location:
        """Where a piece of syntax stands."""
        same = node.end_lineno == node.lineno  # type: ignore[attr-defined]
        end = self._column(node.lineno, node.end_col_offset) if same else 0  # type: ignore[attr-defined]
        return Location(self.file, node.lineno, self._column(node.lineno, node.col_offset), end)  # type: ignore[attr-defined]

    def _column(self, line: int, offset: int) -> int:
        text = self.lines[line - 1]
        return (offset if text.isascii() else len(text.encode()[:offset].decode(errors="ignore"))) + 1

    def _site(self, node: ast.AST, operands: list[ast.expr], receiver: str = "") -> ast.Constant:
        texts = tuple(ast.unparse(o) for o in operands)
        self.sites.append(GuardedSite(self.location(node), ast.unparse(node), texts, receiver))
        return ast.Constant(len(self.sites) - 1)

    def _guard(self, node: ast.AST, name: str, args: list[ast.expr], keywords: Any = ()) -> ast.expr:
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), args, list(keywords)), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in FRAME_READERS:
            return self.generic_visit(node)
        receiver = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        site = self._site(node, [*node.args, *(k.value for k in node.keywords)], receiver)
        self.generic_visit(node)
        return self._guard(node, CALL, [site, node.func, *node.args], node.keywords)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        site = self._site(node, [node.left, node.right])
        self.generic_visit(node)
        return self._guard(node, OPERATE, [site, ast.Constant(type(node.op).__name__), node.left, node.right])

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        plain = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
        if len(node.ops) > 1 or not isinstance(node.ops[0], plain):
            return self.generic_visit(node)
        site = self._site(node, [node.left, *node.comparators])
        self.generic_visit(node)
        kind = ast.Constant(type(node.ops[0]).__name__)
        return self._guard(node, OPERATE, [site, kind, node.left, *node.comparators])

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not isinstance(node.ctx, ast.Load) or _has_starred(node.slice):
            return self.generic_visit(node)
        site = self._site(node, [node.value])
        self.generic_visit(node)
        return self._guard(node, OPERATE, [site, ast.Constant("Index"), node.value, self._index(node.slice)])

    def _index(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Tuple):
            return ast.copy_location(ast.Tuple([self._index(e) for e in node.elts], ast.Load()), node)
        if not isinstance(node, ast.Slice):
            return node
        parts = [p or ast.Constant(None) for p in (node.lower, node.upper, node.step)]
        return self._guard(node, SLICE, parts)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        site = self._site(node, [read, node.value])
        kind = ast.Constant("In" + type(node.op).__name__)
        value = self._guard(node, OPERATE, [site, kind, read, self.visit(node.value)])
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        form = _target_form(node.targets[0]) if len(node.targets) == 1 else None
        if form is not None:
            node.value = self._guard(node.value, UNPACK, [node.value, _literal(form)])
        return node

    def _loop(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        form = _target_form(node.target)
        if form is not None:  # (unpack(item, form) for item in items)
            item = self._guard(node.iter, UNPACK, [ast.Name(LOOP_ITEM, ast.Load()), _literal(form)])
            each = ast.comprehension(ast.Name(LOOP_ITEM, ast.Store()), node.iter, [], 0)
            node.iter = ast.copy_location(ast.GeneratorExp(item, [each]), node.iter)
        return node

    visit_For = visit_comprehension = _loop

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is None or self.depth:
            return self.generic_visit(node)
        site = self._site(node.value, [node.value])
        value = self._guard(node.value, RETURN, [site, self.visit(node.value)])
        return ast.copy_location(ast.Return(value), node)

    def _branch(self, node: Any) -> ast.AST:
        site = self._site(node.test, [node.test])
        self.generic_visit(node)
        node.test = self._guard(node.test, TRUTH, [site, node.test])
        return node

    visit_If = visit_While = visit_IfExp = _branch

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.depth += 1
        node.body = [self.visit(s) for s in node.body]
        self.depth -= 1
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        node.guard = self.visit(node.guard) if node.guard else None
        node.body = [self.visit(s) for s in node.body]
        return node


def _target_form(target: ast.expr) -> tuple | None:
    """The form of a target that unpacks: a tuple of the forms of its parts, None for a name."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return None
    return tuple(_target_form(e) for e in target.elts if not isinstance(e, ast.Starred))


def _literal(value: Any) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def _has_starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Tuple) and any(isinstance(e, ast.Starred) for e in node.elts)
