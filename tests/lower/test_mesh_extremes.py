"""Places of extremes on a mesh: what pads the tiles is no extreme, whatever sign elements have."""

import numpy as np
import pytest

import tessera as ts


@pytest.mark.parametrize("dtype", ["f4", "i4"])
@pytest.mark.parametrize(("shape", "axis"), [((70, 50), 1), ((61, 40), 0)])
def test_padding_is_nowhere(shape, axis, dtype):
    x = (-1 - np.random.default_rng(0).permutation(int(np.prod(shape)))).reshape(shape).astype(dtype)
    both = ts.jit(lambda x, y: (ts.argmax(x, axis=axis), ts.argmin(y, axis=axis)), target="csl:2x3")
    for found in both(x, -x):
        np.testing.assert_array_equal(found.numpy(), x.argmax(axis))
