"""Schemes of products on one PE: each is right, and the chosen one is the fastest in the simulator."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.csl.generator import Csl
from tessera.codegen.csl.table import matmul
from tessera.lower.mesh.cost_model import INNER_PRODUCTS, OUTER_PRODUCTS, ROW_PRODUCTS
from tessera.runtime import driver


def measure(lowered, arch, args):
    generator = Csl((1, 1))
    runtime = generator.runtime(generator.emit(lowered, {"arch": arch}))
    (found,) = runtime.run(args)
    np.testing.assert_allclose(found, args[0] @ args[1], rtol=1e-4, atol=1e-5)
    return runtime.cycles


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize(
    "shape", [(14, 14, 14), (4, 16, 16), (6, 6, 48), (2, 2, 64), (8, 8, 8), (1, 20, 9), (20, 2, 3)]
)
def test_the_chosen_scheme_is_the_fastest(shape, arch, monkeypatch):
    rows, columns, summed = shape
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) for s in ((rows, summed), (summed, columns))]
    lowered = driver.lower(ts.jit(lambda a, b: a @ b).trace(*args).function, "csl:1x1")["tile"]
    chosen, cycles = measure(lowered, arch, args), {}
    for scheme in (ROW_PRODUCTS, OUTER_PRODUCTS, INNER_PRODUCTS):
        monkeypatch.setattr(matmul, "choose_cheapest", lambda found, scheme=scheme: scheme)
        cycles[scheme] = measure(lowered, arch, args)
    assert chosen == min(cycles.values()), cycles
