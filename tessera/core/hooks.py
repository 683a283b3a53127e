"""Hooks: calls from a lower layer into a higher one, bound by name on first use (dependency inversion).

A package imports only from the layers below it. Where a lower layer must call a higher one (a kernel launch needs the
driver), it calls a hook of this table instead; the module behind a hook is imported when the hook is first called, so
`import tessera` does not load it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any


class Hook:
    """A function of a higher layer, by the name of its module and its own.

    >>> Hook("math:sqrt")(9.0)
    3.0
    """

    def __init__(self, target: str) -> None:
        self.module, _, self.name = target.partition(":")

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function itself; its module is imported now."""
        return getattr(import_module(self.module), self.name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)


# ir, a rule table -> ir, tracing: the type rule of a composite op.
infer_by_lowering = Hook("tessera.ir.rewrite:infer_by_lowering")
# core -> codegen: the generators that are installed.
list_generators = Hook("tessera.codegen.contract:list_backends")
# core, ir -> codegen: the memory of a device.
find_device_memory = Hook("tessera.codegen.contract:find_device_memory")
# ir, an op on tensors of a device -> runtime: a program of one op.
run_device_op = Hook("tessera.runtime.launch.device_ops:run_device_op")
# ir, frontend -> transforms: the gradient tape, which records ops on tensors that require gradients.
record_on_tape = Hook("tessera.transforms.autodiff.tape:record_on_tape")
backpropagate = Hook("tessera.transforms.autodiff.tape:backpropagate")
# lower -> stdlib: the rules that lower an op to a kernel of the standard library.
load_library_launches = Hook("tessera.stdlib.launches:load_library_launches")
# frontend, a kernel -> frontend: a launch in a program that is being traced.
record_launch = Hook("tessera.frontend.kernel.graph_launch:update_arguments")
# transforms, the adjoint of a launch -> codegen: its groups of tiles as single programs.
ungroup_launch = Hook("tessera.codegen.grouped.vectoriser:ungroup_launch")
# frontend, a recorded launch -> transforms: recorded in the open trace, or run and put on the tape.
bind_region_op = Hook("tessera.transforms.flow.region_ops:bind_region_op")
bind_ruled_launch = Hook("tessera.transforms.flow.launch_rules:bind_ruled_launch")
# interp, the Graph interpreter -> interp, the Tile interpreter: a launch in a Graph function.
run_graph_launch = Hook("tessera.interp.tile.interpreter:run_graph_launch")
run_graph_launch_with_bounds = Hook("tessera.interp.tile.interpreter:run_graph_launch_with_bounds")
# frontend -> runtime: how functions and kernels run.
compile_graph = Hook("tessera.runtime.driver:compile_graph")
compile_tuned_graph = Hook("tessera.runtime.planning:compile_tuned_graph")
takes_symbolic_sizes = Hook("tessera.runtime.driver:takes_symbolic_sizes")
run_module = Hook("tessera.runtime.launch.streams:run_module")
order_launch = Hook("tessera.runtime.launch.streams:order_launch")
tune_launch = Hook("tessera.runtime.launch.tuner:tune_launch")
apply_configuration = Hook("tessera.runtime.launch.tuner:apply_configuration")
find_storage_function = Hook("tessera.runtime.storage:find_storage_function")
# runtime -> tools: the performance model that ranks configurations where nothing is measured.
list_candidates = Hook("tessera.tools.performance.candidates:Candidates")
make_roofline_model = Hook("tessera.tools.performance.cost_models:RooflineModel")
# ops, a collective -> dist: the exchange between ranks, and the number of this rank in its group.
exchange = Hook("tessera.dist.ranks:exchange")
find_rank_in_groups = Hook("tessera.dist.ranks:find_rank_in_groups")
# frontend, `ts.kernel` -> compiler: the kernel of a group of ops, for rules of fusion.
generate_kernel = Hook("tessera.compiler.fusion:generate")
sequence_ops = Hook("tessera.compiler.fusion:sequence")
# runtime and codegen, a collective on arrays of a device -> dist: in the device's memory, where the engine can.
exchange_on_device = Hook("tessera.dist.ranks:exchange_on_device")
exchange_in_place = Hook("tessera.dist.ranks:exchange_in_place")
start_in_place = Hook("tessera.dist.ranks:start_in_place")
prepare_recorded = Hook("tessera.dist.ranks:prepare_recorded")
open_channels = Hook("tessera.dist.ranks:open_channels")
# codegen, a collective of a plan on arrays -> dist: started, and the order of a plan's collectives compared.
start_exchange = Hook("tessera.dist.ranks:start_exchange")
agree_on_order = Hook("tessera.dist.ranks:agree_on_order")
# core, a method of an element type -> research: `ts.int8.saturating_add`.
find_typed_op = Hook("tessera.research.typed_ops:find_typed_op")
# train -> tools: the first op that makes a NaN or an infinity is an error, in a block.
check_finite = Hook("tessera.tools.debug.sessions:nan_check")
