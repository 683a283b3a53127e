"""All families of instructions, listed: importing them fills the tables."""

from tessera.interp.target.ptx import (
    async_copy,
    atomics,
    bits,
    bulk_copy,
    cluster,
    compare,
    control,
    convert,
    floats,
    integer,
    kinds,
    matrix,
    mbarrier,
    moves,
    system_calls,
    tensor_copy,
    tensor_map_edit,
    warp,
    wgmma,
    wmma,
)

FAMILIES = (
    async_copy, atomics, bits, bulk_copy, cluster, compare, control, convert, floats, integer, matrix, mbarrier, moves,
    system_calls, tensor_copy, tensor_map_edit, warp, wgmma, wmma,
)  # fmt: skip

# The two columns of opcodes that integers and floats share become one.
kinds.join()
