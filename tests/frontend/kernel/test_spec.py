"""The kernels of the specification; what they leave undefined is completed here."""

import math
from types import SimpleNamespace

import numpy as np

from tessera import tile
from tessera.core.types import bf16, f32
from tessera.frontend.kernel import Tile, kernel
from tessera.ir.tensor import Tensor

ts = SimpleNamespace(kernel=kernel, tile=tile, Tensor=Tensor, f32=f32, bf16=bf16)
tessera = ts


@ts.kernel
def tile_example(data: ts.Tensor["N", ts.f32]):
    # Get tile identification
    tile_id = ts.tile.linear_id()
    group_id = ts.tile.group_id()
    lane_id = ts.tile.lane_id()

    # Tile-level operations
    if tile_id < N:
        # Each tile processes one element
        data[tile_id] *= 2.0


def test_tile_example_runs_once_for_each_element(rng):
    data = rng.random(300, dtype="f4")
    want = data * 2
    tile_example(data)
    np.testing.assert_array_equal(data, want)


def process(x):
    return x * x + 1.0


@ts.kernel
def process_chunks(input: ts.Tensor["N", ts.f32], output: ts.Tensor["N", ts.f32]):
    # Process data in chunks
    CHUNK_SIZE = 128

    for chunk_start in ts.tile.range(0, N, CHUNK_SIZE):
        # Each tile group processes a chunk
        chunk_end = min(chunk_start + CHUNK_SIZE, N)

        # Cooperative processing within tile group
        for i in ts.tile.range(chunk_start, chunk_end):
            output[i] = process(input[i])


def test_process_chunks(rng):
    x, out = rng.random(300, dtype="f4"), np.zeros(300, "f4")
    process_chunks(x, out)
    np.testing.assert_allclose(out, x * x + 1, rtol=1e-6)


@ts.kernel
def cooperative_reduction(data: ts.Tensor["N", ts.f32]) -> ts.f32:
    # Allocate shared memory for tile group
    shared_sum = ts.tile.alloc_shared((128,), ts.f32)

    # Each tile computes partial sum
    tile_id = ts.tile.linear_id()
    local_sum = 0.0

    for i in ts.tile.range(tile_id, N, ts.tile.group_size()):
        local_sum += data[i]

    # Store to shared memory
    shared_sum[ts.tile.local_id()] = local_sum

    # Synchronize tile group
    ts.tile.barrier()

    # Cooperative reduction
    stride = ts.tile.group_size() // 2
    while stride > 0:
        if ts.tile.local_id() < stride:
            shared_sum[ts.tile.local_id()] += shared_sum[ts.tile.local_id() + stride]
        ts.tile.barrier()
        stride //= 2

    return shared_sum[0]


def test_cooperative_reduction_runs_as_one_group(rng):
    data = rng.random(1000, dtype="f4")
    found = cooperative_reduction(data)
    assert found.shape == () and found.dtype == np.float32
    np.testing.assert_allclose(found, data.sum(), rtol=1e-5)


@tessera.kernel(tile_shape=(32, 16, 64))
def tile_matmul(A: Tile["M", "K", bf16], B: Tile["K", "N", bf16], C: Tile["M", "N", f32]):
    """
    Tiles abstract away thread/warp complexity
    M, N, K are tile dimensions (e.g., 64x64)
    """
    # Get tile configuration
    ctx = tile.context()

    # Load tiles (automatic vectorization)
    a_tile = tile.load(A, shape=(ctx.M, ctx.K))
    b_tile = tile.load(B, shape=(ctx.K, ctx.N))

    # Compute (maps to tensor cores)
    c_tile = tile.mma(a_tile, b_tile)

    # Store (automatic coalescing)
    tile.store(C, c_tile)


def test_tile_matmul_covers_the_result_in_tiles(rng):
    a, b = rng.random((64, 64)).astype(bf16.numpy), rng.random((64, 48)).astype(bf16.numpy)
    c = np.zeros((64, 48), "f4")
    tile_matmul(a, b, c)
    np.testing.assert_allclose(c, a.astype("f4") @ b.astype("f4"), rtol=1e-5)


BM, BN, BK = 64, 48, 16


@ts.kernel
def double_buffered_gemm(
    A: ts.Tensor["M", "K", ts.bf16], B: ts.Tensor["K", "N", ts.bf16], C: ts.Tensor["M", "N", ts.f32]
):
    # Allocate double buffers
    smem_a = [ts.tile.alloc_shared((BM, BK), ts.bf16), ts.tile.alloc_shared((BM, BK), ts.bf16)]
    smem_b = [ts.tile.alloc_shared((BK, BN), ts.bf16), ts.tile.alloc_shared((BK, BN), ts.bf16)]

    # Pipeline stages
    write_stage = 0
    compute_stage = 1

    # Prefetch first blocks
    ts.tile.cp_async(smem_a[write_stage], A[0:BM, 0:BK])
    ts.tile.cp_async(smem_b[write_stage], B[0:BK, 0:BN])

    for k in ts.tile.range(BK, K, BK):
        # Start loading next blocks
        write_stage, compute_stage = compute_stage, write_stage
        ts.tile.cp_async(smem_a[write_stage], A[0:BM, k : k + BK])
        ts.tile.cp_async(smem_b[write_stage], B[k : k + BK, 0:BN])

        # Wait for previous load and compute
        ts.tile.cp_wait_group(0)
        ts.tile.barrier()

        # Compute on current blocks
        C += ts.tile.mma(smem_a[compute_stage], smem_b[compute_stage])
    # The specification leaves the last block out.
    ts.tile.cp_wait_group(0)
    C += ts.tile.mma(smem_a[write_stage], smem_b[write_stage])


def test_double_buffered_gemm(rng):
    a, b = rng.random((BM, 80)).astype(bf16.numpy), rng.random((80, BN)).astype(bf16.numpy)
    c = np.zeros((BM, BN), "f4")
    double_buffered_gemm(a, b, c)
    np.testing.assert_allclose(c, a.astype("f4") @ b.astype("f4"), rtol=1e-5)


INF = math.inf


@kernel(tile_shape=(16, 32, 8))
def flash_attention(q: Tensor["BH", "S", "D"], k: Tensor["BH", "T", "D"], v: Tensor["BH", "T", "D"], *, causal: bool):
    T = tile.context()
    Qb = tile.load(q, rows=T.m, cols=T.d, vector=T.vector, prefetch=2)
    acc = tile.zeros((T.m, T.d), f32)
    m = tile.full((T.m,), -INF)
    l = tile.zeros((T.m,), f32)  # noqa: E702
    for nblk in tile.range_n(k.shape, T.n, prefetch=2):
        Kb = tile.load(k, nblk, cols=T.d, vector=T.vector)
        Vb = tile.load(v, nblk, cols=T.d, vector=T.vector)
        S  = tile.dot(Qb, tile.transpose(Kb)) * tile.rsqrt(float(T.d))  # fmt: skip
        if causal:
            tile.mask_causal(S, tile.row_index(), tile.col_index(nblk))  # noqa: E701
        P, m_c, l_c = tile.softmax_online(S)
        acc, m, l = tile.softmax_accumulate(acc, m, l, P, Vb, m_c, l_c)
    return tile.cast(acc / l[:, None], bf16)


def test_flash_attention_of_the_goals(rng):
    q, k, v = (rng.standard_normal((3, 64, 8)).astype("f4") for _ in range(3))
    for causal in (False, True):
        found = flash_attention[3, 4](q, k, v, causal=causal)
        assert found.shape == (3, 4, 16, 8) and found.dtype == bf16.numpy
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(8)
        scores = np.where(np.tri(64, dtype=bool) | (not causal), scores, -INF)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        np.testing.assert_allclose(found.reshape(3, 64, 8).astype("f4"), e @ v / e.sum(-1, keepdims=True), atol=0.02)


@ts.kernel
def memory_hierarchy_example(A: ts.Tensor["M", "N", ts.f32], out: ts.Tensor["M", "N", ts.f32], *, i=1, j=2):
    # 1. Register allocation (tile-local)
    reg_value = ts.tile.alloc_register(ts.f32)

    # 2. Shared memory allocation (group-local)
    shared_tile = ts.tile.alloc_shared((64, 64), ts.f32, swizzle="xor")

    # 3. Global memory access
    global_value = A[i, j]
    reg_value[...] = global_value
    block_m, block_n = ts.tile.program_id(0) * 64, ts.tile.program_id(1) * 64

    # 4. Async memory operations
    ts.tile.cp_async(shared_tile, A[block_m : block_m + 64, block_n : block_n + 64])
    ts.tile.cp_commit_group()
    ts.tile.cp_wait_group(0)
    out[block_m : block_m + 64, block_n : block_n + 64] = shared_tile + reg_value


def test_memory_hierarchy(rng):
    a, out = rng.random((128, 64), dtype="f4"), np.zeros((128, 64), "f4")
    memory_hierarchy_example[2, 1](a, out)
    np.testing.assert_allclose(out, a + a[1, 2])


@tessera.kernel
def memory_hierarchy_kernel(input: Tile["M", "N"], output: Tile["M", "N"]):
    shared_buffer = tile.alloc_shared(shape=(64, 64), dtype=f32)
    register_buffer = tile.alloc_register(shape=(8, 8), dtype=f32)
    tile.async_copy(src=input, dst=shared_buffer, size=(64, 64), stage=2)
    tile.wait_async(stage=0)
    register_buffer = tile.load_shared(shared_buffer)
    result = register_buffer * 2.0
    tile.store_shared(shared_buffer, result)
    tile.block.sync()
    tile.async_copy(shared_buffer, output)


def test_memory_spaces(rng):
    x, out = rng.random((64, 64), dtype="f4"), np.zeros((64, 64), "f4")
    memory_hierarchy_kernel(x, out)
    np.testing.assert_array_equal(out, x * 2)
