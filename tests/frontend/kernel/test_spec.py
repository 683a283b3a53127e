"""The kernels of the specification; what they leave undefined is completed here."""

import math
from types import SimpleNamespace

import numpy as np

from tessera import tile
from tessera.core.types import accum, bf16, f32, fp8_e4m3, fp8_e5m2, int32
from tessera.frontend.kernel import KTile, Tile, Tile3D, kernel
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


def visit(block):
    return block


@tessera.kernel
def hierarchical_kernel(X: Tile3D["D1", "D2", "D3"]):
    for l2_tile in tile.split(X, level="L2"):
        for l1_tile in tile.split(l2_tile, level="L1"):
            for reg_tile in tile.split(l1_tile, level="register"):
                reg_tile += 1.0
                visit(reg_tile)


def test_hierarchical_tiles():
    x = np.zeros((8, 8, 8), "f4")
    hierarchical_kernel(x)
    assert (x == 1).all()


@tessera.kernel
def access_patterns(data: Tile, indices: Tile["K", int32], out: Tile["R", "C"]):
    out[0, :] = tile.load_coalesced(data, threads=32)[0, 0:4]
    out[1, :] = tile.load_strided(data, stride=2)[1, 0:4]
    out[2, :] = tile.load_gather(data, indices)[1, 0:4]
    out[3, :] = tile.load_broadcast(data[0])[0:4]


def test_access_patterns(rng):
    data, out = rng.random((8, 8), dtype="f4"), np.zeros((4, 4), "f4")
    access_patterns(data, np.array([5, 3], np.int32), out)
    np.testing.assert_array_equal(out[[0, 2, 3]], data[[0, 3, 0], :4])
    assert set(out[1]) <= set(data.ravel())


@tessera.kernel
def warp_and_block(x: Tile, out: Tile):
    t = tile.local_id()
    value = x[t]
    assert tile.warp.all(value > 0) and not tile.warp.any(value == 0)
    out[0, t], out[1, t] = tile.warp.reduce_sum(value), tile.warp.reduce_max(value)
    out[2, t], out[3, t] = tile.warp.shuffle(value, lane_id=5), tile.warp.butterfly(value, mask=0xF)
    tile.block.sync()
    group = tile.cooperative_group(size=64)
    out[4, t], out[5, t] = tile.block.reduce_sum(value), group.reduce(value, op="sum")
    out[6, t] = tile.block.broadcast(value, src_thread=0)


def test_warp_and_block():
    x, out = np.arange(1, 65, dtype="f4"), np.zeros((7, 64), "f4")
    warp_and_block[(1,), 64](x, out)
    warps, lanes = x.reshape(2, 32), np.arange(64)
    want = [np.repeat(warps.sum(1), 32), np.repeat(warps.max(1), 32), np.repeat(warps[:, 5], 32), x[lanes ^ 15]]
    np.testing.assert_array_equal(out, [*want, *np.broadcast_to([[x.sum()], [x.sum()], [1]], (3, 64))])


@tessera.kernel
def tensor_core_kernel(A: Tile["M", "K", bf16], B: Tile["K", "N", bf16], C: Tile["M", "N", f32]):
    a_frag = tile.fragment.a(shape=(16, 16), dtype=bf16)
    b_frag = tile.fragment.b(shape=(16, 16), dtype=bf16)
    c_frag = tile.fragment.c(shape=(16, 16), dtype=f32)
    tile.load_matrix(a_frag, A, stride=16)
    tile.load_matrix(b_frag, B, stride=16)
    tile.mma(c_frag, a_frag, b_frag, c_frag)
    tile.store_matrix(C, c_frag, stride=16)


m = n = k = 16


@tessera.kernel
def mixed_precision_mma(A: Tile[m, k, fp8_e4m3], B: Tile[k, n, fp8_e5m2], C: Tile[m, n, f32]):
    result = tile.mma_mixed(A, B, accumulate=f32, saturate=True, rounding="rte")
    tile.store(C, result)


def test_tensor_cores(rng):
    numbers = rng.standard_normal((2, 16, 16))
    for entry, types in ((tensor_core_kernel, (bf16, bf16)), (mixed_precision_mma, (fp8_e4m3, fp8_e5m2))):
        a, b = (x.astype(t.numpy) for x, t in zip(numbers, types, strict=True))
        c = np.zeros((16, 16), "f4")
        entry(a, b, c)
        np.testing.assert_allclose(c, a.astype("f8") @ b.astype("f8"), rtol=1e-5, atol=1e-5)


@ts.kernel
def optimized_memory_access(src: ts.Tensor["M", "N", ts.bf16], dst: ts.Tensor["M", "N", ts.bf16]):
    smem = ts.tile.alloc_shared((16, 8), ts.bf16, swizzle="xor", alignment=16)
    for i in ts.tile.range(0, 16, 4):
        ts.tile.store_vector(smem[i], ts.tile.load_vector(src[i], width=4))
        ts.tile.store_vector(dst[i], ts.tile.load_vector(smem[i], width=4))


def test_vectors_through_shared_memory(rng):
    x = rng.random((16, 8)).astype(bf16.numpy)
    y = np.zeros_like(x)
    optimized_memory_access(x, y)
    np.testing.assert_array_equal(y[::4, :4], x[::4, :4])


def dropout_in_kernel(block, p):
    return tile.dropout(block, p, 7, tile.arange(0, block.shape[0] * block.shape[1]))


SPACE = {"BM": [4, 8], "BN": [4], "BD": [8], "warps": [4, 8], "stages": [2], "vector": [4]}


@kernel.autotune(space=SPACE, metric="latency_ms", budget_ms=180)
def tuned_attention(
    q: KTile["B*H", "S", "D_h", bf16 @ accum(f32)], k: KTile["B*H", "S", "D_h", bf16],
    v: KTile["B*H", "S", "D_h", bf16], *, causal: bool,
):  # fmt: skip
    T = tile.context()
    Qb = tile.load(q, rows=T.m, cols=T.d, vector=T.vector, prefetch=2)
    acc, m, l = tile.zeros((T.m, T.d), f32), tile.full((T.m,), -INF), tile.zeros((T.m,), f32)
    for nblk in tile.range_n(k.shape, T.n, prefetch=2):
        Kb = tile.load(k, nblk, cols=T.d, vector=T.vector)
        Vb = tile.load(v, nblk, cols=T.d, vector=T.vector)
        S = tile.dot(Qb, tile.transpose(Kb)) * tile.rsqrt(float(T.d))
        if causal:
            tile.mask_causal(S, tile.row_index(), tile.col_index(nblk))
        P, m_c, l_c = tile.softmax_online(S)
        acc, m, l = tile.softmax_accumulate(acc, m, l, P, Vb, m_c, l_c)
    return tile.cast(acc / l[:, None], bf16)


def test_the_tuned_attention_of_the_goals(rng, tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "tuned"))
    q, k, v = (rng.standard_normal((2, 16, 8)).astype(bf16.numpy) for _ in range(3))
    found = tuned_attention(q, k, v, causal=True)
    q, k, v = (x.astype("f4") for x in (q, k, v))
    scores = np.where(np.tri(16, dtype=bool), q @ k.transpose(0, 2, 1) / math.sqrt(8), -INF)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    want = e @ v / e.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(found).reshape(2, 16, 8).astype("f4"), want, atol=0.03)


@kernel(tile_shape=(4, 4, 8))
def rows_of_heads(q: KTile["B*H", "S", "D_h"]):
    T = tile.context()
    return tile.load(q, rows=T.m, cols=T.d)


def test_rows_of_every_head(rng):
    q = rng.random((2, 16, 8), dtype="f4")
    np.testing.assert_array_equal(rows_of_heads(q).reshape(q.shape), q)
