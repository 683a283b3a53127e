"""Ops are known by their identity: copies and pickles of them are the ops themselves."""

import copy
import pickle
import subprocess
import sys

import pytest

import tessera as ts
from tessera.ir.rules import REGISTRY


@pytest.mark.parametrize("change", [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_a_copy_of_an_op_is_the_op(change):
    assert ts.gelu is not None and all(change(op) is op for op in REGISTRY.values())


def test_an_op_is_loaded_in_a_process_that_has_not_imported_it():
    program = "import pickle, sys; op = pickle.loads(sys.stdin.buffer.read()); print(op(1.0).item())"
    found = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(ts.square), capture_output=True, check=True
    )
    assert found.stdout == b"1.0\n"
