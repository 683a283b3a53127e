"""Inlining before simplification: LLVM simplifies each kernel once, and the machine code is what LLVM makes alone."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.codegen.llvm.runtime import jit
from tessera.runtime.program import prepare

X = np.ones((3, 37), np.float32)
FUNCTIONS = {
    "pointwise": lambda x: x * 2.0 + 1.0,
    "comparison": lambda x: x > 0.5,
    "reduction": lambda x: x.max(1),
    "long": lambda x: ts.gelu(ts.softmax(x @ x.T)),
}


def emit(function):
    levels = prepare(ts.jit(function), (X,), "llvm").levels
    return get_backend("llvm").emit(levels["tile"], {}).text("kernels.ll")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_range_is_part_of_its_task(name):
    text = emit(FUNCTIONS[name])
    code = jit.compile_object(text)
    assert b".task\0" in code and b".range\0" not in code


@pytest.mark.parametrize("name", ["pointwise", "comparison", "reduction"])
def test_the_machine_code_is_that_of_llvm_alone(name, monkeypatch):
    text = emit(FUNCTIONS[name])
    code = jit.compile_object(text)
    monkeypatch.setattr(jit, "_inline_first", lambda functions: None)
    assert code == jit.compile_object(text)


def test_only_short_kernels_are_inlined_early():
    short, long = jit._parse_text(emit(FUNCTIONS["pointwise"])), jit._parse_text(emit(FUNCTIONS["long"]))
    inlined = []
    for module in (short, long):
        jit._inline_first([f for f in module.functions if not f.is_declaration])
        inlined.append({f.name for f in module.functions if b"alwaysinline" in b"".join(f.attributes)})
    assert len(inlined[0]) == 2 and {n.endswith(".range") for n in inlined[0]} == {True, False}
    kernels = {n for n in inlined[1] if not n.endswith(".range")}
    assert not any(n + ".task" in {f.name for f in long.functions} for n in kernels)
