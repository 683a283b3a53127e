"""Kept memory: large results take the memory of results that ended."""

import gc

import numpy as np

import tessera as ts
from tessera.core import kept_memory
from tessera.core.kept_memory import KEPT, LEAST_BYTES, KeptMemory, has_own_memory, make_array, round_size

SHAPE = (600, 512)


def make(shape=SHAPE):
    return make_array(shape, np.dtype(np.float32), 4 * int(np.prod(shape)))


def test_memory_comes_back_with_the_last_view():
    KEPT.clear()
    whole = make()
    assert whole.ctypes.data % kept_memory.ALIGNMENT == 0 and has_own_memory(whole) and whole.flags.writeable
    part, place = whole[1:], whole.ctypes.data
    assert not has_own_memory(part)
    del whole
    gc.collect(1)
    assert KEPT.held == 0
    del part
    gc.collect(1)
    assert KEPT.held > 0
    assert make((590, 512)).ctypes.data == place  # of about the same size


def test_small_arrays_and_too_large_ones_are_not_kept():
    assert make((8, 8)).base is None and 4 * 64 < LEAST_BYTES
    kept = KeptMemory(1 << 20)
    kept.give_back(kept.take(1 << 20))
    assert kept.held == 0


def test_what_was_kept_longest_is_dropped():
    kept = KeptMemory(1 << 20)
    first, second, third = (kept.take(400_000) for _ in range(3))
    for memory in (first, second, third):
        kept.give_back(memory)
    assert kept.held <= kept.limit
    assert kept.take(400_000) is third and kept.take(400_000) is second
    assert kept.take(400_000) is not first


def test_sizes_are_rounded_up_by_an_eighth_at_most():
    for size in (1, 7, 100, 4097, 1 << 20, (1 << 20) + 1, 12_345_678):
        assert size <= round_size(size) <= size + max(size // 8, 1) + 8


def test_results_of_calls_use_memory_again_and_never_that_of_live_ones():
    step = ts.jit(lambda x: x + 1, target="llvm")
    x = ts.zeros((512, 512))
    first, second = step(x).numpy(), step(x).numpy()
    assert not np.shares_memory(first, second)
    place = first.ctypes.data
    del first
    third = step(x).numpy()
    assert third.ctypes.data == place and np.all(third == 1) and np.all(second == 1)
