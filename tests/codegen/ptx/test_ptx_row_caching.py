"""Row caching: rows that a program walks several times, from shared memory, after the pass and in the emulator."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.generator import TEXT_FILE
from tessera.codegen.ptx.passes import row_caching
from tessera.interp.tile import interpreter
from tessera.ir.core import Block
from tessera.ops.dialects import tile
from tessera.runtime import driver

# Rows of more elements are walked in blocks, by one program each.
SHORT = {"row_limit": 1024, "row_tile": 1024, "rows": 1024, "shares_rows": False}
WHOLE = {"shares_rows": False}  # each row is the work of one program
FUNCTIONS = {  # and the loads of global memory that are left, of a loop and of what is left after it
    "log_softmax": (lambda x: ts.log_softmax(x, axis=-1), 2),
    "numbers": (lambda x: ts.logsumexp(x, axis=-1), 2),
    "two rows": (lambda x: ts.softmax(x + ts.flip(x, axis=0), axis=-1), 4),
}


@pytest.fixture(autouse=True)
def _rows_of_any_size(monkeypatch):
    monkeypatch.setattr(row_caching, "LEAST_BYTES", 0)


def lower(function, *args):
    return driver.lower(ts.jit(function).trace(*args).function, "ptx", SHORT)["tile"]


def run_pass(module):
    """The module after the pass, and whether it changed."""
    for each in BACKEND.passes(module, {"arch": "sm_90a"}):
        before, module = module, each.run(module)
        if each.name == "row caching":
            return module, module.functions[1:] != before.functions[1:]
    raise AssertionError


def count_loads(function):
    return sum(n.op.name in ("tile.load", "tile.gather") and n.args[0] in function.params for n in function.body.walk())


def is_ordered(function):
    """Whether a barrier lies between what fills the rows in shared memory and what reads them after it."""
    nodes = function.body.nodes
    held = {n.out for n in nodes if n.op is tile.alloc}
    fills, reads = (
        [i for i, n in enumerate(nodes) for m in Block((), (n,), ()).walk() if m.op is op and m.args[0] in held]
        for op in (tile.store, tile.load)
    )
    after = [i for i in reads if i > max(fills)]
    return bool(after) and any(n.op is tile.barrier for n in nodes[max(fills) : min(after)])


@pytest.mark.in_turn("dtype")
@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("size", [2048, 2061, 3001])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_cached_rows_are_those_of_the_program(name, size, dtype, rng):
    function, left = FUNCTIONS[name]
    x = rng.standard_normal((5, size)).astype(dtype)
    module = lower(function, x)
    wanted, (cached, changed) = interpreter.run(module, [x]), run_pass(module)
    assert changed and count_loads(cached.functions[-1]) == (left if size % 1024 else left // 2)
    assert is_ordered(cached.functions[-1])
    artifact = BACKEND.emit(module, {"arch": "sm_90a"})
    assert "ld.shared.v" in artifact.text(TEXT_FILE)
    for found in (interpreter.run(cached, [x]), BACKEND.sanitized(artifact)([x])):
        for ours, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(ours, "f8"), want.astype("f8"), rtol=2e-3, atol=2e-5)


def test_a_scalar_beside_rows_is_no_row(rng):
    x, scale = rng.standard_normal((5, 2061)).astype("f4"), np.asarray(0.5, "f4")
    module = lower(lambda x, scale: ts.log_softmax(x * scale, axis=-1), x, scale)
    cached, changed = run_pass(module)
    assert changed
    np.testing.assert_array_equal(interpreter.run(cached, [x, scale])[0], interpreter.run(module, [x, scale])[0])


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.max(axis=-1), (5, 2061)),
        (FUNCTIONS["numbers"][0], (5, 1001)),
        (FUNCTIONS["numbers"][0], (2, 90_001)),
    ],
    ids=["once", "registers", "large"],
)
def test_other_rows_stay(function, shape):
    assert not run_pass(lower(function, np.zeros(shape, "f4")))[1]


def test_small_rows_stay(monkeypatch):
    monkeypatch.undo()
    assert not run_pass(lower(FUNCTIONS["log_softmax"][0], np.zeros((5, 2061), "f2")))[1]


def test_teams_grow_with_the_cache():
    """One block of 200 KB for each multiprocessor has all of its threads; three of 64 KB share them.

    Rows of 127 KB in elements of 16 bits are read again by two blocks.
    """
    found = []
    for size, dtype in ((33_000, "f2"), (50_001, "f4"), (63_528, "f2")):
        artifact = BACKEND.emit(
            driver.lower(
                ts.jit(FUNCTIONS["log_softmax"][0]).trace(np.zeros((2048, size), dtype)).function, "ptx", WHOLE
            )["tile"],
            {"arch": "sm_90a"},
        )
        (entry,) = artifact.manifest["plan"]["entries"].values()
        found.append((entry["threads"], entry["shared"] > size))
    assert found[:2] == [(512, True), (1024, True)] and not found[2][1]


@pytest.mark.parametrize(("arch", "size"), [("sm_90a", 51_200), ("sm_80", 34_816)])
def test_the_longest_rows_fit_beside_what_threads_exchange(arch, size):
    x = np.zeros((300, size), "f4")
    assert size * 4 == row_caching.MOST_BYTES[arch]
    function = ts.jit(lambda x: (ts.softmax(x, axis=-1) * 2, x.max(axis=-1))).trace(x).function
    module = driver.lower(function, "ptx", WHOLE)["tile"]
    entries = BACKEND.emit(module, {"arch": arch}).manifest["plan"]["entries"].values()
    assert max(e["shared"] for e in entries) > row_caching.MOST_BYTES[arch]
