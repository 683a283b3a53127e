"""Pass pipeline of the PTX target: the passes from a Tile module to one that is ready for emission, in order.

Each pass gives a module of the level `ptx`. Facts that later passes need are function attributes (`ops.py`). `tessera
inspect --pass-by-pass --target ptx` prints each module, and `tessera bisect --target ptx` runs it in the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tessera.codegen.contract import CompilerPass
from tessera.codegen.ptx.emission import (
    SHARED_LIMIT,
    analyse_launches,
    choose_team_size,
    combines_elements,
    emit_function,
    map_threads,
    select_kernel,
)
from tessera.codegen.ptx.ops import (
    PREFETCHING,
    UNIFORM,
    WARP_SPECIALISED,
    LaunchFacts,
    async_mma,
    get_fact,
    smem_slots,
    uses_tensor_cores,
)
from tessera.codegen.ptx.passes import instruction_selection as selection
from tessera.codegen.ptx.passes import loop_transformations as loops
from tessera.codegen.ptx.passes.async_products import form_async_mma
from tessera.codegen.ptx.passes.boundary_peeling import peel_boundary
from tessera.codegen.ptx.passes.branch_formation import form_branches
from tessera.codegen.ptx.passes.index_narrowing import narrow_indices
from tessera.codegen.ptx.passes.layout_inference import assign_layouts
from tessera.codegen.ptx.passes.loop_unrolling import unroll_loops
from tessera.codegen.ptx.passes.mainloop import PRODUCT_OPS, form_mainloop
from tessera.codegen.ptx.passes.multistage_pipelining import pipeline_operand_copies, read_operands_in_place
from tessera.codegen.ptx.passes.partial_sums import carry_partial_sums
from tessera.codegen.ptx.passes.persistent_prefetch import form_prefetched_loads
from tessera.codegen.ptx.passes.shared_memory import MAX_EARLY_LOADED, hoist_loads
from tessera.codegen.ptx.passes.software_pipelining import pipeline_loops
from tessera.codegen.ptx.passes.tile_scheduler import choose_order
from tessera.ir.core import Function, Module
from tessera.ir.rules import Op
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import contractions, elementwise

Rewrite = Callable[[Function], Function]
NamedPasses = tuple[tuple[str, Rewrite], ...]


def list_passes(arch: str) -> tuple[CompilerPass, ...]:
    """The pipeline for an architecture."""
    analysis = CompilerPass("launch analysis", lambda module: analyse_launches(module, arch))
    return (analysis, *(CompilerPass(name, lift(rewrite)) for name, rewrite in FUNCTION_PASSES))


def lift(rewrite: Rewrite) -> Callable[[Module], Module]:
    """A pass over functions as one over modules: it rewrites each tile function and leaves the entry as it is."""
    return lambda module: module.replace(module.main, *map(rewrite, module.functions[1:]))


def with_ops(rewrite: Rewrite, *ops: Op) -> Rewrite:
    """A rewrite of functions with one of these ops, unless a result has a rounding policy: each op rounds by itself."""
    return lambda f: rewrite(f) if any(n.op in ops for n in f.body.walk()) and not get_fact(f, "rounding") else f


def for_kernels(rewrite: Rewrite, *kinds: str) -> Rewrite:
    """A rewrite of the functions that kernel selection made one of these kinds."""
    return lambda f: rewrite(f) if get_fact(f, "kernel") in kinds and not get_fact(f, "rounding") else f


# Rewrites of warp-specialised functions with asynchronous products.
for_async_loops: Callable[[Rewrite], Rewrite] = lambda f: for_kernels(with_ops(f, async_mma), WARP_SPECIALISED)  # noqa: E731


def beside_tensor_cores(rewrite: Rewrite) -> Rewrite:
    """A rewrite of functions with products for tensor cores."""
    return lambda f: rewrite(f) if any(uses_tensor_cores(n) for n in f.body.walk()) else f


def _pipeline_operand_copies(function: Function) -> Function:
    """The function with as many stages as fit beside its exchange buffer, which the emission itself measures."""
    facts = LaunchFacts.of(function)
    limit = left = SHARED_LIMIT[facts.arch]
    while left > 0:
        made = pipeline_operand_copies(function, facts.noalias, facts.alignments, choose_team_size(function), left)
        if made is function or "stages" in function.attrs:
            return made
        finished = functools.reduce(lambda f, each: each[1](f), MAPPING, read_operands_in_place(made))
        excess = emit_function(finished, None).shared - limit
        if excess <= 0:
            return made
        left -= max(excess, 1024)
    return function


def _hoist_loads(function: Function) -> Function:
    kind = get_fact(function, "kernel")
    most = (MAX_EARLY_LOADED,) if kind == WARP_SPECIALISED else ()
    return function if kind == PREFETCHING else hoist_loads(function, *most)  # whose loads come early already


for_team: Callable[..., Rewrite] = lambda rewrite: lambda f: rewrite(f, choose_team_size(f))  # noqa: E731
_narrow_comparisons = with_ops(loops.narrow_index_comparisons, *loops.COMPARISON_OPS)
SELECTION: NamedPasses = (
    ("row alignment", with_ops(loops.align_rows, control_flow.for_)),
    ("row caching", with_ops(loops.cache_rows, control_flow.for_)),
    ("invariant code motion", with_ops(loops.hoist_scalars, control_flow.for_)),
    ("code sinking", with_ops(loops.sink_past_products, contractions.dot)),
    ("exp2 selection", with_ops(selection.select_exp2_ftz, elementwise.exp2)),
    ("ballot selection", with_ops(selection.select_ballots, tile.collect)),
    ("row element selection", with_ops(selection.select_row_elements, elementwise.equal)),
    ("element selection", with_ops(selection.select_elements, tile.alloc)),
    ("product splitting", with_ops(selection.split_products, contractions.dot)),
    ("accumulator fusion", with_ops(selection.fuse_accumulation, contractions.dot)),
    # No other engine adds up products as tensor cores do, so no result is expected to be equal to the last bit.
    ("FMA contraction", with_ops(beside_tensor_cores(selection.contract_fma), elementwise.mul)),
)
LOOPS: NamedPasses = (
    ("mainloop formation", for_kernels(with_ops(form_mainloop, *PRODUCT_OPS), WARP_SPECIALISED)),
    ("asynchronous MMA formation", for_kernels(with_ops(form_async_mma, *PRODUCT_OPS), WARP_SPECIALISED)),
    ("FMA contraction of asynchronous loops", for_async_loops(selection.contract_fma)),
    ("software pipelining", for_async_loops(lambda f: pipeline_loops(f, LaunchFacts.of(f).grid))),
    ("loop peeling", for_async_loops(lambda f: loops.peel_masked_loops(f, LaunchFacts.of(f).grid))),
    ("index comparison narrowing of asynchronous loops", for_async_loops(loops.narrow_index_comparisons)),
)
COPIES: NamedPasses = (
    ("persistent prefetching", for_kernels(form_prefetched_loads, PREFETCHING)),
    ("multistage pipelining", for_kernels(with_ops(_pipeline_operand_copies, *PRODUCT_OPS), UNIFORM)),
    ("ldmatrix selection", for_kernels(with_ops(read_operands_in_place, smem_slots), UNIFORM)),
    ("boundary peeling", for_kernels(lambda f: f if combines_elements(f) else peel_boundary(f), UNIFORM)),
    ("branch formation", for_kernels(with_ops(form_branches, elementwise.where), UNIFORM)),
    ("partial sums", for_kernels(with_ops(for_team(carry_partial_sums), control_flow.for_), UNIFORM)),
    ("loop unrolling", for_kernels(with_ops(for_team(unroll_loops), control_flow.for_), UNIFORM)),
)
MAPPING: NamedPasses = (
    ("index comparison narrowing", for_kernels(_narrow_comparisons, UNIFORM)),
    ("index narrowing", for_kernels(with_ops(narrow_indices, tile.gather, tile.scatter), UNIFORM)),
    ("load hoisting", _hoist_loads),
    ("thread mapping", map_threads),
    ("rasterisation", for_kernels(choose_order, WARP_SPECIALISED, PREFETCHING)),
    ("layout assignment", assign_layouts),
)


FUNCTION_PASSES: NamedPasses = (
    *SELECTION,
    ("kernel selection", lambda f: select_kernel(f, [run for _, run in LOOPS], [run for _, run in MAPPING])),
    *LOOPS,
    *COPIES,
    *MAPPING,
)
