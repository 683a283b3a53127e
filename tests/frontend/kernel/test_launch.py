"""Arguments, grids, groups, results and the cache of compiled kernels."""

import numpy as np
import pytest

from tessera import tile
from tessera.core.errors import ArgumentError, DTypeError, ResourceError, ShapeError
from tessera.core.types import bf16, f32, int32
from tessera.frontend.kernel import constexpr, kernel
from tessera.frontend.kernel.kernel_function import KernelLaunch
from tessera.ir.tensor import Tensor
from tests.frontend.kernel import strings

OFFSET = 1.0


@kernel
def numbered(out: Tensor["A", "B", "G", int32]):
    out[tile.program_id(0), tile.program_id(1), tile.local_id()] = tile.linear_id() + 100 * tile.num_programs(1)


def test_ids_count_through_the_grid_and_the_group():
    out = np.zeros((2, 3, 4), "i4")
    numbered[(2, 3), 4](out)
    np.testing.assert_array_equal(out.ravel(), np.arange(24) + 300)


@kernel
def warps(out: Tensor["N", int32]):
    i, _, _ = tile.thread_id()
    out[i] = tile.warp_id() * 100 + tile.lane_id() + tile.block_id()[2]


def test_a_kernel_that_asks_for_its_place_in_a_group_runs_as_one():
    out = np.zeros(128, "i4")
    warps(out)
    np.testing.assert_array_equal(out, np.arange(128) // 32 * 100 + np.arange(128) % 32)


@kernel(tile_shape=(4,))
def sums(x: Tensor["M", "N"], out: Tensor["M"]):
    tile.store(out, tile.sum(tile.load(x, shape=(4, N)), axis=1))


def test_the_default_grid_covers_the_written_tensor(rng):
    x, out = rng.random((8, 3), dtype="f4"), np.zeros(8, "f4")
    sums(x, out)
    np.testing.assert_allclose(out, x.sum(1), rtol=1e-6)
    assert KernelLaunch(sums).module(x, out).main.body.nodes[0].attrs["grid"] == (2,)


@kernel
def doubled(x: Tensor["N"], *, B):
    return x[tile.program_id(0) * B + tile.arange(0, B)] * 2.0


def test_each_program_returns_its_block(rng):
    x = rng.random(8, dtype="f4")
    np.testing.assert_allclose(doubled[4](x, B=2), (x * 2).reshape(4, 2))
    np.testing.assert_allclose(doubled[lambda c: c["N"] // c["B"]](x, B=4), (x * 2).reshape(2, 4))
    found = doubled[(1,)](Tensor(x), B=8)
    assert isinstance(found, Tensor)
    np.testing.assert_allclose(found.numpy(), x * 2)


@kernel
def kinds(x: Tensor["N"], n, scale: f32, flag, name, SIZE: constexpr, *, extra=None):
    assert SIZE == 3 and extra is None and name == "sum"
    value = n * scale
    if flag:
        value += 1.0
    x[0] = value


def test_what_is_constant_and_what_is_not():
    x = np.zeros(1, "f4")
    kinds(x, 3, 2, True, "sum", 3)
    assert x[0] == 7
    types = [str(p.type) for p in KernelLaunch(kinds).module(x, np.int32(3), 2, True, "sum", 3).main.params]
    assert types == ["global 1xf32", "int32", "f32", "bool"]


@kernel
def offset(x: Tensor["N"]):
    x[0] = OFFSET


def test_a_kernel_is_compiled_again_when_a_name_it_reads_changes(monkeypatch):
    x = np.zeros(1, "f4")
    offset(x)
    first = KernelLaunch(offset).module(x)
    assert x[0] == 1 and KernelLaunch(offset).module(x) is first
    monkeypatch.setitem(globals(), "OFFSET", 5.0)
    offset(x)
    assert x[0] == 5


@kernel
def product(a: Tensor["M", "K"], b: Tensor["K", "N", bf16]):
    return a[0, 0]


def test_annotations_C1_a_dim_has_one_size():
    with pytest.raises(ShapeError) as error:
        product(np.zeros((2, 3), "f4"), np.zeros((4, 5), bf16.numpy))
    text = str(error.value)
    assert "test_launch.py" in text and "product(np.zeros" in text
    assert "argument `b`: axis 0: K is 3 elsewhere and 4 here" in text
    assert "expected: KxNxbf16" in text and "received: 4x5xbf16" in text


def test_annotations_C2_the_element_type_fits():
    with pytest.raises(DTypeError, match="argument `b` has another element type"):
        product(np.zeros((2, 3), "f4"), np.zeros((3, 5), "f4"))


def test_annotations_C3_the_rank_fits():
    with pytest.raises(ShapeError, match="argument `a`: rank 2 expected, rank 1 received"):
        product(np.zeros(2, "f4"), np.zeros((3, 5), bf16.numpy))


def test_annotations_C4_a_tensor_is_a_tensor():
    with pytest.raises(DTypeError, match="argument `a` is not a tensor"):
        product(1.0, np.zeros((3, 5), bf16.numpy))


def test_calls_C1_the_arguments_fit_the_signature():
    with pytest.raises(ArgumentError, match="product: missing a required argument: 'b'"):
        product(np.zeros((2, 3), "f4"))


def test_calls_C2_a_grid_is_of_positive_ints():
    with pytest.raises(ArgumentError, match="is not a grid size"):
        offset["many"](np.zeros(1, "f4"))
    for group in (0, -1, 2.5, "8"):
        with pytest.raises(ArgumentError, match="is not a group size"):
            offset[(1,), group](np.zeros(1, "f4"))


@kernel(shared_memory=100)
def large(x: Tensor["N"]):
    buffer = tile.alloc_shared((64,), f32)
    buffer[0] = x[0]
    x[0] = buffer[0]


def test_calls_C3_the_shared_memory_is_enough():
    with pytest.raises(ResourceError, match="received: 256 bytes"):
        large(np.zeros(1, "f4"))


def test_string_annotations():
    x = np.float32([1, 2])
    strings.halve(x)
    assert x.tolist() == [0.5, 1]


@kernel(num_warps=2)
def threads(out):
    """Each thread writes its number: a thread program in the sense of CUDA."""
    (x, _, _) = tile.thread_id()
    out[tile.program_id(0) * 64 + x] = tile.lane_id() + 100 * tile.warp_id()


def test_a_thread_program_has_all_its_threads():
    out = np.zeros(128, np.int64)
    threads[(2,)](out)
    one = np.arange(32)
    np.testing.assert_array_equal(out, np.tile(np.concatenate([one, one + 100]), 2))
    out[:] = 0
    threads[(2,), 32](out)
    np.testing.assert_array_equal(out[64:96], one)
    assert not out[32:64].any()
