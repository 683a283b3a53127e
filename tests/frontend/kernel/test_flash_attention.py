"""The attention kernel of the standard library against the definition, in double precision."""

import math

import numpy as np
import pytest

from tessera.core.types import BY_NAME, RefType, f64
from tessera.ops.tensor import attention, nn
from tessera.stdlib.attention import attend, specialise_attention

SHAPES = [(1, 1, 8, 8, 4), (2, 3, 33, 70, 16), (1, 2, 100, 5, 7), (2, 1, 1, 129, 3)]


def reference(q, k, v, mask, causal, scale):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    mask = None if mask is None else mask.astype(np.float64)
    args = (q, k, v) if mask is None else (q, k, v, mask)
    return attention.scaled_dot_product_attention.ref(*args, causal=causal, scale=scale, weights=f64)


def launch(q, k, v, mask, causal, scale, **blocks):
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    grid = (q.shape[0], q.shape[1], -(-q.shape[2] // blocks.get("BM", 32)))
    attend[grid](q, k, v, mask, None, out, causal=causal, scale=scale, **blocks)
    return out.astype(np.float64)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape, causal, dtype, rng):
    b, h, s, t, d = shape
    element = BY_NAME[dtype].numpy
    q = rng.standard_normal((b, h, s, d)).astype(element)
    k, v = (rng.standard_normal((b, h, t, d)).astype(element) for _ in range(2))
    scale = 1 / math.sqrt(d)
    tolerance = {"f32": 2e-6, "f16": 2e-3, "bf16": 2e-2}[dtype]
    want = reference(q, k, v, None, causal, scale)
    np.testing.assert_allclose(launch(q, k, v, None, causal, scale), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("lead", [(2, 3, 20), (1, 3, 20), (2, 1, 1), (1, 1, 1)])
def test_masks(lead, rng):
    q = rng.standard_normal((2, 3, 20, 8)).astype("f4")
    k, v = (rng.standard_normal((2, 3, 45, 8)).astype("f4") for _ in range(2))
    mask = np.where(rng.random((*lead, 45)) < 0.4, -np.inf, rng.standard_normal((*lead, 45))).astype("f4")
    for causal in (False, True):
        mask[..., 0] = 0.0
        want = reference(q, k, v, mask, causal, 0.3)
        np.testing.assert_allclose(launch(q, k, v, mask, causal, 0.3, BM=16, BN=8), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("sizes", [(40, 40), (70, 20), (9, 50)])
@pytest.mark.parametrize("options", [{"window": 1}, {"window": 13}, {"softcap": 2.0}, {"window": 30, "softcap": 0.5}])
def test_windows_and_capped_scores(options, sizes, rng):
    """The kernel skips blocks of keys before the window; a row past all windows gives 0."""
    q, k, v = (
        rng.standard_normal((1, h, n, 8)).astype("f4") for h, n in zip((4, 2, 2), (*sizes, sizes[1]), strict=True)
    )
    for causal in (False, True):
        wide = (x.astype(np.float64) for x in (q, k, v))
        want = attention.scaled_dot_product_attention.ref(*wide, causal=causal, scale=0.3, weights=f64, **options)
        found = launch(q, k, v, None, causal, 0.3, BM=8, BN=4, **options)
        np.testing.assert_allclose(found, want, atol=2e-6, rtol=2e-6)


def test_a_block_that_is_masked_as_a_whole_gives_no_nan(rng):
    q, k, v = rng.standard_normal((3, 1, 1, 16, 4)).astype("f4")
    mask = np.zeros((1, 1, 1, 16), "f4")
    mask[..., :8] = -np.inf  # the first block of keys for every row
    want = reference(q, k, v, mask, False, 0.5)
    np.testing.assert_allclose(launch(q, k, v, mask, False, 0.5, BM=8, BN=4), want, atol=2e-6)
    mask[...] = -3e38
    assert np.isfinite(launch(q, k, v, mask, False, 0.5, BM=8, BN=4)).all()


def test_the_module_that_a_lowering_asks_for():
    types = {n: RefType((2, 3, 40, 8), BY_NAME["bf16"]) for n in ("q", "k", "v", "out")}
    module = specialise_attention(types, causal=True, scale=0.5)
    assert module.level == "tile" and module.main.body.nodes[0].attrs["grid"] == (2, 3, 2)
    assert specialise_attention(types, causal=True, scale=0.5) is module
    masked = specialise_attention({**types, "mask": RefType((1, 1, 1, 40), BY_NAME["bf16"])}, causal=False, scale=0.5)
    assert [p.hint for p in masked.main.params] == ["q", "k", "v", "mask", "out"]
