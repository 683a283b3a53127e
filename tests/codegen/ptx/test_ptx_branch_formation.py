"""Branch formation: programs compute the part of a concatenation that is theirs."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.codegen.ptx.pipeline import list_passes
from tessera.interp.tile import interpreter
from tessera.ops.dialects import control_flow, tile
from tessera.runtime import driver

X = np.random.default_rng(0).standard_normal((6, 40, 70)).astype("f4")


def windows(x):
    padded = ts.pad(x, ((0, 0), (1, 1), (1, 1)))
    return ts.stack([padded[:, i : i + 40, j : j + 70] * (i + 3.0 * j) for i in range(3) for j in range(3)], axis=1)


def run_passes(function, *inputs):
    """The module after the passes up to branch formation, before and after it."""
    module = driver.lower(ts.jit(function).trace(*inputs).function, "ptx")["tile"]
    for each in list_passes("sm_90a"):
        before, module = module, each.run(module)
        if each.name == "branch formation":
            return before, module
    raise AssertionError("no such pass")


def count(block, op):
    return sum(n.op is op for n in block.walk())


def count_most_loads(block):
    """The loads of the branches that a program takes, at most."""
    total = 0
    for node in block.nodes:
        total += node.op is tile.load
        total += max(map(count_most_loads, node.regions), default=0)
    return total


@pytest.mark.parametrize("axis", [0, 1])
def test_a_program_loads_one_part(axis):
    x, y = X[:, :32], X[:, :32] + 1
    before, after = run_passes(lambda x, y: ts.stack([x, y, x * 2.0], axis=axis), x, y)
    (kernel,), (made,) = before.functions[1:], after.functions[1:]
    assert count(made.body, tile.load) == count(kernel.body, tile.load)
    assert count_most_loads(made.body) == 1 < count_most_loads(kernel.body)
    (found,) = interpreter.run(after, [x, y])
    np.testing.assert_array_equal(found, np.stack([x, y, x * 2], axis))


def test_windows_between_zeros():
    before, after = run_passes(windows, X)
    assert count_most_loads(after.functions[1].body) == 1 and count_most_loads(before.functions[1].body) == 9
    (want,) = interpreter.run(before, [X])
    np.testing.assert_array_equal(interpreter.run(after, [X])[0], want)
    module = driver.lower(ts.jit(windows).trace(X).function, "ptx")["tile"]
    for arch in ("sm_80", "sm_90a"):
        generator = get_backend(f"ptx:{arch}")
        np.testing.assert_array_equal(generator.sanitized(generator.emit(module, {}))([X])[0], want)


def test_conditions_of_elements_stay_selects():
    for function in (lambda x: ts.where(x > 0, x, ts.flip(x, axis=2)), lambda x: ts.pad(x, ((0, 0), (3, 2), (0, 0)))):
        before, after = run_passes(function, X)
        assert count(before.functions[1].body, control_flow.if_) == count(after.functions[1].body, control_flow.if_)


def test_what_both_parts_use_stays_before_the_branch():
    def both(x, y):
        total = x + y
        return ts.stack([total * 2.0, total - y], axis=0)

    before, after = run_passes(both, X, X + 1)
    np.testing.assert_array_equal(interpreter.run(after, [X, X + 1])[0], interpreter.run(before, [X, X + 1])[0])
