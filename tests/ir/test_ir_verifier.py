"""Verifier: for each numbered rule, modules that violate it, and the error."""

from __future__ import annotations

import pytest

from tessera.core.errors import Location, VerifyError
from tessera.core.types import f32, scalar
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.levels import LEVELS
from tessera.ir.parser import parse_module
from tessera.ir.verify import VERIFIER_RULES, verify
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, elementwise

REF, BLOCK, I = "!tile.ref<8xf32, global>", "tensor<4xf32>", "tensor<i64>"  # noqa: E741
STORED = 'edge = "error", vector = 1 : i64'
ZERO = f'%z = "ts.full"() {{dtype = i64, shape = [], value = 0 : i64}} : () -> {I}'
TRUE = '%t = "ts.full"() {dtype = i1, shape = [], value = true} : () -> tensor<i1>'
LAUNCH = '"host.launch"(%r) {grid = [1 : i64], kernel = "k"} : (!tile.ref<8xf32, global>) -> ()'
YIELD = '"ts.yield"() : () -> ()'


def function(body: str, name: str = "main", params: str = "", results: str = "() : ()", attrs: str = "") -> str:
    block = f'^bb0({params}): {body} "ts.return"{results} -> ()'
    return f'"ts.func"() ({{ {block} }}) {{sym_name = "{name}"{attrs}}} : () -> ()'


def module(level: str, *functions: str) -> Module:
    return parse_module(f'"builtin.module"() ({{ {" ".join(functions)} }}) {{ts.level = "{level}"}} : () -> ()')


def graph(body: str, params: str = f"%x: {BLOCK}, %n: {I}", **more: str) -> Module:
    return module("graph", function(body, params=params, **more))


def tile(body: str, entry: str = LAUNCH, attrs: str = "", kernel: str = "") -> Module:
    """An entry, and a tile function `k` of this body; `%r` is a ref in both."""
    tile_function = function(body, "k", f"%r: {REF}", attrs=kernel)
    return module("tile", function(entry, params=f"%r: {REF}", attrs=attrs), tile_function)


def schedule(body: str, params: str = f"%s: {REF}") -> Module:
    """An entry with one kernel of this body; `%s` is the ref in it."""
    attrs = '{dims = [["i", 8 : i64, "parallel"]], schedule = {}}'
    kernel = f'"schedule.kernel"(%r) ({{ ^bb0({params}): {body} {YIELD} }}) {attrs} : ({REF}) -> ()'
    return module("schedule", function(kernel, params=f"%r: {REF}"))


def test_valid_modules_pass() -> None:
    verify(graph(f'%y = "ts.exp"(%x) : ({BLOCK}) -> {BLOCK}'))
    verify(tile(ZERO, attrs=", outputs = 1 : i64", kernel=", group = 2 : i64"))
    verify(schedule(f'%i = "schedule.index"() {{dim = 0 : i64}} : () -> {I}'))


def region(op: str, operands: str, regions: str, types: str, attrs: str = "") -> str:
    return f"{op}({operands}) ({{ {regions} }}) {attrs} : {types}"


def for_(params: str, yields: str, results: str = I) -> str:
    return region('%o = "ts.for"', "%n, %n, %n, %n", f"^bb0({params}): {yields}", f"({I}, {I}, {I}, {I}) -> {results}")


def while_(test: str) -> str:
    return region('"ts.while"', "", f"{TRUE} {ZERO} {test} }}, {{ {YIELD}", "() -> ()")


def if_(other: str) -> str:
    one = f'"ts.yield"(%n) : ({I}) -> ()'
    return TRUE + region('%o = "ts.if"', "%t", f"{one} }}, {{ {other}", f"(tensor<i1>) -> {I}", "{apart = false}")


def launch(kernel: str = "k", operands: str = "%r", types: str = REF, grid: str = "[1 : i64]") -> str:
    return f'"host.launch"({operands}) {{grid = {grid}, kernel = "{kernel}"}} : ({types}) -> ()'


BROKEN = [
    ("V2", "results have other types", graph(f'%y = "ts.exp"(%x) : ({BLOCK}) -> {I}')),
    ("V2", "number of operands", graph(f'%y = "ts.add"(%x) : ({BLOCK}) -> {BLOCK}')),
    ("V2", "x is of another kind", tile(f'%y = "ts.exp"(%r) : ({REF}) -> {REF}')),
    ("V2", "ref is of another kind", tile(f'{ZERO} "tile.store"(%z, %z) {{{STORED}}} : ({I}, {I}) -> ()')),
    ("V2", "arithmetic on bool", graph(f'{TRUE} %y = "ts.neg"(%t) : (tensor<i1>) -> tensor<i1>')),
    ("V2", "type rule fails", graph(f'%y = "ts.permute"(%x) {{axes = ["a"]}} : ({BLOCK}) -> {BLOCK}')),
    ("V3", "ts ops", graph('"tile.barrier"() : () -> ()')),
    ("V3", "illegal in a tile function", tile('%b = "host.alloc"() {dtype = f32, offset = 0 : i64, shape = []} '
                                              ': () -> !tile.ref<f32, global>')),
    ("V3", "entry function of a tile module", tile("", f"{ZERO} {LAUNCH}")),
    ("V3", "ts.softmax", tile(f'{ZERO} %y = "ts.softmax"(%z) {{axis = -1 : i64}} : ({I}) -> {I}')),
    ("V3", "body of a schedule.kernel", schedule('"tile.barrier"() : () -> ()')),
    ("V3", "graph module has one function", module("graph", function(""), function("", "f"))),
    ("V3", "refs and scalars", module("tile", function("", params=f"%x: {BLOCK}"))),
    ("V3", "returns nothing", module("tile", function("", params=f"%r: {REF}", results=f"(%r) : ({REF})"))),
    ("V4", "parameters of the region", graph(for_(f"%i: {I}", f'"ts.yield"(%n) : ({I}) -> ()'))),
    ("V4", "values yielded", graph(for_(f"%i: {I}, %c: {I}", YIELD))),
    ("V4", "the results", graph(for_(f"%i: {I}, %c: {I}", f'"ts.yield"(%c) : ({I}) -> ()', BLOCK))),
    ("V4", "values of the condition", graph(while_(f'"ts.yield"(%z) : ({I}) -> ()'))),
    ("V4", "values of a branch", graph(if_(YIELD))),
    ("V4", "number of regions", graph(region('"ts.while"', "", YIELD, "() -> ()"))),
    ("V4", "number of regions", graph(region('%y = "ts.exp"', "%x", YIELD, f"({BLOCK}) -> {BLOCK}"))),
    ("V4", "parameters of the region", schedule("", f"%s: {BLOCK}")),
    ("V5", "no tile function has this name", tile("", launch("main"))),
    ("V5", "operands of k", tile("", launch(operands="", types=""))),
    ("V5", "a grid is", tile("", launch(grid="[-1 : i64]"))),
    ("V6", "0 to 1", tile("", attrs=", outputs = 2 : i64")),
    ("V6", "0 to 1", tile("", attrs=", outputs = true")),
    ("V6", "entry of a schedule or tile module", tile("", kernel=", outputs = 1 : i64")),
    ("V6", "entry of a schedule or tile module", graph("", attrs=", outputs = 1 : i64")),
    ("V6", "an output is no ref", module("tile", function("", params=f"%n: {I}", attrs=", outputs = 1 : i64"))),
    ("V6", "group", tile("", kernel=", group = 0 : i64")),
    ("V7", "axis", graph(f'%y = "ts.softmax"(%x) : ({BLOCK}) -> {BLOCK}')),
    ("V7", "other attributes", graph(f'%y = "ts.exp"(%x) {{fast = true}} : ({BLOCK}) -> {BLOCK}')),
    ("V7", "axis is of another kind", graph(f'%y = "ts.softmax"(%x) {{axis = "a"}} : ({BLOCK}) -> {BLOCK}')),
    ("V8", "not static", tile('%b = "ts.full"() {dtype = f32, shape = [#ts.dim<"B">], value = 0.0} '
                              ': () -> tensor<?xf32, {dims = ["B"]}>')),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "words", "broken"), BROKEN)
def test_broken(rule: str, words: str, broken: Module) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(broken)
    assert caught.value.message.startswith(f"{rule}: ")
    assert words in str(caught.value)


def _undefined() -> Module:
    return Module("graph", (Function("f", Block((), (), (Value(scalar(f32)),))),))


def _twice() -> Module:
    x, y = Value(scalar(f32)), Value(scalar(f32))
    node = Node(elementwise.exp, (x,), Attrs(), (y,))
    return Module("graph", (Function("f", Block((x,), (node, node), ())),))


def _escaped() -> Module:
    """A value of a region used after it."""
    inner = Value(scalar(f32))
    full = Node(basic.full, (), Attrs({"shape": (), "value": 0.0, "dtype": f32}), (inner,))
    regions = (Block((), (full,), ()), Block((), (), ()))
    condition = Value(scalar(elementwise.bool_))
    node = Node(control_flow.if_, (condition,), Attrs(), (), regions)
    return Module("graph", (Function("f", Block((condition,), (node,), (inner,))),))


def _same_name() -> Module:
    return Module("tile", (Function("f", Block((), (), ())),) * 2)


@pytest.mark.parametrize("broken", [_undefined, _twice, _escaped, _same_name, lambda: Module("graph", ())])
def test_V1(broken) -> None:
    with pytest.raises(VerifyError, match="V1: "):
        verify(broken())


def test_V7_attribute_without_a_spelling() -> None:
    kernel = Function("f", Block((), (), ()), Attrs({"a": object()}))
    with pytest.raises(VerifyError, match="V7: function f: an attribute cannot be printed"):
        verify(Module("graph", (kernel,)))


def test_every_rule_is_tested_and_used() -> None:
    assert {rule for rule, *_ in BROKEN} | {"V1"} == set(VERIFIER_RULES)
    assert {rule for level in LEVELS.values() for rule in level.rules} == set(VERIFIER_RULES)


def test_the_error_has_the_place_of_the_node() -> None:
    broken = graph(f'%y = "ts.exp"(%x) : ({BLOCK}) -> {I} loc("model.py":7:3)')
    with pytest.raises(VerifyError) as caught:
        verify(broken)
    assert caught.value.location == Location("model.py", 7, 3)
    assert "ts.exp" in caught.value.message


def test_unknown_level() -> None:
    with pytest.raises(VerifyError, match="level is unknown"):
        verify(Module("grph", (Function("f", Block((), (), ())),)))
