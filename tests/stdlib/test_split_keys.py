"""Split keys: attention of few queries over long keys in parts, against NumPy in f64."""

import math

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.core.types import bf16, f32
from tessera.runtime import driver
from tessera.stdlib import split_keys


@pytest.fixture
def small(monkeypatch):
    """Parts that small attention is cut into."""
    for name, value in {"LEAST_KEYS": 32, "LEAST_PARTS": 2, "BLOCK_KEYS": 16, "BUSY_PROGRAMS": 6}.items():
        monkeypatch.setattr(split_keys, name, value)


def run(function, *arrays):
    """The kernels of a function for a GPU, and its results in the emulator."""
    levels = driver.lower(ts.jit(function).trace(*arrays).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
    return list(artifact.manifest["plan"]["entries"]), BACKEND.interpreter(artifact)(arrays)[0]


def attend(q, k, v, mask=None, scale=None, softcap=0.0):
    q, k, v = (x.astype("f8") for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = softcap * np.tanh(s / softcap) if softcap else s
    s = s if mask is None else s + mask
    high = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(high == -np.inf, 0, high))
    total = p.sum(axis=-1, keepdims=True)
    return p @ v / np.where(total == 0, 1, total)


def draw(*shapes, dtype=np.float32):
    rng = np.random.default_rng(7)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(("heads", "shared", "queries", "keys", "width"), [
    (1, 1, 1, 131, 80), (4, 2, 1, 100, 32), (2, 1, 5, 64, 24), (1, 1, 16, 97, 16), (2, 2, 3, 70, 8),
])  # fmt: skip
def test_parts_of_keys_give_attention(heads, shared, queries, keys, width, dtype, small):
    q, k, v = draw((2, heads, queries, width), *[(2, heads // shared, keys, width)] * 2, dtype=dtype)
    names, got = run(ts.scaled_dot_product_attention, q, k, v)
    assert [n for n in names if "part" in n] == names and len(names) == 2
    tolerance = 2e-6 if dtype == np.float32 else 2**-7
    np.testing.assert_allclose(got.astype("f8"), attend(q, k, v), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 90), (2, 3, 1, 90), (2, 1, 4, 90)])
def test_masks_caps_and_queries_without_keys(shape, dtype, small):
    q, k, v = draw((2, 3, 4, 16), (2, 3, 90, 16), (2, 3, 90, 40), dtype=dtype)
    mask = np.where(np.arange(90) % 7 == 0, 0.5, -np.inf).astype(dtype) * np.ones(shape, dtype)
    mask[0, :, :, 30:] = -np.inf
    mask[-1, 0, 0, :] = -np.inf
    names, got = run(lambda *x: ts.scaled_dot_product_attention(*x, scale=0.7, softcap=3.0), q, k, v, mask)
    assert all("part" in n for n in names)
    want = attend(q, k, v, mask.astype("f8"), scale=0.7, softcap=3.0)
    tolerance = 2e-6 if dtype == np.float32 else 2**-9
    np.testing.assert_allclose(got.astype("f8"), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 4.0])
def test_the_sign_of_the_scale(scale, small):
    q, k, v = draw((1, 2, 1, 8), (1, 2, 65, 8), (1, 2, 65, 8))
    _, got = run(lambda *x: ts.scaled_dot_product_attention(*x, scale=scale), q, k, v)
    np.testing.assert_allclose(got, attend(q, k, v, scale=scale), rtol=1e-5, atol=1e-5)


def test_rank_two_and_large_scores(small):
    q, k, v = draw((3, 16), (80, 16), (80, 16))
    q *= 1e3
    _, got = run(ts.scaled_dot_product_attention, q, k, v)
    np.testing.assert_allclose(got, attend(*(x[None, None] for x in (q, k, v)))[0, 0], rtol=1e-4, atol=1e-4)


def test_three_parts_of_scores_far_below_zero(small):
    q, k, v = np.full((1, 1, 1, 8), 100, np.float32), *draw((1, 1, 130, 8), (1, 1, 130, 8))
    k -= 20
    _, got = run(ts.scaled_dot_product_attention, q, k, v)
    np.testing.assert_allclose(got, attend(q, k, v), rtol=1e-3, atol=1e-3)


def match(queries, keys, heads=8, dtype=bf16):
    found = split_keys.match_split_attention((1, heads, queries, 80), (1, heads, keys, 80), (1, heads, keys, 80), dtype)
    return found and (found.parts, found.keys, found.vectors)


def test_only_where_it_pays():
    assert match(1, 9841, heads=4) == (52, 192, False)
    assert match(1, 6467, dtype=f32) == (26, 256, True) and not match(8, 6467, dtype=f32)[2]
    assert match(17, 9841) is None  # the flash kernel has whole blocks of queries
    assert match(1, 200) is None  # short
    assert match(1, 9841, heads=256) is None  # the heads fill the GPU
