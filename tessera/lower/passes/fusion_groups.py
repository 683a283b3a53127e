"""Fusion groups: which ops may share a kernel, as the user says it (`ts.fusion`).

Groups are kept apart by barriers (XLA's optimization barrier): a value that passes from one group to another is held in
memory. Inside of a group the fusion of the lowering decides as ever. A barrier is the identity: nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tessera.core.errors import UnknownNameError
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ir.levels import KERNEL_OP
from tessera.ir.rewrite import RewritePatterns, UseDef, rewrite_function
from tessera.lower.lowering_plan import FUSION, FUSION_RULES
from tessera.lower.op_chains import CONSTANT_OPS, VIEW_OPS, match_chain, strip_views
from tessera.lower.op_counts import count_elements, count_flops
from tessera.ops.dialects import host
from tessera.ops.tensor import basic

# Operations a byte above which an op is bound by arithmetic on the devices of the performance models.
COMPUTE_BOUND_INTENSITY = 8.0


@dataclass
class FusionUnit:
    """The nodes of one call of the user: what rules about fusion see."""

    nodes: list[Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its op: of the one that does the most work."""
        return max(self.nodes, key=count_flops).op.name.removeprefix("ts.")

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values that it takes."""
        made = {v for n in self.nodes for v in n.results}
        return tuple(dict.fromkeys(v for n in self.nodes for v in n.args if v not in made))

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The values that its last node gives."""
        return self.nodes[-1].results

    @property
    def input_size(self) -> int:
        """The elements of its largest operand."""
        return max((count_elements(v) for v in self.inputs), default=0)

    @property
    def output_size(self) -> int:
        """The elements of its results."""
        return sum(count_elements(v) for v in self.outputs)

    @property
    def flops(self) -> int:
        """Its arithmetic operations; one for each element of a pointwise op."""
        return sum(count_flops(n) for n in self.nodes)

    @property
    def bytes(self) -> int:
        """The bytes of its operands and results."""
        return sum(count_elements(v) * v.type.dtype.bits // 8 for v in (*self.inputs, *self.outputs))

    @property
    def compute_bound(self) -> bool:
        """Whether it does many operations for each byte."""
        return self.flops >= COMPUTE_BOUND_INTENSITY * max(self.bytes, 1)

    @property
    def memory_bound(self) -> bool:
        """Whether it does few operations for each byte."""
        return not self.compute_bound


# Groups.


def separate_groups(function: Function) -> Function:
    """A Graph function with barriers between the groups that its attribute `fusion` asks for."""
    fusion = function.attrs[FUSION]
    uses = UseDef(function, nested=False)
    units = list(list_units(function, uses))
    groups = _GROUPINGS[fusion["mode"]](units, uses, fusion)
    return function if groups is None else _add_barriers(function, uses, groups)


def list_units(function: Function, uses: UseDef) -> Iterator[FusionUnit]:
    """The calls of the user: adjacent nodes of one source location, each op once, of which each uses the others."""
    unit = FusionUnit()
    for node in function.body.nodes:
        if node.op in (*VIEW_OPS, *CONSTANT_OPS):
            continue
        if unit.nodes and not _belongs(node, unit, uses):
            yield unit
            unit = FusionUnit()
        unit.nodes.append(node)
    if unit.nodes:
        yield unit


def _belongs(node: Node, unit: FusionUnit, uses: UseDef) -> bool:
    made = {v for n in unit.nodes for v in n.results}
    return (
        node.loc == unit.nodes[0].loc
        and all(node.op is not n.op for n in unit.nodes)
        and any(strip_views(v, uses) in made for v in node.args)
    )


Groups = dict[Node, int]


def _group_manually(units: Sequence[FusionUnit], uses: UseDef, fusion: Mapping[str, Any]) -> Groups:
    """Each match of a chain of names is a group, every other call one of its own."""
    groups: Groups = {n: i for i, unit in enumerate(units) for n in unit.nodes}
    taken: set[Node] = set()
    for chain in fusion["groups"]:
        for node in list(groups):
            found = match_chain(chain, node, uses)
            if found is not None and taken.isdisjoint(found) and all(n in groups for n in found):
                taken.update(found)
                groups.update(dict.fromkeys(found, len(units) + len(taken)))
    return groups


def _group_by_rule(units: Sequence[FusionUnit], uses: UseDef, fusion: Mapping[str, Any]) -> Groups:
    """A call joins the group of a producer where the user's rule says so."""
    name = fusion["rule"]
    if name not in FUSION_RULES:
        raise UnknownNameError(
            f"the fusion rule {name} is not here", expected=", ".join(FUSION_RULES) or "none",
            suggestion="import the module that defines it",
        )  # fmt: skip
    rule, groups, owner = FUSION_RULES[name], dict[Node, int](), dict[Node, FusionUnit]()
    for number, unit in enumerate(units):
        producers = {id(u): u for v in unit.inputs if (u := owner.get(uses.get(strip_views(v, uses)))) is not None}  # type: ignore[arg-type]
        joined = [u for u in producers.values() if rule(u, unit)]
        group = groups[joined[-1].nodes[0]] if joined else number
        groups.update(dict.fromkeys(unit.nodes, group))
        owner.update(dict.fromkeys(unit.nodes, unit))
    return groups


_GROUPINGS: dict[str, Callable[[Sequence[FusionUnit], UseDef, Mapping[str, Any]], Groups | None]] = {
    "auto": lambda units, uses, fusion: None,
    "vertical": lambda units, uses, fusion: None,
    "horizontal": lambda units, uses, fusion: None,
    "none": lambda units, uses, fusion: {n: i for i, unit in enumerate(units) for n in unit.nodes},
    "manual": _group_manually,
    "pattern": _group_by_rule,
}


def _add_barriers(function: Function, uses: UseDef, groups: Groups) -> Function:
    """A barrier after each value that nodes of another group use."""
    held: set[Value] = set()
    for node, group in groups.items():
        for value in node.args:
            base = strip_views(value, uses)
            producer = uses.get(base)
            if producer in groups and groups[producer] != group and not producer.regions:
                held.add(base)
    patterns = RewritePatterns("fusion groups")

    @patterns.any_op
    def _(rewriter: Any, node: Node, args: list[Value]) -> Sequence[Value] | None:
        if held.isdisjoint(node.results):
            return None
        made = rewriter.copy(node, args)
        pairs = zip(node.results, made, strict=True)
        return [rewriter.add(basic.fusion_barrier, v) if old in held else v for old, v in pairs]

    return rewrite_function(function, patterns) if held else function


# Horizontal fusion: independent kernels over the same iteration dims become one.


def fuse_horizontally(module: Module) -> Module:
    """Join adjacent kernels of a Schedule module that do not depend on each other and have the same dims and tiles."""
    made: list[Node] = []
    for node in module.main.body.nodes:
        place = _find_partner(made, node)
        if place is None:
            made.append(node)
        else:
            made[place] = _join_kernels(made[place], node)
    # What a kernel takes is defined before it: allocations and views move up.
    first = [n for n in made if n.op in (host.alloc, host.view)]
    rest = [n for n in made if n.op not in (host.alloc, host.view)]
    body = Block(module.main.params, (*first, *rest), module.main.results)
    if len(made) == len(module.main.body.nodes):
        return module
    return module.replace(replace(module.main, body=body), *module.functions[1:])


def _find_partner(made: Sequence[Node], node: Node) -> int | None:
    """The place of the last kernel that a kernel can join; kernels between them may not touch its memory."""
    if node.op.name != KERNEL_OP:
        return None
    for place in range(len(made) - 1, -1, -1):
        other = made[place]
        if other.op in (host.alloc, host.view):
            continue
        if other.op.name != KERNEL_OP or _depends(node, other, made):
            return None
        if other.attrs == node.attrs:
            return place
    return None


def _depends(node: Node, other: Node, made: Sequence[Node]) -> bool:
    """Whether one of two kernels writes memory that the other one reads or writes."""
    views = {n.out: n.args[0] for n in made if n.op is host.view}

    def base(value: Value) -> Value:
        while value in views:
            value = views[value]
        return value

    memory, touched = [base(v) for v in node.args], [base(v) for v in other.args]
    written, before = _list_written(node), _list_written(other)
    return any(memory[i] in touched for i in written) or any(touched[i] in memory for i in before)


def _list_written(kernel: Node) -> list[int]:
    """The places of the refs that a kernel writes."""
    (region,) = kernel.regions
    stored = {n.args[0] for n in region.nodes if n.op.name == "schedule.store"}
    return [i for i, p in enumerate(region.params) if p in stored]


def _join_kernels(one: Node, other: Node) -> Node:
    """One kernel with the bodies of both."""
    (a,), (b,) = one.regions, other.regions
    region = Block((*a.params, *b.params), (*a.nodes, *b.nodes), ())
    return replace(one, args=(*one.args, *other.args), regions=(region,))
