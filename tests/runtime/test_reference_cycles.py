"""What compiles and runs a program is freed when its last reference goes: the garbage collector has nothing to find."""

import gc

import numpy as np
import pytest

import tessera as ts
from tessera.interp.target.ptx.machine.simt import PtxMachine
from tessera.ir.core import Node
from tessera.runtime.program import PreparedProgram, prepare


def compile_and_run(level, target):
    x = np.ones((8, 8), np.float32)
    program = prepare(ts.jit(lambda x, y: ts.softmax(x @ y + 1.0, axis=-1).sum(0)), (x, x))
    return program.run(level, target)


@pytest.fixture
def garbage():
    """The objects that are left to the collector from here on: call it after the test's work."""

    def find():
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            return {type(each) for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    gc.collect()
    gc.disable()
    gc.freeze()  # what is alive is not walked over again
    yield find
    gc.enable()


@pytest.mark.parametrize(
    ("level", "target"),
    [("graph", "interp"), ("schedule", "interp"), ("tile", "interp"), ("target", "llvm"), ("device", "llvm"),
     ("target", "ptx")],
)  # fmt: skip
def test_a_compiled_program_is_in_no_reference_cycle(level, target, garbage):
    compile_and_run(level, target)
    compiled = {"LlvmProgram", "MachineCode", "LlvmModule"}
    found = garbage()
    assert not found & {Node, PtxMachine, PreparedProgram} and not {t.__name__ for t in found} & compiled
