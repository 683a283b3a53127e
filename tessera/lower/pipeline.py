"""Lowering pipelines: the named passes that turn a traced Graph module into a Tile module, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from tessera.core.symbolic_dim import Dim
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ir.rewrite import (
    RewritePatterns,
    Rewriter,
    UseDef,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    expand_composites,
    rewrite_function,
)
from tessera.ir.rules import Op, Rules
from tessera.ir.tensor import Tensor
from tessera.lower.graph_to_schedule.lowering import to_schedule
from tessera.lower.lowering_plan import (
    FUSION,
    GRAPH,
    SCHEDULE,
    LoweringPlan,
    find_extensions,
    find_library_launch,
    find_library_lowering,
    find_library_ops,
    library_lowerings,
    simplified_lowerings,
)
from tessera.lower.mesh import MeshShape, to_mesh
from tessera.lower.mesh.op_rules import mesh_op_rules
from tessera.lower.passes.canonicalisation import (
    canonicalise,
    share_reductions,
    sink_widening,
    split_concatenations,
)
from tessera.lower.passes.collective_scheduling import schedule_collectives
from tessera.lower.passes.fusion_groups import fuse_horizontally, separate_groups
from tessera.lower.passes.gather_sinking import sink_gathers, spread_scatters
from tessera.lower.passes.generated_values import hold_generated_values
from tessera.lower.passes.launch_fusion import fuse_launches
from tessera.lower.passes.memory_planning import plan_memory
from tessera.lower.passes.moment_merging import merge_moments
from tessera.lower.passes.multi_output_fusion import fuse_loop_steps, fuse_multi_output
from tessera.lower.passes.product_rewrites import (
    form_vector_products,
    multiply_once,
    narrow_dots,
    round_windows_early,
    turn_products,
)
from tessera.lower.passes.reduction_splitting import split_reductions
from tessera.lower.passes.slice_updates import find_argument_updates, merge_slice_updates
from tessera.lower.passes.stochastic_rounding import expand_stochastic_rounding
from tessera.lower.passes.table_staging import stage_tables
from tessera.lower.passes.window_sums import gather_window_sums
from tessera.lower.passes.window_views import flatten_windows, form_window_views
from tessera.lower.schedule_to_tile.lowering import to_legal_tile
from tessera.ops.dialects import control_flow, host, schedule, tile
from tessera.ops.tensor import contractions, elementwise, reduce, scatter, shape, sorting

LoweringPass = Callable[[Module, LoweringPlan], Module]


def rewrite_main(rewrite: Callable[[Function], Function]) -> LoweringPass:
    """A pass that rewrites the entry function of a module."""
    return lambda module, plan: module.replace(rewrite(module.main), *module.functions[1:])


def rewrite_module(rewrite: Callable[[Module], Module]) -> LoweringPass:
    """A pass that needs no lowering plan."""
    return lambda module, plan: rewrite(module)


def with_ops(run: LoweringPass, *ops: Op) -> LoweringPass:
    """A pass for modules whose entry function has one of these ops; it would leave others as they are."""
    return lambda module, plan: run(module, plan) if any(n.op in ops for n in module.main.body.walk()) else module


def _has_several_kernels(module: Module) -> bool:
    return sum(n.op is schedule.kernel for n in module.main.body.nodes) > 1


def with_policies(run: LoweringPass) -> LoweringPass:
    """A pass for modules whose entry function has values with numeric policies; it would leave others as they are."""
    return lambda module, plan: run(module, plan) if _has_policies(module.main.body) else module


def _has_policies(body: Block) -> bool:
    held = (*body.params, *(v for n in body.walk() for v in (*n.results, *(p for r in n.regions for p in r.params))))
    return any(v.type.policy is not None for v in held)


def _has_products(function: Function) -> bool:
    return any(n.op is contractions.dot for n in function.body.walk())


def merge_updates(module: Module, plan: LoweringPlan) -> Module:
    """Updates of slices as results in the memory of what they update, where the plan says so."""
    return module.replace(merge_slice_updates(module.main, plan.donated), *module.functions[1:])


def expand_for_target(module: Module, plan: LoweringPlan) -> Module:
    """Replace composite ops by their lowering, except those of the kernel library and of the host."""

    def keep(op: Op) -> bool:
        kept = _has_library_launch(main, op, plan) or _runs_on_host(main, op, plan)
        return kept or (op is scatter.update_slice and _updates_arguments(main, plan))

    main = eliminate_dead_code(module.main)  # library lowerings ask for uses
    main = turn_products(main) if plan.tensor_cores and _has_products(main) else main
    main = expand_composites(main, lambda op: keep(op) or op in library_lowerings)
    while (made := use_library_lowerings(main, plan)) is not main:  # they may use ops that have one
        main = made
    expanded = expand_composites(main, keep)
    if expanded is not main and _has_library_lowering(expanded, plan):
        expanded = eliminate_common_subexpressions(expanded)  # launches are none
    while (made := use_library_lowerings(expanded, plan)) is not expanded:  # of what had none itself
        expanded = expand_composites(made, keep)
    return module.replace(expanded, *module.functions[1:])


def _has_library_lowering(function: Function, plan: LoweringPlan) -> bool:
    uses = UseDef(function)
    return any(find_library_lowering(n, uses, plan) for n in _walk_tensor_ops(function.body))


def use_library_lowerings(function: Function, plan: LoweringPlan, rules: Rules = library_lowerings) -> Function:
    """Replace nodes by the library lowerings that they have under a plan."""
    uses = UseDef(function)
    found = {n: way for n in _walk_tensor_ops(function.body) if (way := find_library_lowering(n, uses, plan, rules))}
    patterns = RewritePatterns("library lowering")
    ops = {n.op: None for n in found}

    @patterns(*ops)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        way = found.get(node)
        if way is None:
            return None
        out = way.function(*(Tensor(rewriter.new(v)) for v in way.operands))
        return tuple(t.data for t in (out if isinstance(out, tuple) else (out,)))

    return rewrite_function(function, patterns, remove_dead=True) if found else function


def use_simplified_lowerings(module: Module, plan: LoweringPlan) -> Module:
    """Library lowerings of what only a simplified function shows: many sums that are one gradient of weights."""
    return module.replace(use_library_lowerings(module.main, plan, simplified_lowerings), *module.functions[1:])


def _walk_tensor_ops(block: Block) -> Iterator[Node]:
    """The nodes of a block and of its regions, but not those of kernels."""
    for node in block.nodes:
        yield node
        for region in node.regions if node.op is not control_flow.launch else ():
            yield from _walk_tensor_ops(region)


def _has_library_launch(function: Function, op: Op, plan: LoweringPlan) -> bool:
    if op not in find_library_ops(plan):
        return False
    return all(find_library_launch(n, plan) is not None for n in function.body.walk() if n.op is op)


def _updates_arguments(function: Function, plan: LoweringPlan) -> bool:
    """Whether all updates of slices are results in the memory of what they update."""
    updates = [n for n in function.body.walk() if n.op is scatter.update_slice]
    return bool(plan.donated) and updates == find_argument_updates(function, plan.donated)


def _runs_on_host(function: Function, op: Op, plan: LoweringPlan) -> bool:
    """Whether the host executes an op that has a lowering: a sort whose lowering compares too many pairs, or may."""
    if op is not sorting.argsort or plan.host_sort is None:
        return False
    sizes = [n.types[0].shape[n.attrs["axis"]] for n in function.body.walk() if n.op is op]
    return any(isinstance(size, Dim) or size > plan.host_sort for size in sizes)


def expand_for_mesh(module: Module, plan: LoweringPlan) -> Module:
    """Replace composite ops by their lowering, except those with a rule for a mesh."""
    return module.replace(expand_composites(module.main, mesh_op_rules.__contains__))


def distribute_on_mesh(module: Module, plan: LoweringPlan) -> Module:
    """Lower a Graph module to one program for each element of the mesh."""
    assert plan.mesh is not None
    return to_mesh(module, MeshShape(*plan.mesh, plan.mesh_product), plan.mesh_shardings)


def rewrite_vector_products(module: Module, plan: LoweringPlan) -> Module:
    """Products of few rows or columns as reductions, where the plan says so."""
    made = form_vector_products(module.main, plan.vector_products, plan.vector_results)
    return module.replace(made, *module.functions[1:])


def rewrite_windows(module: Module, plan: LoweringPlan) -> Module:
    """Windows as strided views, where the plan says so for those of products, and along flat lines."""
    main = form_window_views(module.main, plan.stack_views)
    return module.replace(flatten_windows(main) if plan.flat_windows else main, *module.functions[1:])


def rewrite_window_sums(module: Module, plan: LoweringPlan) -> Module:
    """Sums of values between zeros as sums over windows, where these overlap by phases unless threads read each element
    by itself."""
    main = gather_window_sums(module.main, plan.parallel is not None)
    if plan.parallel is None and main is not module.main:
        main = eliminate_common_subexpressions(canonicalise(main))  # phases have much in common
    return module.replace(main, *module.functions[1:])


def merge_row_moments(module: Module, plan: LoweringPlan) -> Module:
    """Variances and sums of exponentials of long rows from those of their parts, where programs run side by side."""
    if plan.parallel is None or not plan.shares_rows or not _has_long_rows(module.main, plan):
        return module
    return module.replace(merge_moments(module.main, plan), *module.functions[1:])


def _gathers_often(module: Module, plan: LoweringPlan) -> bool:
    """Whether a tile function gathers more than once, where the target has memory for what it gathers from."""
    kernels = module.functions[1:] if plan.table_bytes else ()
    return any(sum(n.op is tile.gather for n in f.body.nodes) > 1 for f in kernels)


def _has_long_rows(function: Function, plan: LoweringPlan) -> bool:
    """Whether a sum has more terms, or as many as a symbol says, than a program holds."""
    sizes = ([n.args[0].type.shape[a] for a in n.attrs["axis"]] for n in function.body.nodes if n.op is reduce.sum)  # type: ignore[union-attr]
    return any(not all(isinstance(s, int) for s in each) or math.prod(each) > plan.row_limit for each in sizes)


def hold_generated(module: Module, plan: LoweringPlan) -> Module:
    """Random numbers that reductions read in memory."""
    return module.replace(hold_generated_values(module.main, plan), *module.functions[1:])


def split_long_reductions(module: Module, plan: LoweringPlan) -> Module:
    """Long reductions in parts, where the plan says so."""
    return module.replace(split_reductions(module.main, plan), *module.functions[1:])


MULTI_OUTPUT = "multi-output fusion"  # programs that ask for a fusion of their own have none of the compiler's choice
# For targets with one memory: LLVM and PTX.
PIPELINE: tuple[tuple[str, LoweringPass], ...] = (
    ("uniform operands", with_ops(rewrite_main(multiply_once), contractions.dot)),
    ("early rounding", with_ops(rewrite_main(round_windows_early), shape.concatenate)),
    ("slice updates", with_ops(merge_updates, scatter.update_slice)),
    ("row scatters", with_ops(rewrite_main(spread_scatters), scatter.scatter_add, scatter.scatter)),
    ("expand", expand_for_target),
    ("stochastic rounding", with_policies(rewrite_main(expand_stochastic_rounding))),
    ("simplify", rewrite_main(canonicalise)),
    ("common subexpressions", rewrite_main(eliminate_common_subexpressions)),
    ("shared reductions", rewrite_main(share_reductions)),
    ("dead code", rewrite_main(eliminate_dead_code)),
    ("sink gathers", with_ops(rewrite_main(sink_gathers), shape.gather)),
    ("sink casts", rewrite_main(sink_widening)),
    ("simplified lowerings", with_ops(use_simplified_lowerings, shape.concatenate)),
    ("window sums", with_ops(rewrite_window_sums, shape.pad, shape.concatenate)),
    ("window views", with_ops(rewrite_windows, shape.concatenate, shape.gather, contractions.dot)),
    ("wide concatenations", with_ops(rewrite_main(split_concatenations), shape.concatenate)),
    ("vector products", with_ops(rewrite_vector_products, contractions.dot)),
    ("generated values", with_ops(hold_generated, elementwise.floor_divide)),
    ("moment merging", with_ops(merge_row_moments, elementwise.mul, elementwise.exp)),
    ("reduction splitting", split_long_reductions),
    ("launch fusion", with_ops(rewrite_main(fuse_launches), control_flow.launch)),
    ("schedule", to_schedule),
    ("multi-output fusion of loops", with_ops(fuse_loop_steps, host.loop, host.while_)),
    (MULTI_OUTPUT, lambda module, plan: fuse_multi_output(module, plan) if _has_several_kernels(module) else module),
    ("collective scheduling", with_ops(rewrite_module(schedule_collectives), host.call)),
    ("memory plan", with_ops(rewrite_module(plan_memory), host.alloc)),
    ("tile", to_legal_tile),
    ("table staging", lambda module, plan: stage_tables(module, plan) if _gathers_often(module, plan) else module),
)
# For a mesh of processing elements (CSL): no loop nests, so none of the rewrites that prepare them.
MESH_PIPELINE: tuple[tuple[str, LoweringPass], ...] = (
    ("expand", expand_for_mesh),
    ("narrow products", rewrite_main(narrow_dots)),
    ("common subexpressions", rewrite_main(eliminate_common_subexpressions)),
    ("dead code", rewrite_main(eliminate_dead_code)),
    ("mesh", distribute_on_mesh),
)


def list_steps(plan: LoweringPlan, function: Function | None = None) -> list[tuple[str, Callable[[Module], Module]]]:
    """The passes of a lowering plan with their names, in order; with the extensions of a traced function, if given."""
    passes = list(PIPELINE if plan.mesh is None else MESH_PIPELINE)
    if function is not None:
        passes = _insert_extensions(passes, function)
    return [(name, lambda module, run=run: run(module, plan)) for name, run in passes]  # type: ignore[misc]


def _insert_extensions(passes: list[tuple[str, LoweringPass]], function: Function) -> list[tuple[str, LoweringPass]]:
    """Passes with those of the users: of the Graph level first, of the Schedule level after `schedule`."""
    first: list[tuple[str, LoweringPass]] = [(e.name, e.run) for e in find_extensions(function, GRAPH)]
    later: list[tuple[str, LoweringPass]] = [(e.name, e.run) for e in find_extensions(function, SCHEDULE)]
    fusion = function.attrs.get(FUSION)
    if fusion is not None:
        first.append(("fusion groups", rewrite_main(separate_groups)))
        if fusion["mode"] == "horizontal":
            later.insert(0, ("horizontal fusion", rewrite_module(fuse_horizontally)))
        if fusion["mode"] != "auto":
            passes = [each for each in passes if each[0] != MULTI_OUTPUT]
    after = next((i + 1 for i, (name, _) in enumerate(passes) if name == "schedule"), None)
    return [*first, *passes] if after is None else [*first, *passes[:after], *later, *passes[after:]]


def lower(module: Module, plan: LoweringPlan | None = None) -> Iterator[tuple[str, Module]]:
    """Yield the module after each pass, with the name of the pass."""
    for name, run in list_steps(plan or LoweringPlan(), module.main):
        module = run(module)
        yield name, module
