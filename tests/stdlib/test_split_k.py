"""Split K: 16-bit products with few results, cut along the contraction, against NumPy."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.ir.rewrite import UseDef
from tessera.ops.tensor import contractions
from tessera.runtime import driver
from tessera.stdlib import split_k

FORMS = {
    "plain": (lambda a, b: a @ b, lambda a, b: (a, b)),
    "turned right": (lambda a, b: a @ b.mT, lambda a, b: (a, b.swapaxes(-1, -2).copy())),
    "turned left": (lambda a, b: a.mT @ b, lambda a, b: (a.swapaxes(-1, -2).copy(), b)),
}


@pytest.fixture
def small(monkeypatch):
    """Limits that small products exceed."""
    for name, value in {"LEAST_DEPTH": 64, "LEAST_ELEMENTS": 1, "LONG_DEPTH": 64, "COLUMNS": 64}.items():
        monkeypatch.setattr(split_k, name, value)


def draw(*shape, dtype=ml_dtypes.bfloat16):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def run(function, *arrays, arch="sm_90a"):
    """The kernels of a function for a GPU, and its results in the emulator."""
    levels = driver.lower(ts.jit(function).trace(*arrays).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": arch})
    return list(artifact.manifest["plan"]["entries"]), BACKEND.interpreter(artifact)(arrays)[0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(8, 256, 72), (80, 200, 72)])
def test_parts_add_up_to_the_product(form, sizes, arch, small):
    m, k, n = sizes
    a, b = draw(m, k), draw(k, n)
    function, arrange = FORMS[form]
    names, got = run(function, *arrange(a, b), arch=arch)
    assert any("multiply_chunks" in name for name in names)
    want = a.astype("f8") @ b.astype("f8")
    np.testing.assert_allclose(got.astype("f8"), want, rtol=2**-8, atol=2**-8)


def test_batches_types_and_what_follows(small):
    a, b, c = draw(3, 8, 128, dtype=np.float16), draw(3, 128, 64, dtype=np.float16), draw(64, dtype=np.float16)
    names, got = run(lambda a, b, c: ts.relu(a @ b + c), a, b, c)
    assert any("multiply_chunks" in name for name in names) and len(names) <= 2
    want = np.maximum(np.matmul(a.astype("f8"), b.astype("f8")).astype("f2") + c, 0)
    np.testing.assert_allclose(got.astype("f8"), want.astype("f8"), rtol=2**-9, atol=2**-6)


def match(m, k, n, turned=False, function=None):
    a, b = (np.zeros(s, ml_dtypes.bfloat16) for s in ((m, k), (n, k) if turned else (k, n)))
    function = function or ((lambda a, b: a @ b.T) if turned else (lambda a, b: a @ b))
    traced = ts.jit(function).trace(a, b).function
    (node,) = [n for n in traced.body.walk() if n.op is contractions.dot]
    found = split_k.match_chunked_product(UseDef(traced), *node.args)
    return found and (found.rows, found.chunks)


def test_only_where_it_pays():
    assert match(2, 4096, 4096) == match(2, 4096, 4096, turned=True) == (64, 4)
    assert match(1, 4096, 4096) == (64, 4) and match(1, 4096, 4096, turned=True) is None  # the latter is a reduction
    assert match(512, 4096, 1024) == (128, 4) and match(8, 4096, 32768) == (64, 1)
    assert match(64, 1024, 1024) is None  # short
    assert match(4096, 4096, 4096) is None  # fills the GPU
    assert match(2, 4096, 4100) is None  # no tensor map has such rows
    assert match(2, 4096, 4096, function=lambda a, b: a @ (b * 2)) is None  # computed where it is read
