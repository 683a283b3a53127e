"""Results that are reshapes of computed values are computed in place, in their own shape, whatever else reads them."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.runtime import driver

PROGRAMS = {
    "product": (lambda a, b: (a @ b).reshape(2, 3, 40), 1),
    "cast": (lambda a, b: (a @ b).reshape(240).to("f16"), 1),
    "with its base": (lambda a, b: ((p := a @ b), p.reshape(240)), 2),
    "twice": (lambda a, b: ((p := a @ b).reshape(240), p.reshape(3, 80)), 2),
    "one result twice": (lambda a, b: ((r := (a @ b).reshape(240)), r), 2),
    "with another reader": (lambda a, b: ((p := (a @ b).to("f16")).reshape(240), p.to("f32") + 1), 2),
    "of a sort": (lambda a, b: ts.argsort((a @ b).reshape(3, 80), axis=-1).reshape(240), None),
    "of an argument": (lambda a, b: (a.reshape(96), b), None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_reshaped_results(name, rng):
    program, kernels = PROGRAMS[name]
    a, b = rng.integers(-9, 9, (6, 16)).astype("f4"), rng.integers(-9, 9, (16, 40)).astype("f4")
    eager = program(ts.Tensor(a), ts.Tensor(b))
    want = [t.numpy() for t in (eager if isinstance(eager, tuple) else (eager,))]
    for target in ("ptx", "llvm"):
        levels = driver.lower(ts.jit(program).trace(a, b).function, target)
        launches = [n for n in levels["tile"].main.body.nodes if n.op.name == "host.launch"]
        assert kernels is None or len(launches) == kernels
        for level in ("schedule", "tile", "target"):
            for ours, theirs in zip(driver.run_level(levels, level, [a, b], target), want, strict=True):
                assert ours.shape == theirs.shape
                np.testing.assert_array_equal(ours, theirs)


def test_convolutions_run_on_the_pipeline_of_products():
    shapes = ((32, 256, 56, 56), (256, 256, 3, 3))
    x, w = (np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), shape) for shape in shapes)
    levels = driver.lower(ts.jit(lambda x, w: ts.conv2d(x, w, padding=1)).trace(x, w).function, "ptx")
    entries = BACKEND.emit(levels["tile"], {"arch": "sm_90a"}).manifest["plan"]["entries"]
    assert all("maps" in entry for name, entry in entries.items() if "matmul" in name)  # operands by tensor maps


def test_convolutions_in_place(rng):
    x = rng.integers(-3, 4, (2, 64, 8, 8)).astype(ml_dtypes.bfloat16)
    w = rng.integers(-3, 4, (128, 64, 1, 1)).astype(ml_dtypes.bfloat16)
    levels = driver.lower(ts.jit(lambda x, w: ts.conv2d(x, w)).trace(x, w).function, "ptx")
    (ours,) = BACKEND.interpreter(BACKEND.emit(levels["tile"], {"arch": "sm_90a"}))([x, w])
    want = np.einsum("oc,bchw->bohw", w[:, :, 0, 0].astype("f4"), x.astype("f4"))
    np.testing.assert_allclose(ours.astype("f4"), want, rtol=1e-2)
