"""IR text: printing and parsing round-trip, and other tools read the text."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.core.errors import Location
from tessera.ir.core import Attrs, Block, Function, Module, structural_hash
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_function, print_module
from tessera.ir.verify import verify
from tests.ir.modules import modules

MLIR_OPT = shutil.which("mlir-opt") or shutil.which("mlir-opt-15")
calm = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(calm, max_examples=200)
@given(modules)
def test_round_trip(module: Module) -> None:
    text = print_module(module)
    again = parse_module(text)
    assert again == module
    assert print_module(again) == text


@settings(calm, max_examples=40)
@given(modules)
def test_without_locations(module: Module) -> None:
    again = parse_module(print_module(module, locations=False))
    assert structural_hash(again) == structural_hash(module)
    assert print_module(again, locations=False) == print_module(module, locations=False)


@settings(calm, max_examples=60)
@given(modules)
def test_generated_modules_are_valid(module: Module) -> None:
    assert verify(module) is module


@settings(calm, max_examples=60)
@given(modules)
def test_xdsl_reads_it(module: Module) -> None:
    pytest.importorskip("xdsl", reason="xdsl is not installed")
    from xdsl.context import Context
    from xdsl.dialects.builtin import Builtin
    from xdsl.parser import Parser

    context = Context(allow_unregistered=True)
    context.load_dialect(Builtin)
    Parser(context, print_module(module)).parse_module().verify()


@pytest.mark.skipif(MLIR_OPT is None, reason="mlir-opt is not on PATH")
@settings(calm, max_examples=25)
@given(modules)
def test_mlir_reads_it_and_prints_it_back(module: Module) -> None:
    command = [str(MLIR_OPT), "--allow-unregistered-dialect", "--mlir-print-op-generic"]
    found = subprocess.run(command, input=print_module(module).encode(), capture_output=True)
    assert found.returncode == 0, found.stderr.decode()
    assert structural_hash(parse_module(found.stdout.decode())) == structural_hash(module)


@given(st.text() | st.sampled_from(["C:\\zoë\\a.py", "\udcff", "\ud83d\ude00"]))
def test_any_string(text: str) -> None:
    location = Location(text, 1, 2, 3)
    block = Block((), (), ())
    module = Module("graph", (Function(text, block, Attrs({"s": text, text or "t": (text,)}), location),))
    assert parse_module(print_module(module)) == module


def test_a_function_alone_stands_as_in_its_module() -> None:
    function = Function("f", Block((), (), ()))
    inner = print_function(function).replace("\n", "\n  ").strip()
    assert inner in print_module(Module("graph", (function,)))
