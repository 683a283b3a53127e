"""What the entry function of a Tile module does, as plain data: parameters, buffers, launches in order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.op import Rules
from tessera.ops import host
from tessera.types import RefType

ALIGN = 64


@dataclass(frozen=True)
class Place:
    """Memory of the entry function: a parameter, or bytes of the workspace.

    `moves` are (loop, bytes): how far the place moves with a loop's index. It stays within `reach` bytes.
    """

    param: int
    offset: int
    bytes: int
    moves: tuple[tuple[int, int], ...] = ()
    reach: int = 0

    def overlaps(self, other: Place) -> bool:
        """Whether two places share memory (parameters share none: the runtime sees to it)."""
        if self.param != other.param or self.param >= 0:
            return self.param == other.param
        return self.offset < other.offset + other.extent and other.offset < self.offset + self.extent

    @property
    def extent(self) -> int:
        """The bytes it may touch from its offset on."""
        return max(self.bytes, self.reach)

    def slice(self, loop: int, count: int) -> Place:
        """One slice of `count` bytes: which one, a loop's index says."""
        return Place(self.param, self.offset, count, (*self.moves, (loop, count)), self.extent)

    def described(self) -> dict[str, Any]:
        """This place as data."""
        found: dict[str, Any] = (
            {"param": self.param} if self.param >= 0 else {"offset": self.offset, "bytes": self.bytes}
        )
        return {**found, "bytes": self.bytes, "moves": [list(m) for m in self.moves]} if self.moves else found


class Places:
    """Where each value of an entry function lies."""

    def __init__(self, main: Function) -> None:
        self.of: dict[Value, Place] = {v: Place(i, 0, _bytes(v)) for i, v in enumerate(main.params)}
        self.workspace = int(main.attrs.get("workspace", 0))
        self.launches: list[Node] = []
        self.flags: list[Place] = []
        self.calls: list[dict[str, Any]] = []
        self.loops: dict[Value, int] = {}
        self.steps = self.walk(main.body)

    def walk(self, block: Block) -> list[dict[str, Any]]:
        """The steps of a block; runs of launches between loops and branches are one step each."""
        steps: list[dict[str, Any]] = []
        first = len(self.launches)
        for node in block.nodes:
            if node.op not in flow:
                places.of(node.op)(self, node)
                continue
            steps += _run(first, len(self.launches))
            steps.append(flow.of(node.op)(self, node))
            first = len(self.launches)
        return steps + _run(first, len(self.launches))

    def flag(self, value: Value) -> int:
        """The number of the flag that lies in a bool's place."""
        self.flags.append(self.of[value])
        return len(self.flags) - 1

    def room(self, count: int) -> int:
        """An offset past all planned buffers, for one that has none."""
        start = math.ceil(self.workspace / ALIGN) * ALIGN
        self.workspace = start + count
        return start


def _run(first: int, last: int) -> list[dict[str, Any]]:
    return [{"run": [first, last]}] if last > first else []


places = Rules("host places")
# rule(found, node) gives the step for a loop or branch of the host.
flow = Rules("host control flow")


@flow(host.call)
def _(found, node):
    described = [{**found.of[v].described(), **_kind(v)} for v in node.args]
    found.calls.append({"op": node.attrs["op"], "operands": node.attrs["operands"], "args": described})
    found.calls[-1] |= {"attrs": dict(node.attrs["attrs"]), "place": str(node.loc)}
    return {"call": len(found.calls) - 1}


def _kind(v: Value) -> dict[str, Any]:
    return {"shape": [int(n) for n in v.type.shape], "dtype": v.type.dtype.name}


@flow(host.loop)
def _(found, node):
    (body,) = node.regions
    number = found.loops[body.params[0]] = len(found.loops)
    return {"loop": number, **node.attrs, "body": found.walk(body)}


@flow(host.while_)
def _(found, node):
    test, body = node.regions
    return {"while": found.flag(node.args[0]), "test": found.walk(test), "body": found.walk(body)}


@flow(host.if_)
def _(found, node):
    then, other = node.regions
    return {"if": found.flag(node.args[0]), "then": found.walk(then), "else": found.walk(other)}


@places(host.alloc)
def _(found, node):
    count, offset = _bytes(node.out), node.attrs["offset"]
    found.of[node.out] = Place(-1, offset if offset >= 0 else found.room(count), count)


@places(host.view)
def _(found, node):
    found.of[node.out] = found.of[node.args[0]]


@places(host.at)
def _(found, node):
    place, index = node.args
    found.of[node.out] = found.of[place].slice(found.loops[index], _bytes(node.out))


@places(host.launch)
def _(found, node):
    found.launches.append(node)


def _bytes(v: Value) -> int:
    return math.prod(int(n) for n in v.type.shape) * v.type.dtype.numpy.itemsize


def effects(function: Function, *kinds: str) -> set[int]:
    """The parameters of a tile function with one of these effects on their memory."""
    touched = {_ref(n, k) for n in function.body.walk() for k in kinds if k in n.op.effects}
    return {i for i, p in enumerate(function.params) if p in touched}


def _ref(node: Node, kind: str) -> Value:
    """The memory a node reads or writes: an async copy reads its second operand."""
    return node.args[1] if kind == "read" and "async" in node.op.effects else node.args[0]


def overlapping(module: Module) -> set[str]:
    """The kernels with a launch in which something written shares memory with another argument."""
    found = Places(module.main)
    shared = set()
    for node in found.launches:
        written = effects(module.function(node.attrs["kernel"]), "write")
        at = [found.of[v] for v in node.args]
        clash = [i for i in written for j, p in enumerate(at) if i != j and at[i].overlaps(p)]
        if clash:
            shared.add(node.attrs["kernel"])
    return shared


def launch_plan(module: Module, scratch: Mapping[str, int]) -> dict[str, Any]:
    """The entry function as data that JSON can hold."""
    main, found = module.main, Places(module.main)
    outputs = int(main.attrs.get("outputs", 0))
    inputs = len(main.params) - outputs
    return {
        "params": [_param(v, i >= inputs) for i, v in enumerate(main.params)],
        "workspace": found.workspace,
        "launches": [_launch(module, node, found) for node in found.launches],
        "scratch": dict(scratch),
        "written": _effected(module, found, "write"),
        "read": _effected(module, found, "read"),
        **({"steps": found.steps, "flags": [p.described() for p in found.flags]} if _has_flow(found) else {}),
        **({"calls": found.calls} if found.calls else {}),
    }


def _has_flow(found: Places) -> bool:
    return any("run" not in step for step in found.steps)


def _param(v: Value, output: bool) -> dict[str, Any]:
    role = "output" if output else "input" if isinstance(v.type, RefType) else "scalar"
    return {"name": v.hint, "shape": [int(n) for n in v.type.shape], "dtype": v.type.dtype.name, "role": role}


def _launch(module: Module, node: Node, found: Places) -> dict[str, Any]:
    grid = [int(n) for n in node.attrs["grid"]]
    args = [found.of[v].described() for v in node.args]
    return {"kernel": node.attrs["kernel"], "grid": [*grid, 1, 1, 1][: max(3, len(grid))], "args": args}


def _effected(module: Module, found: Places, kind: str) -> list[int]:
    """The entry's parameters that some launch reads or writes."""
    hit: set[int] = set()
    for node in found.launches:
        for i in effects(module.function(node.attrs["kernel"]), kind):
            hit.add(found.of[node.args[i]].param)
    return sorted(p for p in hit if p >= 0)
