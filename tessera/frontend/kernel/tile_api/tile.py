"""The `tile` namespace: every function that a kernel may call on its tile."""

from typing import TYPE_CHECKING

from tessera.frontend.kernel.memref import updates_first
from tessera.frontend.kernel.tile_api.access_patterns import (
    load_broadcast,
    load_coalesced,
    load_gather,
    load_strided,
    split,
)
from tessera.frontend.kernel.tile_api.assertions import assert_, print
from tessera.frontend.kernel.tile_api.blocks import (
    abs,
    arange,
    broadcast,
    cast,
    full,
    max,
    min,
    ones,
    reshape,
    transpose,
    zeros,
)
from tessera.frontend.kernel.tile_api.ids import (
    block_id,
    cdiv,
    col_index,
    context,
    grid_size,
    group_id,
    group_size,
    lane_id,
    linear_id,
    local_id,
    num_programs,
    program_id,
    range_n,
    row_index,
    static_range,
    thread_id,
    warp_id,
)
from tessera.frontend.kernel.tile_api.ids import tile_range as range
from tessera.frontend.kernel.tile_api.inline import inline
from tessera.frontend.kernel.tile_api.matrix import fragment, load_matrix, mma, mma_mixed, store_matrix
from tessera.frontend.kernel.tile_api.matrix import matrix_product as dot
from tessera.frontend.kernel.tile_api.matrix import mma as matmul
from tessera.frontend.kernel.tile_api.memory import (
    alloc_register,
    alloc_shared,
    async_copy,
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_exchange,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xor,
    barrier,
    cp_async,
    cp_commit_group,
    cp_wait_group,
    grid_barrier,
    load,
    load_vector,
    store,
    store_vector,
    wait_async,
)
from tessera.frontend.kernel.tile_api.online_softmax import mask_causal, softmax_accumulate, softmax_online
from tessera.frontend.kernel.tile_api.random import dropout, randint, randn, random, random_bits
from tessera.frontend.kernel.tile_api.scans import (
    argsort,
    cummax,
    cummin,
    cumprod,
    cumsum,
    flip,
    histogram,
    join,
    reduce,
    scan,
    sort,
    take,
)
from tessera.frontend.kernel.tile_api.synchronisation import (
    block,
    cooperative_group,
    grid,
    mbarrier,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    warp,
)
from tessera.ir.rules import REGISTRY, Op
from tessera.ops.tensor.elementwise import (
    ceil,
    cos,
    erf,
    erfc,
    exp,
    exp2,
    floor,
    log,
    log2,
    maximum,
    minimum,
    pow,
    round,
    rsqrt,
    sin,
    sqrt,
    tanh,
    where,
)
from tessera.ops.tensor.nn import gelu, relu, sigmoid, silu, softmax
from tessera.ops.tensor.reduce import argmax, argmin, sum
from tessera.ops.tensor.scalar_functions import (
    acos,
    asin,
    atan,
    atan2,
    clip,
    cosh,
    expm1,
    fma,
    isfinite,
    isinf,
    isnan,
    log1p,
    log10,
    sign,
    sinh,
    tan,
    trunc,
)

load_shared, store_shared = load, store
updates_first(mma, 4)
updates_first(mask_causal)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Op:
        """A pointwise op that is a method of Tensor too, by its name: new ops need no entry here."""
        op = REGISTRY.get(f"ts.{name}")
        if op is None or not op.method:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return op


__all__ = [
    "abs", "acos", "alloc_register", "alloc_shared", "arange", "argmax", "argmin", "argsort", "asin", "assert_",
    "async_copy", "atan", "atan2", "atomic_add", "atomic_and", "atomic_cas", "atomic_exchange", "atomic_max",
    "atomic_min", "atomic_or", "atomic_xor", "barrier", "block", "block_id", "broadcast", "cast", "cdiv", "ceil",
    "clip", "col_index", "context", "cooperative_group", "cos", "cosh", "cp_async", "cp_commit_group", "cp_wait_group",
    "cummax", "cummin", "cumprod", "cumsum", "dot", "dropout", "erf", "erfc", "exp", "exp2", "expm1", "flip", "floor",
    "fma", "fragment", "full", "gelu", "grid", "grid_barrier", "grid_size", "group_id", "group_size", "histogram",
    "inline", "isfinite", "isinf", "isnan", "join", "lane_id", "linear_id", "load", "load_broadcast", "load_coalesced",
    "load_gather", "load_matrix", "load_shared", "load_strided", "load_vector", "local_id", "log", "log10", "log1p",
    "log2", "mask_causal", "matmul", "max", "maximum", "mbarrier", "mbarrier_arrive", "mbarrier_expect",
    "mbarrier_init", "mbarrier_wait", "min", "minimum", "mma", "mma_mixed", "num_programs", "ones", "pow", "print",
    "program_id", "randint", "randn", "random", "random_bits", "range", "range_n", "reduce", "relu", "reshape", "round",
    "row_index", "rsqrt", "scan", "sigmoid", "sign", "silu", "sin", "sinh", "softmax", "softmax_accumulate",
    "softmax_online", "sort", "split", "sqrt", "static_range", "store", "store_matrix", "store_shared", "store_vector",
    "sum", "take", "tan", "tanh", "thread_id", "transpose", "trunc", "wait_async", "warp", "warp_id", "where", "zeros",
]  # fmt: skip
