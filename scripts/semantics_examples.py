"""Cases of the numbered constraints in `docs/semantics*`: what the pages say of expressions and conformance cases."""

from __future__ import annotations

import ast
import builtins
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

import tessera as ts
from conformance.run import list_engines
from tessera.core.types import as_dtype
from tessera.frontend.jit.tracing import Jit
from tessera.ir.numerics.conversion import convert
from tessera.ir.rules import REGISTRY
from tessera.runtime.program import prepare

PAGES = ("semantics.md", "semantics/graph.md", "semantics/schedule.md", "semantics/tile.md", "semantics/target.md")
MARK = "<!-- below: written by a script from the definitions of the ops -->\n"
ITEM = re.compile(r"^- \*\*([\w.]+?)\.?\*\* (.*(?:\n(?:  .*|$))*)", re.M)
CASE = re.compile(r"`([^`]+)`\s+(?:(is\s+refused|passes)|(is|raises)\s+`([^`]+)`)")


@dataclass(frozen=True)
class Example:
    """One case of a number: an expression or the name of a conformance case, and what comes of it."""

    number: str
    what: str
    verb: str
    want: str
    positive: bool

    @property
    def is_expression(self) -> bool:
        """Whether this is evaluated; else it names a conformance case."""
        return self.verb in ("is", "raises")


def read_numbers(page: str) -> dict[str, str]:
    """The text of each number of a page."""
    found = {}
    for number, text in ITEM.findall(page):
        assert number not in found, f"{number} is stated twice"
        found[number] = text
    return found


def read_examples(number: str, text: str) -> list[Example]:
    """The cases that the text of a number has: those before "but" are where it holds."""
    found, end, positive = [], 0, True
    for match in CASE.finditer(text):
        positive = positive and not re.search(r"\bbut\b", text[end : match.start()])
        end = match.end()
        verb = " ".join((match[2] or match[3]).split())
        found.append(Example(number, " ".join(match[1].split()), verb, match[4] or "", positive))
    return found


def run_on_ranks(function: Any) -> Any:
    """What a function of the rank and the mesh gives on each of two simulated ranks."""
    mesh = ts.Mesh((2,), "x")
    program = ts.spmd(lambda x: function(ts.get_rank(), mesh), mesh=mesh, out_specs="ranks")
    return ts.Tensor(np.stack([np.asarray(r) for r in program(ts.zeros(1))]))


def make_tensor(values: Any, dtype: str = "f32") -> ts.Tensor:
    """A list as a tensor: of `dtype` if it has floats."""
    wide = np.asarray(values)
    return ts.Tensor(wide) if wide.dtype.kind != "f" else ts.Tensor(convert(wide, as_dtype(dtype)), as_dtype(dtype))


def run_on_target(target: str, function: Any) -> Any:
    """What the text for a target gives in its emulator."""
    program = prepare(Jit(function), ())
    results = list_engines([target], ["target"])[0].run(program)
    return ts.Tensor(results[0]) if len(results) == 1 else tuple(map(ts.Tensor, results))


def _list_dialect(dialect: str) -> SimpleNamespace:
    return SimpleNamespace(**{op.__name__: op for name, op in REGISTRY.items() if name.startswith(f"{dialect}.")})


OWN = {"ops": _list_dialect("ts"), "transforms": _list_dialect("transform"), "ranks": run_on_ranks, "on": run_on_target,
       "inf": np.inf,
       "nan": np.nan, "tensor_of": make_tensor, "__builtins__": {}}  # fmt: skip


class Names(dict):
    """The names of an expression: those of `tessera`, and a few more."""

    def __missing__(self, name: str) -> Any:
        return getattr(ts, name) if hasattr(ts, name) else getattr(builtins, name)


class ListsToTensors(ast.NodeTransformer):
    """Lists as tensors, those of tuples aside; lists with a float have an element type, if one is given."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def visit_List(self, node: ast.List) -> ast.expr:
        """A list as a call of `tensor`."""
        inside = list(ast.walk(node))
        if any(isinstance(n, ast.Tuple) for n in inside):
            return node
        numbers = any(isinstance(n, ast.Constant) and isinstance(n.value, float) for n in inside)
        arguments = [node, *([ast.Constant(self.dtype)] if self.dtype and numbers else [])]
        return ast.Call(ast.Name("tensor_of", ast.Load()), arguments, [])


def evaluate(expression: str, dtype: str = "") -> Any:
    """The value of an expression, whose lists are tensors."""
    tree = ast.fix_missing_locations(ListsToTensors(dtype).visit(ast.parse(expression, mode="eval")))
    return eval(compile(tree, "<case>", "eval"), Names(OWN))  # the pages of this repository alone


def agrees(got: Any, want: Any) -> bool:
    """Whether a value is the stated one: NaN, infinities and signs of zero exactly, other floats to 1e-5."""
    if isinstance(want, tuple) and isinstance(got, (tuple, list)) and any(not isinstance(g, int) for g in got):
        return len(got) == len(want) and all(map(agrees, got, want))
    if not isinstance(got, (ts.Tensor, np.ndarray, np.generic)):
        return bool(got == want)
    a = np.asarray(got.numpy() if isinstance(got, ts.Tensor) else got).astype(np.float64)
    b = np.asarray(want.numpy() if isinstance(want, ts.Tensor) else want).astype(np.float64)
    same = a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=0, equal_nan=True)
    return bool(same and np.array_equal(np.signbit(a)[b == 0], np.signbit(b)[b == 0]))
