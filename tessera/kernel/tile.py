"""The `tile` namespace: everything that a kernel asks of its tile."""

from tessera.kernel.atomics import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_exchange,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xor,
)
from tessera.kernel.blocks import (
    abs,
    acos,
    arange,
    argmax,
    argmin,
    asin,
    atan,
    atan2,
    broadcast,
    cast,
    ceil,
    clip,
    cos,
    cosh,
    erf,
    exp,
    exp2,
    expm1,
    floor,
    fma,
    full,
    isfinite,
    isinf,
    isnan,
    log,
    log1p,
    log2,
    log10,
    max,
    maximum,
    min,
    minimum,
    ones,
    pow,
    reshape,
    round,
    rsqrt,
    sign,
    sin,
    sinh,
    sqrt,
    sum,
    tan,
    tanh,
    transpose,
    trunc,
    where,
    zeros,
)
from tessera.kernel.checks import assert_, print
from tessera.kernel.context import col_index, context, row_index
from tessera.kernel.cooperation import block, cooperative_group, grid, warp
from tessera.kernel.copies import (
    alloc_register,
    alloc_shared,
    async_copy,
    barrier,
    cp_async,
    cp_commit_group,
    cp_wait_group,
    grid_barrier,
    wait_async,
)
from tessera.kernel.fragments import fragment, load_matrix, store_matrix
from tessera.kernel.ids import (
    block_id,
    grid_size,
    group_id,
    group_size,
    lane_id,
    linear_id,
    local_id,
    num_programs,
    program_id,
    thread_id,
    warp_id,
)
from tessera.kernel.inline import inline
from tessera.kernel.levels import split
from tessera.kernel.marks import updates_first
from tessera.kernel.mbarriers import mbarrier, mbarrier_arrive, mbarrier_expect, mbarrier_init, mbarrier_wait
from tessera.kernel.patterns import load_broadcast, load_coalesced, load_gather, load_strided
from tessera.kernel.products import mma, mma_mixed
from tessera.kernel.products import mma as matmul
from tessera.kernel.products import product as dot
from tessera.kernel.random import dropout, randint, randn, random, random_bits
from tessera.kernel.ranges import range_n, static_range
from tessera.kernel.ranges import tile_range as range
from tessera.kernel.scans import cummax, cummin, cumprod, cumsum, flip, reduce, scan, take
from tessera.kernel.sorting import argsort, histogram, join, sort
from tessera.kernel.transfer import (
    load,
    load_vector,
    store,
    store_vector,
)
from tessera.stdlib.online_softmax import mask_causal, softmax_accumulate, softmax_online

load_shared, store_shared = load, store
updates_first(mma, 4)
updates_first(mask_causal)

__all__ = [
    "abs", "acos", "alloc_register", "alloc_shared", "arange", "argmax", "argmin", "argsort", "asin", "assert_",
    "async_copy", "atan", "atan2", "atomic_add", "atomic_and", "atomic_cas", "atomic_exchange", "atomic_max",
    "atomic_min", "atomic_or", "atomic_xor", "barrier", "block", "block_id", "broadcast", "cast", "ceil", "clip",
    "col_index", "context", "cooperative_group", "cos", "cosh", "cp_async", "cp_commit_group", "cp_wait_group",
    "cummax", "cummin", "cumprod", "cumsum", "dot", "dropout", "erf", "exp", "exp2", "expm1", "flip", "floor", "fma",
    "fragment", "full", "grid", "grid_barrier", "grid_size", "group_id", "group_size", "histogram", "inline",
    "isfinite", "isinf", "isnan", "join", "lane_id", "linear_id", "load", "load_broadcast", "load_coalesced",
    "load_gather", "load_matrix", "load_shared", "load_strided", "load_vector", "local_id", "log", "log10", "log1p",
    "log2", "mask_causal", "matmul", "max", "maximum", "mbarrier", "mbarrier_arrive", "mbarrier_expect",
    "mbarrier_init", "mbarrier_wait", "min", "minimum", "mma", "mma_mixed", "num_programs", "ones", "pow", "print",
    "program_id", "randint", "randn", "random", "random_bits", "range", "range_n", "reduce", "reshape", "round",
    "row_index", "rsqrt", "scan", "sign", "sin", "sinh", "softmax_accumulate", "softmax_online", "sort", "split",
    "sqrt", "static_range", "store", "store_matrix", "store_shared", "store_vector", "sum", "take", "tan", "tanh",
    "thread_id", "transpose", "trunc", "wait_async", "warp", "warp_id", "where", "zeros",
]  # fmt: skip
