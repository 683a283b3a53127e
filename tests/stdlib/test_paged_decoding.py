"""One position of each request, rotated, written and attended to in one launch, against the ops one by one."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import TesseraError
from tessera.stdlib.paged_attention import append_pages, paged_attention
from tessera.stdlib.paged_decoding import decode_position

RNG = np.random.default_rng(3)


def draw(batch, heads, shared, width, size, pages, dtype):
    """Projected heads, angles, and a cache of requests of different lengths, of which the last writes nothing."""
    x = RNG.standard_normal((batch, 1, heads + 2 * shared, width)).astype(np.float32)
    angle = RNG.uniform(0, 6, (batch, 1, width // 2)).astype(np.float32)
    keys, values = (RNG.standard_normal((batch * pages, shared, size, width)).astype(dtype.numpy) for _ in range(2))
    table = RNG.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    past = RNG.integers(0, pages * size - 1, batch).astype(np.int32)
    count = np.ones(batch, np.int32)
    count[-1] = batch == 1
    return (x, np.cos(angle), np.sin(angle), keys, values), (table, past, count)


def step_by_step(heads, cos, sin, keys, values, table, past, count, turned, window):
    """The same by `append_pages` and `paged_attention`, which round queries and keys alike."""
    shared, half = keys.shape[1], keys.shape[3] // 2
    first, last = heads.shape[2] - 2 * shared, heads.shape[2] - shared
    q, k, v = heads[:, :, :first], heads[:, :, first:last], heads[:, :, last:]
    if turned:
        c, s = cos[:, :, None], sin[:, :, None]

        def turn(x):
            first, second = x[..., :half], x[..., half:]
            return ts.concatenate([first * c - second * s, second * c + first * s], axis=-1)

        q, k = turn(q), turn(k)
    q, k, v = (x.to(keys.dtype) for x in (q, k, v))
    keys, values = append_pages(keys, values, k, v, table, past, count)
    return paged_attention(q, keys, values, table, past, count, window=window), keys, values


@pytest.mark.parametrize(("target", "dtype"), [("interp", ts.f32), ("llvm", ts.f32), ("ptx", ts.f32), ("ptx", ts.bf16),
                                               ("llvm", ts.bf16)])  # fmt: skip
@pytest.mark.parametrize(("sizes", "turned", "window", "parts"), [
    ((2, 6, 2, 32, 16, 4), True, 0, 1), ((1, 8, 2, 32, 16, 5), True, 0, 3), ((3, 3, 3, 64, 8, 3), False, 0, 2),
    ((2, 9, 3, 16, 8, 4), True, 11, 2), ((2, 40, 2, 16, 8, 3), True, 0, 1), ((2, 40, 2, 16, 8, 3), False, 9, 2),
])  # fmt: skip
def test_a_position_is_what_its_ops_give(target, dtype, sizes, turned, window, parts):
    arrays, requests = draw(*sizes, dtype)

    @ts.jit(target=target)
    def fused(heads, cos, sin, keys, values, *requests):
        angles = (cos, sin) if turned else None
        return decode_position(heads, angles, (keys, values), *requests, window=window, parts=parts)

    got = fused(*arrays, *requests)
    want = ts.jit(step_by_step, target="interp", static_argnames=("turned", "window"))(
        *arrays, *requests, turned=turned, window=window
    )
    live = requests[2] > 0
    tolerance = 3e-2 if dtype == ts.bf16 else 2e-6
    for g, w, rows in zip(got, want, (live, ..., ...), strict=True):
        g, w = (np.asarray(x.numpy(), np.float32)[rows] for x in (g, w))
        assert np.allclose(g, w, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("place", "page", "says"), [(8, 0, "past its end"), (5, -1, r"has no page[\s\S]*with 5")])
def test_a_position_without_a_page_is_an_error(place, page, says):
    arrays, (table, past, count) = draw(1, 2, 1, 8, 4, 2, ts.f32)
    table[0, 1] = page

    @ts.jit(target="llvm")
    def fused(heads, cos, sin, keys, values, *requests):
        return decode_position(heads, (cos, sin), (keys, values), *requests)

    with pytest.raises(TesseraError, match=says):
        fused(*arrays, table, np.full_like(past, place), count)
