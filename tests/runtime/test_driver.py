"""The pipeline as a whole: levels, passes, devices."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.core.device import find_generator_name
from tessera.core.errors import ArgumentError, DeviceUnavailable, UnknownNameError
from tessera.ir.core import structural_hash
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.verify import verify
from tessera.runtime import driver
from tessera.runtime.program import prepare

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)


def traced(fn=lambda x: ts.softmax(x * 2.0) + 1.0):
    return ts.jit(fn).trace(X).function


def test_every_level_verifies_prints_and_parses():
    levels = driver.lower(traced())
    assert list(levels) == ["graph", "schedule", "tile"]
    for module in levels.values():
        assert parse_module(print_module(verify(module))) == module


def test_the_same_program_gives_the_same_hashes():
    first, second = (driver.lower(traced()) for _ in range(2))
    assert [structural_hash(m) for m in first.values()] == [structural_hash(m) for m in second.values()]


def test_every_pass_keeps_the_meaning():
    want = driver.run_level(driver.lower(traced()), "graph", [X])[0]
    for name, module in driver.iterate_passes(traced(), driver.find_plan("llvm")):
        (found,) = driver.run_level({module.level: module}, module.level, [X])
        assert np.allclose(found, want, rtol=1e-6), name


def test_an_unknown_level_is_named():
    with pytest.raises(ArgumentError, match='"assembly" is not a level'):
        driver.run_level({}, "assembly", [])


def test_devices():
    assert find_generator_name("cpu") == "llvm" and find_generator_name("interp") == "interp"
    with pytest.raises(DeviceUnavailable, match="cuda:0"):
        ts.set_default_device("cuda:0")
    with pytest.raises(UnknownNameError, match="is not a code generator"):
        ts.jit(lambda x: x, target="abacus")(X)


def test_the_default_device_is_used():
    ts.set_default_device("cpu")
    try:
        assert ts.default_device() == "llvm"
        assert np.allclose(ts.jit(lambda x: ts.exp(x))(X).numpy(), np.exp(X), rtol=1e-6)
    finally:
        ts.set_default_device("interp")


def test_a_program_is_emitted_once_for_its_emulator_and_its_device(monkeypatch):
    x = np.arange(6, dtype=np.float32)
    program, backend, emitted = prepare(ts.jit(lambda x: x * 2.0 + 1.0), (x,)), get_backend("llvm"), []
    emit = type(backend).emit
    monkeypatch.setattr(type(backend), "emit", lambda self, *args: emitted.append(args) or emit(self, *args))
    for level in ("target", "device", "device"):
        np.testing.assert_array_equal(program.run(level, "llvm")[0], x * 2 + 1)
    assert len(emitted) == 1
    program.compile("device", "llvm", {"vector_bytes": 16})
    assert len(emitted) == 2  # other options, another text
