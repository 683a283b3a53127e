"""Conditions of passes: where the pipeline skips a pass, the pass would have changed nothing."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.llvm import TILING_PLAN
from tessera.ir.core import Module, structural_hash
from tessera.lower import pipeline
from tessera.lower.passes.launch_fusion import fuse_launches
from tessera.lower.passes.stochastic_rounding import expand_stochastic_rounding
from tessera.ops.tensor.shape import strided_view

X = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 6)).astype(np.float32)
ROUNDED = ts.bf16 @ ts.stochastic_round
# The passes as they are without a condition.
PASSES = {
    "stochastic rounding": pipeline.rewrite_main(expand_stochastic_rounding),
    "window sums": pipeline.rewrite_window_sums,
    "window views": pipeline.rewrite_windows,
    "launch fusion": pipeline.rewrite_main(fuse_launches),
}


@ts.kernel
def double(x, y):
    row = ts.tile.program_id(0)
    ts.tile.store(y[row, 0:40], ts.tile.load(x[row, 0:40]) * 2.0)


def multiply_windows(x):
    """A product with the windows of 3 by 3 of an array of 6 channels."""
    strides = ((1, 0, 0, 0, 0), (0, 1, 0, 1, 0), (0, 0, 1, 0, 1))
    view = strided_view(x.reshape(6, 4, 10), shape=(6, 3, 3, 2, 8), start=(0, 0, 0), strides=strides)
    return np.ones((8, 54), np.float32) @ view.reshape(54, 16)


CASES = {
    "stack": (lambda x: ts.stack([x[:, i : i + 36] for i in range(4)], axis=1) * 2.0, {"window views"}),
    "launch": (lambda x: ts.launch(double, (6,), x + 1.0, ts.zeros((6, 40))), {"launch fusion"}),
    "policy": (lambda x: ts.cast(x * 3.0, ROUNDED), {"stochastic rounding"}),
    "product of windows": (multiply_windows, {"window views"}),
    "softmax": (lambda x: ts.softmax(x), set()),
    "product": (lambda x: ts.relu(W @ x), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_skipped_pass_would_change_nothing(name):
    program, expected = CASES[name]
    module, changed = Module("graph", (ts.jit(program).trace(X).function,)), set()
    for step, run in pipeline.list_steps(TILING_PLAN):
        if step == "schedule":
            break
        made = run(module)
        if step in PASSES:
            assert structural_hash(made) == structural_hash(PASSES[step](module, TILING_PLAN))
            changed |= {step} if structural_hash(made) != structural_hash(module) else set()
        module = made
    assert changed == expected
