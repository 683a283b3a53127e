"""The Python text of a compiled tile function: one line for each node, its row of the tables chosen ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tessera.errors import Location
from tessera.interp import instances, moves
from tessera.interp.affine import Affine, combined
from tessera.interp.lifetimes import last_uses
from tessera.interp.machine import Machine
from tessera.ir.core import Block, Node, Value
from tessera.numerics.convert import convert, store
from tessera.op import COMPUTE, STORAGE, Op
from tessera.ops import tile
from tessera.types import DType, TensorType, Type, tf32


class Text:
    """The functions of a program's blocks as they grow.

    A value is a local variable, dropped where it is used last. What inner regions use lies in `env` meanwhile, where
    a part of the instances finds its own share of it.
    """

    def __init__(self, constants: dict[Value, Any], rank: int) -> None:
        self.constants, self.rank = constants, rank
        self.lines: list[str] = []
        self.locations: list[Location | None] = []
        self.objects: dict[str, Any] = {"arrayed": _arrayed, "convert": convert}
        self.names: dict[Value, str] = {}

    def functions(self) -> dict[str, Any]:
        """All of them, by name."""
        exec(compile("\n".join(self.lines), "<compiled tile function>", "exec"), self.objects)
        return self.objects

    def object(self, thing: Any) -> str:
        """The name by which lines know an object."""
        name = f"o{len(self.objects)}"
        self.objects[name] = thing
        return name

    def name(self, value: Value) -> str:
        """The name of a value."""
        if value not in self.names:
            known = value in self.constants
            self.names[value] = self.object(self.constants[value]) if known else f"v{len(self.names)}"
        return self.names[value]

    def block(self, block: Block, nodes: Sequence[Node]) -> str:
        """The function of a block that runs these of its nodes; its name."""
        name = f"b{len(self.lines)}"
        self._line(f"def {name}({', '.join(['run', 'env', *map(self.name, block.params)])}):")
        self._line(" machine = run.machine; count = machine.count")
        direct = dict.fromkeys([v for node in nodes for v in node.args] + list(block.results))
        for value in direct:
            if value in block.free and value not in self.constants:
                self._line(f" {self.name(value)} = env[{self.object(value)}]")
        last = last_uses(block)
        for node in nodes:
            dead = [f"{self.name(v)} = None" for v in last[node] if v not in self.constants]
            self._line("; ".join([f" {self._within(block, node)}", *dead]), node.loc)
        self._line(f" return [{self._listed(block.results)}]")
        return name

    def _line(self, line: str, location: Location | None = None) -> None:
        self.lines.append(line)
        self.locations.append(location)

    def _within(self, block: Block, node: Node) -> str:
        """A node, with what its regions use of this block's values put into `env` for them."""
        used = {v for region in node.regions for v in region.free if v not in block.free and v not in self.constants}
        own = {v: self.object(v) for v in sorted(used, key=self.name)}
        before = [f"env[{key}] = {self.name(v)}" for v, key in own.items()]
        return "; ".join([*before, self._node(node), *(f"del env[{key}]" for key in own.values())])

    def _node(self, node: Node) -> str:
        row = moves.rows.get(node.op)
        if row is not None:
            move, array = row(node, self.rank), self._array(node.args[0])
            return f"{self.name(node.out)} = {array if move is moves.itself else f'{self.object(move)}({array})'}"
        rule = instances.places.get(node.op)
        if rule is not None:
            return self._ruled(node, rule, self._listed(node.args))
        rule = instances.rules.get(node.op)
        if rule is not None and node.op not in instances.prepared:
            return self._ruled(node, rule, ", ".join(map(self._array, node.args)))
        return self._pure(node)

    def _ruled(self, node: Node, rule: Callable[..., Any], args: str) -> str:
        """A node of the rule tables."""
        call = f"{self.object(rule)}(machine, {self.object(node)}, [{args}], run)"
        return f"[{self._listed(node.results)}] = {call}" if node.results else call

    def _pure(self, node: Node) -> str:
        """An op that only computes; index scalars stay affine as long as they can, else they are arrays."""
        if len(node.results) > 1:
            calculate = self.object(partial(node.op.compute, node.types, node.result_types, node.keywords))
            return f"[{self._listed(node.results)}] = {calculate}([{', '.join(map(self._array, node.args))}])"
        out = self.name(node.out)
        if any(v.type == tile.INDEX for v in node.args):
            return f"{out} = {self.object(_indexed(node))}(machine, [{self._listed(node.args)}])"
        if node.op in instances.prepared:
            return f"{out} = {self.object(_calculation(node))}([{self._listed(node.args)}])"
        return f"{out} = {self._direct(node)}"

    def _direct(self, node: Node) -> str:
        """Operands widened, computed, rounded: as `_calculation` does, without its calls."""
        wider = [_wider(node.op, t) for t in node.types]
        names = [self.name(v) for v in node.args]
        args = [n if w is None else f"convert({n}, {self.object(w)})" for n, w in zip(names, wider, strict=True)]
        call = f"{self.object(_compute(node))}({', '.join(args)})"
        rounded, always = self.object(_rounding(node)), _always(node)
        if always:
            return f"{rounded}({call})"
        return f"t if (t := {call}).dtype is {self.object(node.out.type.dtype.numpy)} else {rounded}(t)"

    def _array(self, value: Value) -> str:
        """A value, as an array where it may be affine."""
        name = self.name(value)
        return f"arrayed({name}, count)" if value.type == tile.INDEX else name

    def _listed(self, values: Sequence[Value]) -> str:
        return ", ".join(map(self.name, values))


def _arrayed(value: Any, count: tuple[int, ...]) -> Any:
    return value.array(count) if type(value) is Affine else value


def _indexed(node: Node) -> Callable[[Machine, list[Any]], Any]:
    calculate = _calculation(node)

    def indexed(machine: Machine, values: list[Any]) -> Any:
        if Affine in map(type, values):
            found = combined(node.op, values)
            if found is not None:
                return found
            values = machine.arrays(values)
        return calculate(values)

    return indexed


def _calculation(node: Node) -> Callable[[list[Any]], Any]:
    """One result: operands widened, computed, rounded (as `Op.compute` does, its choices made ahead)."""
    prepare, compute, rounded = instances.prepared.get(node.op), _compute(node), _rounding(node)
    wider = [_wider(node.op, t) for t in node.types]

    def calculate(values: list[Any]) -> Any:
        if prepare is not None:
            values = prepare(node, values)
        return rounded(compute(*(v if w is None else convert(v, w) for v, w in zip(values, wider, strict=True))))

    return calculate


def _compute(node: Node) -> Callable[..., Any]:
    return partial(node.op.ref, **node.keywords) if node.attrs else node.op.ref


def _rounding(node: Node) -> Callable[[Any], Any]:
    dtype, policy, always = node.out.type.dtype, node.out.type.policy, _always(node)
    return lambda found: store(found, dtype, policy) if always or found.dtype != dtype.numpy else found


def _always(node: Node) -> bool:
    """Whether a result is rounded though its elements have the right type already."""
    return node.out.type.policy is not None or node.out.type.dtype is tf32


def _wider(op: Op, type: Type) -> DType | None:
    """The type an operand is widened to, if it is not of it already."""
    if op.numerics == STORAGE:
        return None
    assert isinstance(type, TensorType)
    wide = type.compute if op.numerics == COMPUTE else type.accumulate
    return None if wide.numpy == type.dtype.numpy else wide
