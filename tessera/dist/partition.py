"""Partitioning: runs a function of whole tensors on a mesh, by the layouts that propagation gives its values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, UnsupportedOpError, user_location
from tessera.core.types import TensorType
from tessera.dist.mesh import Mesh
from tessera.dist.propagation import (
    NVLINK,
    Layout,
    Link,
    ShardingPlan,
    Transfer,
    check_plannable,
    plan_shardings,
    tensor_type,
    whole,
)
from tessera.dist.sharding import ShardSpec, check_spec, make_spec
from tessera.dist.spmd import Spmd, check_mesh, match_specs
from tessera.frontend.jit.tracing import BoundCall, Jit, TracedFunction
from tessera.ir.core import Block, Node, Value
from tessera.ir.rewrite import eliminate_dead_code, expand_composites
from tessera.ir.rules import Op, sharding
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.tensor import collectives as ops
from tessera.transforms.autodiff.gradients import value_and_grad
from tessera.transforms.recording import rebind_node, set_location


class Partitioned:
    """A function of whole tensors that runs on a mesh: see `partition`."""

    def __init__(
        self, function: Callable[..., Any], mesh: Mesh, in_specs: Any = None, out_specs: Any = None,
        links: Mapping[str, Link] | None = None, target: str | None = None,
    ) -> None:  # fmt: skip
        self.jit = function if isinstance(function, Jit) else Jit(function)
        functools.update_wrapper(self, self.jit.function)
        self.function = self.jit.function
        self.mesh, self.in_specs, self.out_specs, self.target = mesh, in_specs, out_specs, target
        self.links = {name: (links or {}).get(name, NVLINK) for name in mesh.axis_names}
        if unknown := [n for n in links or {} if n not in mesh.axis_names]:
            raise ArgumentError(f"the mesh has no axis {unknown[0]!r}", location=user_location(), received=repr(links))
        self._known: dict[Hashable, tuple[TracedFunction, ShardingPlan, Spmd]] = {}
        self._blocks: dict[Hashable, Block] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        call = self.jit.bind(args, named)
        traced, _, run = self._compile(call)
        results = run(*[as_tensor(x) for x in call.leaves], *[Tensor(a) for a in traced.captures])
        return traced.results.build(iter(results))

    def __value_and_grad__(self, argnums: Any, has_aux: bool) -> Partitioned:
        """The value and gradient of the whole function, which run on the mesh as it does."""
        run = value_and_grad(self.function, argnums, has_aux)
        return Partitioned(run, self.mesh, self.in_specs, None, self.links, self.target)

    def plan(self, *args: Any, **named: Any) -> ShardingPlan:
        """The layouts of all values, and the collectives between them, for these arguments or their types.

        Raises:
            ArgumentError, ShapeError: the specs do not fit the arguments or the results.
            UnsupportedOpError: the function draws random numbers, or has collectives already.
        """
        return self._compile(self.jit.bind(args, named))[1]

    def block(self, call: BoundCall) -> Block:
        """The block that a call's plan is of."""
        self._compile(call)
        return self._blocks[call.key()]

    def _compile(self, call: BoundCall) -> tuple[TracedFunction, ShardingPlan, Spmd]:
        key = call.key()
        if key not in self._known:
            self._known[key] = self._make(call)
        return self._known[key]

    def _make(self, call: BoundCall) -> tuple[TracedFunction, ShardingPlan, Spmd]:
        traced = self.jit._trace(call)
        if traced.random is not None:
            raise UnsupportedOpError(
                f"{self.jit.name} draws random numbers, which partition does not divide", location=self.jit.location,
                suggestion="draw them outside, and pass them as an argument",
            )  # fmt: skip
        check_plannable(traced.function.body, self.jit.name)
        function = eliminate_dead_code(expand_composites(traced.function, _has_rule))
        self._blocks[call.key()] = function.body
        inputs = [*self._input_layouts(call), *(whole(a.ndim) for a in traced.captures)]
        outputs = self._output_layouts(traced, function.body)
        plan = plan_shardings(function.body, inputs, self.mesh, self.links, outputs)
        specs = [make_spec(layout.dims) for layout in inputs]

        def program(*parts: Tensor) -> list[Tensor]:
            return _run_plan(plan, function.body, *parts)

        program.__name__ = self.jit.name
        outs = [make_spec(layout.dims) for layout in plan.outputs]
        return traced, plan, Spmd(program, self.mesh, specs, outs, jit=True, target=self.target)

    def _input_layouts(self, call: BoundCall) -> list[Layout]:
        parameters = list(self.jit.signature.parameters.values())
        specs = self.in_specs
        listed = list(specs) if isinstance(specs, (list, tuple)) else [specs] * len(parameters)
        at = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), None)
        if at is not None and isinstance(specs, (list, tuple)):
            listed = [*listed[:at], listed[at:]]  # those of `*args`
        if len(listed) > len(parameters):
            raise ArgumentError(
                f"{self.jit.name} has {len(listed)} in_specs", location=user_location(),
                expected=f"one for each of {len(parameters)} arguments",
            )  # fmt: skip
        found: dict[str, Any] = {}
        for parameter, spec in zip(parameters, [*listed, *[None] * len(parameters)], strict=False):
            paths = [n for n in call.names if n.partition(".")[0] == parameter.name]
            found.update(_match_paths(paths, spec, parameter.name))
        return [
            Layout(check_spec(found[n], t.shape, self.mesh, n))  # type: ignore[arg-type]
            for n, t in zip(call.names, call.types, strict=True)
        ]

    def _output_layouts(self, traced: TracedFunction, body: Block) -> list[Layout | None]:
        if self.out_specs is None:
            return [None] * len(body.results)
        result = traced.results.build(iter(body.results))
        matched = match_specs(result, self.out_specs, f"the result of {self.jit.name}")
        found: list[Layout | None] = []
        for name, value, spec in matched:
            found.append(Layout(check_spec(spec, tensor_type(value).shape, self.mesh, name)))  # type: ignore[arg-type]
        return found


def _match_paths(paths: Sequence[str], spec: Any, name: str) -> dict[str, Any]:
    """The spec of each leaf of an argument: one for all, or a container of them."""
    if spec is None or isinstance(spec, ShardSpec):
        return dict.fromkeys(paths, spec)
    if isinstance(spec, (dict, list, tuple)):
        parts = spec.items() if isinstance(spec, dict) else enumerate(spec)
        found: dict[str, Any] = {}
        for key, inner in parts:
            under = f"{name}.{key}"
            found.update(_match_paths([p for p in paths if p == under or p.startswith(under + ".")], inner, under))
        if set(found) == set(paths):
            return found
    raise ArgumentError(
        f"the sharding of {name} does not fit it", location=user_location(), received=repr(spec),
        expected="a spec, None, or a container of them like the argument",
    )  # fmt: skip


def _has_rule(op: Op) -> bool:
    return op in sharding or op.pointwise


# Execution of a plan, as one rank.


def _run_plan(plan: ShardingPlan, body: Block, *parts: Tensor) -> list[Tensor]:
    """The parts of the results, from those of the arguments."""
    known: dict[Value, Tensor] = dict(zip(body.params, parts, strict=True))
    moved: dict[tuple[Value, tuple[Transfer, ...]], Tensor] = {}

    def bring(value: Value, moves: list[Transfer], loc: Any) -> Tensor:
        key = value, tuple(moves)
        if key not in moved:
            moved[key] = functools.reduce(lambda x, t: _move(plan, x, t, str(loc)), moves, known[value])
        return moved[key]

    for step in plan.steps:
        with set_location(step.node.loc):
            pairs = zip(step.node.args, step.moves, strict=True)
            operands = [bring(v, moves, step.node.loc) for v, moves in pairs]
            known.update(zip(step.node.results, _run_node(plan, step.node, operands, step.results), strict=True))
    results = zip(body.results, plan.moves, strict=True)
    return [bring(v, moves, "the results") for v, moves in results]


def _move(plan: ShardingPlan, x: Tensor, t: Transfer, site: str) -> Tensor:
    groups = plan.mesh.groups(t.axes)
    if t.op == "local_part":
        return ops.local_part(x, axis=t.split, groups=groups)  # type: ignore[no-any-return]
    if t.op == "all_gather":
        return ops.all_gather(x, axis=t.join, groups=groups, site=site)  # type: ignore[no-any-return]
    if t.op == "reduce_scatter":
        return ops.reduce_scatter(x, axis=t.split, kind="sum", groups=groups, site=site)  # type: ignore[no-any-return]
    if t.op == "all_to_all":
        return ops.all_to_all(x, split=t.split, join=t.join, groups=groups, site=site)  # type: ignore[no-any-return]
    return ops.all_reduce(x, kind=t.kind, groups=groups, site=site)  # type: ignore[no-any-return]


def _run_node(plan: ShardingPlan, node: Node, operands: list[Tensor], results: list[Layout]) -> list[Tensor]:
    """A node on parts of its operands; attributes that hold sizes get those of the part."""
    if node.regions:
        return rebind_node(node, operands)
    attrs = dict(node.attrs)
    if any(any(layout.dims) for layout in results):
        local = _local_shape(plan, tensor_type(node.out), results[0])
        if "shape" in attrs:
            attrs["shape"] = local
        if "stop" in attrs:
            cut = [bool(d) for d in results[0].dims]
            attrs["stop"] = tuple(n if c else s for n, c, s in zip(local, cut, attrs["stop"], strict=True))
    out = bind_op(node.op, operands, attrs)
    return list(out) if isinstance(out, tuple) else [out]


def _local_shape(plan: ShardingPlan, type: TensorType, layout: Layout) -> tuple[int, ...]:
    return tuple(int(n) // plan.mesh.count(axes) for n, axes in zip(type.shape, layout.dims, strict=True))


def partition(
    function: Callable[..., Any] | None = None, *, mesh: Mesh | None = None, in_specs: Any = None,
    out_specs: Any = None, links: Mapping[str, Link] | None = None, target: str | None = None,
) -> Any:  # fmt: skip
    """A function of whole tensors that runs on a mesh; the layouts of its values follow from those of its arguments.

    `in_specs` is a sharding for all arguments, or one for each (or a container of them, like the argument); `out_specs`
    those of the results, which otherwise keep the layouts that they have. Arguments and results are whole tensors, and
    the results are those of the function alone. `links` are the connections along mesh axes (`ts.dist.NVLINK`,
    `ts.dist.NETWORK`), by which the cheapest layouts are chosen. `ts.dist.explain` shows the plan.

    >>> import tessera as ts
    >>> mesh = ts.Mesh((2, 2), ("dp", "tp"))
    >>> f = partition(lambda x, w: ts.tanh(x @ w).sum(), mesh=mesh, in_specs=(ts.dist.P("dp"), ts.dist.P(None, "tp")))
    >>> f(ts.ones((4, 3)), ts.zeros((3, 2)))
    Tensor(0., f32)

    Raises:
        ArgumentError, ShapeError: there is no mesh, or the specs do not fit.
        UnsupportedOpError: the function draws random numbers, or has collectives.
    """
    if function is None:
        return functools.partial(
            partition, mesh=mesh, in_specs=in_specs, out_specs=out_specs, links=links, target=target
        )
    if mesh is None:
        raise ArgumentError("partition needs a mesh", location=user_location(), expected="mesh=ts.Mesh(...)")
    check_mesh(mesh, "partition")
    return Partitioned(function, mesh, in_specs, out_specs, links, target)
