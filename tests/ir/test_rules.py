"""Ops are known by their identity, and pointwise ones have no effects: kernels are fused without looking for them."""

import copy
import pickle
import subprocess
import sys

import pytest

import tessera as ts
from tessera.ir.rules import REGISTRY, op
from tessera.ops.dialects import schedule


@pytest.mark.parametrize("change", [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_a_copy_of_an_op_is_the_op(change):
    assert ts.gelu is not None and all(change(op) is op for op in REGISTRY.values())


def test_an_op_is_loaded_in_a_process_that_has_not_imported_it():
    program = "import pickle, sys; op = pickle.loads(sys.stdin.buffer.read()); print(op(1.0).item())"
    found = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(ts.square), capture_output=True, check=True
    )
    assert found.stdout == b"1.0\n"


def test_a_pointwise_op_has_no_effects():
    define = op(coerce=None, pointwise=True, effects=("io",), dialect="test")
    with pytest.raises(AssertionError, match="has no effects"):
        define(lambda x: x)
    inside = [
        o for o in REGISTRY.values() if o.pointwise or o.name.startswith("schedule.") and o is not schedule.kernel
    ]
    assert {o for o in inside if o.effects} == {schedule.load, schedule.store}
