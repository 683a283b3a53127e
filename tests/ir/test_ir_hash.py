"""Structural hash: equal in every process, independent of locations, and different for different modules."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings

from tessera.core.symbolic_dim import Dim
from tessera.core.types import SHARED, RefType, TensorType, Type, accum, bf16, f16, f32, scalar
from tessera.ir.core import Attrs, Block, Function, Module, Value, structural_hash
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_function, print_module
from tests.ir.modules import modules

TEXT = """"builtin.module"() ({
  "ts.func"() ({
  ^bb0(%0: tensor<?x4xbf16, {accumulate = f32, dims = ["A*B+2*((C) // (3))"]}>):
    %1 = "ts.exp"(%0) : (tensor<?x4xbf16, {accumulate = f32, dims = ["A*B+2*((C) // (3))"]}>)
      -> tensor<?x4xbf16, {accumulate = f32, dims = ["A*B+2*((C) // (3))"]}> loc("f.py":1:2)
    "ts.return"(%1) : (tensor<?x4xbf16, {accumulate = f32, dims = ["A*B+2*((C) // (3))"]}>) -> ()
  }) {b = {z = 1 : i64, y = 2.0 : f64}, a = f32, sym_name = "main"} : () -> ()
}) {ts.level = "graph"} : () -> ()
"""
PROGRAM = """
import sys, tessera.ops
from tessera.ir.core import structural_hash
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
module = parse_module(sys.argv[1])
print(structural_hash(module), print_module(module).encode().hex())
"""


def _elsewhere(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, TEXT], env=environment, capture_output=True, check=True, text=True
    ).stdout


def test_the_same_in_every_process() -> None:
    assert _elsewhere("1") == _elsewhere("2")
    assert _elsewhere("3").split()[0] == structural_hash(parse_module(TEXT))


def test_attribute_order_does_not_matter() -> None:
    changed = TEXT.replace("b = {z = 1 : i64, y = 2.0 : f64}, a = f32", "a = f32, b = {y = 2.0 : f64, z = 1 : i64}")
    assert changed != TEXT
    assert structural_hash(parse_module(changed)) == structural_hash(parse_module(TEXT))


@settings(max_examples=40, deadline=None)
@given(modules)
def test_locations_do_not_matter(module: Module) -> None:
    assert structural_hash(parse_module(print_module(module, locations=False))) == structural_hash(module)


def _function(attrs: dict | None = None, type: Type = TensorType((), f32), name: str = "f") -> Function:  # noqa: B008
    x = Value(type)
    return Function(name, Block((x,), (), (x,)), Attrs(attrs))


DIFFERENT = [
    (_function({"a": 1}), _function({"a": 1.0})),
    (_function({"a": 1}), _function({"a": True})),
    (_function({"a": 0.0}), _function({"a": -0.0})),
    (_function({"a": "ts.f32"}), _function({"a": f32})),
    (_function({"a": None}), _function({"a": "None"})),
    (_function({"a": (1,)}), _function({"a": ((1,),)})),
    (_function({"a": ()}), _function({"a": {}})),
    (_function({"a": {"b": 1}}), _function({"a": (("b", 1),)})),
    (_function({"a": Dim.of("B")}), _function({"a": Dim.of("C")})),
    (_function(), _function(type=scalar(f16))),
    (_function(type=scalar(bf16)), _function(type=TensorType((), bf16, bf16 @ accum(bf16)))),
    (_function(type=RefType((4,), f32)), _function(type=RefType((4,), f32, SHARED))),
    (_function(), _function(name="g")),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_differences_show(one: Function, other: Function) -> None:
    assert one != other
    assert structural_hash(one) != structural_hash(other)
    assert print_function(one) != print_function(other)
