"""`ts.fusion`: which ops of a function may share a kernel. It changes the kernels, never what they compute.

>>> import tessera as ts
>>> @manual([["matmul", "add", "relu"]])
... def layer(x, w, b):
...     return ts.tanh(ts.relu(x @ w + b))
>>> layer(ts.ones((2, 3)), ts.ones((3, 4)), ts.ones((4,))).shape
(2, 4)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tessera.compiler.graph_ir import GraphIR
from tessera.compiler.passes import make_extension
from tessera.core.errors import ArgumentError, user_location
from tessera.frontend.jit.tracing import Jit
from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.lowering_plan import FUSION_RULES, use_extensions
from tessera.lower.op_chains import check_names
from tessera.lower.passes.fusion_groups import FusionUnit, list_units
from tessera.transforms.recording import rebind_node

__all__ = ["FusionUnit", "auto", "horizontal", "manual", "none", "pattern", "use", "vertical"]


def _decorate(fusion: dict[str, Any], function: Any) -> Any:
    made = function if isinstance(function, Jit) else Jit(function)
    made.fusion = fusion
    return made


def auto(function: Callable[..., Any]) -> Any:
    """The fusion of the compiler, which every jit function has: also where the context asks for another."""
    return _decorate({"mode": "auto"}, function)


def none(function: Callable[..., Any]) -> Any:
    """No fusion: a kernel for each call of the program."""
    return _decorate({"mode": "none"}, function)


def vertical(function: Callable[..., Any]) -> Any:
    """Producers become part of the kernels of their consumers, wherever that is legal and no more work."""
    return _decorate({"mode": "vertical"}, function)


def horizontal(function: Callable[..., Any]) -> Any:
    """Besides vertical fusion, independent kernels of the same iteration space and tiles become one kernel."""
    return _decorate({"mode": "horizontal"}, function)


def manual(groups: Sequence[Sequence[str]]) -> Callable[[Callable[..., Any]], Any]:
    """Only these chains of ops are fused: lists of names, each op a user of the one before; all other ops are apart.

    Raises:
        ArgumentError: a group is no list of names.
        UnknownNameError: no op has one of the names.
    """
    if isinstance(groups, str) or not isinstance(groups, (list, tuple)) or not groups:
        raise ArgumentError(
            "the groups are a list of lists of op names", location=user_location(),
            expected='[["matmul", "add", "gelu"]]', received=repr(groups)[:80],
        )  # fmt: skip
    chains = tuple(check_names(g) for g in groups)
    return lambda function: _decorate({"mode": "manual", "groups": chains}, function)


def pattern(rule: type) -> Any:
    """A rule about pairs of ops: a class with `should_fuse(op1, op2)`, and perhaps `fuse(ops)`; decorates functions.

    The ops have `name`, `input_size`, `output_size` (elements), `flops`, `bytes`, `memory_bound` and `compute_bound`.
    `op2` uses a result of `op1`; they share a kernel only where `should_fuse` says so. `fuse(ops)` gives the program of
    a group, as `ts.kernel.generate` makes it; its result is compared with that of the ops themselves.

    Raises:
        ArgumentError: it has no `should_fuse`.
    """
    should_fuse = getattr(rule, "should_fuse", None)
    if not callable(should_fuse):
        raise ArgumentError(
            "a fusion rule is a class with should_fuse(op1, op2)", location=user_location(), received=repr(rule)[:80]
        )
    FUSION_RULES[rule.__name__] = lambda one, other: bool(should_fuse(one, other))
    replacing = make_extension(_FusePass(rule)) if callable(getattr(rule, "fuse", None)) else None
    return _FusionRule(rule, replacing.name if replacing else None)


class _FusionRule:
    """A fusion rule, which decorates functions; otherwise its class."""

    def __init__(self, rule: type, replacing: str | None) -> None:
        functools.update_wrapper(self, rule, updated=())
        self.rule, self.replacing = rule, replacing

    def __call__(self, function: Callable[..., Any]) -> Any:
        made = _decorate({"mode": "pattern", "rule": self.rule.__name__}, function)
        if self.replacing is not None:
            made.passes = (*made.passes, self.replacing)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)


class _FusePass:
    """The pass that replaces each group of a rule by what its `fuse` gives."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.__class__ = type(f"{rule.__name__}Fuse", (_FusePass,), {})

    def run(self, graph: GraphIR) -> GraphIR:
        """The graph with each chain of fusible ops as its `fuse` makes it."""
        for ops in _list_groups(graph, self.rule):
            made = self.rule.fuse(ops)
            if not callable(made):
                raise ArgumentError(
                    f"{self.rule.__name__}.fuse gives no kernel", location=ops[0].nodes[0].loc,
                    expected="ts.kernel.generate(inputs=..., outputs=..., body=...), or a function of the inputs",
                    received=repr(made)[:80],
                )  # fmt: skip
            graph = graph.replace_nodes([n for op in ops for n in op.nodes], made)
        return graph


def _list_groups(graph: GraphIR, rule: Any) -> list[list[FusionUnit]]:
    """The chains of ops in which each uses the one before, nothing else does, and the rule fuses all."""
    uses = UseDef(graph.function, nested=False)
    groups: list[list[FusionUnit]] = []
    for unit in list_units(graph.function, uses):
        last = groups[-1][-1] if groups else None
        if last is not None and _follows(unit, last, uses) and rule.should_fuse(last, unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [g for g in groups if len(g) > 1]


def _follows(unit: FusionUnit, last: FusionUnit, uses: UseDef) -> bool:
    alone = len(last.outputs) == 1 and all(not n.regions for n in (*unit.nodes, *last.nodes))
    return alone and set(uses.users(last.outputs[0])) <= set(unit.nodes) and last.outputs[0] not in uses.scope.results


def use(mode: str = "none", groups: Sequence[Sequence[str]] = ()) -> Any:
    """A context in which jit functions without a fusion of their own have this one.

    Raises:
        ArgumentError: there is no such mode.
    """
    if mode not in ("auto", "none", "vertical", "horizontal", "manual"):
        raise ArgumentError(
            f"{mode!r} is no fusion", location=user_location(), expected="auto, none, vertical, horizontal or manual"
        )
    chains = {"groups": tuple(check_names(g) for g in groups)} if mode == "manual" else {}
    return use_extensions(fusion={"mode": mode, **chains})


# Fused kernels as `fuse(ops)` makes them.


def sequence(ops: Sequence[FusionUnit]) -> Callable[..., tuple[Tensor, ...]]:
    """The ops one after another, as a function of the values that they take from outside: `body(values, outputs)`."""

    def body(inputs: Sequence[Value], tensors: Sequence[Tensor], outputs: Sequence[Value]) -> tuple[Tensor, ...]:
        known = dict(zip(inputs, tensors, strict=True))
        for node in (n for op in ops for n in op.nodes):
            known.update(zip(node.results, rebind_node(node, [_find(known, v, node) for v in node.args]), strict=True))
        return tuple(known[v] for v in outputs)

    return body


def _find(known: dict[Value, Tensor], value: Value, node: Node) -> Tensor:
    if value not in known:
        raise ArgumentError(
            f"the fused kernel does not take an operand of {node.op.name}", location=node.loc,
            suggestion="inputs are the inputs of all ops that no other op of the group makes",
        )  # fmt: skip
    return known[value]


def generate(inputs: Sequence[Value], outputs: Sequence[Value], body: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of a group of ops: a function of tensors for its inputs; `body` is that of `sequence`."""
    taken = tuple(dict.fromkeys(inputs))

    def kernel(values: Sequence[Value], tensors: Sequence[Tensor]) -> Any:
        known = dict(zip(values, tensors, strict=True))
        missing = {v: known[v] for v in values if v not in taken}
        return body((*taken, *missing), [*(known[v] for v in taken), *missing.values()], tuple(outputs))

    return kernel
