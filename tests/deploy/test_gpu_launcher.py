"""Standalone launchers for GPUs: the C text runs against a fake driver, whose launches the PTX emulator executes."""

import ctypes
import shutil

import numpy as np
import pytest
from fake_cuda import FakeGpu

import tessera as ts
from tessera import deploy
from tessera.core.errors import UnsupportedOpError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
RNG = np.random.default_rng(0)
W = RNG.standard_normal((4, 5)).astype(np.float32)
X = RNG.standard_normal((3, 4)).astype(np.float32)


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


@pytest.fixture
def gpu(tmp_path):
    return FakeGpu(tmp_path / "driver")


@ts.jit
def layer(p, x):
    return ts.softmax(ts.relu(x @ p["w"]) + 0.5, axis=-1)


def test_a_launcher_computes_what_the_function_does(gpu, tmp_path):
    made = deploy.standalone(layer, {"w": W}, X, out=tmp_path / "a", weights=["p"], target="ptx")
    library, out = gpu.load(made), np.zeros((3, 5), np.float32)
    for _ in range(2):
        assert library.layer(pointer(X), pointer(out)) == 0
        np.testing.assert_allclose(out, layer({"w": W}, X).numpy(), rtol=1e-5, atol=1e-6)
        assert ctypes.c_int.in_dll(gpu.driver, "live").value == 1  # the weights alone stay
        out[:] = 0
    assert made.library is None and (tmp_path / "a" / "layer.hpp").exists()


def test_errors_of_the_driver_are_explained(gpu, tmp_path):
    made = deploy.standalone(layer, {"w": W}, X, out=tmp_path / "a", weights=["p"], target="ptx")
    library = gpu.load(made)
    ctypes.c_int.in_dll(gpu.driver, "fail").value = 100
    code = library.layer(pointer(X), pointer(X))
    library.layer_error.restype = ctypes.c_char_p
    assert code == 1100 and library.layer_error(code) == b"the fake driver fails"
    assert library.layer_error(0) == b"success" and ctypes.c_int.in_dll(gpu.driver, "live").value == 0


def test_loops_branches_and_sizes(gpu, tmp_path):
    @ts.jit
    def steps(x):
        y = ts.fori_loop(0, 3, lambda i, y: y * 1.5 - 0.25, x)
        y = ts.while_loop(lambda y: ts.max(y) > 1.0, lambda y: y * 0.5, y)
        return ts.cond(ts.sum(y) > 0, lambda y: y + 10.0, lambda y: -y, y)

    made = deploy.standalone(steps, X, out=tmp_path / "a", target="ptx")
    library = gpu.load(made)
    for x in (X, -np.abs(X)):
        out = np.zeros_like(x)
        assert library.steps(pointer(x), pointer(out)) == 0
        np.testing.assert_allclose(out, steps(x).numpy(), rtol=1e-6)


def test_symbolic_sizes(gpu, tmp_path):
    made = deploy.standalone(
        layer, {"w": W}, X, out=tmp_path / "a", weights=["p"], target="ptx", dynamic={"x": {0: "B"}}
    )
    library = gpu.load(made)
    for n in (1, 3, 40):
        x, out = RNG.standard_normal((n, 4)).astype(np.float32), np.zeros((n, 5), np.float32)
        assert library.layer(ctypes.c_int64(n), pointer(x), pointer(out)) == 0
        np.testing.assert_allclose(out, layer({"w": W}, x).numpy(), rtol=1e-5, atol=1e-6)
    assert library.layer(ctypes.c_int64(0), None, None) == 2


def test_kernels_in_place_with_numbers_and_names_of_c(gpu, tmp_path):
    @ts.kernel
    def scale(memory, argument0: ts.f32, *, BLOCK: int = 4):
        i = ts.tile.program_id(0) * BLOCK
        memory[i : i + BLOCK] = memory[i : i + BLOCK] * argument0

    x = np.arange(8, dtype=np.float32)
    made = deploy.standalone(scale[(2,)], x.copy(), np.float32(2), out=tmp_path / "a", target="ptx")
    assert gpu.load(made).scale(pointer(x), ctypes.c_float(2.5)) == 0
    np.testing.assert_array_equal(x, np.arange(8) * 2.5)
    assert gpu.launches[0][1] == (2, 1, 1)


def test_what_reports_to_python_is_refused(tmp_path):
    @ts.kernel
    def positive(x, y):
        i = ts.tile.program_id(0)
        assert x[i] > 0, "not positive"
        y[i] = x[i]

    x = np.ones(3, np.float32)
    with pytest.raises(UnsupportedOpError, match="reports to Python"):
        deploy.standalone(positive[(3,)], x, x * 0, out=tmp_path / "a", target="ptx")
    assert not (tmp_path / "a").exists()
