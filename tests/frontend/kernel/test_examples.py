"""The example kernels against their references."""

import importlib

import numpy as np
import pytest

from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.verify import verify

EXAMPLES = ["vector_add", "softmax", "matmul", "block_reduction", "flash_attention"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, rng):
    entry = getattr(importlib.import_module(f"examples.{name}"), name)
    found = entry.example
    arguments = found.inputs(rng)
    want = found.reference(**arguments)
    grid = found.grid(**arguments)
    launch = entry[grid if isinstance(grid, tuple) else (grid,), found.group]
    launch(**arguments)
    np.testing.assert_allclose(list(arguments.values())[-1], want, rtol=1e-5, atol=1e-5)
    module = launch.module(**arguments)
    assert parse_module(print_module(verify(module))) == module
