"""Blocks of attention: those of a processor pad the queries and keys little, those of a GPU are powers of two."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.core.symbolic_dim import round_up
from tessera.ops.tensor.attention import positional_attention, scaled_dot_product_attention
from tessera.runtime import driver
from tessera.stdlib import attention_launches


def attend(causal):
    return lambda q, k, v: ts.scaled_dot_product_attention(q, k, v, causal=causal)


def find_blocks(length, keys, target, causal=False):
    """The queries of a block, by the grid, and its keys, by the blocks of keys that are loaded."""
    q, k = np.zeros((1, 2, length, 64), "f4"), np.zeros((1, 2, keys, 64), "f4")
    module = driver.lower(ts.jit(attend(causal)).trace(q, k, k).function, target)["tile"]
    (function,) = [f for f in module.functions[1:] if f.name.startswith("attend")]
    shapes = {
        n.attrs["shape"][-2] for n in function.body.walk() if n.op.name == "tile.load" and len(n.attrs["shape"]) == 4
    }
    rows = next(n.args[1].type.shape[-2] for n in function.body.walk() if n.op.name == "tile.store")
    return rows, max(shapes - {rows}, default=rows)


@pytest.mark.parametrize("length", [80, 143, 160, 195, 459, 834])
def test_blocks_of_a_processor_pad_little(length):
    rows, columns = find_blocks(length, length + 6, "llvm")
    assert round_up(length, rows) <= 1.05 * length and rows >= 32
    assert round_up(length + 6, columns) <= 1.2 * (length + 6) and columns % 16 == 0


def test_blocks_of_a_gpu_are_powers_of_two():
    assert find_blocks(195, 143, "ptx") == (64, 64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 5), (37, 37), (143, 143), (66, 195)])
def test_any_length(sizes, causal, rng):
    queries, keys = sizes
    q, k, v = (rng.normal(size=(2, 2, n, 24)).astype("f4") for n in (queries, keys, keys))
    scores = np.einsum("bhsd,bhtd->bhst", q.astype("f8"), k) / 24**0.5
    if causal:
        scores = np.where(np.arange(keys) <= np.arange(queries)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ v
    np.testing.assert_allclose(ts.jit(attend(causal), target="llvm")(q, k, v), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "causal", "turned"), [(40, False, False), (80, True, False), (80, False, True), (160, True, False)]
)
def test_heads_of_other_features_are_padded_for_warpgroups(width, causal, turned, rng, monkeypatch):
    """Tensor maps fill the columns that a block has beyond a head's features with zeros; stores drop them."""
    monkeypatch.setattr(attention_launches, "PADDED", ((1, 2.0),))
    shape = (1, 70, 3, width) if turned else (1, 3, 70, width)
    q, k, v = (rng.normal(size=shape).astype("f2") for _ in range(3))
    op = positional_attention if turned else scaled_dot_product_attention
    levels = driver.lower(ts.jit(lambda q, k, v: op(q, k, v, causal=causal)).trace(q, k, v).function, "ptx")
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    assert "wgmma.mma_async" in artifact.text("kernels.ptx")
    found = get_backend("ptx").sanitized(artifact)([q, k, v])[0].astype("f8")
    q, k, v = (x.astype("f8").swapaxes(1, 2) if turned else x.astype("f8") for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / width**0.5
    if causal:
        scores = np.where(np.arange(70) <= np.arange(70)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ v
    np.testing.assert_allclose(found.swapaxes(1, 2) if turned else found, want, rtol=1e-2, atol=1e-2)


def test_short_heads_are_not_padded():
    q = np.zeros((1, 2, 90, 80), "f2")
    module = driver.lower(ts.jit(attend(False)).trace(q, q, q).function, "ptx")["tile"]
    assert all(
        n.attrs["shape"][-1] == 80 for f in module.functions[1:] for n in f.body.walk() if n.op.name == "tile.load"
    )
