"""Host plans: the entry function of a Tile module as JSON data, which `tessera.codegen.plan_execution` executes.

A plan's steps are `{"run": [first, last]}` for launches one after the other, `{"call": number}` for an op that NumPy
runs, `{"start": [first, last]}` for collectives that start together, `{"wait": number}` for the end of one, `{"agree":
pairs}` for a comparison of the order of collectives (groups, digest) with the other ranks of the groups,
`{"loop": number, "first": …, "step": …, "count": …, "body": steps}`, `{"while": flag, "test": steps, "body": steps}`
and `{"if": flag, "then": steps, "else": steps}`. A flag is the number of a buffer that holds a bool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import tessera.ops  # noqa: F401
from tessera.codegen.artifact import describe_size
from tessera.codegen.contract import static_shape
from tessera.codegen.diagnostics import describe_location
from tessera.core.symbolic_dim import Dim, Size, proves_at_most, round_up
from tessera.core.types import RefType
from tessera.ir.core import Block, Function, Module, Node, Value, find_size_names
from tessera.ir.rules import Rules
from tessera.ops.dialects import control_flow, host, tile
from tessera.ops.tensor import basic

# Building a plan from the entry function of a Tile module.

WORKSPACE_ALIGN = 64


@dataclass(frozen=True)
class HostBufferSlice:
    """Memory of the entry function: a parameter, or bytes of the workspace (`param` is -1).

    `moves` are pairs (loop, bytes): how far the slice moves for each step of a loop's index. `reachable_bytes` bounds
    the bytes that it covers over all iterations.
    """

    param: int
    offset: Size
    bytes: Size
    moves: tuple[tuple[int, Size], ...] = ()
    reachable_bytes: Size = 0

    def overlaps(self, other: HostBufferSlice) -> bool:
        """Whether two slices may share memory; two parameters never do, since the runtime copies aliased arguments."""
        if self.param != other.param or self.param >= 0:
            return self.param == other.param
        before = proves_at_most(self.offset + self.extent, other.offset)
        return not (before or proves_at_most(other.offset + other.extent, self.offset))

    @property
    def extent(self) -> Size:
        """The bytes from its offset that it may touch."""
        return self.reachable_bytes or self.bytes

    def slice(self, loop: int, count: Size) -> HostBufferSlice:
        """A slice of `count` bytes, selected by the index of a loop."""
        return HostBufferSlice(self.param, self.offset, count, (*self.moves, (loop, count)), self.extent)

    def describe(self) -> dict[str, Any]:
        """This slice as JSON data."""
        data: dict[str, Any] = (
            {"param": self.param}
            if self.param >= 0
            else {"offset": describe_size(self.offset), "bytes": describe_size(self.bytes)}
        )
        moves = [[loop, describe_size(count)] for loop, count in self.moves]
        return {**data, "bytes": describe_size(self.bytes), "moves": moves} if self.moves else data


class HostPlanBuilder:
    """Assigns memory to each value of an entry function, and collects its launches and steps."""

    def __init__(self, main: Function) -> None:
        self.slices: dict[Value, HostBufferSlice] = {
            v: HostBufferSlice(i, 0, _count_bytes(v)) for i, v in enumerate(main.params)
        }
        for result, argument in main.attrs.get("reused", ()):  # a result in the memory of a donated argument
            self.slices[main.params[result]] = self.slices[main.params[argument]]
        self.workspace: Size = main.attrs.get("workspace", 0)
        self.launches: list[Node] = []
        self.flags: list[HostBufferSlice] = []
        self.calls: list[dict[str, Any]] = []
        self.started: dict[tuple[Value, ...], int] = {}  # the numbers of collectives, by their buffers
        self.loops: dict[Value, int] = {}
        self.steps = [*_make_agreement(main), *self.walk(main.body)]

    def walk(self, block: Block) -> list[dict[str, Any]]:
        """The steps of a block; consecutive launches form one step."""
        steps: list[dict[str, Any]] = []
        first = len(self.launches)
        for node in block.nodes:
            if node.op not in control_rule:
                buffer_rule.of(node.op)(self, node)
                continue
            steps += _make_launch_step(first, len(self.launches))
            step = control_rule.of(node.op)(self, node)
            if steps and "start" in step and "start" in steps[-1]:
                steps[-1]["start"][1] = step["start"][1]
            else:
                steps.append(step)
            first = len(self.launches)
        return steps + _make_launch_step(first, len(self.launches))

    def add_flag(self, value: Value) -> int:
        """The number of a new flag, which is a bool in memory."""
        self.flags.append(self.slices[value])
        return len(self.flags) - 1

    def reserve(self, count: Size) -> Size:
        """The offset of `count` new bytes at the end of the workspace."""
        start = round_up(self.workspace, WORKSPACE_ALIGN)
        self.workspace = start + count
        return start


def _make_agreement(main: Function) -> list[dict[str, Any]]:
    orders = main.attrs.get("collective_order", ())
    pairs = [[[list(group) for group in groups], digest] for groups, digest in orders]
    return [{"agree": pairs}] if pairs else []


def _make_launch_step(first: int, last: int) -> list[dict[str, Any]]:
    return [{"run": [first, last]}] if last > first else []


# rule(plan, node) assigns memory to the results of a node.
buffer_rule = Rules("host buffers")
# rule(plan, node) gives the step of a loop, branch or call of the host.
control_rule = Rules("host control flow")


@control_rule(host.call)
def _(plan, node):
    return {"call": _add_call(plan, node)}


@control_rule(host.start)
def _(plan, node):
    number = plan.started[node.args] = _add_call(plan, node)
    return {"start": [number, number + 1]}


@control_rule(host.wait)
def _(plan, node):
    return {"wait": plan.started[node.args]}


def _add_call(plan: HostPlanBuilder, node: Node) -> int:
    args = [{**plan.slices[v].describe(), **_describe_type(v)} for v in node.args]
    plan.calls.append({"op": node.attrs["op"], "operands": node.attrs["operands"], "args": args})
    plan.calls[-1] |= {"attrs": dict(node.attrs["attrs"]), "place": describe_location(node.loc)}
    return len(plan.calls) - 1


def _describe_type(v: Value) -> dict[str, Any]:
    return {"shape": [describe_size(n) for n in v.type.shape], "dtype": v.type.dtype.name}


@control_rule(host.loop)
def _(plan, node):
    (body,) = node.regions
    number = plan.loops[body.params[0]] = len(plan.loops)
    return {"loop": number, **{k: describe_size(v) for k, v in node.attrs.items()}, "body": plan.walk(body)}


@control_rule(host.while_)
def _(plan, node):
    test, body = node.regions
    return {"while": plan.add_flag(node.args[0]), "test": plan.walk(test), "body": plan.walk(body)}


@control_rule(host.if_)
def _(plan, node):
    then, other = node.regions
    return {"if": plan.add_flag(node.args[0]), "then": plan.walk(then), "else": plan.walk(other)}


@buffer_rule(host.alloc)
def _(plan, node):
    count, offset = _count_bytes(node.out), node.attrs["offset"]
    plan.slices[node.out] = HostBufferSlice(-1, offset if offset >= 0 else plan.reserve(count), count)


@buffer_rule(host.view)
def _(plan, node):
    plan.slices[node.out] = plan.slices[node.args[0]]


@buffer_rule(host.at)
def _(plan, node):
    buffer, index = node.args
    plan.slices[node.out] = plan.slices[buffer].slice(plan.loops[index], _count_bytes(node.out))


@buffer_rule(host.launch)
def _(plan, node):
    plan.launches.append(node)


def _count_bytes(v: Value) -> Size:
    return math.prod(v.type.shape) * v.type.dtype.numpy.itemsize


def find_touched_parameters(function: Function, *effects: str) -> set[int]:
    """The parameters of a tile function whose memory a node with one of these effects accesses."""
    touched = {_find_touched_memory(n, e) for n in function.body.walk() for e in effects if e in n.op.effects}
    return {i for i, p in enumerate(function.params) if p in touched}


def _find_touched_memory(node: Node, effect: str) -> Value:
    """The memory a node reads or writes: an async copy reads its second operand."""
    return node.args[1] if effect == "read" and "async" in node.op.effects else node.args[0]


def find_aliased_kernels(module: Module) -> set[str]:
    """The kernels with a launch in which a written argument shares memory with another argument."""
    return {name for name, pairs in find_aliased_parameters(module).items() if pairs}


def find_aliased_parameters(module: Module) -> dict[str, dict[tuple[int, int], bool]]:
    """For each kernel the pairs of a written parameter and another one that share memory in a launch.

    The value is whether both are always the same memory, element by element.
    """
    plan = HostPlanBuilder(module.main)
    found: dict[str, dict[tuple[int, int], bool]] = {}
    for node in plan.launches:
        pairs = found.setdefault(node.attrs["kernel"], {})
        slices = [plan.slices[v] for v in node.args]
        for i in find_touched_parameters(module.function(node.attrs["kernel"]), "write"):
            for j, other in enumerate(slices):
                if i != j and slices[i].overlaps(other):
                    same = slices[i] == other and node.args[i].type == node.args[j].type
                    pairs[i, j] = pairs.get((i, j), True) and same
    return found


def build_host_plan(module: Module, scratch: Mapping[str, int]) -> dict[str, Any]:
    """The entry function as JSON data; `scratch` holds the bytes of scratch memory of each kernel."""
    main, plan = module.main, HostPlanBuilder(module.main)
    outputs = int(main.attrs.get("outputs", 0))
    inputs = len(main.params) - outputs
    return {
        "params": [_describe_parameter(v, i >= inputs) for i, v in enumerate(main.params)],
        "workspace": describe_size(plan.workspace),
        "launches": [_describe_launch(node, plan, module) for node in plan.launches],
        "scratch": dict(scratch),
        "written": _find_touched_entry_parameters(module, plan, "write"),
        "read": _find_touched_entry_parameters(module, plan, "read"),
        **({"steps": plan.steps, "flags": [s.describe() for s in plan.flags]} if _has_control_flow(plan) else {}),
        **({"calls": plan.calls} if plan.calls else {}),
        **({"reused": [list(pair) for pair in main.attrs["reused"]]} if "reused" in main.attrs else {}),
        **_describe_sizes(main),
    }


def _describe_sizes(main: Function) -> dict[str, Any]:
    """The names of the symbolic sizes of a program, and its constraints on them."""
    if "sizes" not in main.attrs:
        return {}
    return {"sizes": list(main.attrs["sizes"]), "constraints": list(main.attrs["constraints"])}


def _has_control_flow(plan: HostPlanBuilder) -> bool:
    return any("run" not in step for step in plan.steps)


def _describe_parameter(v: Value, output: bool) -> dict[str, Any]:
    role = "output" if output else "input" if isinstance(v.type, RefType) else "scalar"
    return {"name": v.hint, **_describe_type(v), "role": role}


def _describe_launch(node: Node, plan: HostPlanBuilder, module: Module) -> dict[str, Any]:
    """A launch: the symbolic sizes that its kernel mentions are its last arguments."""
    grid = [describe_size(n) for n in node.attrs["grid"]]
    args = [plan.slices[v].describe() for v in node.args]
    args += [{"value": describe_size(Dim.of(n))} for n in find_size_names(module.function(node.attrs["kernel"]))]
    return {"kernel": node.attrs["kernel"], "grid": [*grid, 1, 1, 1][: max(3, len(grid))], "args": args}


def _find_touched_entry_parameters(module: Module, plan: HostPlanBuilder, effect: str) -> list[int]:
    """The entry's parameters that some launch reads or writes."""
    touched: set[int] = set()
    for node in plan.launches:
        for i in find_touched_parameters(module.function(node.attrs["kernel"]), effect):
            touched.add(plan.slices[node.args[i]].param)
    return sorted(p for p in touched if p >= 0)


# Initialised outputs: which outputs that kernels read hold elements of this program when they are first read.
#
# The others must hold zeros before the first launch. An output is initialised where the first launch that touches it
# stores every one of its elements and reads none, as the copy before updates in place does. Whether it stores all is
# computed: the starts of a store, for every program of the grid.

MAX_PROGRAMS = 1 << 18  # of a launch whose starts are computed


def plan_launches(module: Module, scratch: Mapping[str, int]) -> dict[str, Any]:
    """The host plan (`build_host_plan`), whose `read` leaves out the outputs that need no zeros."""
    plan = build_host_plan(module, scratch)
    touched = any(plan["params"][i]["role"] == "output" for i in plan["read"])
    return {**plan, "read": _find_read_parameters(module, plan)} if touched else plan


def _find_read_parameters(module: Module, plan: Mapping[str, Any]) -> list[int]:
    """The parameters of a plan that are read, without the outputs that launches before have written as a whole."""
    params = module.main.params
    outputs = {i for i in plan["read"] if plan["params"][i]["role"] == "output"}
    return [i for i in plan["read"] if i not in outputs or not _is_initialised(module, params[i])]


def _is_initialised(module: Module, output: Value) -> bool:
    """Whether the first launch that touches an output writes it as a whole."""
    same = {output}
    for node in module.main.body.nodes:
        if node.op is host.view and node.args[0] in same:
            same.add(node.out)
        elif same.intersection(node.args) or node.regions:
            return node.op is host.launch and _initialises(module.function(node.attrs["kernel"]), node, same)
    return False


def _initialises(function: Function, launch: Node, same: set[Value]) -> bool:
    """Whether a launch writes all of a memory, which one of its arguments is, and reads nothing of it."""
    places = [i for i, v in enumerate(launch.args) if v in same]
    if len(places) != 1 or places[0] in find_touched_parameters(function, "read"):
        return False
    ref, sizes = function.params[places[0]], (*launch.attrs["grid"], *launch.args[places[0]].type.shape)  # type: ignore[union-attr]
    if not all(isinstance(n, int) for n in sizes) or math.prod(launch.attrs["grid"]) > MAX_PROGRAMS:
        return False
    return any(_covers(function, store, launch.attrs["grid"]) for store in _list_stores(function.body, ref))


def _list_stores(body: Block, ref: Value) -> Iterator[Node]:
    """The stores to a memory that every program executes; of a condition whose two sides store to the same block, one.

    The programs within the boundary have a side of their own (boundary peeling).
    """
    for node in body.nodes:
        if node.op is tile.store and node.args[0] is ref:
            yield node
        elif node.op is control_flow.if_:
            first, second = ([n for n in r.nodes if n.op is tile.store and n.args[0] is ref] for r in node.regions)
            yield from (n for n in first if any(_store_alike(n, other) for other in second))


def _store_alike(store: Node, other: Node) -> bool:
    """Whether two stores have the same block of the same memory."""
    return store.args[2:] == other.args[2:] and static_shape(store.args[1].type) == static_shape(other.args[1].type)


def _covers(function: Function, store: Node, grid: tuple[int, ...]) -> bool:
    """Whether the programs of a grid store to all blocks of a memory; a store with a mask is taken for one of less."""
    ref, value, *starts = store.args
    if len(starts) > ref.type.rank:  # type: ignore[union-attr]
        return False
    numbers = _compute_scalars(function, grid)
    found, counts = np.zeros(math.prod(grid), np.int64), 1
    for start, block, size in zip(starts, static_shape(value.type), static_shape(ref.type), strict=True):
        if start not in numbers:
            return False
        number, rest = np.divmod(numbers[start], block)
        count = -(-size // block)
        if np.any(rest) or np.any((number < 0) | (number >= count)):
            return False
        found, counts = found * count + number, counts * count
    return len(np.unique(found)) == counts


def _compute_scalars(function: Function, grid: tuple[int, ...]) -> dict[Value, np.ndarray]:
    """The integers at the top of a tile function that follow from the program's number, for every program of a grid."""
    ids = np.indices(grid, np.int64).reshape(len(grid), -1)
    found: dict[Value, np.ndarray] = {}
    for node in function.body.nodes:
        if node.op is tile.program_id and node.attrs["axis"] < len(grid):
            found[node.out] = ids[node.attrs["axis"]]
        elif node.op is basic.full and not node.attrs["shape"] and node.out.type.dtype.is_integer:  # type: ignore[union-attr]
            found[node.out] = np.asarray(node.attrs["value"], np.int64)
        elif node.op.pointwise and node.args and all(v in found for v in node.args) and not node.attrs:
            found[node.out] = np.asarray(node.op.ref(*(found[v] for v in node.args)))
    return found
