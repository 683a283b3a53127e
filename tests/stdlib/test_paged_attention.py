"""Attention over the pages of a cache against PyTorch on the whole sequences, and writes in place."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import TesseraError
from tessera.stdlib.paged_attention import append_pages, paged_attention

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(0)


def attend(q, k, v, window):
    """Queries [S, H, D] at the last positions of keys [n, G, D]."""
    n, length = len(k), len(q)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    i, j = np.arange(n - length, n)[:, None], np.arange(n)[None]
    seen = torch.tensor((j <= i) & ((j > i - window) if window else True))
    q, k, v = (torch.tensor(x).transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).numpy()


class Case:
    """Requests of different lengths in shuffled pages; what no request holds is NaN."""

    def __init__(self, batch, length, heads, groups, width, size, window):
        count = 8 if length < 20 else 12
        self.window, pages = window, batch * count + 3
        self.table = RNG.permutation(pages)[: batch * count].reshape(batch, count).astype(np.int32)
        self.past = RNG.integers(0, count * size - length + 1, batch).astype(np.int32)
        self.count = RNG.integers(1, length + 1, batch).astype(np.int32)
        self.keys, self.values = (np.full((pages, groups, size, width), np.nan, np.float32) for _ in range(2))
        self.k, self.v = (np.full((batch, length, groups, width), np.nan, np.float32) for _ in range(2))
        self.whole = []
        for b, (past, new) in enumerate(zip(self.past, self.count, strict=True)):
            k, v = (RNG.standard_normal((past + new, groups, width)).astype(np.float32) for _ in range(2))
            for p in range(past):
                at = self.table[b, p // size], slice(None), p % size
                self.keys[at], self.values[at] = k[p], v[p]
            self.k[b, :new], self.v[b, :new] = k[past:], v[past:]
            self.whole.append((k, v))
        self.q = RNG.standard_normal((batch, length, heads, width)).astype(np.float32)


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
@pytest.mark.parametrize("sizes", [(2, 1, 9, 3, 64, 16, 0), (2, 7, 4, 2, 32, 8, 0), (1, 1, 4, 4, 16, 8, 5),
                                   (3, 20, 6, 3, 32, 4, 6)])  # fmt: skip
def test_attention(target, sizes):
    case = Case(*sizes)

    @ts.jit(target=target, donate=("keys", "values"))
    def run(q, k, v, keys, values, table, past, count):
        keys, values = append_pages(keys, values, k, v, table, past, count)
        return paged_attention(q, keys, values, table, past, count, window=case.window), keys, values

    keys, values = ts.tensor(case.keys), ts.tensor(case.values)
    before = keys.numpy().ctypes.data
    got, keys, values = run(case.q, case.k, case.v, keys, values, case.table, case.past, case.count)
    for b, n in enumerate(case.count):
        want = attend(case.q[b, :n], *case.whole[b], case.window)
        assert np.allclose(got.numpy()[b, :n], want, rtol=1e-5, atol=2e-6)
    assert np.isnan(keys.numpy()).sum() == np.isnan(case.keys).sum() - case.count.sum() * sizes[3] * sizes[4]
    assert target != "llvm" or keys.numpy().ctypes.data == before


@pytest.mark.in_turn("parts")
@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("sizes", [(2, 1, 9, 3, 64, 16, 0), (2, 3, 4, 2, 32, 8, 0), (1, 1, 4, 4, 16, 8, 5),
                                   (3, 2, 6, 3, 32, 4, 6)])  # fmt: skip
def test_parts_of_the_pages(target, parts, sizes):
    case = Case(*sizes)

    @ts.jit(target=target)
    def run(q, k, v, keys, values, table, past, count):
        keys, values = append_pages(keys, values, k, v, table, past, count)
        return paged_attention(q, keys, values, table, past, count, window=case.window, parts=parts)

    got = run(case.q, case.k, case.v, case.keys, case.values, case.table, case.past, case.count).numpy()
    for b, n in enumerate(case.count):
        want = attend(case.q[b, :n], *case.whole[b], case.window)
        assert np.allclose(got[b, :n], want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((2, 1, 9, 3, 64, 16, 0), None),
        ((1, 24, 8, 2, 64, 32, 0), None),
        ((3, 5, 6, 3, 32, 4, 6), None),
        ((1, 17, 4, 2, 32, 8, 5), 3),
    ],
)
@pytest.mark.parametrize("dtype", [ts.bf16, ts.f16])
def test_tensor_cores_multiply_narrow_pages(sizes, parts, dtype):
    case = Case(*sizes)
    arrays = [x.astype(dtype.numpy) for x in (case.q, case.k, case.v, case.keys, case.values)]

    @ts.jit(target="ptx")
    def run(q, k, v, keys, values, table, past, count):
        keys, values = append_pages(keys, values, k, v, table, past, count)
        return paged_attention(q, keys, values, table, past, count, window=case.window, parts=parts)

    got = run(*arrays, case.table, case.past, case.count).numpy().astype(np.float32)
    for b, n in enumerate(case.count):
        want = attend(case.q[b, :n], *case.whole[b], case.window)
        assert np.allclose(got[b, :n], want, atol=4e-2 if dtype == ts.bf16 else 6e-3)


@pytest.mark.parametrize("target", ["interp", "llvm"])
@pytest.mark.parametrize(("past", "page"), [(8, 0), (0, -1)])
def test_writes_past_the_end_are_errors(target, past, page):
    pages, new = np.zeros((3, 1, 4, 2), np.float32), np.ones((1, 1, 1, 2), np.float32)
    run = ts.jit(append_pages, target=target)
    with pytest.raises(TesseraError, match="a cache is written"):
        run(pages, pages.copy(), new, new, np.full((1, 2), page, np.int32), np.int32([past]), np.int32([1]))


def test_a_ring_keeps_the_newest():
    pages = np.zeros((2, 1, 2, 1), np.float32)
    keys = values = ts.tensor(pages)
    table = np.int32([[0, 1]])
    for i in range(7):
        new = np.full((1, 1, 1, 1), i, np.float32)
        keys, values = append_pages(keys, values, new, new, table, np.int32([i]), np.int32([1]), ring=True)
    assert keys.numpy().ravel().tolist() == [4, 5, 6, 3]
    q = np.zeros((1, 1, 1, 1), np.float32)
    got = paged_attention(q, keys, values, table, np.int32([6]), np.int32([1]), window=3, ring=True)
    assert got.numpy().item() == 5.0


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_a_window_reads_a_ring(target, parts):
    """Positions after the end of the table are read where `append_pages` wrote them."""
    case, ring, steps = Case(1, 1, 4, 2, 16, 4, 0), 3, 23
    table, pages = np.int32([[2, 0, 1]]), np.full((3, 2, 4, 16), np.nan, np.float32)
    k, v = (RNG.standard_normal((steps, 2, 16)).astype(np.float32) for _ in range(2))

    @ts.jit(target=target)
    def run(q, k, v, keys, values, past, count):
        keys, values = append_pages(keys, values, k, v, table, past, count, ring=True)
        return paged_attention(q, keys, values, table, past, count, window=7, ring=True, parts=parts), keys, values

    keys = values = pages
    for i in range(steps):
        got, keys, values = run(
            case.q, k[None, i : i + 1], v[None, i : i + 1], keys, values, np.int32([i]), np.int32([1])
        )
        want = attend(case.q[0], k[: i + 1], v[: i + 1], 7)
        assert i < ring * 4 - 4 or np.isfinite(got.numpy()).all()
        assert np.allclose(got.numpy()[0], want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_scales_that_are_not_positive(scale, parts):
    case = Case(2, 3, 4, 2, 32, 8, 0)

    @ts.jit(target="llvm")
    def run(q, k, v, keys, values, table, past, count):
        keys, values = append_pages(keys, values, k, v, table, past, count)
        return paged_attention(q, keys, values, table, past, count, scale=scale, parts=parts)

    got = run(case.q, case.k, case.v, case.keys, case.values, case.table, case.past, case.count).numpy()
    for b, n in enumerate(case.count):
        want = attend(case.q[b, :n] * np.float32(scale * 32**0.5), *case.whole[b], 0)
        assert np.allclose(got[b, :n], want, rtol=1e-5, atol=2e-6)
