"""Products whose results are turned are products of turned operands, where a target has tensor cores."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.runtime import driver

X, G = (np.random.default_rng(n).standard_normal((2, 64, n)).astype(np.float16) for n in (32, 48))


def turn(x):
    return ts.swapaxes(x, -1, -2)


FORMS = {
    "one": (lambda x, g: turn(x) @ g, [(2, 64, 48), (2, 64, 32), (2, 48, 32)]),
    "both": (lambda x, g: turn(x) @ turn(turn(g)), [(2, 64, 48), (2, 64, 32), (2, 48, 32)]),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_turned_product_is_stored_as_it_is(form):
    product, shapes = FORMS[form]
    traced = ts.jit(lambda x, g: turn(product(x, g))).trace(X, G).function
    levels = driver.lower(traced, "ptx")
    (kernel,) = (n for n in levels["schedule"].main.body.nodes if n.op.name == "schedule.kernel")
    assert [v.type.shape for v in kernel.args] == shapes
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    (found,) = get_backend("ptx").interpreter(artifact)([X, G])
    want = np.matmul(G.swapaxes(1, 2).astype("f8"), X.astype("f8"))
    np.testing.assert_allclose(found.astype("f8"), want, rtol=2e-3, atol=2e-3)


def test_a_product_that_is_read_as_it_is_stays():
    def both(x, g):
        found = turn(x) @ g
        return turn(found), found

    traced = ts.jit(both).trace(X, G).function
    kernels = [n for n in driver.lower(traced, "ptx")["schedule"].main.body.nodes if n.op.name == "schedule.kernel"]
    assert [v.type.shape for v in kernels[0].args][-1] == (2, 32, 48)
