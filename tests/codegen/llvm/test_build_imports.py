"""A build for llvm, and a program of several ranks on it, load the compiler alone: no emulator, no sanitizer, no
debugger, no other generator."""

import subprocess
import sys

BUILD = """
import sys

import numpy as np

import tessera as ts
from examples.vector_add import vector_add


@ts.jit
def softmax(x):
    return ts.softmax(x @ x.T, axis=-1)


ts.build(softmax, np.ones((32, 32), np.float32), target="llvm", out=sys.argv[1])
x = np.ones(4096, np.float32)
ts.build(vector_add, x, x, x, grid=16, target="llvm", out=sys.argv[2])
print(*(name for name in sys.modules if name.startswith("tessera.")))
"""
# What selects debug mode is data; the sanitizer itself is imported by the first run in debug mode.
ALLOWED = {"tessera.interp.sanitizer", "tessera.interp.sanitizer.report"}
REFUSED = (
    "tessera.interp.target", "tessera.interp.sanitizer", "tessera.tools.debug", "tessera.tools.bisect",
    "tessera.codegen.ptx", "tessera.codegen.csl",
)  # fmt: skip


def test_a_build_for_llvm_loads_no_emulator_and_no_debugger(tmp_path):
    command = [sys.executable, "-c", BUILD, str(tmp_path / "softmax"), str(tmp_path / "add")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "tessera.codegen.llvm.generator" in loaded
    assert [name for name in loaded if name.startswith(REFUSED) and name not in ALLOWED] == []


RANKS = """
import sys

import tessera as ts


@ts.spmd(mesh=ts.Mesh(2), target="llvm")
def add_ranks(x):
    return ts.all_reduce(x)


assert add_ranks(ts.ones(2)).tolist() == [2.0, 2.0]
print(*(name for name in sys.modules if name.startswith("tessera.")))
"""


def test_ranks_on_a_processor_load_no_emulator_and_no_other_generator():
    """Each process of MPI would load them."""
    loaded = subprocess.run([sys.executable, "-c", RANKS], capture_output=True, text=True, check=True).stdout.split()
    assert "tessera.dist.simulation" in loaded
    assert [name for name in loaded if name.startswith(REFUSED) and name not in ALLOWED] == []
