"""The `tile` namespace: everything that a kernel asks of its tile."""

from tessera.kernel.blocks import (
    abs,
    arange,
    argmax,
    argmin,
    broadcast,
    cast,
    ceil,
    cos,
    erf,
    exp,
    exp2,
    floor,
    full,
    log,
    log2,
    max,
    maximum,
    min,
    minimum,
    ones,
    reshape,
    rsqrt,
    sin,
    sqrt,
    sum,
    tanh,
    transpose,
    where,
    zeros,
)
from tessera.kernel.context import col_index, context, row_index
from tessera.kernel.copies import (
    alloc_register,
    alloc_shared,
    async_copy,
    barrier,
    block,
    cp_async,
    cp_commit_group,
    cp_wait_group,
    wait_async,
)
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
from tessera.kernel.marks import updates_first
from tessera.kernel.products import mma
from tessera.kernel.products import product as dot
from tessera.kernel.ranges import range_n, static_range
from tessera.kernel.ranges import tile_range as range
from tessera.kernel.transfer import (
    atomic_add,
    atomic_exchange,
    atomic_max,
    atomic_min,
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
    "abs", "alloc_register", "alloc_shared", "arange", "argmax", "argmin", "async_copy", "atomic_add",
    "atomic_exchange", "atomic_max", "atomic_min", "barrier", "block", "block_id", "broadcast", "cast", "ceil",
    "col_index", "context", "cos", "cp_async", "cp_commit_group", "cp_wait_group", "dot", "erf", "exp", "exp2",
    "floor", "full", "grid_size", "group_id", "group_size", "lane_id", "linear_id", "load", "load_shared",
    "load_vector", "local_id", "log", "log2", "mask_causal", "max", "maximum", "min", "minimum", "mma",
    "num_programs", "ones", "program_id", "range", "range_n", "reshape", "row_index", "rsqrt", "sin",
    "softmax_accumulate", "softmax_online", "sqrt", "static_range", "store", "store_shared", "store_vector", "sum",
    "tanh", "thread_id", "transpose", "wait_async", "warp_id", "where", "zeros",
]  # fmt: skip
