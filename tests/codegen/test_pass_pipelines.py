"""Passes of generators with one rewrite: what it makes verifies, parses back and runs as the Tile module does."""

import contextlib
import io

import numpy as np
import pytest

from conformance.case import all_cases
from tessera import tile
from tessera.codegen.contract import CompilerPass, PassPipeline, get_backend, list_target_passes, run_passes
from tessera.core.errors import ExecutionError
from tessera.frontend.kernel import kernel
from tessera.interp.tile import interpreter
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.verify import verify
from tessera.runtime.program import prepare

GROUPED = [case for case in all_cases() if case.rejects is None and case.name.startswith("tile") and case.group][::6]


def executed(program, module):
    arrays = [np.copy(a) if isinstance(a, np.ndarray) else a for a in program.arrays]
    with contextlib.redirect_stdout(io.StringIO()):
        outputs = interpreter.run(module, arrays)
    return [*outputs, *(arrays[i] for i in program.written)]


@pytest.mark.parametrize("case", GROUPED, ids=lambda c: c.name)
def test_vectorised_groups_do_the_same(case):
    entry, arguments = case.entry()
    program = prepare(entry, arguments, "llvm", case.grid, case.group)
    module = program.levels["tile"]
    propagate, vectorise = list_target_passes("llvm", module, {})
    after = verify(vectorise.run(verify(propagate.run(module))))
    again = parse_module(print_module(after))
    assert after.level == "grouped" and again == after
    for ours, theirs in zip(executed(program, again), executed(program, module), strict=True):
        np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=1e-4, atol=1e-5)
    assert list_target_passes("llvm", after, {}) == ()
    assert get_backend("llvm").emit(after, {}).files == get_backend("llvm").emit(module, {}).files


@kernel
def positive(x):
    i = tile.local_id()
    value = tile.load(x[i])
    tile.assert_(value > 0.0, "not positive", value)
    tile.store(x[i], value * 2.0)


def test_a_vectorised_assertion_fails_in_the_interpreter():
    x = np.ones(8, np.float32)
    program = prepare(positive, {"x": x}, "llvm", (1,), 8)
    module = run_passes(list_target_passes("llvm", program.levels["tile"], {}), program.levels["tile"])
    assert '"grouped.report"' in print_module(verify(module))
    interpreter.run(module, [x])
    np.testing.assert_array_equal(x, 2.0)
    x[3] = -1.0
    with pytest.raises(ExecutionError, match="not positive"):
        interpreter.run(module, [x])


@pytest.mark.parametrize("target", ["llvm", "ptx", "csl:2x2"])
def test_built_in_generators_name_their_passes(target):
    case = next(c for c in all_cases() if c.name.startswith("tile") and c.group and c.rejects is None)
    entry, arguments = case.entry()
    module = prepare(entry, arguments, target, case.grid, case.group).levels["tile"]
    found = list_target_passes(target, module, {})
    assert isinstance(get_backend(target), PassPipeline)
    assert found and all(isinstance(each, CompilerPass) and each.name for each in found)
