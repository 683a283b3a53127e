"""One program at every level above Target, compared with the Graph interpreter."""

from dataclasses import replace

import numpy as np

from tessera.frontend.jit.tracing import jit
from tessera.interp import graph, schedule
from tessera.interp.tile import interpreter
from tessera.ir.core import Module
from tessera.ir.verify import verify
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.pipeline import lower

# Tiles that fit nothing: every edge is ragged, and every reduction needs a loop.
SMALL = LoweringPlan(
    m=5, n=7, k=6, whole_k=8, multiple=1, rows=16, row_limit=3, pointwise=5, lanes=3, programs=1, flash=False
)
PLANS = {
    "default": LoweringPlan(),
    "small": SMALL,
    "parallel": LoweringPlan(programs=1000, flash=False),
    "own rows": LoweringPlan(programs=1, own_row=4096, vector_products=1, collapse=True, parallel=8, shares_rows=True),
    "small own rows": replace(SMALL, own_row=4096, vector_products=1, collapse=True, parallel=8),
    "reshaped": replace(SMALL, result_lanes=5, collapse=True, peel=True, stack_views=False, vector_products=1),
}


def modules(function, plan):
    """The module of each level, each verified."""
    found = {"graph": Module("graph", (function,))}
    for _, module in lower(found["graph"], plan):
        found[module.level] = verify(module)
    return found


def traced(function, *arrays):
    """The Graph function for these arrays, and all its arguments."""
    trace = jit(function).trace(*arrays)
    return trace.function, [*arrays, *trace.captures]


def agree(function, *arrays, plans=PLANS, rtol=None):
    """Check that the levels give what the Graph interpreter gives; its results."""
    traced_function, arguments = traced(function, *arrays)
    want = graph.run(traced_function, arguments)
    for name, plan in plans.items():
        levels = modules(traced_function, plan)
        for level, run in (("schedule", schedule.run), ("tile", interpreter.run)):
            for got, expected in zip(run(levels[level], arguments), want, strict=True):
                close(got, expected, f"{name} plan, {level} level", rtol)
    return want


def close(got, want, where, rtol):
    """Check shape, element type and elements; integers and bools are exact."""
    assert got.shape == want.shape and got.dtype == want.dtype, where
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want, err_msg=where)
        return
    unit = rtol or {4: 2e-5, 8: 2e-5, 2: 2e-2, 1: 0.3}[want.dtype.itemsize]
    wide = [a.astype(np.float64) for a in (got, want)]
    finite = wide[1][np.isfinite(wide[1])]
    size = np.abs(finite).max(initial=0.0)
    np.testing.assert_allclose(*wide, rtol=unit, atol=unit * size, err_msg=where)
