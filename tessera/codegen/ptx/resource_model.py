"""Resource model of the PTX target: the kernels of a Tile module that exceed a GPU's shared memory or registers.

The lowering asks it before it settles tile sizes (`LoweringPlan.find_refused`), so that no tiles are chosen that
emission would refuse. A bound settles most kernels; the passes and the emission themselves measure the others, for each
architecture, since the architecture is chosen after the tiles.
"""

from __future__ import annotations

import math

from tessera.codegen.legality import measure_resources
from tessera.codegen.ptx.emission import emit_function
from tessera.codegen.ptx.passes.kernel_selection import SHARED_LIMIT
from tessera.codegen.ptx.passes.launch_analysis import analyse_launches
from tessera.codegen.ptx.pipeline import FUNCTION_PASSES
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import TensorType
from tessera.ir.core import Function, Module

BLOCK_BYTES = 1 << 20  # of blocks live at once in a team's registers: more indicates a wrong size
# Kernels hold one block at a time in the exchange buffer, and pipelining leaves room for it: with smaller blocks than
# this, the kernel fits on every architecture.
SAFE_BLOCK_BYTES = min(SHARED_LIMIT.values()) - (32 << 10)


def find_refused(module: Module) -> frozenset[str]:
    """The names of the tile functions of a Tile module that need more than a GPU of some architecture has."""
    large = [f for f in module.functions[1:] if _largest_block_bytes(f) > SAFE_BLOCK_BYTES]
    refused = {f.name for f in large if measure_resources(f).block_bytes > BLOCK_BYTES}
    open_ = [f.name for f in large if f.name not in refused]
    for arch, limit in SHARED_LIMIT.items() if open_ else ():
        analysed = analyse_launches(module, arch)
        refused |= {name for name in open_ if _measure_shared_bytes(analysed.function(name)) > limit}
    return frozenset(refused)


def _largest_block_bytes(function: Function) -> int:
    """The bytes of the largest block of a tile function."""
    types = [v.type for node in function.body.walk() for v in node.results if isinstance(v.type, TensorType)]
    return max((math.prod(map(int, t.shape)) * max(t.dtype.bits, 8) // 8 for t in types), default=0)


def _measure_shared_bytes(function: Function) -> int:
    """The bytes of shared memory that a block needs; 0 for a function that cannot be emitted for another reason."""
    try:
        for _, rewrite in FUNCTION_PASSES:
            function = rewrite(function)
        return emit_function(function, None).shared
    except UnsupportedOpError:  # the generator raises it, with the target's name
        return 0
