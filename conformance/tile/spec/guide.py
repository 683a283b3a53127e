"""The kernels of the programming guide: tiles and execution, memory management. What it leaves open is completed."""

from __future__ import annotations

import tessera as ts

BM, BN, BK = 64, 48, 16


@ts.kernel
def tile_example(data: ts.Tensor["N", ts.f32]):  # noqa: F821
    # Get tile identification
    tile_id = ts.tile.linear_id()
    group_id = ts.tile.group_id()  # noqa: F841
    lane_id = ts.tile.lane_id()  # noqa: F841

    # Tile-level operations
    if tile_id < N:  # noqa: F821
        # Each tile processes one element
        data[tile_id] *= 2.0


def process(x):
    return x * x + 1.0


@ts.kernel
def process_chunks(input: ts.Tensor["N", ts.f32], output: ts.Tensor["N", ts.f32]):  # noqa: F821
    # Process data in chunks
    CHUNK_SIZE = 128

    for chunk_start in ts.tile.range(0, N, CHUNK_SIZE):  # noqa: F821
        # Each tile group processes a chunk
        chunk_end = min(chunk_start + CHUNK_SIZE, N)  # noqa: F821

        # Cooperative processing within tile group
        for i in ts.tile.range(chunk_start, chunk_end):
            output[i] = process(input[i])


@ts.kernel
def cooperative_reduction(data: ts.Tensor["N", ts.f32]) -> ts.f32:  # noqa: F821
    # Allocate shared memory for tile group
    shared_sum = ts.tile.alloc_shared((128,), ts.f32)

    # Each tile computes partial sum
    tile_id = ts.tile.linear_id()
    local_sum = 0.0

    for i in ts.tile.range(tile_id, N, ts.tile.group_size()):  # noqa: F821
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


@ts.kernel
def memory_hierarchy_example(A: ts.Tensor["M", "N", ts.f32], out: ts.Tensor["M", "N", ts.f32], *, i=1, j=2):  # noqa: F821
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


@ts.kernel
def optimized_memory_access(src: ts.Tensor["M", "N", ts.bf16], dst: ts.Tensor["M", "N", ts.bf16]):  # noqa: F821
    # Coalesced access pattern
    TILE_M, TILE_N = 128, 128
    block_m = ts.tile.program_id(0) * TILE_M

    # Allocate shared memory with bank conflict avoidance
    smem = ts.tile.alloc_shared((TILE_M, TILE_N), ts.bf16,
                                swizzle="xor",      # XOR swizzling
                                alignment=16)  # 128-bit alignment  # fmt: skip

    # Vectorized loads for maximum bandwidth
    for i in ts.tile.range(0, TILE_M, 4):
        # Load 4 elements at once
        vec4 = ts.tile.load_vector(src[block_m + i], width=4)
        ts.tile.store_vector(smem[i], vec4)
        dst[block_m + i, 0:4] = smem[i, 0:4]


@ts.kernel
def double_buffered_gemm(
    A: ts.Tensor["M", "K", ts.bf16], B: ts.Tensor["K", "N", ts.bf16], C: ts.Tensor["M", "N", ts.f32]  # noqa: F821
):  # fmt: skip
    # Allocate double buffers
    smem_a = [ts.tile.alloc_shared((BM, BK), ts.bf16), ts.tile.alloc_shared((BM, BK), ts.bf16)]
    smem_b = [ts.tile.alloc_shared((BK, BN), ts.bf16), ts.tile.alloc_shared((BK, BN), ts.bf16)]

    # Pipeline stages
    write_stage = 0
    compute_stage = 1

    # Prefetch first blocks
    ts.tile.cp_async(smem_a[write_stage], A[0:BM, 0:BK])
    ts.tile.cp_async(smem_b[write_stage], B[0:BK, 0:BN])

    for k in ts.tile.range(BK, K, BK):  # noqa: F821
        # Start loading next blocks
        write_stage, compute_stage = compute_stage, write_stage
        ts.tile.cp_async(smem_a[write_stage], A[0:BM, k : k + BK])
        ts.tile.cp_async(smem_b[write_stage], B[k : k + BK, 0:BN])

        # Wait for previous load and compute
        ts.tile.cp_wait_group(0)
        ts.tile.barrier()

        # Compute on current blocks
        C += ts.tile.mma(smem_a[compute_stage], smem_b[compute_stage])
    # The guide leaves the last block out.
    ts.tile.cp_wait_group(0)
    C += ts.tile.mma(smem_a[write_stage], smem_b[write_stage])
