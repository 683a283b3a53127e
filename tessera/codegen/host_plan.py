"""Host plans: the entry function of a Tile module as JSON data, how a runtime binds arguments to it and executes it.

A plan's steps are `{"run": [first, last]}` for launches one after the other, `{"call": number}` for an op that NumPy
runs, `{"loop": number, "first": …, "step": …, "count": …, "body": steps}`, `{"while": flag, "test": steps,
"body": steps}` and `{"if": flag, "then": steps, "else": steps}`. A flag is the number of a buffer that holds a bool.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import tessera.ops  # noqa: F401
from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.types import RefType, TensorType, as_dtype
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ir.rules import REGISTRY, Rules
from tessera.ops.dialects import host

# The arguments of a program: what arrays fit its parameters, and which must lie apart.


class PlanParameter:
    """A parameter of the program: an input, an output or a scalar."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.name = given["name"]
        self.shape, self.dtype = tuple(given["shape"]), as_dtype(given["dtype"])
        self.output, self.scalar = given["role"] == "output", given["role"] == "scalar"

    def made(self, read: bool) -> np.ndarray:
        """A new array; of zeros where a kernel reads it before it is written, as atomics do."""
        return (np.zeros if read else np.empty)(self.shape, self.dtype.numpy)

    def checked(self, value: Any) -> np.ndarray:
        """An argument as an array of the right shape and type."""
        number = self.scalar and not hasattr(value, "dtype")
        array = np.asarray(value, self.dtype.numpy) if number else np.asarray(value)
        if array.shape != self.shape:
            raise ShapeError(f"argument {self.name} has another shape", expected=self.shape, received=array.shape)
        if array.dtype != self.dtype.numpy:
            raise DTypeError(f"argument {self.name} has another type", expected=self.dtype, received=array.dtype)
        return array


class ArgumentBinder:
    """The parameters of a launch plan."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.params = [PlanParameter(p) for p in plan["params"]]
        self.written, self.read = set(plan["written"]), set(plan["read"])
        self.inputs = [i for i, p in enumerate(self.params) if not p.output]
        self._changed = [i for i in self.inputs if i in self.written]

    def bind(self, arrays: Sequence[Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """An array for each parameter: the user's or a new one, and that with its elements in row-major order.

        Raises:
            ShapeError, DTypeError, ArgumentError: the arrays are not what the program takes.
        """
        if len(arrays) != len(self.inputs):
            raise ArgumentError(f"{len(self.inputs)} arguments are needed, {len(arrays)} came")
        given = iter(arrays)
        users = [p.made(i in self.read) if p.output else p.checked(next(given)) for i, p in enumerate(self.params)]
        held = [make_row_major(a) for a in users]
        return users, copy_aliased_arguments(held, self.written) if self._changed else held

    def finish(self, users: list[np.ndarray], held: list[np.ndarray]) -> list[np.ndarray]:
        """Write back what was written to copies; the outputs."""
        for i in self._changed:
            if held[i] is not users[i]:
                users[i][...] = held[i]
        return [a for a, p in zip(users, self.params, strict=True) if p.output]


def make_row_major(array: np.ndarray) -> np.ndarray:
    """The array itself if its elements lie in row-major order, else a copy in which they do."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.array(array, order="C")


def copy_aliased_arguments(arrays: list[np.ndarray], written: set[int]) -> list[np.ndarray]:
    """Arrays of which no written one shares memory with another: what is only read is copied first.

    Raises:
        ArgumentError: two arrays that are written share memory.
    """
    found = list(arrays)
    for i, j in itertools.product(written, range(len(arrays))):
        if i == j or not np.may_share_memory(arrays[i], arrays[j]):
            continue
        if j in written:
            raise ArgumentError(
                f"arguments {i} and {j} are both written and share memory", suggestion="pass a copy of one of them"
            )
        found[j] = arrays[j].copy()
    return found


# Following a launch plan: runs of launches, and the loops and branches of the host around them.
#
# A plan's steps are data that JSON can hold: `{"run": [first, last]}` for launches one after the other,
# `{"call": number}` for an op that NumPy runs, `{"loop": number, "first": …, "step": …, "count": …, "body": steps}`,
# `{"while": flag, "test": steps, "body": steps}` and `{"if": flag, "then": steps, "else": steps}`. A flag is the number
# of a place that holds a bool.


PlanSteps = Sequence[Mapping[str, Any]]


class PlanEngine(Protocol):
    """What runs launches."""

    def launch(self, first: int, last: int) -> None:
        """Run the launches from `first` to before `last`."""

    def holds(self, flag: int) -> bool:
        """Whether a flag is set."""

    def turn(self, loop: int, index: int) -> None:
        """A loop has come to an index."""


def execute_plan(steps: PlanSteps, engine: PlanEngine) -> None:
    """Run steps in order."""
    for step in steps:
        _EXECUTORS[next(k for k in step if k in _EXECUTORS)](step, engine)


def _execute_launches(step: Mapping[str, Any], engine: PlanEngine) -> None:
    engine.launch(*step["run"])


def _execute_call(step: Mapping[str, Any], engine: Any) -> None:
    engine.call(step["call"])  # a generator without such calls refuses them when it emits


def _execute_loop(step: Mapping[str, Any], engine: PlanEngine) -> None:
    for number in range(step["count"]):
        engine.turn(step["loop"], step["first"] + number * step["step"])
        execute_plan(step["body"], engine)


def _execute_while(step: Mapping[str, Any], engine: PlanEngine) -> None:
    execute_plan(step["test"], engine)
    while engine.holds(step["while"]):
        execute_plan(step["body"], engine)
        execute_plan(step["test"], engine)


def _execute_if(step: Mapping[str, Any], engine: PlanEngine) -> None:
    execute_plan(step["then" if engine.holds(step["if"]) else "else"], engine)


_EXECUTORS: Mapping[str, Callable[[Mapping[str, Any], PlanEngine], None]] = {
    "run": _execute_launches, "call": _execute_call, "loop": _execute_loop, "while": _execute_while, "if": _execute_if,
}  # fmt: skip


# Ops that a plan leaves to the host: NumPy runs them on memory that compiled code has filled.


def view_bytes_at(address: int, argument: Mapping[str, Any]) -> np.ndarray:
    """The memory of an argument, by its address."""
    count = math.prod(argument["shape"]) * as_dtype(argument["dtype"]).numpy.itemsize
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8) if count else np.empty(0, np.uint8)


def view_as_array(memory: np.ndarray, argument: Mapping[str, Any]) -> np.ndarray:
    """Memory as an array of an argument's shape and type."""
    dtype = as_dtype(argument["dtype"]).numpy
    count = math.prod(argument["shape"]) * dtype.itemsize
    return memory[:count].view(dtype).reshape(argument["shape"])


def run_host_call(call: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Run an op from the first arrays to the rest."""
    op, many = REGISTRY[call["op"]], call["operands"]
    types = [TensorType(tuple(a["shape"]), as_dtype(a["dtype"])) for a in call["args"]]
    found = op.execute(tuple(types[:many]), tuple(types[many:]), call["attrs"], list(arrays[:many]))
    for target, result in zip(arrays[many:], found, strict=True):
        target[...] = result


# What the entry function of a Tile module does, as plain data: parameters, buffers, launches in order.


WORKSPACE_ALIGN = 64


@dataclass(frozen=True)
class HostBufferSlice:
    """Memory of the entry function: a parameter, or bytes of the workspace.

    `moves` are (loop, bytes): how far the place moves with a loop's index. It stays within `reach` bytes.
    """

    param: int
    offset: int
    bytes: int
    moves: tuple[tuple[int, int], ...] = ()
    reachable_bytes: int = 0

    def overlaps(self, other: HostBufferSlice) -> bool:
        """Whether two places share memory (parameters share none: the runtime sees to it)."""
        if self.param != other.param or self.param >= 0:
            return self.param == other.param
        return self.offset < other.offset + other.extent and other.offset < self.offset + self.extent

    @property
    def extent(self) -> int:
        """The bytes it may touch from its offset on."""
        return max(self.bytes, self.reachable_bytes)

    def slice(self, loop: int, count: int) -> HostBufferSlice:
        """One slice of `count` bytes: which one, a loop's index says."""
        return HostBufferSlice(self.param, self.offset, count, (*self.moves, (loop, count)), self.extent)

    def described(self) -> dict[str, Any]:
        """This place as data."""
        found: dict[str, Any] = (
            {"param": self.param} if self.param >= 0 else {"offset": self.offset, "bytes": self.bytes}
        )
        return {**found, "bytes": self.bytes, "moves": [list(m) for m in self.moves]} if self.moves else found


class HostPlanBuilder:
    """Where each value of an entry function lies."""

    def __init__(self, main: Function) -> None:
        self.of: dict[Value, HostBufferSlice] = {
            v: HostBufferSlice(i, 0, _count_bytes(v)) for i, v in enumerate(main.params)
        }
        self.workspace = int(main.attrs.get("workspace", 0))
        self.launches: list[Node] = []
        self.flags: list[HostBufferSlice] = []
        self.calls: list[dict[str, Any]] = []
        self.loops: dict[Value, int] = {}
        self.steps = self.walk(main.body)

    def walk(self, block: Block) -> list[dict[str, Any]]:
        """The steps of a block; runs of launches between loops and branches are one step each."""
        steps: list[dict[str, Any]] = []
        first = len(self.launches)
        for node in block.nodes:
            if node.op not in control_rule:
                buffer_rule.of(node.op)(self, node)
                continue
            steps += _make_launch_step(first, len(self.launches))
            steps.append(control_rule.of(node.op)(self, node))
            first = len(self.launches)
        return steps + _make_launch_step(first, len(self.launches))

    def flag(self, value: Value) -> int:
        """The number of the flag that lies in a bool's place."""
        self.flags.append(self.of[value])
        return len(self.flags) - 1

    def room(self, count: int) -> int:
        """An offset past all planned buffers, for one that has none."""
        start = math.ceil(self.workspace / WORKSPACE_ALIGN) * WORKSPACE_ALIGN
        self.workspace = start + count
        return start


def _make_launch_step(first: int, last: int) -> list[dict[str, Any]]:
    return [{"run": [first, last]}] if last > first else []


buffer_rule = Rules("host places")
# rule(found, node) gives the step for a loop or branch of the host.
control_rule = Rules("host control flow")


@control_rule(host.call)
def _(found, node):
    described = [{**found.of[v].described(), **_describe_type(v)} for v in node.args]
    found.calls.append({"op": node.attrs["op"], "operands": node.attrs["operands"], "args": described})
    found.calls[-1] |= {"attrs": dict(node.attrs["attrs"]), "place": str(node.loc)}
    return {"call": len(found.calls) - 1}


def _describe_type(v: Value) -> dict[str, Any]:
    return {"shape": [int(n) for n in v.type.shape], "dtype": v.type.dtype.name}


@control_rule(host.loop)
def _(found, node):
    (body,) = node.regions
    number = found.loops[body.params[0]] = len(found.loops)
    return {"loop": number, **node.attrs, "body": found.walk(body)}


@control_rule(host.while_)
def _(found, node):
    test, body = node.regions
    return {"while": found.flag(node.args[0]), "test": found.walk(test), "body": found.walk(body)}


@control_rule(host.if_)
def _(found, node):
    then, other = node.regions
    return {"if": found.flag(node.args[0]), "then": found.walk(then), "else": found.walk(other)}


@buffer_rule(host.alloc)
def _(found, node):
    count, offset = _count_bytes(node.out), node.attrs["offset"]
    found.of[node.out] = HostBufferSlice(-1, offset if offset >= 0 else found.room(count), count)


@buffer_rule(host.view)
def _(found, node):
    found.of[node.out] = found.of[node.args[0]]


@buffer_rule(host.at)
def _(found, node):
    place, index = node.args
    found.of[node.out] = found.of[place].slice(found.loops[index], _count_bytes(node.out))


@buffer_rule(host.launch)
def _(found, node):
    found.launches.append(node)


def _count_bytes(v: Value) -> int:
    return math.prod(int(n) for n in v.type.shape) * v.type.dtype.numpy.itemsize


def find_touched_parameters(function: Function, *kinds: str) -> set[int]:
    """The parameters of a tile function with one of these effects on their memory."""
    touched = {_find_touched_memory(n, k) for n in function.body.walk() for k in kinds if k in n.op.effects}
    return {i for i, p in enumerate(function.params) if p in touched}


def _find_touched_memory(node: Node, kind: str) -> Value:
    """The memory a node reads or writes: an async copy reads its second operand."""
    return node.args[1] if kind == "read" and "async" in node.op.effects else node.args[0]


def find_aliased_kernels(module: Module) -> set[str]:
    """The kernels with a launch in which something written shares memory with another argument."""
    found = HostPlanBuilder(module.main)
    shared = set()
    for node in found.launches:
        written = find_touched_parameters(module.function(node.attrs["kernel"]), "write")
        at = [found.of[v] for v in node.args]
        clash = [i for i in written for j, p in enumerate(at) if i != j and at[i].overlaps(p)]
        if clash:
            shared.add(node.attrs["kernel"])
    return shared


def build_host_plan(module: Module, scratch: Mapping[str, int]) -> dict[str, Any]:
    """The entry function as data that JSON can hold."""
    main, found = module.main, HostPlanBuilder(module.main)
    outputs = int(main.attrs.get("outputs", 0))
    inputs = len(main.params) - outputs
    return {
        "params": [_describe_parameter(v, i >= inputs) for i, v in enumerate(main.params)],
        "workspace": found.workspace,
        "launches": [_describe_launch(module, node, found) for node in found.launches],
        "scratch": dict(scratch),
        "written": _find_touched_entry_parameters(module, found, "write"),
        "read": _find_touched_entry_parameters(module, found, "read"),
        **({"steps": found.steps, "flags": [p.described() for p in found.flags]} if _has_control_flow(found) else {}),
        **({"calls": found.calls} if found.calls else {}),
    }


def _has_control_flow(found: HostPlanBuilder) -> bool:
    return any("run" not in step for step in found.steps)


def _describe_parameter(v: Value, output: bool) -> dict[str, Any]:
    role = "output" if output else "input" if isinstance(v.type, RefType) else "scalar"
    return {"name": v.hint, "shape": [int(n) for n in v.type.shape], "dtype": v.type.dtype.name, "role": role}


def _describe_launch(module: Module, node: Node, found: HostPlanBuilder) -> dict[str, Any]:
    grid = [int(n) for n in node.attrs["grid"]]
    args = [found.of[v].described() for v in node.args]
    return {"kernel": node.attrs["kernel"], "grid": [*grid, 1, 1, 1][: max(3, len(grid))], "args": args}


def _find_touched_entry_parameters(module: Module, found: HostPlanBuilder, kind: str) -> list[int]:
    """The entry's parameters that some launch reads or writes."""
    hit: set[int] = set()
    for node in found.launches:
        for i in find_touched_parameters(module.function(node.attrs["kernel"]), kind):
            hit.add(found.of[node.args[i]].param)
    return sorted(p for p in hit if p >= 0)
