"""Pools: where tensors lie, what comes back when, growth, and refusals (programming model, 4.2)."""

import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.core.device import count_gpus
from tessera.core.errors import ArgumentError, DeviceUnavailable, ResourceError
from tessera.runtime.storage.memory_pool import CACHE_LINE, HostArena


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_blocks_never_overlap_and_holes_merge(steps):
    arena, live = HostArena(4096), []
    for take, number in steps:
        if take and (offset := arena.take(number)) is not None:
            live.append((offset, arena.blocks[offset]))
        elif not take and live:
            arena.give_back(live.pop(number % len(live))[0])
        parts = sorted([*live, *arena.holes])
        assert [o for o, _ in parts] == [0, *np.cumsum([s for _, s in parts])[:-1]] and sum(s for _, s in parts) == 4096
        holes = arena.holes
        assert all(a + s < b for (a, s), (b, _) in zip(holes, holes[1:], strict=False))  # none touch


def test_the_specifications_pool():
    pool = ts.memory.Pool(size="1MB", growth_factor=1.5)
    with ts.memory.use_pool(pool):
        tensors = [ts.zeros((1000, 10)) for _ in range(100)]
        total = sum(float(t.sum()) for t in tensors)
        tensors[3].numpy()[:] = 2.0
    assert total == 0 and float(tensors[3].sum()) == 20000 and float(tensors[4].sum()) == 0
    report = pool.report()
    assert report.used == 100 * (-(-40000 // CACHE_LINE) * CACHE_LINE) and report.capacity >= report.used > 1 << 20
    assert tensors[0].numpy().ctypes.data % CACHE_LINE == 0
    assert report.peak >= report.used
    del tensors
    after = pool.report()
    assert after.used == 0 and after.peak == report.peak  # the most that was ever held
    assert (
        pool.report().used == 0
        and pool.defragment() == report.capacity - (1 << 20)
        and pool.report().capacity == 1 << 20
    )


def test_results_lie_in_the_pool_and_views_keep_them():
    pool = ts.memory.Pool("64K")
    with ts.memory.use_pool(pool):
        x = ts.Tensor([[1.0, 2.0], [3.0, 4.0]])
        y = x @ x + 1.0
    row = y[1]
    before = pool.report().used
    del x, y
    gc.collect(1)
    assert 0 < pool.report().used <= before
    np.testing.assert_array_equal(row.numpy(), [16, 23])
    outside = ts.zeros(100)
    del row
    assert pool.report().used == 0 and outside.shape == (100,)


def test_what_lies_elsewhere_stays_there(tmp_path):
    held = np.ones((4, 4), "f4")
    with ts.memory.use_pool(pool := ts.memory.Pool("1K")):
        x, disk = ts.Tensor(held), ts.memory.on_disk(tmp_path / "x.npy", (8,))
        part = x[1:3]
    assert np.shares_memory(x.numpy(), held) and ts.memory.space_of(disk) == "disk"
    assert np.shares_memory(part.numpy(), held) and pool.report().used == 0


def test_kernels_read_and_write_pooled_tensors():
    @ts.kernel
    def double(x):
        x[ts.tile.program_id(0)] *= 2.0

    with ts.memory.use_pool(ts.memory.Pool("1K")):
        x = ts.Tensor([1.0, 2.0, 3.0])
        double[3](x)
    assert x.tolist() == [2, 4, 6]


def test_a_pool_that_does_not_grow():
    pool = ts.memory.Pool("4K", growth_factor=1.0)
    held = pool.empty(512)
    with pytest.raises(ResourceError, match="the pool of 4,096 bytes is full"):
        pool.empty(1024)
    del held
    assert pool.empty(1024).nbytes == 4096


def test_threads_share_a_pool():
    pool, bad = ts.memory.Pool("256K"), []

    def work(number):
        for _ in range(200):
            x = pool.empty(64, "int64")
            x[:] = number
            if not (x == number).all():
                bad.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not bad and pool.report().used == 0 and pool.report().allocations == 800


@pytest.mark.parametrize("wrong", [{"size": "much"}, {"size": -1}, {"growth_factor": 0.5}])
def test_no_pool(wrong):
    with pytest.raises(ArgumentError):
        ts.memory.Pool(**wrong)


def test_more_than_the_system_has():
    with pytest.raises(ResourceError, match="the system gives no"):
        ts.memory.Pool("9000000T")


@pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU here")
@pytest.mark.parametrize("device", ["gpu:0", "cuda:0"])
def test_without_a_gpu(device):
    with pytest.raises(DeviceUnavailable, match="the device cuda:0 is not available") as caught:
        ts.memory.Pool("1M", device=device)
    assert {"cpu", "interp", "llvm", "ptx", "csl"} <= set(caught.value.expected.removeprefix("one of ").split(", "))
