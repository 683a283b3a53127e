"""The kernels of the programming model, chapters 4, 8 and 9. What they leave open is completed."""

from __future__ import annotations

import tessera
from tessera import Tensor, Tile, bf16, f32, fp8_e4m3, fp8_e5m2, memory, tile


@tessera.memory
class MemoryHierarchy:
    """Explicit control over memory placement: the fields that a kernel allocates."""

    # On-chip SRAM (fastest, smallest)
    registers: Tensor["128", f32] @ memory("register")
    shared: Tensor["1024", bf16] @ memory("shared")


def expensive_operation(block):
    return tile.exp(block) * 2.0


@tessera.kernel
def efficient_compute(x: Tensor["N", f32] @ memory("global"), out):  # noqa: F821
    # Explicit prefetch to faster memory
    with tessera.memory.prefetch(x, to="shared"):
        # x is now in shared memory for this block
        result = expensive_operation(tile.load(x))

    placed = MemoryHierarchy()
    placed.registers[...] = result
    placed.shared[0:128] = tile.cast(result, bf16)
    tile.barrier()
    out[...] = tile.cast(tile.load(placed.shared[0:128]), f32) + placed.registers


@tessera.kernel(tile_shape=(32, 16, 64))
def tile_matmul(A: Tile["M", "K", bf16], B: Tile["K", "N", bf16], C: Tile["M", "N", f32]):  # noqa: F821
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


def process(part):
    part[...] = tile.load(part) * 2.0 + 1.0


@tessera.kernel
def hierarchical_kernel(X: Tile["D1", "D2", "D3"]):  # noqa: F821
    """Multi-level tiling for cache optimization"""
    # L2 cache tile
    for l2_tile in tile.split(X, level="L2"):
        # L1 cache tile
        for l1_tile in tile.split(l2_tile, level="L1"):
            # Register tile
            for reg_tile in tile.split(l1_tile, level="register"):
                process(reg_tile)


def compute(block):
    return block * 2.0


@tessera.kernel
def memory_hierarchy_kernel(input: Tile["M", "N"], output: Tile["M", "N"]):  # noqa: F821
    """Explicit memory hierarchy management"""
    # Shared memory (48KB on A100); the model copies f32 into bf16, which no copy does
    shared_buffer = tile.alloc_shared(shape=(64, 64), dtype=f32)

    # Registers (256KB per SM)
    register_buffer = tile.alloc_register(shape=(8, 8), dtype=f32)

    # Async copy global -> shared (hides latency)
    tile.async_copy(
        src=input,
        dst=shared_buffer,
        size=(64, 64),
        stage=2,  # Double buffering
    )

    # Wait for async copy
    tile.wait_async(stage=0)

    # Load shared -> register (very fast)
    register_buffer = tile.load_shared(shared_buffer)

    # Compute in registers
    result = compute(register_buffer)

    # Store back through hierarchy
    tile.store_shared(shared_buffer, result)
    tile.async_copy(shared_buffer, output)


@tessera.kernel
def coalesced_access(data: Tile["M", "N"], indices, out):  # noqa: F821
    """Optimized memory access patterns"""
    # Coalesced access (all threads access contiguous memory)
    coalesced = tile.load_coalesced(data, threads=32)

    # Strided access (less efficient)
    strided = tile.load_strided(data, stride=2)

    # Random access (very slow)
    random = tile.load_gather(data, tile.load(indices))

    # Broadcast (single load, shared by all)
    broadcasted = tile.load_broadcast(data[0])
    out[0:4, 0:8] = coalesced + broadcasted
    out[4:8, 0:4] = strided
    out[8:10, 0:8] = random


@tessera.kernel
def avoid_bank_conflicts(data: Tile["M", "N"], out: Tile["N", "M"]):  # noqa: F821
    """Shared memory bank conflict prevention"""
    # Automatic padding to avoid conflicts
    shared = tile.alloc_shared(
        shape=(32, 33),  # 33 instead of 32 for padding
        dtype=f32,
        swizzle="xor",  # XOR-based swizzling
    )
    shared[0:32, 0:32] = data
    out[...] = tile.transpose(tile.load(shared[0:32, 0:32]))


@tessera.kernel
def warp_primitives(data, sums, bits):
    """Warp-level operations (32 threads)"""
    me = tile.local_id()
    x = data[me]
    # Warp-level reductions (very fast)
    warp_sum = tile.warp.reduce_sum(x)
    warp_max = tile.warp.reduce_max(x)

    # Warp shuffle (register-to-register)
    shuffled = tile.warp.shuffle(x, lane_id=5)
    butterfly = tile.warp.butterfly(x, mask=0xF)

    # Warp vote (consensus operations)
    all_positive = tile.warp.all(x > 0)
    any_zero = tile.warp.any(x == 0)

    # Warp match (find threads with same value)
    mask = tile.warp.match(x)
    sums[0, me], sums[1, me], sums[2, me], sums[3, me] = warp_sum, warp_max, shuffled, butterfly
    bits[0, me], bits[1, me], bits[2, me] = all_positive, any_zero, mask


@tessera.kernel
def block_primitives(data, out):
    """Block-level operations (multiple warps)"""
    me = tile.local_id()
    x = data[me]
    # Block-level synchronization
    tile.block.sync()

    # Block-level reduction
    block_sum = tile.block.reduce_sum(x)

    # Cooperative groups
    group = tile.cooperative_group(size=64)
    group_result = group.reduce(x, op="sum")

    # Block-wide broadcast
    value = tile.block.broadcast(x, src_thread=0)
    out[0, me], out[1, me], out[2, me] = block_sum, group_result, value


@tessera.kernel
def tensor_core_kernel(A: Tile["M", "K", bf16], B: Tile["K", "N", bf16], C: Tile["M", "N", f32]):  # noqa: F821
    """Direct tensor core programming"""
    # Fragment types for tensor cores
    a_frag = tile.fragment.a(shape=(16, 16), dtype=bf16)
    b_frag = tile.fragment.b(shape=(16, 16), dtype=bf16)
    c_frag = tile.fragment.c(shape=(16, 16), dtype=f32)

    # Load matrix fragments
    tile.load_matrix(a_frag, A, stride=16)
    tile.load_matrix(b_frag, B, stride=16)

    # Tensor core MMA (matrix multiply-accumulate)
    tile.mma(c_frag, a_frag, b_frag, c_frag)

    # Store result
    tile.store_matrix(C, c_frag, stride=16)


@tessera.kernel
def mixed_precision_mma(A: Tile["m", "k", fp8_e4m3], B: Tile["k", "n", fp8_e5m2], C: Tile["m", "n", f32]):  # noqa: F821
    """FP8 computation with FP32 accumulation"""
    # Automatic mixed precision handling
    result = tile.mma_mixed(
        A, B,
        accumulate=f32,
        saturate=True,
        rounding="rte",  # Round to nearest even
    )  # fmt: skip
    tile.store(C, result)


schedule = tessera.Schedule(
    # Tiling parameters
    tile_m=128,
    tile_n=128,
    tile_k=32,
    # Thread block configuration
    block_m=256,
    block_n=128,
    warps=8,
    # Memory hierarchy
    stages=3,  # Pipeline stages
    vector_width=8,  # Vectorization
    # Optimization flags
    unroll_factor=4,
    prefetch_distance=2,
    swizzle_pattern="xor",
)


@tessera.kernel.with_schedule(schedule)
def scheduled_kernel(A, B, C):
    tile.store(C, tile.matmul(A, B, C))


@tessera.autotune(
    configs=[
        {"tile_m": 4, "tile_n": 4, "warps": 4},
        {"tile_m": 8, "tile_n": 8, "warps": 8},
        {"tile_m": 16, "tile_n": 4, "warps": 4},
    ],
    metric="latency",
)
def autotuned_kernel(A, B, C, *, tile_m: int, tile_n: int):
    i, j = tile.program_id(0) * tile_m, tile.program_id(1) * tile_n
    a = tile.load(A[i : i + tile_m, :], edge="clip")
    b = tile.load(B[:, j : j + tile_n], edge="clip")
    tile.store(C[i : i + tile_m, j : j + tile_n], tile.matmul(a, b), edge="clip")


def _block(A, B, C, tile_m, tile_n):
    i, j = tile.program_id(0) * tile_m, tile.program_id(1) * tile_n
    a = tile.load(A[i : i + tile_m, :], edge="clip")
    b = tile.load(B[:, j : j + tile_n], edge="clip")
    tile.store(C[i : i + tile_m, j : j + tile_n], tile.matmul(a, b), edge="clip")


@tessera.autotune.search_space(
    tile_m=[4, 8, 16],
    tile_n=[4, 8, 16],
    warps=[2, 4, 8],
    stages=[2, 3, 4],
    # Constraints
    constraints=[
        lambda c: c.tile_m * c.tile_n <= 64,
        lambda c: c.warps * 2 <= c.tile_m,  # Enough work per warp
    ],
)
def complex_kernel(A, B, C, *, tile_m: int, tile_n: int):
    _block(A, B, C, tile_m, tile_n)


@tessera.autotune.evolutionary(
    population_size=50,
    generations=20,
    mutation_rate=0.1,
    crossover_rate=0.7,
    space={"tile_m": [4, 8], "tile_n": [4, 8]},
)
def evolutionary_tuned(A, B, C, *, tile_m: int, tile_n: int):
    """Uses genetic algorithm for optimization"""
    _block(A, B, C, tile_m, tile_n)
