"""Schemes of products on one PE: each is right, and the chosen one is the fastest in the simulator."""

import re

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.csl.generator import Csl
from tessera.codegen.csl.table import matmul
from tessera.lower.mesh.cost_model import INNER_PRODUCTS, OUTER_PRODUCTS, ROW_PRODUCTS, estimate_row_cycles
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


def test_longer_rows_take_more_cycles():
    """A product by rows multiplies each row of the right operand, one by columns each column of the left one."""
    by_rows, by_columns = (np.array([estimate_row_cycles(8, n, 16)[k] for n in (4, 64, 256)]) for k in (0, 1))
    assert (np.diff(by_rows) > 0).all() and by_columns[2] > 3 * by_columns[1] > 9 * by_columns[0]
    np.testing.assert_array_equal([estimate_row_cycles(n, 8, 16)[1] > by_rows[0] for n in (64, 256)], True)
    assert estimate_row_cycles(8, 512, 16)[0] / by_rows[2] < 2  # the overhead of a row does not grow


def test_rows_of_a_multiple_of_four_elements_conflict():
    """Twice the cycles for an element: both rows begin at one bank (`docs/csl-cycles.md`)."""
    times = [estimate_row_cycles(1, n, 1)[0] - estimate_row_cycles(1, 0, 1)[0] for n in (8, 9, 10, 11)]
    assert times == [16, 11.25, 15, 13.75]


def test_operands_of_the_type_of_the_sum_are_not_copied():
    args = [np.ones(shape, np.int32) for shape in ((4, 6), (6, 5))]
    generator = Csl((1, 1))
    lowered = driver.lower(ts.jit(lambda a, b: a @ b).trace(*args).function, "csl:1x1")["tile"]
    text = generator.emit(lowered, {}).text("pe_program.csl")
    held = re.findall(r"^var (\w+) = @zeros\(\[(?:24|30)\]", text, re.MULTILINE)
    assert sorted(held) == ["host_a", "host_b"]
