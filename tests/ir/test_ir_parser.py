"""Parser errors: every text that is not a module gives an error with its line and column."""

from __future__ import annotations

import random

import pytest

import tessera.ops  # noqa: F401  (defines the ops)
from tessera.core.errors import UNKNOWN, Location, ParseError
from tessera.core.types import SHARED, RefType, f32
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module

TEXT = """"builtin.module"() ({
  "ts.func"() ({
  ^bb0(%0: tensor<?x4xbf16, {accumulate = f32, dims = ["2*B"]}>, %1: !tile.ref<4xf32, shared>):
    %2 = "ts.softmax"(%0) {axis = -1 : i64} : (tensor<?x4xbf16, {accumulate = f32, dims = ["2*B"]}>) -> tensor<f32> loc("to 9"("f.py":12:4))
    "ts.return"(%2) : (tensor<f32>) -> ()
  }) {a = [0x7FF0000000000000 : f64, #ts.dim<"B">, unit, #ts.int<99999999999999999999>], sym_name = "main"} : () -> () loc(unknown)
}) {ts.level = "graph"} : () -> ()
"""  # noqa: E501


def test_what_is_read() -> None:
    module = parse_module(TEXT)
    (node,) = module.main.body.nodes
    assert print_module(module) == TEXT
    assert node.loc == Location("f.py", 12, 4, 9)
    assert module.main.loc == UNKNOWN
    assert module.main.params[1].type == RefType((4,), f32, SHARED)


# What is replaced in the text, by what, what the error then points at, and what it says.
BROKEN = [
    ("ts.softmax", "ts.sofmax", '"ts.sofmax"', 'write "ts.softmax"'),
    ("(%0)", "(%7)", "%7", "%7 is not defined here"),
    ("(%2) : (tensor<f32>)", "(%2) : (tensor<f16>)", "%2) : (tensor<f16>)", "%2 has another type"),
    ("%2 =", "%0 =", "%0 =", "%0 is defined twice"),
    ("%2 =", "%2, %3 =", "%2, %3", "differ in number"),
    ("(%2) :", "() :", "}) {a = [", "operands and their types differ in number"),
    ("-1 : i64", "-1 : i65", "i65", "not an element type"),
    ("axis = -1", "axis = ?", "? : i64", "no part of the language"),
    ('"ts.return"(%2) : (tensor<f32>) -> ()', "", "}) {a = [", '"ts.return"'),
    ('sym_name = "main"', 'name = "main"', '"ts.func"', "has no name"),
    ("ts.level", "level", '"builtin.module"', "does not tell its level"),
    ("a = [", "sym_name = [", 'sym_name = "main"', "given twice"),
    ('dims = ["2*B"]}>, %1', "dims = []}>, %1", "tensor<?x4x", "dims does not name"),
    ("accumulate = f32, dims", "accumulates = f32, dims", "tensor<?x4x", "accumulates"),
    ('"B"', '"B+"', '"B+"', "this is not a size"),
    ("to 9", "from 9", '"from 9"', "end column"),
    ('"graph"} : () -> ()', '"graph"} : () -> () ^', "^\n", "no part of the language"),
    ('"graph"} : () -> ()', '"graph"} : () -> () [', "[\n", "end of the text"),
    ("0x7FF0000000000000", "0x7FF", "0x7FF", "16 digits"),
    ("-1 : i64", "9" * 5000, "999", "this number is too long"),
    ("?x4xbf16, {acc", "9" * 5000 + "xbf16, {acc", "tensor<999", "this number is too long"),
    ("%2 =", "%2:1000000000 =", "%2:1", "no such number of results"),
    ('sym_name = "main"', 'sym_name = "\\ff"', "} : () -> () loc", "not UTF-8"),
]


@pytest.mark.parametrize(("old", "new", "at", "words"), BROKEN)
def test_errors(old: str, new: str, at: str, words: str) -> None:
    text = TEXT.replace(old, new, 1)
    before = text[: text.index(at)].split("\n")
    with pytest.raises(ParseError) as caught:
        parse_module(text, "m.mlir")
    assert words in str(caught.value)
    assert caught.value.location == Location("m.mlir", len(before), len(before[-1]) + 1)


def test_any_damage_is_a_parse_error_or_a_module() -> None:
    chance = random.Random(0)
    for _ in range(3000):
        at, width = chance.randrange(len(TEXT)), chance.randrange(1, 5)
        piece = chance.choice(["", chance.choice('"\\%{}[]()<>,:?x0-'), TEXT[at : at + 3 * width] * 2])
        try:
            parse_module(TEXT[:at] + piece + TEXT[at + width :])
        except ParseError as error:
            assert error.location is not None


def test_deep_nesting() -> None:
    with pytest.raises(ParseError, match="too deep"):
        parse_module(TEXT.replace("unit", "[" * 9999))
