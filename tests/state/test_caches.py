"""Ring buffers, page tables and key-value caches against lists and PyTorch's attention."""

from collections import deque

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, OutOfBoundsError, ShapeError, TesseraError

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(0)


class SpecCache(ts.Cache):
    """The cache of the programming model."""

    def __init__(self, max_batch, max_seq, dim, page_size=4):
        self.keys = ts.RingBuffer(max_batch, max_seq, dim)
        self.values = ts.RingBuffer(max_batch, max_seq, dim)
        self.page_table = ts.PageTable(page_size=page_size, num_pages=max_seq // page_size)

    @ts.cache.eviction_policy("lru")
    def get(self, position):
        page = self.page_table.get_page(position)
        return self.keys[page], self.values[page]

    @ts.cache.write_through
    def update(self, position, k, v):
        page = self.page_table.allocate_page(position)
        self.keys[page] = k
        self.values[page] = v


def test_the_cache_of_the_programming_model():
    cache = SpecCache(2, 8, 3)
    rows = RNG.standard_normal((13, 2, 3)).astype(np.float32)
    for i, row in enumerate(rows):
        cache.update(i, row, -row)
    assert cache.page_table.evicted == [0, 1]
    for position in (12, 0, 5, 9):  # pages 0 and 1 come back from what was written through
        keys, values = cache.get(position)
        assert keys.shape == (2, 4, 3)
        assert np.array_equal(keys.numpy()[:, position % 4], rows[position])
        assert np.array_equal(values.numpy()[:, position % 4], -rows[position])
    cache.clear()
    with pytest.raises(OutOfBoundsError, match="never written"):
        cache.get(1)


@pytest.mark.parametrize(("policy", "lost"), [("lru", 1), ("fifo", 0), ("lfu", 2)])
def test_eviction(policy, lost):
    table = ts.PageTable(page_size=2, num_pages=3, policy=policy)
    for position in (0, 2, 4):
        table.allocate_page(position)
    for position in (2, 2, 0, 4, 0):
        table.get_page(position)
    table.get_page(2)
    table.get_page(0) if policy == "lru" else None
    table.get_page(4) if policy == "lru" else None
    table.allocate_page(6)
    assert table.evicted == [lost]
    with pytest.raises(OutOfBoundsError, match="was evicted"):
        table.get_page(2 * lost)


def test_a_table_without_a_policy_has_an_end():
    table = ts.PageTable(page_size=2, num_pages=1, policy=None)
    assert table.allocate_page(1).offset == 1
    with pytest.raises(OutOfBoundsError, match="past the cache's end"):
        table.allocate_page(2)


@pytest.mark.parametrize("target", [None, "interp", "llvm", "ptx"])
def test_ring_buffer(target):
    ring, want = ts.RingBuffer(2, 5, 3), deque([np.zeros((2, 3), np.float32)] * 5, maxlen=5)
    push = ring.push if target is None else ts.jit(ts.with_state(lambda r, x: r.push(x).count), target=target)
    for n in (1, 3, 5, 2):
        rows = RNG.standard_normal((2, n, 3)).astype(np.float32)
        push(rows) if target is None else push(ring, rows)
        want.extend(rows.swapaxes(0, 1))
        ring.to("cpu")
        for last in (0, 1, 5):
            got = ring.last(last).numpy()
            assert np.array_equal(got, np.stack([*want][5 - last :], axis=1) if last else np.zeros((2, 0, 3)))


def attend(q, k, v, window):
    """PyTorch's attention of the last positions: q [S, H, D], k and v [n, G, D]."""
    n, length = len(k), len(q)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    i, j = np.arange(n - length, n)[:, None], np.arange(n)[None]
    seen = torch.tensor((j <= i) & ((j > i - window) if window else True))
    q, k, v = (torch.tensor(x).transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).numpy()


@pytest.mark.parametrize("target", [None, "interp", "llvm", "ptx"])
@pytest.mark.parametrize("window", [None, 5])
def test_key_value_cache(target, window):
    cache = ts.KVCache(2, 2, 40, 8, page_size=4, window=window, step=4)

    @ts.with_state
    def step(cache, q, k, v, count):
        return cache.append(k, v, count).attend(q)

    run = step if target is None else ts.jit(step, target=target)
    keys, values = [[], []], [[], []]
    for length in (4, 1, 1, 3, 4, 1, 4):
        q, k, v = (RNG.standard_normal((2, length, h, 8)).astype(np.float32) for h in (4, 2, 2))
        count = np.int32([length, max(length - 1, 1)])
        got = run(cache, q, k, v, count).numpy()
        for b, n in enumerate(count):
            keys[b] += [*k[b, :n]]
            values[b] += [*v[b, :n]]
            want = attend(q[b, :n], np.array(keys[b]), np.array(values[b]), window)
            assert np.allclose(got[b, :n], want, rtol=1e-5, atol=1e-5)
    assert cache.lengths.tolist() == [len(x) for x in keys]
    if window is None:
        cache.to("cpu").truncate([3, 2])
        got = cache.append(k[:, :1], v[:, :1]).attend(q[:, :1]).numpy()
        assert np.allclose(got[0], attend(q[0, :1], np.array([*keys[0][:3], k[0, 0]]),
                                          np.array([*values[0][:3], v[0, 0]]), None), atol=1e-5)  # fmt: skip


def test_types_of_caches():
    kind = ts.KVCache["B", 2, "S", 8, ts.bf16]
    plain, rolling = kind(B=3, S=20, page_size=4), (kind @ ts.rolling_window)(B=3, S=5, page_size=2, step=3)
    assert plain.keys.dtype == ts.bf16 and plain.keys.shape == (15, 2, 4, 8) and plain.window is None
    assert (rolling.window, rolling.longest, rolling.step, rolling.keys.shape) == (5, 5, 3, (12, 2, 2, 8))
    assert kind == ts.KVCache["B", 2, "S", 8, "bf16"] and kind != kind @ ts.rolling_window
    cache, rows = (ts.KVCache[1, 1, 3, 4] @ ts.rolling_window)(), RNG.standard_normal((3, 6, 1, 4)).astype(np.float32)
    for i in range(6):
        q, k, v = rows[:, None, i : i + 1]
        got = cache.append(k, v).attend(q).numpy()
        want = attend(rows[0, i : i + 1], rows[1, : i + 1], rows[2, : i + 1], 3)
        np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6)
    for call in (
        lambda: kind(B=3), lambda: kind(B=3, S=4, D=1), lambda: ts.KVCache[1, 1, 4], lambda: ts.KVCache[1, 1, 4, True],
        lambda: ts.KVCache[1, 1, 4, 2.0], lambda: kind @ "cuda:0", lambda: kind(B=0, S=4),
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            call()


@pytest.mark.parametrize("target", [None, "llvm"])
def test_a_cache_is_not_written_past_its_end(target):
    cache = ts.KVCache(1, 1, 4, 2, page_size=4)
    one = np.ones((1, 3, 1, 2), np.float32)
    append = ts.with_state(lambda c, x: c.append(x, x).lengths)
    append = append if target is None else ts.jit(append, target=target)
    append(cache, one)
    with pytest.raises(TesseraError, match="past (its end|the end of its cache)"):
        append(cache, one)


def test_misfits_are_errors():
    ring = ts.RingBuffer(1, 4, 2)
    for call, error in (
        (lambda: ring.push(np.ones((1, 5, 2), np.float32)), ShapeError),
        (lambda: ring.push(np.ones((1, 1, 3), np.float32)), ShapeError),
        (lambda: ring[4], OutOfBoundsError), (lambda: ring["a"], ArgumentError), (lambda: ring.last(5), ArgumentError),
        (lambda: ring.__setitem__(0, np.ones((2, 2), np.float32)), ShapeError),
        (lambda: ts.RingBuffer(0, 1), ArgumentError), (lambda: ts.PageTable(0, 1), ArgumentError),
        (lambda: ts.PageTable(1, 1, "random"), ArgumentError), (lambda: ts.cache.eviction_policy("x"), ArgumentError),
        (lambda: ts.PageTable(1, 1).get_page(-1), ArgumentError),
        (lambda: ts.KVCache(1, 1, 8, 4, window=4).append(*np.ones((2, 1, 2, 1, 4), np.float32)), ShapeError),
        (lambda: ts.KVCache(1, 1, 8, 4).append(*np.ones((2, 1, 1, 2, 4), np.float32)), ShapeError),
        (lambda: ts.KVCache(1, 1, 8, 4, window=4).truncate([0]), ArgumentError),
        (lambda: ts.KVCache(1, 0, 8, 4), ArgumentError),
    ):  # fmt: skip
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("count", [[3, 1], [1, -2]])
def test_a_count_of_rows_that_do_not_exist(count):
    cache = ts.KVCache(2, 1, 16, 8)
    rows = ts.ones((2, 2, 1, 8))
    with pytest.raises(ArgumentError, match="so many rows"):
        cache.append(rows, rows, count)
    assert cache.append(rows, rows, [2, 0]).lengths.tolist() == [2, 0]
    with pytest.raises(ShapeError, match="count does not fit"):
        cache.append(rows, rows, [1, 1, 1])


class Layers(ts.Stateful):
    def __init__(self):
        self.caches = {"self": ts.KVCache(2, 1, 4, 4, page_size=4)}

    @ts.stateful
    def step(self, x):
        return self.caches["self"].append(x, x).lengths


@pytest.mark.parametrize("target", [None, "interp", "cpu", "ptx"])
def test_a_cache_written_past_its_end_is_named(target):
    """By its path in the state, at the user's line."""
    layers, x = Layers(), np.ones((2, 3, 1, 4), np.float32)
    step = layers.step if target is None else ts.jit(layers.step, target=target)
    step(x)
    with pytest.raises(TesseraError, match=r"\(in caches\.self: KVCache\)") as found:
        step(x)
    error = found.value
    assert 'self.caches["self"].append(x, x)' in str(error) and "^^^" in str(error) and "longer" in str(error)
    if target is None:
        assert isinstance(error, ts.errors.OutOfBoundsError) and error.expected == "up to 4 positions"
        assert error.received == "3 and 3 more"


@pytest.mark.parametrize("wrap", [ts.jit, lambda f: ts.jit(ts.with_state(f))])
def test_a_cache_that_is_an_argument_has_its_name(wrap):
    append = wrap(lambda memory, x: memory.append(x, x).lengths)
    cache, x = ts.KVCache(2, 1, 4, 4, page_size=4), np.ones((2, 5, 1, 4), np.float32)
    with pytest.raises(TesseraError, match=r"\(in memory: KVCache\)"):
        append(cache, x)


def test_only_the_sequences_that_have_no_room_are_refused():
    cache, x = ts.KVCache(2, 1, 4, 4, page_size=4), np.ones((2, 4, 1, 4), np.float32)
    cache.append(x, x, [4, 2])
    with pytest.raises(ts.errors.OutOfBoundsError, match="sequence 1 is") as found:
        cache.append(x, x, [0, 3])
    assert found.value.received == "2 and 3 more"
    assert cache.append(x, x, [0, 2]).lengths.tolist() == [4, 4]


def attend_to(k, v, q):
    """Attention of one query [H, D] to keys and values [n, H, D]."""
    scores = np.einsum("hd,nhd->hn", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdims=True), v)


MASK = np.array([[1, 0, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]], bool)  # of 7 and 5 positions
PRUNINGS = {
    "sinks": ({"first": 1, "last": 2}, [[0, 5, 6], [0, 3, 4]]),
    "all": ({"last": 9}, [range(7), range(5)]),
    "none": ({"last": 0}, [[], []]),
    "mask": ({"keep": MASK}, [[0, 2, 4, 5, 6], [3, 4]]),
    "short mask": ({"keep": MASK[:, :3]}, [[0, 2], []]),
}


@pytest.mark.parametrize("target", [None, "interp", "cpu"])
@pytest.mark.parametrize(("how", "kept"), PRUNINGS.values(), ids=PRUNINGS.keys())
def test_a_pruned_cache_attends_to_what_it_keeps(target, how, kept):
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 7, 2, 4)).astype(np.float32) for _ in range(2))
    q, new = (rng.standard_normal((2, 1, 2, 4)).astype(np.float32) for _ in range(2))
    cache = ts.KVCache(2, 2, 8, 4, page_size=4)
    cache.append(k, v, [7, 5])
    prune = ts.with_state(lambda cache: cache.prune(**how).lengths)
    lengths = (prune if target is None else ts.jit(prune, target=target))(cache)
    assert lengths.tolist() == cache.lengths.tolist() == [len(each) for each in kept]
    found = cache.append(new, new).attend(q).numpy()[:, 0]
    for b, rows in enumerate(kept):
        keys, values = (np.concatenate([x[b][list(rows)], new[b]]) for x in (k, v))
        np.testing.assert_allclose(found[b], attend_to(keys, values, q[b, 0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("how", "says"), [
    ({}, "neither"), ({"keep": MASK, "last": 3}, "both"), ({"keep": MASK[:1]}, "does not fit"),
    ({"keep": MASK.astype(np.int32)}, "does not fit"), ({"first": -1, "last": 3}, "first"),
])  # fmt: skip
def test_prunings_that_are_refused(how, says):
    with pytest.raises(TesseraError, match=says):
        ts.KVCache(2, 2, 8, 4).prune(**how)
    with pytest.raises(ts.errors.ArgumentError, match="ring"):
        ts.KVCache(2, 2, 8, 4, window=4).prune(last=3)


def test_an_offloaded_cache_goes_on(tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 3, 2, 4)).astype(np.float32)
    caches = [ts.KVCache(2, 2, 8, 4, page_size=4) for _ in range(2)]
    step = ts.jit(ts.with_state(lambda cache, x: cache.append(x, x).attend(x)), target="cpu")
    for cache in caches:
        step(cache, x)
    caches[0].offload(tmp_path)
    assert ts.memory.space_of(caches[0].keys) == "disk" and (tmp_path / "keys.npy").exists()
    np.testing.assert_array_equal(step(caches[0], x).numpy(), step(caches[1], x).numpy())
    caches[0].offload(tmp_path / "again")
    coming = caches[0].prefetch()
    caches[0].truncate([1, 2])
    assert coming.wait() is caches[0] and coming.done()
    assert ts.memory.space_of(caches[0].keys) == "host" and caches[0].lengths.tolist() == [1, 2]
    np.testing.assert_array_equal(caches[0].keys.numpy(), caches[1].keys.numpy())


def test_the_state_of_an_optimizer_on_disk_gives_the_same_steps(tmp_path):
    params, optimizer = {"w": ts.ones((5,))}, ts.optim.AdamW(0.1)
    update = ts.jit(optimizer.update, target="cpu")
    state = here = optimizer.init(params)
    away = ts.state.offload(state, tmp_path)
    assert ts.memory.space_of(away["m"]["w"]) == "disk"
    for _ in range(3):
        found, here = update(params, params, here)
        other, away = update(params, params, ts.state.prefetch(ts.state.offload(away, tmp_path)).wait())
        np.testing.assert_array_equal(found["w"].numpy(), other["w"].numpy())


def test_a_traced_state_is_not_offloaded(tmp_path):
    cache = ts.KVCache(1, 1, 4, 4)
    for move in (lambda c: c.offload(tmp_path), lambda c: c.prefetch()):
        with pytest.raises(ts.errors.TraceError, match="keys is traced"):
            ts.jit(ts.with_state(lambda cache, move=move: move(cache)))(cache)
